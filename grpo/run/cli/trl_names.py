"""TRL's names on the command line, as ``name=value`` or ``--name value``, and recipe files of them.

``--config FILE`` is a flat YAML file as TRL's and open-r1's scripts take it. What stands behind it
on the command line wins over it, by its name of today or by TRL's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf

import grpo
from grpo.config.aliases import ALIASES
from grpo.config.keys import ConfigError
from grpo.config.presets import leaves
from grpo.config.trl_names import FIELDS, translate, typed

_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"(\+{0,2})(train\.)?(\w+)=", re.ASCII)
_MULTIRUN = ("-m", "--multirun")


def recipe_folder() -> Path:
    """Where the recipe files are, of a clone or of the installed package."""
    package = Path(grpo.__file__).resolve().parent
    installed = package / "run" / "recipe_files"
    return installed if installed.is_dir() else package.parent / "recipes"


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe file, by its path or as the name of one of this library's.

    Raises:
        FileNotFoundError: if there is none.
        ConfigError: if it is no table of names.
    """
    folder = recipe_folder()
    path = next((one for one in (Path(name).expanduser(), folder / name, folder / f"{name}.yaml")
                 if one.is_file()), None)
    if path is None:
        known = ", ".join(sorted(one.name for one in folder.glob("*.yaml")))
        raise FileNotFoundError(f"--config {name}: there is no such file; give a path, or one of "
                                f"this library's: {known}")
    values = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(values, dict):
        raise ConfigError(f"--config {name}: expected a table of names and values")
    return values


def overrides_of(
    given: Mapping[str, Any], own: Mapping[str, Any], *, whole: bool
) -> tuple[dict[str, str], list[str]]:
    """Overrides for Hydra by their keys, and what is said of them.

    Args:
        given: values by TRL's names.
        own: values by the keys of today that are given as well, which win.
        whole: see :func:`grpo.config.trl_names.translate`.
    """
    done = translate(given, own, whole=whole)
    named = {key for key, value in done.keys.items() if key in own and own[key] != value}
    if named and not whole:
        key = sorted(named)[0]
        raise ConfigError(f"{key}={typed(own[key])} and {key}={typed(done.keys[key])}, by "
                          f"{' and '.join(given)}, are the same setting; give one")
    kept = {key: value for key, value in done.keys.items() if key not in own}
    if won := sorted(named - done.defaults):
        done.said.append("what is typed behind it wins: "
                         + " ".join(f"{key}={typed(own[key])}" for key in won))
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
    own = {one.key_or_group: one.value() for text in rest if (one := _own(text, parser))}
    named, behind = {}, {}
    for name, value in ({} if recipe is None else read_recipe(recipe)).items():
        if name in FIELDS:
            named[name] = value
        else:
            behind |= dict(leaves({name: value}))
    values = {name: _value(name, text, parser) for name, text in given.items()}
    typed_keys = own.keys() | {key for name in values for key in FIELDS[name].to}
    behind = {key: value for key, value in behind.items() if key not in typed_keys}
    overrides, said = overrides_of(named | values, behind | own, whole=recipe is not None)
    if set(arguments) & {*_MULTIRUN} and "hydra.run.dir" in overrides:
        overrides["hydra.run.dir"] = overrides["hydra.run.dir"].replace(".run.", ".sweep.", 1)
    for line in said:
        print(line)
    of_file = {key: f"{key}={typed(value)}" for key, value in behind.items()}
    swept = {text.partition("=")[0] for text in [*rest, *sweeps]}
    return [*rest, *(text for key, text in (of_file | overrides).items() if key not in swept),
            *sweeps]


def _sorted(arguments: list[str]) -> tuple[list[str], dict[str, str], str | None, list[str]]:
    """What is Hydra's, texts by TRL's names, the recipe file, and sweeps of renamed keys."""
    rest, given, recipe, sweeps = [], {}, None, []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, override = _FLAG.fullmatch(argument), _OVERRIDE.match(argument)
        name = flag[1].replace("-", "_") if flag else override[3] if override else ""
        if flag and name == "config":
            if flag[2] is None and (not waiting or waiting[0].startswith("-")):
                raise ConfigError("--config: which file? write --config FILE")
            file = waiting.pop(0) if flag[2] is None else flag[2]
            if recipe not in (None, file):
                raise ConfigError(f"--config is given twice, as {recipe} and {file}; give one")
            recipe = file
        elif flag and name in FIELDS:
            _give(given, name, _flag_value(waiting) if flag[2] is None else flag[2])
        elif override and name in (ALIASES if override[2] else FIELDS):
            text = argument[override.end():]
            if _is_sweep(name, text):
                if FIELDS[name].rule != "same":
                    raise ConfigError(f"{argument}: its values say several keys; sweep over those, "
                                      f"{', '.join(FIELDS[name].to) or 'of today'}")
                sweeps.append(f"{FIELDS[name].to[0]}={text}")
            else:
                _give(given, name, text)
        else:
            rest.append(argument)
    return rest, given, recipe, sweeps


def _give(given: dict[str, str], name: str, text: str) -> None:
    if given.setdefault(name, text) != text:
        raise ConfigError(f"{name} is given twice, as {given[name]} and {text}; give one")


def _flag_value(waiting: list[str]) -> str:
    """The value of ``--name`` from the words behind it: none is true, several are a list."""
    words = []
    while waiting and not waiting[0].startswith("-") and not re.match(r"[+~\w.@/]+=", waiting[0]):
        words.append(waiting.pop(0))
    if waiting and not words and re.fullmatch(r"-[\d.][\w.+-]*", waiting[0]):  # a negative number
        words.append(waiting.pop(0))
    return "true" if not words else words[0] if len(words) == 1 else f"[{','.join(words)}]"


def _own(text: str, parser: OverridesParser) -> Override | None:
    """An override of a key of today that sets it to one value."""
    if text.startswith("-") or "=" not in text:
        return None
    one = parser.parse_override(text)
    return None if one.is_sweep_override() or one.type == OverrideType.DEL else one


def _is_sweep(name: str, text: str) -> bool:
    return OverridesParser.create().parse_override(f"{name}={text}").is_sweep_override()


def _value(name: str, text: str, parser: OverridesParser) -> Any:
    return parser.parse_override(f"{name}={text}").value()
