"""The part of the configuration that says how gradients become updates."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo.config.keys import OptimizerName
from grpo.config.section import Section
from grpo.config.unread import Unread

_Beta = Annotated[float, Field(ge=0, lt=1)]
_ADAMW = Unread(lambda c: c.optimizer.name == "adafactor", "by optimizer.name=adafactor;")
_ADAFACTOR = Unread(lambda c: c.optimizer.name != "adafactor",
                    "by optimizer.name={optimizer.name}; choose adafactor, or")
_SCHEDULE = Unread(lambda c: c.optimizer.relative_step, "by optimizer.relative_step=true;")
_DECAY = Unread(lambda c: c.optimizer.schedule == "constant",
                "by optimizer.schedule=constant; choose linear or cosine, or")


class OptimizerConfig(Section):
    """AdamW, or another optimizer, over float32 master weights."""

    name: OptimizerName = "adamw"
    lr: Annotated[float, _SCHEDULE] = Field(1e-5, gt=0)
    betas: Annotated[tuple[_Beta, _Beta], _ADAMW] = (0.9, 0.999)
    eps: Annotated[float, _ADAMW] = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad_norm: float | None = Field(1.0, gt=0)
    warmup_steps: Annotated[int | float, _SCHEDULE] = Field(0, ge=0)
    """Optimizer steps of linear warm-up; below 1: as a share of the run's, rounded up."""
    schedule: Annotated[Literal["constant", "linear", "cosine"], _SCHEDULE] = "constant"
    final_lr_fraction: Annotated[float | None, _DECAY] = Field(None, ge=0, le=1)
    """Share of ``lr`` that a decaying schedule runs towards; null: 0."""
    scale_parameter: Annotated[bool, _ADAFACTOR] = False
    """Adafactor: multiply the learning rate by the root mean square of each weight matrix."""
    relative_step: Annotated[bool, _ADAFACTOR] = False
    """Adafactor: the learning rate follows the number of steps, ``lr`` is not read."""

    @model_validator(mode="after")
    def _warmup_is_steps_or_a_share(self) -> OptimizerConfig:
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"optimizer.warmup_steps={self.warmup_steps} must be a whole number "
                             "of steps, or a share of the run below 1")
        return self

    def warmup(self, total_steps: int) -> int:
        """``warmup_steps`` of a run of so many.

        Examples:
            >>> OptimizerConfig(warmup_steps=0.1).warmup(25)
            3
        """
        share = 0 < self.warmup_steps < 1
        return math.ceil(self.warmup_steps * total_steps) if share else int(self.warmup_steps)
