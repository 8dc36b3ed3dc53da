"""Which folder a run writes to, and what it goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from grpo.config import Config
from grpo.training.checkpoint import Checkpoint, changed_keys, find_checkpoint, identity_changes


def open_run(config: Config, run_dir: Path) -> tuple[Path, Checkpoint | None]:
    """Folder of the run, and the checkpoint it goes on from.

    Args:
        config: whose ``resume`` says what to go on from.
        run_dir: of a new run.

    Raises:
        ValueError: if the checkpoint belongs to a run with another model, task or seed.
        FileNotFoundError: if ``resume`` names a path without a checkpoint.
    """
    if config.resume is None:
        return run_dir, None
    settings = config.model_dump(mode="json")
    checkpoint = find_checkpoint(
        config.resume, root=[Path("outputs"), Path("multirun"), run_dir],
        exp_name=config.train.exp_name, config=settings)
    if checkpoint is None:
        print(f"resume=auto: no checkpoint of {config.train.exp_name!r} with this model, task and "
              "seed yet, starting a new run")
        return run_dir, None
    if other := identity_changes(checkpoint.info()["config"], settings):
        raise ValueError(f"resume={config.resume}: {checkpoint.folder} belongs to another run "
                         f"({'; '.join(other)}); set these back, or start a new run")
    for change in changed_keys(checkpoint.info()["config"], settings):
        if not change.startswith("resume:"):
            logging.getLogger("grpo").warning("changed since the checkpoint: %s", change)
    return checkpoint.run_dir, checkpoint
