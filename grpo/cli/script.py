"""The command line of a Hydra script, looked at before PyTorch is imported.

Importing PyTorch and vLLM takes some ten seconds, which nobody should wait for help or to learn of
a misspelt key. What is checked here are names: keys against the recipes in ``config/``, which have
every key of the schema, and the options of a task. Values are the schema's, later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from grpo.config_aliases import ALIASES
from grpo.config_keys import errors_text, unknown_key
from grpo.tasks.base import check_options

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed for {sys.executable}; activate the environment "
             "that `make setup` builds (source .venv/bin/activate), or pip install this package")


def look_ahead(folder: Path, config_name: str) -> None:
    """Show help, or what is wrong with the names on the command line, and exit; else return.

    The arguments are put into an order that Hydra reads: it takes no options between overrides.

    Args:
        folder: the recipes.
        config_name: the recipe that runs where none is named.

    Raises:
        SystemExit: with a message, or after what was asked for is printed.
    """
    args = get_args_parser().parse_intermixed_args()
    sys.argv[1:] = [a for a in sys.argv[1:] if a not in args.overrides] + args.overrides
    # Recipes of somebody's own are found by Hydra alone.
    if not (args.config_path or args.config_dir or args.experimental_rerun):
        try:
            errors = [*_name_errors(folder, args.config_name or config_name, args.overrides)]
        except (HydraException, OmegaConfBaseException) as error:
            sys.exit(f"error: {error}")
        if errors:
            sys.exit(f"error: {errors_text(errors)}")
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        def show(config: DictConfig) -> None:
            raise AssertionError("Hydra runs nothing where it is asked to show something")

        show.__module__ = Path(sys.argv[0]).stem  # which Hydra calls the application
        hydra.main(version_base=None, config_path=str(folder), config_name=config_name)(show)()
        sys.exit()


def _name_errors(folder: Path, config_name: str, overrides: list[str]) -> Iterator[str]:
    """What is wrong with the names of keys, and of the task's options where all keys are right."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    groups = [override for override in parsed if _is_group(override, folder)]
    with hydra.initialize_config_dir(str(folder), version_base=None):
        known = hydra.compose(config_name, overrides=[_first(override) for override in groups])
        errors = [error for override in parsed if override not in groups
                  for error in _key_errors(override, known)]
        yield from errors
        if errors:
            return
        config = hydra.compose(config_name, overrides=[_first(override) for override in parsed])
    yield from _task_errors(config, folder)


def _is_group(override: Override, folder: Path) -> bool:
    key = override.key_or_group
    return override.package is not None or "/" in key or (folder / key).is_dir()


def _first(override: Override) -> str:
    """The override; of a sweep its first job."""
    if not override.is_sweep_override():
        return override.input_line
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def _key_errors(override: Override, known: DictConfig) -> Iterator[str]:
    path, value = override.key_or_group, override.input_line.partition("=")[2]
    if override.is_hydra_override() or override.is_delete():
        return
    *parents, name = path.split(".")
    section = known
    for depth, parent in enumerate(parents, start=1):
        if parent not in section:
            yield unknown_key(".".join(parents[:depth]), _plain(value), section)
            return
        section = section[parent]
        if not OmegaConf.is_dict(section):
            if not override.is_add() and not override.is_force_add():
                yield (f"{path}: {'.'.join(parents[:depth])} has no keys before it is given one; "
                       f"write '{'.'.join(parents)}={{{name}: {value}}}'")
            return
    adds = override.is_add() or override.is_force_add()
    if name in section or (adds and parents == ["env", "task"]):
        return
    if parents in ([], ["train"]) and name in ALIASES:
        if not adds:
            yield f"{path}: is now called {'.'.join(ALIASES[name])}; write that (given {value})"
        return
    yield unknown_key(path, _plain(value), section, elsewhere=_paths(known))


def _plain(text: str) -> object:
    """What the text of an override stands for, as far as that is needed to print it."""
    return OmegaConf.from_dotlist([f"value={text}"]).value


def _paths(section: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, value in section.items_ex(resolve=False):
        if OmegaConf.is_dict(value):
            yield from _paths(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name)


def _task_errors(config: DictConfig, folder: Path) -> Iterator[str]:
    """An option that the task does not have, as where only ``env.dataset`` was changed."""
    name = config.env.dataset
    try:
        check_options(name, config.env.task or {})
    except ValueError as error:
        recipe = (folder / "env" / f"{name}.yaml").exists()
        yield f"env.dataset={name}: {error}" + recipe * (
            f"; env={name} chooses the task and its options, --config-name the whole recipe")
