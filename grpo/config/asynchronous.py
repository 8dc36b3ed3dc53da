"""The configuration of ``grpo-async.py``: that of every run, who computes on which devices, how old
rollouts may be, and Ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo.config.schema import Config, load_config
from grpo.config.section import Section
from grpo.config.train import TrainConfig
from grpo.config.unread import Unread

_UPDATE = Unread(lambda c: c.train.staleness == 0 and c.train.oversample == 0, "because with "
                 "train.staleness=0 and train.oversample=0 nothing is being generated when "
                 "weights are updated; raise one of them, or")
_EXTRA = Unread(lambda c: c.oversampled_groups == 0, "because of the {groups_per_batch} groups of "
                "a batch that is less than half a group; raise it, or")


class AsyncTrainConfig(TrainConfig):
    """The loop, and how far generation may run ahead of it."""

    staleness: int = Field(1, ge=0)
    """Weight updates that may lie between a token and its training; 0: none, on-policy. The more,
    the less a batch has to wait for long groups."""
    update_at: Annotated[Literal["auto", "in_flight", "group_border"], _UPDATE] = "auto"
    """When engines take new weights: ``in_flight``, between two tokens, so that a row may have
    tokens of several versions; ``group_border``, when what they generate is finished, so that none
    has; auto: in flight where the engine can, which is vLLM."""
    group_deadline: float | None = Field(None, gt=0)
    """Seconds that a group may take; then it is generated again elsewhere, and dropped after three
    attempts, so that the longest completions are not trained. null: any time."""
    oversample: Annotated[float, _EXTRA] = Field(0.0, ge=0)
    """Share of groups started beyond those a batch needs, so that it need not wait for the slowest
    ones. The prompts of those are sampled anew, which favours short completions."""


class RayConfig(Section):
    """Ray, which starts and watches the processes that generate."""

    address: str | None = None
    """Of a running cluster, or ``auto``; null: Ray is started on this machine, for this run."""
    max_restarts: int = Field(3, ge=0)
    """How often, in all, rollout workers that died are replaced, and as often reference workers."""
    start_timeout: float = Field(900.0, gt=0)
    """Seconds until a worker must have started; one that takes a dead one's place is waited for
    only where there is no other."""


class AsyncConfig(Config):
    """A whole asynchronous run; see :class:`~grpo.config.schema.Config` for the rest."""

    train: AsyncTrainConfig = Field(default_factory=AsyncTrainConfig)
    ray: RayConfig = Field(default_factory=RayConfig)

    @model_validator(mode="after")
    def _a_sharded_reference_is_on_one_machine(self) -> AsyncConfig:
        if self.ref_model.sharded and self.ray.address is not None:
            raise ValueError(f"ref_model.sharded=true joins devices of one machine, but ray.address"
                             f"={self.ray.address} is a cluster, which may spread them; set it to "
                             "false for a whole copy on each, or remove ray.address")
        return self

    @property
    def oversampled_groups(self) -> int:
        """Groups started beyond those of a batch."""
        return round(self.train.oversample * self.groups_per_batch)

    @property
    def has_workers(self) -> bool:
        return True


def with_workers(config: Config) -> AsyncConfig:
    """A run of ``grpo.py`` as one whose workers on Ray never run ahead of the trainer: its batches
    are the same.

    Examples:
        >>> with_workers(Config(inference_model={"num_devices": 2})).train.staleness
        0
    """
    values = config.model_dump()
    values["train"]["staleness"] = 0
    return load_config(values, AsyncConfig)
