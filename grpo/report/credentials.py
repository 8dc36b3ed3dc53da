"""Configurations as they are shown to others: without what gives access to something."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(r"(^|_)(api_?key|secret|password|(access|auth|hf|bearer)_token)$", re.I)


def without_credentials(value: Any, key: str = "") -> Any:
    """A copy of a configuration in which values of keys that name a credential are hidden.

    Args:
        value: of any depth.
        key: whose value it is.

    Examples:
        >>> without_credentials({"seed": 1, "model": {"hf_token": "hf_x", "max_tokens": 8}})
        {'seed': 1, 'model': {'hf_token': '(hidden)', 'max_tokens': 8}}
    """
    if isinstance(value, Mapping):
        return {name: without_credentials(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(inner, key) for inner in value]
    return "(hidden)" if value and _NAMES.search(key.replace(".", "_")) else value
