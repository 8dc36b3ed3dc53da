"""Rollouts on demand: generate, score, hand over."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

# What the next observation repeats, and what TorchRL keeps for longer episodes.
_DROPPED = (("next", "tokens"), ("next", "masks"), ("next", "group_id"), "done", "terminated",
            "truncated", "reward_error", "success")


class SyncCollector:
    """Run single-turn episodes of an environment with a policy.

    The batch that :meth:`collect` returns is dense, flat (``batch_size [N]``) and complete: whole
    groups, all sampled by one version of the weights.

    Args:
        env: whose episodes end after one step.
        policy: reads the prompts, writes tokens and log-probs.
        turns_per_batch: rows of a batch; a multiple of the environment's batch size.

    Attributes:
        seconds: what the last batch spent in ``"generate"`` and in ``"reward"``.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        turns_per_batch: int | None = None,
    ) -> None:
        rows = env.batch_size.numel()
        turns_per_batch = turns_per_batch or rows
        if turns_per_batch % rows:
            raise ValueError(f"turns_per_batch={turns_per_batch} must be a multiple of the "
                             f"environment's batch size {rows}")
        self.env, self.policy = env, policy
        self.rollouts_per_batch = turns_per_batch // rows
        self.seconds = {"generate": 0.0, "reward": 0.0}

    def collect(self) -> TensorDictBase:
        """One batch of finished episodes."""
        self.seconds = {"generate": 0.0, "reward": 0.0}
        batches = [self._rollout() for _ in range(self.rollouts_per_batch)]
        return batches[0] if len(batches) == 1 else torch.cat(batches)

    def _rollout(self) -> TensorDictBase:
        batch = self.env.reset()
        start = time.perf_counter()
        batch = self.policy(batch)
        generated = time.perf_counter()
        batch = self.env.step(batch)
        self.seconds["generate"] += generated - start
        self.seconds["reward"] += time.perf_counter() - generated
        return batch.exclude(*_DROPPED).flatten()
