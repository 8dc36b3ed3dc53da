"""Names of configuration keys, checked before PyTorch is imported.

The recipes in ``config/`` have every key of the schema, except for section ``atropos``, whose
schema is light.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from grpo.config.aliases import ALIASES, replaced_key
from grpo.config.keys import unknown_key
from grpo.config.offline_keys import KEYS
from grpo.config.presets import leaves
from grpo.config.recipes import recipes
from grpo.config.trl_names import FIELDS


def key_error(path: str, value: object, known: DictConfig, *, adds: bool) -> str | None:
    """What is wrong with the name of a key in a configuration with all that are ``known``; None if
    nothing is. ``adds``: it may be added where any are possible, such as options of a task.

    Examples:
        >>> known = OmegaConf.create({"train": {"seed": 0}, "env": {"task": {"seed": 0}}})
        >>> key_error("train.sead", 1, known, adds=False)
        "train.sead: unknown key (given 1); did you mean 'seed'?"
        >>> key_error("train.seed", 1, known, adds=False) is None
        True
    """
    if instead := replaced_key(path, value):
        return instead
    *parents, name = path.split(".")
    section = known
    for depth, parent in enumerate(parents, start=1):
        if parent not in section:
            if depth == 1 and parent in known.get("run", {}):  # of grpo-offline.py
                return (f"{path}: unknown key (given {value!r}); did you mean "
                        f"'{KEYS.get(path, f'run.{path}')}'?")
            return unknown_key(".".join(parents[:depth]), value, section)
        section = section[parent]
        if not OmegaConf.is_dict(section):
            return None if adds else (
                f"{path}: {'.'.join(parents[:depth])} has no keys before it is given one; write "
                f"'{'.'.join(parents)}={{{name}: {value}}}'")
    if name in section or (adds and parents[-2:] == ["env", "task"]):
        return None
    if not parents and "run" in known and name in FIELDS:  # TRL's, of grpo-offline.py
        meant = " and ".join(KEYS.get(key, f"run.{key}") for key in FIELDS[name].to)
        return f"{path}: unknown key (given {value!r}); " + (
            f"write {meant}" if meant else FIELDS[name].text)
    if not parents and (close := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)) and (
            difflib.get_close_matches(name, [*close, *section], n=1) == close):
        return f"{path}: unknown key (given {value!r}); did you mean {close[0]!r}?"
    if parents in ([], ["train"]) and name in ALIASES:
        return None if adds else (
            f"{path}: is now called {'.'.join(ALIASES[name])}; write that (given {value})")
    return unknown_key(path, value, section, elsewhere=dict(leaves(OmegaConf.to_container(known))))


def atropos_key_errors(overrides: Sequence[str]) -> list[str]:
    """What is wrong with ``section.key=value`` of a run on Atropos environments, one line each.

    Examples:
        >>> atropos_key_errors(["train.sead=1", "atropos.step=3", "train.epochs=2", "seed"])
        ... # doctest: +NORMALIZE_WHITESPACE
        ["train.sead: unknown key (given 1); did you mean 'seed'?",
         "atropos.step: unknown key (given 3); did you mean 'steps'?",
         'seed: has no value; write section.key=value']
    """
    from grpo.config.atropos_section import AtroposSection

    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        known = OmegaConf.merge({"atropos": dict.fromkeys(AtroposSection.model_fields)},
                                hydra.compose("grpo"))
    found = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            found.append(f"{text}: has no value; write section.key=value")
        elif error := key_error(path, plain(value), known, adds=True):
            found.append(error)
    return found


def with_env_groups(overrides: Sequence[str], folder: Path) -> list[str]:
    """``env.dataset=NAME`` as the group ``env=NAME``, so that the task comes with its own options
    and all else that goes with it; what is typed besides wins, as over any group.

    Where a group is typed as well, or there is none of the name, nothing changes.

    Examples:
        >>> with_env_groups(["env.dataset=gsm8k", "env.repeats=4"], recipes())
        ['env=gsm8k', 'env.repeats=4']
        >>> with_env_groups(["env.dataset=mine"], recipes())
        ['env.dataset=mine']
    """
    if any(text.partition("=")[0] == "env" for text in overrides):
        return list(overrides)
    known = {path.stem for path in (folder / "env").glob("*.yaml")}

    def group(text: str) -> str:
        key, _, value = text.partition("=")
        named = {name.strip().strip("'\"") for name in value.split(",")}  # several in a sweep
        return f"env={value}" if key == "env.dataset" and named <= known else text

    return [group(text) for text in overrides]


def plain(text: str) -> object:
    """What the text of a value stands for, as far as that is needed to print it."""
    return OmegaConf.from_dotlist([f"value={text}"]).value
