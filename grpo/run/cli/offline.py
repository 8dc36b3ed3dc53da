"""``grpo offline`` and ``grpo-offline.py``: the offline trainer's keys, files and commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo.config.recipes import recipes
from grpo.run.cli.script import job_name, look_ahead
from grpo.training.stopping import interrupts_end_at_once

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RECIPE = "offline_grpo"


def main(argv: Sequence[str], *, prog: str) -> None:
    """Its keys are translated into those of ``grpo.py``, whose loop runs."""
    sys.argv = [prog, *argv]  # which Hydra reads
    interrupts_end_at_once()
    look_ahead(recipes(), _RECIPE, model="model.train_id", within="run")
    import hydra

    def run(cfg: DictConfig) -> None:
        _run(cfg)

    run.__module__ = job_name(_RECIPE)
    hydra.main(version_base=None, config_path=str(recipes()), config_name=_RECIPE)(run)()


def with_one_length(cfg: DictConfig, typed: Sequence[str]) -> DictConfig:
    """The configuration without a recipe's own length, where another is typed by its other name."""
    keys = {text.partition("=")[0].lstrip("+") for text in typed}
    if "train.iterations" in keys and "iterations" not in keys:
        cfg.iterations = None
    if "iterations" in keys and "train.iterations" not in keys:
        cfg.train.iterations = None
    return cfg


def _run(cfg: DictConfig) -> None:
    from contextlib import ExitStack
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig

    from grpo.config.offline import OfflineConfig, in_offline_keys, notes, translate
    from grpo.config.schema import load_config
    from grpo.run.cli.endings import bad_input_in_a_line, endings_in_a_line, fit_with_workers
    from grpo.run.offline import build

    with endings_in_a_line(in_offline_keys), ExitStack() as at_end:
        with bad_input_in_a_line(said=str):
            offline = load_config(with_one_length(cfg, HydraConfig.get().overrides.task),
                                  OfflineConfig)
            config = translate(offline)
            print("\n".join(notes(offline)), flush=True)
        with bad_input_in_a_line(in_offline_keys):
            trainer = build(config, Path(HydraConfig.get().runtime.output_dir), at_end)
        if config.has_workers:
            fit_with_workers(trainer, in_offline_keys, ahead=False)
        else:
            trainer.fit()
