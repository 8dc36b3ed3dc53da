"""Rollouts on demand: generate, score, hand over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from grpo import data
from grpo.envs.rewards.batch import first_failures
from grpo.envs.verifiable import VerifiableEnv
from grpo.objectives.shaping import informative_groups
from grpo.policies.base import Policy
from grpo.policies.converse import respond

# What the next observation repeats, and what TorchRL keeps for longer episodes.
DROPPED = (("next", "tokens"), ("next", "masks"), ("next", "group_id"), "done", "terminated",
            "truncated", "reward_error", "reward_fault", "reward_parts", "success")


class SyncCollector:
    """Run single-turn episodes of an environment with a policy.

    The batch that :meth:`collect` returns is dense, flat (``batch_size [N]``) and complete: whole
    groups, all sampled by one version of the weights.

    With ``max_rounds`` it samples dynamically (DAPO, arXiv:2503.14476, sec. 3.2): groups whose
    rewards are all equal teach nothing, so more prompts are drawn until the batch is full of
    others. After ``max_rounds`` rounds the rest is filled with what there is.

    Args:
        env: whose episodes end after one step.
        policy: reads the prompts, writes tokens and log-probs.
        turns_per_batch: rows of a batch; a multiple of the environment's batch size.
        max_rounds: at most so many times the rows of a batch are generated for it; None: each
            group is used, whatever its rewards.

    Groups are scored as they are finished, where policy and environment know how
    (:func:`~grpo.policies.converse.respond`).

    Attributes:
        seconds: what the last batch spent in ``"generate"``, and then waited for ``"reward"``.
        failures: of rewards of the last batch, as of :class:`~grpo.envs.rewards.RewardBatch`.
        metrics: with ``max_rounds``, what the last batch took: ``sampling/rounds``, the share of
            generated rows in informative groups, and the mean reward of all that was generated
            (that of the batch alone is biased by the choice).
    """

    keeps_untrained = False  # what an environment has begun cannot be gone on with
    finished = 0

    def __init__(
        self, env: EnvBase, policy: Callable[[TensorDictBase], TensorDictBase], *,
        turns_per_batch: int | None = None, max_rounds: int | None = None,
    ) -> None:
        rows = env.batch_size.numel()
        turns_per_batch = turns_per_batch or rows
        if turns_per_batch % rows:
            raise ValueError(f"turns_per_batch={turns_per_batch} must be a multiple of the "
                             f"environment's batch size {rows}")
        if max_rounds is not None and max_rounds < 2:
            raise ValueError(f"max_rounds={max_rounds} leaves no second round to sample in; give "
                             "at least 2, or None to use every group")
        self.env, self.policy = env, policy
        self.turns_per_batch, self.max_rounds = turns_per_batch, max_rounds
        self.rollouts_per_batch = turns_per_batch // rows
        self.seconds = {"generate": 0.0, "reward": 0.0}
        self.metrics: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def collect(self) -> TensorDictBase:
        """One batch of finished episodes."""
        self.seconds, self.failures = {"generate": 0.0, "reward": 0.0}, {}
        if self.max_rounds is not None:
            return self._collect_informative()
        rollouts = [self._rollout() for _ in range(self.rollouts_per_batch)]
        return rollouts[0] if len(rollouts) == 1 else torch.cat(rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The environment's, for a checkpoint."""
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "ready" in state:
            raise ValueError("resume: the checkpoint is of a run with workers, who draw prompts in "
                             "another way; go on with the devices it had for inference_model and "
                             "ref_model, or start anew from its model by "
                             "model.name=CHECKPOINT/model")
        self.env.load_state_dict(state)

    def _collect_informative(self) -> TensorDictBase:
        informative, others, failed = [], [], []
        found = rollouts = 0
        while found < self.turns_per_batch and rollouts < self.max_rounds * self.rollouts_per_batch:
            rollout = self._rollout()
            useful_B = informative_groups(
                rollout[data.REWARD].flatten(), rollout[data.GROUP_ID].flatten(),
                ~rollout[data.REWARD_ERROR].flatten())
            informative.append(rollout[useful_B])
            # Groups without any reward go last: a batch of nothing else cannot be trained on.
            error_B = _all_of_group(rollout[data.REWARD_ERROR], rollout[data.GROUP_ID])
            others.append(rollout[~useful_B & ~error_B])
            failed.append(rollout[error_B])
            found, rollouts = found + int(useful_B.sum()), rollouts + 1
        batch = torch.cat(informative + others + failed)
        valid_B = ~batch[data.REWARD_ERROR].flatten()
        self.metrics = {"sampling/rounds": rollouts / self.rollouts_per_batch,
                        "sampling/informative_fraction": found / len(batch),
                        "sampling/reward_mean": batch[data.REWARD].flatten()[valid_B].mean().item()}
        # Groups are whole and of one size, which divides the batch, so this cuts between groups.
        return batch[: self.turns_per_batch]

    def _rollout(self) -> TensorDictBase:
        batch = self.env.reset()
        start = time.perf_counter()
        if isinstance(self.policy, Policy) and isinstance(self.env, VerifiableEnv):
            batch = respond(self.policy, self.env, batch)
        else:
            batch = self.policy(batch)
        generated = time.perf_counter()
        batch = self.env.step(batch)
        self.failures = first_failures([self.failures, getattr(self.env, "failures", {})])
        self.seconds["generate"] += generated - start
        self.seconds["reward"] += time.perf_counter() - generated
        return batch.exclude(*DROPPED).flatten()


def _all_of_group(flag_B1: Tensor, group_id_B: Tensor) -> Tensor:
    """Whether a flag is set on all rows of a row's group, bool ``[B]``."""
    _, group_B = group_id_B.unique(return_inverse=True)
    unset_G = torch.zeros(len(group_B)).index_add(0, group_B, (~flag_B1.flatten()).float())
    return unset_G[group_B] == 0
