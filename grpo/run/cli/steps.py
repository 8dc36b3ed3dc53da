"""A run step by step, as both scripts and ``grpo train`` take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from grpo.config.asynchronous import AsyncConfig
from grpo.config.presets import describe_preset
from grpo.config.recipes import recipes
from grpo.config.schema import Config, load_config
from grpo.run.cli.endings import bad_input_in_a_line, endings_in_a_line, fit_with_workers
from grpo.run.resume import open_run
from grpo.training.checkpoint import Checkpoint
from grpo.training.trainer import Trainer

SomeConfig = TypeVar("SomeConfig", bound=Config)


def check_keys(cfg: DictConfig, schema: type[SomeConfig]) -> SomeConfig:
    """The configuration of a run, every key of it checked; what a preset set is printed.

    Args:
        cfg: what Hydra has composed.
        schema: of a script, :class:`~grpo.config.schema.Config` or
            :class:`~grpo.config.asynchronous.AsyncConfig`.

    Raises:
        ConfigError: naming keys, values and fixes.
    """
    config = load_config(cfg, schema)
    if (preset := HydraConfig.get().runtime.choices.get("preset", "none")) != "none":
        print("preset", describe_preset(preset, cfg, config_folder=recipes()))
    return config


def open_folder(config: Config, at_end: ExitStack) -> tuple[Path, Checkpoint | None]:
    """Hydra's folder or that of the run that goes on, and the checkpoint that it goes on from; see
    :func:`grpo.run.resume.open_run`."""
    return open_run(config, Path(HydraConfig.get().runtime.output_dir), at_end)


def fit(trainer: Trainer, config: Config) -> None:
    """Generate, score, compare, update, publish, prove, report, and again; where workers on Ray
    generate, say at the end what was waited for."""
    if config.has_workers:
        fit_with_workers(trainer, ahead=isinstance(config, AsyncConfig))
    else:
        trainer.fit()


def train(cfg: DictConfig, schema: type[SomeConfig], assemble: Callable[..., Trainer]) -> None:
    """All steps; ``assemble`` makes the trainer, see :mod:`grpo.run.assemble`."""
    with endings_in_a_line(), ExitStack() as at_end:  # a sweep starts the next run in this process
        with bad_input_in_a_line():
            config = check_keys(cfg, schema)
            run_dir, checkpoint = open_folder(config, at_end)
            trainer = assemble(config, run_dir, checkpoint, at_end)
        fit(trainer, config)
