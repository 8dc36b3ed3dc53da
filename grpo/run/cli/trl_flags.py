"""The values of ``--name``, which are read as TRL's scripts read them.

Hydra's grammar of ``name=value`` gives commas, brackets and quotes of a text a meaning.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

#: Names that take several values, also with commas between them.
LISTS = {"reward_funcs", "reward_weights", "report_to", "lora_target_modules", "benchmarks"}
#: Names whose value is a text, whatever it looks like.
TEXTS = {"system_prompt", "chat_template"}


def take_words(name: str, waiting: list[str]) -> list[str]:
    """The words behind ``--name`` that are its value, taken off those that wait."""
    if name in TEXTS:
        return [waiting.pop(0)] if waiting else []
    words = []
    while waiting and not waiting[0].startswith("-") and not re.match(r"[+~\w.@/]+=", waiting[0]):
        words.append(waiting.pop(0))
    if waiting and not words and re.fullmatch(r"-[\d.][\w.+-]*", waiting[0]):  # a negative number
        words.append(waiting.pop(0))
    return words


def read_words(name: str, words: list[str]) -> Any:
    """The value that words stand for: none is true, several are a list.

    Examples:
        >>> read_words("report_to", ["wandb,tensorboard"])
        ['wandb', 'tensorboard']
        >>> read_words("lr_scheduler_kwargs", ['{"min_lr_rate": 0.1}'])
        {'min_lr_rate': 0.1}
        >>> read_words("run_name", ["first, with (some) changes"])
        'first, with (some) changes'
        >>> read_words("learning_rate", ["1e-5"]), read_words("bf16", [])
        (1e-05, True)
    """
    if name in TEXTS and words:
        return words[0]
    if name in LISTS and words and words[0][:1] not in ("[", "{"):
        parts = [_read(part.strip()) for word in words for part in word.split(",") if part.strip()]
        return None if parts == [None] else parts
    if len(words) > 1:
        return [_read(word) for word in words]
    return _read(words[0]) if words else True


def is_sweep(name: str, words: list[str]) -> bool:
    """Whether the value of a flag stands for several runs, in a sweep."""
    if name in TEXTS | LISTS or len(words) != 1:
        return False
    try:
        return OverridesParser.create().parse_override(f"_={words[0]}").is_sweep_override()
    except HydraException:
        return False


def _read(text: str) -> Any:
    if text[:1] not in ("[", "{"):
        return _scalar(text)
    for read in (json.loads, _of_hydra, _of_yaml):
        try:
            return read(text)
        except (ValueError, HydraException, OmegaConfBaseException, YAMLError):
            continue
    return text


def _scalar(text: str) -> Any:
    """What Hydra takes for a number, true, false or null; anything else is a text."""
    try:
        value = _of_hydra(text)
    except HydraException:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def _of_hydra(text: str) -> Any:
    return OverridesParser.create().parse_override(f"_={text}").value()


def _of_yaml(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text))
