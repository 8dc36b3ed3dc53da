"""What the trainer needs of whatever makes its rollouts."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase


class Collector(Protocol):
    """Rollouts, one batch at a time; what is told of the last batch can be read from it."""

    policy: Any  # what generates them, whose ``calls`` a checkpoint keeps
    seconds: dict[str, float]  # what the last batch took, by phase
    metrics: dict[str, float]  # under the names of metrics.jsonl
    failures: dict[str, str]  # of rewards, as of grpo.envs.rewards.RewardBatch
    #: Whether :meth:`state_dict` may be asked for at any moment, and has a batch until it is
    #: trained; else a batch that was not trained is collected anew.
    keeps_untrained: bool
    finished: int  # groups so far that it has then before they are trained; else 0

    def collect(self) -> TensorDictBase:
        """One batch of whole groups, dense and flat, ``batch_size [N]``."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
