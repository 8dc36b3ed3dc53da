"""Named settings of published objectives: ``preset=NAME`` on the command line.

A preset is a file ``config/preset/NAME.yaml`` with the keys it sets; keys given on the command line
win over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.keys import TABLES


def describe_preset(name: str, values: DictConfig, *, config_folder: Path) -> str:
    """One line: the keys a preset sets, with the value in use where another was given.

    Examples:
        >>> folder = Path("config")
        >>> values = OmegaConf.load(folder / "preset" / "rloo.yaml")
        >>> values.train.aggregation = "token"
        >>> print(describe_preset("rloo", values, config_folder=folder))
        rloo: train.objective=reinforce, train.aggregation=token (not dr_grpo), \
train.advantage_estimator=rloo
    """
    preset = OmegaConf.to_container(OmegaConf.load(config_folder / "preset" / f"{name}.yaml"))
    parts = []
    for key, value in leaves(preset):
        used = OmegaConf.select(values, key)
        used = OmegaConf.to_container(used) if OmegaConf.is_config(used) else used
        changed = "" if used == value else f" (not {value})"
        parts.append(f"{key}={used}{changed}")
    return f"{name}: {', '.join(parts) or 'sets nothing'}"


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their dotted path; one that is a table itself stays whole.

    Examples:
        >>> dict(leaves({"train": {"seed": 3, "mismatch": {"tis": 2.0}}}))
        {'train.seed': 3, 'train.mismatch': {'tis': 2.0}}
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and (value or not prefix and "." not in path) and not (
                path in TABLES or path.startswith("env.task.")):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value
