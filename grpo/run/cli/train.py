"""``grpo train`` and ``grpo train-async``: what ``grpo.py`` and ``grpo-async.py`` do, of the
installed package and with its recipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grpo.config.recipes import recipes
from grpo.run.ahead import start_ahead
from grpo.run.cli.script import job_name, look_ahead, what_runs
from grpo.system.collection import without_collection
from grpo.training.stopping import interrupts_end_at_once

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str], *, prog: str) -> None:
    """One process holds everything, unless roles have devices of their own."""
    _look_ahead(argv, prog, "grpo")
    start_ahead(what_runs(recipes(), "grpo"))
    with without_collection():
        from grpo.config.schema import Config
        from grpo.run.assemble import assemble
        from grpo.run.cli.steps import train

    _with_hydra(lambda cfg: train(cfg, Config, assemble), "grpo")


def main_async(argv: Sequence[str], *, prog: str) -> None:
    """Workers on Ray generate all the time, the trainer trains all the time."""
    _look_ahead(argv, prog, "grpo_async")
    start_ahead(what_runs(recipes(), "grpo_async"))
    print("loading PyTorch, TorchRL and Transformers", flush=True)
    with without_collection():
        from grpo.config.asynchronous import AsyncConfig
        from grpo.run.assemble import assemble_async
        from grpo.run.cli.steps import train

    _with_hydra(lambda cfg: train(cfg, AsyncConfig, assemble_async), "grpo_async")


def _look_ahead(argv: Sequence[str], prog: str, recipe: str) -> None:
    sys.argv = [prog, *argv]  # which Hydra reads
    interrupts_end_at_once()
    look_ahead(recipes(), recipe)


def _with_hydra(run: Callable[[DictConfig], None], recipe: str) -> None:
    import hydra

    run.__module__ = job_name(recipe)
    hydra.main(version_base=None, config_path=str(recipes()), config_name=recipe)(run)()
