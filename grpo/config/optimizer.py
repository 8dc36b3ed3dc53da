"""The part of the configuration that says how gradients become updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo.config.keys import OptimizerName
from grpo.config.section import Section

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW, or another optimizer, over float32 master weights."""

    name: OptimizerName = "adamw"
    lr: float = Field(1e-5, gt=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad_norm: float | None = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_fraction: float | None = Field(None, ge=0, le=1)
    """Share of ``lr`` that a decaying schedule runs towards; null: 0."""
    scale_parameter: bool = False
    """Adafactor: multiply the learning rate by the root mean square of each weight matrix."""
    relative_step: bool = False
    """Adafactor: the learning rate follows the number of steps, ``lr`` is not read."""
