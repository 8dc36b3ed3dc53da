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

from grpo.config.trl_names import FIELDS

#: Names that take several values, also with commas between them.
LISTS = {"reward_funcs", "reward_weights", "report_to", "lora_target_modules", "benchmarks"}
#: Names whose value is a text, whatever it looks like.
TEXTS = {"system_prompt", "chat_template"}
#: Names that are true where nothing stands behind them, beside those with such a default.
_BARE = {"bf16", "tf32", "disable_tqdm", "include_num_input_tokens_seen", "hub_private_repo",
         "greater_is_better", "ddp_find_unused_parameters", "ddp_broadcast_buffers",
         "ddp_static_graph", "scale_rewards", "maxent_length_normalize_ref",
         "resume_from_checkpoint"}
_OVERRIDE = re.compile(r"[+~\w.@/]+=")
_NEGATIVE = re.compile(r"-[\d.][\w.,+-]*")  # no option of Hydra's begins like it


def take_words(name: str, waiting: list[str]) -> list[str]:
    """The words behind ``--name`` that are its value, taken off those that wait.

    Examples:
        >>> take_words("output_dir", ["runs/lr=1e-6", "train.seed=3"])
        ['runs/lr=1e-6']
        >>> take_words("bf16", ["train.seed=3"])
        []
        >>> take_words("reward_weights", ["1.0", "-0.5", "-m"])
        ['1.0', '-0.5']
    """
    if name in TEXTS:
        return [waiting.pop(0)] if waiting else []
    words: list[str] = []
    while waiting and (_NEGATIVE.fullmatch(waiting[0]) or not waiting[0].startswith("-")):
        needed = not words and not _may_be_bare(name)
        if not needed and _OVERRIDE.match(waiting[0]):
            break
        words.append(waiting.pop(0))
    return words


def _may_be_bare(name: str) -> bool:
    return name in _BARE or isinstance(FIELDS[name].default, bool)


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
