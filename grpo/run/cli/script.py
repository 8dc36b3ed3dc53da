"""The command line of a Hydra script, looked at before PyTorch is imported.

Importing PyTorch and vLLM takes some ten seconds, which nobody should wait for help or to learn of
a misspelt key. What is checked here are names: keys against the recipes in ``config/``, and the
options of a task. Values are the schema's, later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from grpo.config.keys import ATROPOS, ConfigError, errors_text
    from grpo.config.recipes import unknown_group
    from grpo.config.trl_names import FIELDS
    from grpo.envs.tasks.base import check_options
    from grpo.policies.model_source import look_for
    from grpo.run.cli.names import key_error, plain, with_env_groups
    from grpo.run.cli.trl_names import with_trl_names
    from grpo.system.command_line import end_with
    from grpo.system.folders import why_not_writable
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed for {sys.executable}; activate the environment "
             "that `make setup` builds (source .venv/bin/activate), or pip install this package")


#: Keys of further models that a run needs.
_OTHER_MODELS = ("ref_model.name", "distill.teacher", "model.ref_id")


def look_ahead(folder: Path, config_name: str, *, model: str = "model.name",
               within: str | None = None) -> None:
    """Show help, or what is wrong with the names on the command line, and exit; else return.

    The arguments are put into an order that Hydra reads: it takes no options between overrides.
    ``env.dataset=NAME`` becomes the group of that name.

    Args:
        folder: the recipes.
        config_name: the recipe that runs where none is named.
        model: key of the model.
        within: a section that takes all keys of another recipe, of the name ``grpo``.
    """
    try:
        if within is None:  # the offline trainer has keys of these names, train.iterations and seed
            sys.argv[1:] = with_trl_names(sys.argv[1:])
    except (ConfigError, HydraException, OSError) as error:
        sys.exit(f"error: {error}")
    parser = get_args_parser()
    names = () if within is not None else [f"--{name}" for name in FIELDS]
    parser.error = partial(end_with, parser, more=names)
    args = parser.parse_intermixed_args()
    if args.multirun and (args.cfg or args.info):
        parser.error("--multirun and --cfg: what would run is shown of one run; give one of them")
    options = [argument for argument in sys.argv[1:] if argument not in args.overrides]
    args.overrides = [_added(text, within) for text in with_env_groups(args.overrides, folder)]
    sys.argv[1:] = options + args.overrides
    # Recipes of somebody's own are found by Hydra alone.
    if not (args.config_path or args.config_dir or args.experimental_rerun):
        check_names(folder, args.config_name or config_name, args.overrides, within=within)
        _check_kind(args.config_name or config_name, config_name)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        def show(config: DictConfig) -> None:
            raise AssertionError("Hydra runs nothing where it is asked to show something")

        show.__module__ = job_name(config_name)
        if args.help:
            typed = f"python {sys.argv[0]}" if sys.argv[0].endswith(".py") else sys.argv[0]
            sys.argv.append("hydra.help.app_name='{}'".format(typed.replace("'", "\\'")))
        hydra.main(version_base=None, config_path=str(folder), config_name=config_name)(show)()
        sys.exit()
    for key in (model, *_OTHER_MODELS):
        _check_model(args.overrides, key)
    _check_run_folder(args.overrides, "hydra.sweep.dir" if args.multirun else "hydra.run.dir")


def what_runs(folder: Path, config_name: str) -> DictConfig | None:
    """The configuration of a command line that :func:`look_ahead` has let pass, not checked; None
    for a sweep, and for recipes of somebody's own."""
    args = get_args_parser().parse_args()
    if args.multirun or args.config_path or args.config_dir or args.experimental_rerun:
        return None
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            return hydra.compose(args.config_name or config_name, overrides=args.overrides)
    except (HydraException, OmegaConfBaseException):  # which Hydra will say, too
        return None


def _added(text: str, section: str | None) -> str:
    """An override of a section that is empty before it is given keys, as Hydra wants it."""
    return f"++{text}" if section is not None and text.startswith(f"{section}.") else text


def job_name(config_name: str) -> str:
    """What Hydra calls a run, and its log: after the script whose recipe it is.

    Examples:
        >>> job_name("grpo_async")
        'grpo-async'
    """
    return config_name.replace("_", "-")


def check_names(folder: Path, config_name: str, overrides: list[str], *,
                within: str | None = None) -> None:
    """End the command where a recipe or a key has a name that is unknown."""
    if not (folder / config_name).with_suffix(".yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml") if (
            path.stem.startswith("offline")) == (within is not None)))
        sys.exit(f"error: --config-name {config_name}: there is no such recipe; known: {known}; "
                 "with --config-dir FOLDER your own are found, too")
    try:
        errors = [*_name_errors(folder, config_name, overrides, within)] if overrides else []
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")
    if errors:
        sys.exit(f"error: {errors_text(errors)}")


