"""The reference model on a device of its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from grpo import data
from grpo.policies.scoring import ReferenceScorer


@dataclass(frozen=True)
class Scored:
    """A scored group.

    Attributes:
        log_probs: float32 ``[B, T]``, on the CPU.
        busy: seconds that the worker has scored since it started.
        seconds: since then.
        started: Unix time of that start, which tells a worker from the one that it replaces.
    """

    log_probs: Tensor
    busy: float
    seconds: float
    started: float


class ReferenceWorker:
    """Score groups with the frozen reference, while others generate and train.

    Args:
        config: a :class:`grpo.config.asynchronous.AsyncConfig` as plain values.
        path: folder or hub id of the reference.
        device: ``cuda`` or ``cpu``.
        dtype: of the weights, without ``torch.``.
    """

    def __init__(self, config: dict[str, Any], path: str, device: str, dtype: str) -> None:
        from grpo.config.asynchronous import AsyncConfig
        from grpo.config.schema import load_config
        from grpo.run import build
        from grpo.run.build_model import load_model
        from grpo.run.build_objective import scoring_budget

        build.quiet_libraries()
        checked = load_config(config, AsyncConfig)
        model = load_model(path, checked, device=torch.device(device),
                           dtype=getattr(torch, dtype))
        self.scorer = ReferenceScorer(
            model, temperature=checked.inference_model.temperature,
            max_tokens=scoring_budget(checked), fp32_head=checked.train_model.fp32_head)
        self.path = path
        self._busy, self._started, self._started_at = 0.0, time.monotonic(), time.time()

    def describe(self) -> dict[str, Any]:
        """Who and where this is; an answer proves that it has started."""
        return {"pid": os.getpid(), "host": os.uname().nodename, "model": self.path}

    def score(self, group: TensorDictBase) -> Scored:
        """Its log-probs of a group's tokens."""
        start = time.monotonic()
        log_probs_BT = self.scorer(group.clone())[data.REF_LOG_PROBS].cpu()
        now = time.monotonic()
        self._busy += now - start
        return Scored(log_probs_BT, self._busy, now - self._started, self._started_at)
