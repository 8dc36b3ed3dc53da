"""What ``python -m grpo.run.plan`` is told beside the keys of a run; needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, ValidationError

from grpo.config.keys import ConfigError, errors_text
from grpo.config.section import Section


class PlanOptions(Section):
    """Keys without a section, beside those of the run."""

    num_gpus: int = Field(ge=1)
    """GPUs there are; with ``device=cpu`` processes on this machine."""
    gpus_per_host: int = Field(8, ge=1)
    """The trainer and each engine are on one host."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Of one GPU; null: of that of this machine, without one 139.8, which an H200 has."""
    prompt_tokens: int = Field(256, ge=1)
    """Of a prompt."""
    response_tokens: int | None = Field(None, ge=1)
    """Mean of a completion; null: half of ``inference_model.max_tokens``, which they are cut at;
    all of it with ``inference_model.ignore_eos=true``."""
    sigma: float = Field(0.6, ge=0, le=3)
    """Standard deviation of the logarithm of the lengths of completions; 0: all alike."""
    calibrate: bool = False
    """Measure this machine for at most 20 seconds, with the model of the run; else times are those
    of an H200."""


def split_options(overrides: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """The options of a plan among ``key=value``, and the rest.

    Raises:
        ConfigError: naming key, value and fix.

    Examples:
        >>> options, rest = split_options(["num_gpus=4", "train.seed=1"])
        >>> options.num_gpus, rest
        (4, ['train.seed=1'])
        >>> split_options(["gpus_per_host=0"])
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: the configuration has 2 errors:
          num_gpus is missing: how many GPUs are there? write num_gpus=8
          gpus_per_host=0: Input should be greater than or equal to 1
    """
    values, rest = {}, []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key not in PlanOptions.model_fields:
            rest.append(text)
        elif equals:
            values[key] = None if value == "null" else value
    try:
        return PlanOptions.model_validate(values), rest
    except ValidationError as error:
        raise ConfigError(errors_text([
            "num_gpus is missing: how many GPUs are there? write num_gpus=8"
            if problem["type"] == "missing" else
            f"{problem['loc'][0]}={problem['input']}: {problem['msg']}"
            for problem in error.errors()])) from None
