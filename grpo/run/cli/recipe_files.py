"""Recipe files of ``--config``: a flat YAML file of TRL's names, keys of today and groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import grpo
from grpo.config.keys import ConfigError
from grpo.config.presets import leaves
from grpo.config.recipes import recipes
from grpo.config.trl_names import FIELDS, typed
from grpo.config.trl_names.groups import OF_THE_OBJECTIVE

#: Names that say what is trained on, and the keys that do.
_DATA = ("dataset_name", "datasets", "dataset_mixture")
_DATA_KEYS = ("env", "env.dataset", "env.name", "env.path", "env.dataset_mixture")
#: What else is about the objective, whichever preset is chosen.
_SECTIONS = ("maxent.", "kl_controller.", "entropy_controller.")


def recipe_folder() -> Path:
    """Where the recipe files are, of a clone or of the installed package."""
    package = Path(grpo.__file__).resolve().parent
    installed = package / "run" / "recipe_files"
    return installed if installed.is_dir() else package.parent / "recipes"


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe file, by its path or as the name of one of this library's.

    Raises:
        FileNotFoundError: if there is none.
        ConfigError: if it is no YAML, or no table of names.
    """
    folder = recipe_folder()
    path = next((one for one in (Path(name).expanduser(), folder / name, folder / f"{name}.yaml")
                 if one.is_file()), None)
    if path is None:
        known = ", ".join(sorted(one.name for one in folder.glob("*.yaml")))
        raise FileNotFoundError(f"--config {name}: there is no such file; give a path, or one of "
                                f"this library's: {known}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {name}: it cannot be read as YAML ({error}); correct it"
                          ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {name}: expected a table of names and values")
    return values


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a file by TRL's names and by dotted keys of today, in its order."""
    done: dict[str, Any] = {}
    for name, value in values.items():
        done |= {name: value} if name in FIELDS else dict(leaves({name: value}))
    return done


def give_way(file: dict[str, Any], given: Collection[str], here: Iterable[Override]) -> list[str]:
    """Take out of a file what something on the command line is instead of, and say so.

    A preset is instead of all that is about the objective, and a data set instead of another one.

    Args:
        file: see :func:`flat`; is changed.
        given: TRL's names on the command line.
        here: keys of today there, and groups.
    """
    said = []
    if preset := preset_of(here):
        keys = _keys_of_presets(preset)
        said += _take_out(file, preset.input_line, "the objective", lambda one: (
            _is_of_the_objective(one) or not keys.isdisjoint(_keys(one))))
    if name := next((one for one in _DATA if one in given), None):
        said += _take_out(file, name, "what is trained on", lambda one: (
            one in _DATA_KEYS or one in _DATA and one not in given
            or one == "test_split_size" and "datasets" not in given))
    return said


def preset_of(here: Iterable[Override]) -> Override | None:
    """The preset that is typed, or several of a sweep; none is no preset."""
    return next((one for one in here if one.key_or_group == "preset" and not one.is_delete()
                 and one.value() not in (None, "none")), None)


def _take_out(file: dict[str, Any], by: str, of: str, gone: Callable[[str], bool]) -> list[str]:
    out = [one for one in file if gone(one)]
    text = " ".join(f"{one}={typed(file.pop(one))}" for one in out)
    return [f"{by} takes the place of what the file says of {of}: {text}"] if out else []


def _keys(one: str) -> tuple[str, ...]:
    """Of a name, those of today; of one of these, itself."""
    return FIELDS[one].to if one in FIELDS else (one,)


def _is_of_the_objective(one: str) -> bool:
    if one in FIELDS and FIELDS[one].group in OF_THE_OBJECTIVE:
        return True
    return any(key.startswith(_SECTIONS) or key in _OF_THE_OBJECTIVE for key in _keys(one))


_OF_THE_OBJECTIVE = {"preset"} | {key for one in FIELDS.values()
                                  if one.group in OF_THE_OBJECTIVE for key in one.to}


def _keys_of_presets(preset: Override) -> set[str]:
    names = preset.sweep_string_iterator() if preset.is_sweep_override() else [preset.value()]
    files = [recipes() / "preset" / f"{name}.yaml" for name in names]
    return {key for file in files if file.is_file()  # others are refused later
            for key, _ in leaves(OmegaConf.to_container(OmegaConf.load(file)))}
