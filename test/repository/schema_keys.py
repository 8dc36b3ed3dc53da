"""Keys of the configuration as pages name them."""

from __future__ import annotations

import re

from pydantic import BaseModel

from grpo.config.asynchronous import AsyncConfig
from grpo.config.atropos import AtroposConfig

from ..support import code_in


def _paths(schema: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in schema.model_fields.items():
        found.add(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _paths(field.annotation, f"{prefix}{name}.")
    return found


KEYS = _paths(AsyncConfig) | _paths(AtroposConfig)
_SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
#: Whose keys are options of a task, a reward or an objective, not of the schema.
_OPEN = ("env.task.",)


def named_keys(text: str) -> set[str]:
    """Keys ``section.key`` that stand in backticks in a text, with a value or without."""
    return {found[0] for code in code_in(text)
            for found in re.finditer(r"(?<![\w./-])([a-z_]+)(?:\.[a-z_0-9]+)+(?=[=\s,]|$)", code)
            if found[1] in _SECTIONS}


def unknown_keys(text: str) -> set[str]:
    """Those of them that no script has."""
    return {key for key in named_keys(text) - KEYS if not key.startswith(_OPEN)}
