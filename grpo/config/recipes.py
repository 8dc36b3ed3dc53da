"""Where the Hydra recipes are, and those of section ``env`` by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import grpo
from grpo.config.env import EnvConfig
from grpo.config.keys import ConfigError


def recipes() -> Path:
    """The folder of the Hydra recipes, of a clone or of the installed package."""
    package = Path(grpo.__file__).resolve().parent
    installed = package / "run" / "recipes"
    return installed if installed.is_dir() else package.parent / "config"


def env_recipe(name: str, changes: dict[str, Any], *, key: str) -> EnvConfig:
    """Section ``env`` of the recipe of a task.

    Args:
        name: of ``config/env/NAME.yaml``.
        changes: keys that are otherwise; those of ``task`` are merged.
        key: that names the task, for messages.

    Raises:
        ConfigError: if there is no such recipe, or a value is wrong.

    Examples:
        >>> env_recipe("arithmetic", {"task": {"num_test": 8}}, key="eval.benchmarks").task["seed"]
        0
    """
    path = recipes() / "env" / f"{name}.yaml"
    known = sorted(file.stem for file in path.parent.glob("*.yaml") if file.stem != "atropos")
    if name not in known:
        raise ConfigError(f"{key}: there is no recipe {name!r}; known: {', '.join(known)}")
    recipe = OmegaConf.to_container(OmegaConf.load(path))
    task = {**recipe["task"], **changes.get("task", {})}
    try:
        return EnvConfig.model_validate({**recipe, **changes, "task": task})
    except ValueError as error:
        raise ConfigError(f"{key}={name}: {error}") from error