#: The command that takes recipes of a name with this word, and others of its kind alone.
_OF_A_KIND = {"offline": "grpo offline, or grpo-offline.py", "async": "grpo train-async, or "
              "grpo-async.py", "": "grpo train, or grpo.py"}


def _check_kind(recipe: str, own: str) -> None:
    """Refuse a recipe of another command; ``grpo-async.py`` takes those of ``grpo.py``, too."""
    wanted, kind = (next(word for word in _OF_A_KIND if word in name) for name in (recipe, own))
    if wanted != kind and (wanted, kind) != ("", "async"):
        sys.exit(f"error: --config-name {recipe} is a recipe of another command; start "
                 f"{_OF_A_KIND[wanted]}, with it")


def _check_model(overrides: list[str], key: str) -> None:
    """Refuse a model that is not there; which files it has is looked at later."""
    given = _given(overrides)
    name = given.get(key, "embedded")
    if name in ("embedded", "null") or "," in name or "resume" in given:
        return
    try:
        look_for(name, key=key)
    except ConfigError as error:
        sys.exit(f"error: {error}")


def _check_run_folder(overrides: list[str], key: str) -> None:
    """Refuse a folder of runs that cannot be written to, which Hydra would make later."""
    default = "multirun/" if "sweep" in key else "outputs/"
    before, filled_in, _ = _given(overrides).get(key, default).partition("${")
    whole = not filled_in or before.endswith("/")
    folder = Path(before) if whole else Path(before).parent
    if problem := why_not_writable(folder):
        sys.exit(f"error: {key}={folder}: runs cannot be written there ({problem}); give another "
                 f"folder, such as {key}=/tmp/run")


def _given(overrides: list[str]) -> dict[str, str]:
    return {key: value.strip("'\"") for key, _, value in (
        text.partition("=") for text in overrides)}


def _name_errors(folder: Path, config_name: str, overrides: list[str],
                 within: str | None) -> Iterator[str]:
    """What is wrong with the names of keys, and of the task's options where all keys are right."""
    if nameless := [text for text in overrides if text.startswith("=")]:
        yield f"{nameless[0]}: has no key; write KEY{nameless[0]}"
        return
    bare = [text for text in overrides if "=" not in text and not text.startswith("~")]
    if bare:
        yield from (f"{text}: has no value; write {text}=VALUE" for text in bare)
        return
    parsed = OverridesParser.create().parse_overrides(overrides)
    groups = [override for override in parsed if _is_group(override, folder)]
    unknown = [error for override in groups for error in _group_errors(override, folder)]
    if unknown:
        yield from unknown
        return
    with hydra.initialize_config_dir(str(folder), version_base=None):
        known = hydra.compose(config_name, overrides=[_first(override) for override in groups])
        if within is not None:
            OmegaConf.set_struct(known, False)
            known[within] = hydra.compose("grpo")
        errors = [error for override in parsed if override not in groups
                  if (error := _key_error(override, known))]
        yield from errors
        if errors:
            return
        config = hydra.compose(config_name, overrides=[_first(override) for override in parsed])
    if "env" in config:
        yield from _task_errors(config)


def _is_group(override: Override, folder: Path) -> bool:
    key = override.key_or_group
    return override.package is not None or "/" in key or (folder / key).is_dir()


def _group_errors(override: Override, folder: Path) -> Iterator[str]:
    """Of each name that a group is given, of which a sweep has several."""
    group = override.key_or_group
    if override.is_delete() or not (folder / group).is_dir():
        return
    names = override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
    for name in names:
        if isinstance(name, str) and (error := unknown_group(folder, group, name)):
            yield error


def _first(override: Override) -> str:
    """The override; of a sweep its first job."""
    if not override.is_sweep_override():
        return override.input_line
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def _key_error(override: Override, known: DictConfig) -> str | None:
    if override.is_hydra_override() or override.is_delete():
        return None
    value = plain(override.input_line.partition("=")[2])
    adds = override.is_add() or override.is_force_add()
    return key_error(override.key_or_group, value, known, adds=adds)


def _task_errors(config: DictConfig) -> Iterator[str]:
    """A task that does not exist, or an option that it does not have."""
    name = config.env.dataset
    if name == ATROPOS:  # whose environment knows its options
        return
    try:
        check_options(name, config.env.task or {})
    except ValueError as error:
        yield f"env.dataset={name}: {error}"
