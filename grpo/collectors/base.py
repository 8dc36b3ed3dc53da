"""What the trainer needs of whatever makes its rollouts."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase


class Collector(Protocol):
    """Rollouts, one batch at a time.

    Attributes:
        policy: what generates them, whose ``calls`` a checkpoint keeps.
        seconds: what the last batch took, by phase.
        metrics: of the last batch, under the names of ``metrics.jsonl``.
        failures: of the last batch's rewards, as of :class:`~grpo.envs.rewards.RewardBatch`.
    """

    policy: Any
    seconds: dict[str, float]
    metrics: dict[str, float]
    failures: dict[str, str]

    def collect(self) -> TensorDictBase:
        """One batch of whole groups, dense and flat, ``batch_size [N]``."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
