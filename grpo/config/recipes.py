"""Where the Hydra recipes are, which groups they have, and those of section ``env`` by name."""

from __future__ import annotations

import difflib
import secrets
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

import grpo
from grpo.config.env import EnvConfig
from grpo.config.keys import ConfigError, OptimizerName
from grpo.config.section import Section
from grpo.config.unread import Unread, refuse_unread

# Jobs of an array start in the same second, on several hosts and with the same process ids.
OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(4), use_cache=True,
                                replace=True)

#: Of groups, which held-out problems do not have.
_TRAINING = ("num_envs", "repeats")
_BENCHMARK = (Unread(lambda c: True, "by a benchmark;",
                     " ".join(f"env.{name}" for name in _TRAINING)),)


class _Section(Section):
    """Section ``env`` alone, where its own rules find it."""

    env: EnvConfig


def recipes() -> Path:
    """The folder of the Hydra recipes, of a clone or of the installed package."""
    package = Path(grpo.__file__).resolve().parent
    installed = package / "run" / "recipes"
    return installed if installed.is_dir() else package.parent / "config"


def unknown_group(folder: Path, group: str, name: str) -> str | None:
    """What is wrong with ``group=name``, of the groups in a folder of recipes; None if nothing is.

    Examples:
        >>> unknown_group(recipes(), "env", "gsm8")[:70]
        "env=gsm8: there is no group 'gsm8' of env; did you mean env=gsm8k? Kno"
        >>> unknown_group(recipes(), "model", "gpt2")
        'model=gpt2: model is a section; write model.KEY=VALUE, such as model.name=gpt2'
        >>> unknown_group(recipes(), "env", "gsm8k") is None
        True
    """
    known = sorted(path.stem for path in (folder / group).glob("*.yaml"))
    if name.removesuffix(".yaml") in known:
        return None
    if known == ["default"]:
        keys = OmegaConf.load(folder / group / "default.yaml").items()
        first = next((key for key, value in keys if not OmegaConf.is_config(value)), None)
        return f"{group}={name}: {group} is a section; write {group}.KEY=VALUE" + (
            f", such as {group}.{first}={name}" if first else "")
    if group == "optimizer" and name in get_args(OptimizerName):
        return f"{group}={name}: it is a name; write optimizer.name={name}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"{group}={name}: there is no group {name!r} of {group}; " + (
        f"did you mean {group}={near[0]}? Known: " if near else "known: ") + ", ".join(known)


def env_recipe(name: str, changes: dict[str, Any], *, key: str) -> EnvConfig:
    """Section ``env`` of the recipe of a task.

    Args:
        name: of ``config/env/NAME.yaml``.
        changes: keys that are otherwise; those of ``task`` are merged, null is none.
        key: that names the task, for messages.

    Raises:
        ConfigError: if there is no such recipe, a value is wrong, or a key that is not read is set.

    Examples:
        >>> env_recipe("arithmetic", {"task": {"num_test": 8}}, key="eval.benchmarks").task["seed"]
        0
    """
    path = recipes() / "env" / f"{name}.yaml"
    known = sorted(file.stem for file in path.parent.glob("*.yaml") if file.stem != "atropos")
    if name not in known:
        raise ConfigError(f"{key}: there is no recipe {name!r}; known: {', '.join(known)}")
    recipe = OmegaConf.to_container(OmegaConf.load(path))
    task = {} if changes.get("task") is None else changes["task"]
    if isinstance(task, dict):  # anything else is refused as what it is
        task = {**recipe["task"], **task}
    try:
        env = EnvConfig.model_validate({**recipe, **changes, "task": task})
        refuse_unread(_Section(env=EnvConfig(**{
            name: value for name, value in env if name in changes or name not in _TRAINING})),
            _BENCHMARK)
    except ValueError as error:
        raise ConfigError(f"{key}={name}: {error}") from error
    return env
