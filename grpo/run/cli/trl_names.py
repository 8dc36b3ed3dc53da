"""TRL's names on the command line, as ``name=value`` or ``--name value``, and recipe files of them.

``--config FILE`` is a flat YAML file as TRL's and open-r1's scripts take it. What stands behind it
on the command line wins over it, by its name of today or by TRL's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType

from grpo.config.aliases import ALIASES
from grpo.config.keys import ConfigError
from grpo.config.trl_names import FIELDS, translate, typed
from grpo.config.trl_names.batch import LENGTHS
from grpo.config.trl_names.loss import refuse_both
from grpo.run.cli.recipe_files import flat, give_way, preset_of, read_recipe
from grpo.run.cli.trl_flags import is_sweep, read_words, take_words

_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"(\+{0,2})(train\.)?(\w+)=", re.ASCII)
_MULTIRUN = ("-m", "--multirun")


def overrides_of(
    given: Mapping[str, Any], own: Mapping[str, Any], *, whole: bool, swept: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Overrides for Hydra by their keys, and what is said of them.

    Args:
        given: values by TRL's names.
        own: values by the keys of today that are given as well, which win over a file, and over
            what a name only implies.
        whole, swept: see :func:`grpo.config.trl_names.translate`.
    """
    done = translate(given, own, whole=whole, swept=swept)
    named = {key for key, value in done.keys.items() if key in own and own[key] != value}
    if not whole and (twice := sorted(named - done.implied)):
        key = twice[0]
        raise ConfigError(f"{key}={typed(own[key])} and {key}={typed(done.keys[key])}, by "
                          f"{' and '.join(given)}, are the same setting; give one")
    kept = {key: value for key, value in done.keys.items() if key not in {*own, *swept}}
    if won := sorted(named - done.defaults):
        text = " ".join(f"{key}={typed(own[key])}" for key in won)
        done.said.append(f"what is typed behind it wins: {text}" if whole else
                         f"the key that is given wins: {text}")
    if left := [f"{key}={typed(value)}" for key, value in kept.items() if key in done.defaults]:
        done.said.append(f"TRL's defaults for what is left open: {' '.join(left)}")
    return {key: f"{key}={typed(value)}" for key, value in kept.items()}, done.said


def with_trl_names(arguments: list[str]) -> list[str]:
    """A script's arguments with keys of today in the place of TRL's names and of ``--config``;
    says on the screen what became of each.

    Raises:
        ConfigError: if a name is unknown or has nothing here.
        FileNotFoundError: if the recipe file is not there.

    Examples:
        >>> with_trl_names(["preset=dapo", "learning_rate=1e-6", "--seed", "3"])
        learning_rate is now called optimizer.lr; using 1e-06
        seed is now called train.seed; using 3
        ['preset=dapo', 'optimizer.lr=1e-06', 'train.seed=3']
    """
    rest, given, recipe, sweeps = _sorted(arguments)
    if recipe is None and not given:
        return rest + sweeps
    parser = OverridesParser.create()
    here = [parser.parse_override(text) for text in [*rest, *sweeps]
            if "=" in text and not text.startswith("-")]
    swept = {one.key_or_group for one in here if one.is_sweep_override()}
    own = {one.key_or_group: one.value() for one in here
           if one.key_or_group not in swept and one.type != OverrideType.DEL}
    values = {name: one.value for name, one in given.items()}
    refuse_both(preset.input_line if (preset := preset_of(here)) else "", values.get("loss_type"))
    file = {} if recipe is None else flat(read_recipe(recipe))
    for line in give_way(file, [name for name in values if values[name] is not None], here):
        print(line)
    named = {name: value for name, value in file.items() if name in FIELDS}
    behind = {key: value for key, value in file.items() if key not in FIELDS}
    typed_keys = own.keys() | swept | {key for name in values for key in FIELDS[name].to}
    if _says_how_long(values, own, swept):
        typed_keys |= {*LENGTHS}
    behind = {key: value for key, value in behind.items() if key not in typed_keys}
    overrides, said = overrides_of(named | values, behind | own, whole=recipe is not None,
                                   swept=swept)
    if set(arguments) & {*_MULTIRUN} and "hydra.run.dir" in overrides:
        overrides["hydra.run.dir"] = overrides["hydra.run.dir"].replace(".run.", ".sweep.", 1)
    for line in said:
        print(line)
    of_file = {key: f"{key}={typed(value)}" for key, value in behind.items()}
    return [*rest, *(of_file | overrides).values(), *sweeps]


def _says_how_long(values: Mapping[str, Any], own: Mapping[str, Any], swept: set[str]) -> bool:
    """Whether the command line does, so that no other key of the file may."""
    said = swept | {key for key, value in own.items() if value is not None}
    for name, value in values.items():
        if value not in (None, -1):  # which leaves it open
            said |= {*FIELDS[name].to}
    return not said.isdisjoint(LENGTHS)


class _Given(NamedTuple):
    """The value of a name, and what was typed for it."""

    typed: str
    value: Any


class _Sorted(NamedTuple):
    """A command line: what is Hydra's, values by TRL's names, the recipe file, and sweeps of
    renamed keys."""

    rest: list[str]
    given: dict[str, _Given]
    recipe: str | None
    sweeps: list[str]


def _sorted(arguments: list[str]) -> _Sorted:
    rest, given, recipe, sweeps = [], {}, None, []
    waiting, several_runs = list(arguments), bool({*arguments} & {*_MULTIRUN})
    while waiting:
        argument = waiting.pop(0)
        flag, override = _FLAG.fullmatch(argument), _OVERRIDE.match(argument)
        name = flag[1].replace("-", "_") if flag else override[3] if override else ""
        if flag and name == "config":
            recipe = _recipe(flag[2], waiting, recipe)
        elif flag and name in FIELDS:
            words = take_words(name, waiting) if flag[2] is None else [flag[2]]
            if several_runs and is_sweep(name, words):
                sweeps.append(_sweep(name, words[0], f"--{name} {words[0]}"))
            else:
                _give(given, name, " ".join(words) or "true", read_words(name, words))
        elif override and name in (ALIASES if override[2] else FIELDS):
            text = argument[override.end():]
            one = OverridesParser.create().parse_override(f"{name}={text}")
            if one.is_sweep_override():
                sweeps.append(_sweep(name, text, argument))
            else:
                _give(given, name, text, one.value())
        else:
            rest.append(argument)
    return _Sorted(rest, given, recipe, sweeps)


def _recipe(file: str | None, waiting: list[str], before: str | None) -> str:
    """The file of ``--config``, which may be the next word."""
    if file is None and (not waiting or waiting[0].startswith("-")):
        raise ConfigError("--config: which file? write --config FILE")
    file = waiting.pop(0) if file is None else file
    if before not in (None, file):
        raise ConfigError(f"--config is given twice, as {before} and {file}; give one")
    return file


def _give(given: dict[str, _Given], name: str, text: str, value: Any) -> None:
    before = given.setdefault(name, _Given(text, value))
    if before.typed != text:
        raise ConfigError(f"{name} is given twice, as {before.typed} and {text}; give one")


def _sweep(name: str, text: str, argument: str) -> str:
    """A sweep of a name as one of the key that it is another name of."""
    if FIELDS[name].rule != "same":
        raise ConfigError(f"{argument}: its values say several keys; sweep over those, "
                          f"{', '.join(FIELDS[name].to) or 'of today'}")
    return f"{FIELDS[name].to[0]}={text}"
