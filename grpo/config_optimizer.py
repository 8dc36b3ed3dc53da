"""The part of the configuration that says how gradients become updates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo.config_keys import OptimizerName
from grpo.config_objective import Section

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

    @model_validator(mode="after")
    def _final_fraction_needs_a_decay(self) -> OptimizerConfig:
        if self.schedule == "constant" and self.final_lr_fraction is not None:
            raise ValueError(f"optimizer.final_lr_fraction={self.final_lr_fraction} is not read by "
                             "schedule=constant; choose linear or cosine, or remove it")
        return self

    @model_validator(mode="after")
    def _options_are_the_optimizers(self) -> OptimizerConfig:
        adafactor = self.name == "adafactor"
        unread = ["betas", "eps"] if adafactor else ["scale_parameter", "relative_step"]
        if self.relative_step:
            unread += ["lr", "schedule", "warmup_steps"]
        for key in unread:
            value = getattr(self, key)
            if key in self.model_fields_set and value != type(self).model_fields[key].default:
                by = "relative_step=true" if key in ("lr", "schedule", "warmup_steps") else (
                    f"optimizer.name={self.name}")
                raise ValueError(f"optimizer.{key}={value} is not read by {by}; remove it")
        return self
