"""``grpo-offline.py``: the offline trainer's keys, files and commands."""

from __future__ import annotations

from grpo.config.recipes import recipes
from grpo.run.cli.script import look_ahead
from grpo.training.stopping import interrupts_end_at_once


def main() -> None:
    """Read the command line, and run; help and misspelt keys take no time."""
    interrupts_end_at_once()
    look_ahead(recipes(), "offline_grpo", model="model.train_id", within="run")
    _run()


def _run() -> None:
    from contextlib import ExitStack
    from pathlib import Path

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from grpo.config.offline import OfflineConfig, in_offline_keys, notes, translate
    from grpo.config.schema import load_config
    from grpo.policies.handle import EngineError
    from grpo.policies.ray_engine import WorkersLost
    from grpo.run.cli.endings import bad_input_in_a_line, endings_in_a_line, fit_with_workers
    from grpo.run.offline import build

    @hydra.main(version_base=None, config_path=str(recipes()), config_name="offline_grpo")
    def run(cfg: DictConfig) -> None:
        with endings_in_a_line(in_offline_keys), ExitStack() as at_end:
            with bad_input_in_a_line(said=str):
                offline = load_config(cfg, OfflineConfig)
                config = translate(offline)
                print("\n".join(notes(offline)), flush=True)
            with bad_input_in_a_line(EngineError, WorkersLost, said=in_offline_keys):
                trainer = build(config, Path(HydraConfig.get().runtime.output_dir), at_end)
            if config.has_workers:
                fit_with_workers(trainer, in_offline_keys)
            else:
                trainer.fit()

    run()


if __name__ == "__main__":
    main()
