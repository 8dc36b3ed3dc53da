"""What the tests of the configuration share: where it lies, a small one, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from pydantic import BaseModel

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, ConfigError, load_config
from grpo.run.cli.trl_names import with_trl_names

FOLDER = Path(__file__).resolve().parents[2] / "config"
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)}
MAXENT = {"train": {"objective": "maxent_listwise", "aggregation": "prompt"}}


def composed(name: str, *overrides: str):
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose(name, overrides=list(overrides))


def composed_like(arguments: list[str], *, script: str = "grpo.py") -> Config:
    """The checked configuration that a script makes of its command line."""
    asynchronous = script.endswith("grpo-async.py")
    args = get_args_parser().parse_intermixed_args(with_trl_names(arguments))
    name = args.config_name or ("grpo_async" if asynchronous else "grpo")
    return load_config(composed(name, *args.overrides), AsyncConfig if asynchronous else Config)


def small(**changes) -> dict:
    """A small valid configuration; ``changes`` are merged in, section by section."""
    values = {"env": {"num_envs": 2, "repeats": 2, "task": {"num_train": 20, "num_test": 8}},
              "train": {"total_dialog_turns": 40},
              "inference_model": {"backend": "transformers", "max_tokens": 3}}
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return values


def message(values: dict) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(values)
    return str(error.value)
