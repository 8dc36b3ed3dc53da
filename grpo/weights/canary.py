"""Proof after each update that the engine generates with the trainer's weights.

The engine continues a few fixed prompts and reports the log-prob of each token; the trainer's
model scores the same tokens. The comparison goes through both systems' whole forward pass, so it
also catches what a comparison of weights cannot: stale key-value caches, a different temperature,
a model that is computed differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from grpo import data
from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Policy
from grpo.weights.shared import WeightSync, some_names

#: Greatest allowed mean and maximum difference of log-probs, in nats. Half precision rounds the
#: two forward passes differently; float32 leaves only the order of summation. In half precision the
#: numbers alone cannot see one small missed update; that the memory is shared is checked exactly.
TOLERANCE = {
    torch.float64: (1e-6, 1e-5),
    torch.float32: (2e-5, 1e-4),
    torch.float16: (0.05, 0.5),
    torch.bfloat16: (0.1, 1.0),
}

#: Attention kernels of GPUs multiply float32 in reduced precision.
CUDA_FLOAT32_TOLERANCE = (1e-3, 2e-2)


class StaleWeightsError(RuntimeError):
    """The engine does not generate with the trainer's weights."""


@dataclass(frozen=True)
class CanaryReport:
    """Agreement of engine and trainer on the fixed prompts, in nats."""

    mean_abs_diff: float
    max_abs_diff: float


class Canary:
    """Compare engine and trainer on fixed prompts after every weight update.

    Args:
        policy: what generates the rollouts.
        scorer: what the loss scores tokens with.
        weights: names the parameters that differ when the check fails.
        prompts: token ids of a few prompts, at most as long as the policy's own.
        max_tokens: tokens generated for each prompt; several, so that decoding is checked beside
            prefill.
        tolerance: ``(mean, max)`` in nats; by default chosen by the weights' dtype.

    Raises:
        StaleWeightsError: from :meth:`check`, with what differs and what to look at.
    """

    def __init__(
        self,
        policy: Policy,
        scorer: TokenScorer,
        weights: WeightSync,
        *,
        prompts: list[list[int]],
        max_tokens: int = 4,
        tolerance: tuple[float, float] | None = None,
    ) -> None:
        self.policy = policy.with_sampling(max_tokens=max_tokens)
        self.scorer, self.weights = scorer, weights
        dtype = next(scorer.model.parameters()).dtype
        on_gpu = next(scorer.model.parameters()).is_cuda
        self.tolerance = tolerance or (
            CUDA_FLOAT32_TOLERANCE if on_gpu and dtype == torch.float32 else TOLERANCE[dtype])
        self.prompts = policy.pad_prompts(prompts)

    @torch.no_grad()
    def check(self) -> CanaryReport:
        """Generate, score, compare.

        Raises:
            StaleWeightsError: if the difference is past tolerance, or a parameter is not shared.
        """
        if moved := self.weights.unshared():
            raise StaleWeightsError(
                f"policy version {self.weights.version}: {some_names(moved)} no longer lies in the "
                "engine's memory, so its updates do not reach the engine. Something replaced the "
                "parameter's storage; write into parameters in place instead")
        batch = self.policy(self.prompts.clone())
        diff = self._difference(batch)
        report = CanaryReport(diff.mean().item(), diff.max().item())
        if not (report.mean_abs_diff <= self.tolerance[0]
                and report.max_abs_diff <= self.tolerance[1]):
            raise StaleWeightsError(self._explain(report))
        return report

    def _difference(self, batch: TensorDict) -> Tensor:
        device = next(self.scorer.model.parameters()).device
        batch = data.trim(batch).to(device)
        mask = batch[data.ASSISTANT_MASK]
        log_probs, _ = self.scorer(batch[data.TOKENS], batch[data.ATTENTION_MASK], mask)
        return (log_probs - batch[data.LOG_PROBS]).abs()[mask]

    def _explain(self, report: CanaryReport) -> str:
        different = self.weights.differing()
        cause = (f"these parameters differ: {some_names(different)}" if different else
                 "all parameters are equal, so look at the engine's caches, the temperature and "
                 "the attention implementation on both sides")
        return (f"policy version {self.weights.version}: engine and trainer disagree on the same "
                f"tokens by {report.mean_abs_diff:.2e} mean, {report.max_abs_diff:.2e} max nats "
                f"(allowed {self.tolerance[0]:.0e}, {self.tolerance[1]:.0e}); {cause}")
