"""What kinds of values names take whose translation computes with them or asks for them; values
that become a key's as they are, are the schema's to check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo.config.trl_names.fields import Field


class Kind(NamedTuple):
    """Values that are allowed, and their name in messages."""

    allows: Callable[[Any], bool]
    text: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and int(value) == value


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, kind) for one in values)


_FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
_NUMBER = Kind(_is_number, "a number")
_WHOLE = Kind(_is_whole, "a whole number")
COUNT = Kind(lambda value: _is_whole(value) and value > 0, "a whole number above 0")
_TEXT = Kind(lambda value: isinstance(value, str), "a text")
_TEXTS = Kind(lambda value: isinstance(value, str) or _are(value, str), "a text, or a list of them")
_SCALE = Kind(lambda value: isinstance(value, str | bool), "group or none")
_TABLE = Kind(lambda value: isinstance(value, Mapping), "a table, such as {min_lr_rate: 0.1}")
_TABLES = Kind(lambda value: _are(value, Mapping), "a list of tables, such as [{path: org/name}]")
#: Of names whose default does not say it.
_KINDS = {
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "num_processes"), COUNT),
    **dict.fromkeys(("eval_steps", "delta", "epsilon_high", "vllm_importance_sampling_clip_min",
                     "vllm_importance_sampling_cap"), _NUMBER),
    **dict.fromkeys(("dataset_name", "loss_type", "vllm_importance_sampling_mode"), _TEXT),
    **dict.fromkeys(("reward_funcs", "report_to", "lora_target_modules"), _TEXTS),
    "scale_rewards": _SCALE, "lr_scheduler_kwargs": _TABLE, "datasets": _TABLES,
}


def kind_of(name: str, one: Field) -> Kind | None:
    """The kind of value that a name takes; None: any.

    Examples:
        >>> from grpo.config.trl_names import FIELDS
        >>> kind_of("epsilon", FIELDS["epsilon"]).text
        'a number'
    """
    default = one.default
    if name in _KINDS or one.rule != "joint" or not isinstance(default, int | float):
        return _KINDS.get(name)
    if isinstance(default, bool):
        return _FLAG
    if one.group not in ("batch", "length") or isinstance(default, float):
        return _NUMBER
    return COUNT if default > 0 else _WHOLE
