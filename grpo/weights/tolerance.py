"""How far log-probs of engine and trainer may differ where both have the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Greatest allowed mean and maximum difference of log-probs, in nats. Half precision rounds the
#: two forward passes differently; float32 leaves only the order of summation. In half precision the
#: numbers alone cannot see one small missed update; :mod:`grpo.weights.proof` compares the bits.
TOLERANCE = {
    torch.float64: (1e-6, 1e-5),
    torch.float32: (2e-5, 1e-4),
    torch.float16: (0.05, 0.5),
    torch.bfloat16: (0.1, 1.0),
}

#: Attention kernels of GPUs multiply float32 in reduced precision.
CUDA_FLOAT32_TOLERANCE = (1e-3, 2e-2)


@dataclass(frozen=True)
class CanaryReport:
    """Agreement of engine and trainer on the fixed prompts, in nats."""

    mean_abs_diff: float
    max_abs_diff: float

    @classmethod
    def of(cls, differences_N: Tensor) -> CanaryReport:
        """Summary of some tokens' differences."""
        sizes_N = differences_N.abs()
        return cls(*torch.stack([sizes_N.mean(), sizes_N.max()]).tolist())


def canary_tolerance(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """``(mean, max)`` in nats for a model that computes in ``dtype``."""
    on_gpu = device.type == "cuda"
    return CUDA_FLOAT32_TOLERANCE if on_gpu and dtype == torch.float32 else TOLERANCE[dtype]
