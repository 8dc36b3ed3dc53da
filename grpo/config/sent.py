"""The configuration of a run, in a process that the run has started."""

from __future__ import annotations

from typing import Any

from grpo.config.asynchronous import AsyncConfig
from grpo.config.atropos_script import AtroposScriptConfig
from grpo.config.schema import Config, load_config


def load_sent(values: dict[str, Any]) -> Config:
    """What a run has sent as plain values, of the kind that it was.

    Examples:
        >>> type(load_sent(AsyncConfig().model_dump(mode="json"))).__name__
        'AsyncConfig'
    """
    schema = Config if "ray" not in values else (
        AtroposScriptConfig if "atropos" in values else AsyncConfig)
    return load_config(values, schema)
