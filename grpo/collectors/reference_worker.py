"""The reference model on a device of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from grpo import data
from grpo.policies.scoring import ReferenceScorer


@dataclass(frozen=True)
class Scored:
    """A scored group."""

    log_probs: Tensor  # float32 [B, T], on the CPU
    busy: float  # seconds that the worker has scored since it started
    seconds: float  # since then
    started: float  # Unix time of that start, which tells a worker from the one that it replaces


class ReferenceWorker:
    """Score groups with the frozen reference, while others generate and train.

    Args:
        build: loads the reference, in the process of the worker.
        path: folder or hub id of the reference.
    """

    def __init__(self, build: Callable[[], ReferenceScorer], path: str) -> None:
        self.scorer, self.path = build(), path
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
