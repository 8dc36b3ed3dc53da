"""A run of the offline trainer: its configuration in the keys of ``grpo.py``, the one composer, and
the files that the earlier trainer wrote."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from grpo.config.schema import Config
from grpo.report.eval_file import FOLDER
from grpo.report.loggers import LoggerGroup, MetricLogger, write_atomically
from grpo.run.assemble import assemble
from grpo.run.resume import open_run
from grpo.training.checkpoint import Checkpoint
from grpo.training.trainer import Trainer

logger = logging.getLogger(__name__)

#: Name in ``metrics/train_iter_NNN.json`` -> name in ``metrics.jsonl``. Terms of the loss have
#: their coefficients.
NAMES = {"loss_total": "loss/total", "loss_pg": "loss/objective", "loss_kl": "loss/kl_to_ref",
         "loss_entropy": "loss/entropy", "kl_divergence": "policy/kl_to_ref",
         "reward_mean": "reward/mean", "grad_norm": "train/grad_norm"}
#: Terms that are 0 where they are switched off.
_TERMS = ("loss_kl", "loss_entropy")


def build(config: Config, output: Path, at_end: ExitStack) -> Trainer:
    """A trainer that is ready to ``fit``.

    Args:
        config: from :func:`~grpo.config.offline.translate`.
        output: folder of a new run.
        at_end: gets what ends the parts.

    Raises:
        ConfigError: for what cannot work, in the keys of ``grpo.py``.
    """
    run_dir, checkpoint = open_run(config, output, at_end)
    trainer = assemble(config, run_dir, checkpoint, at_end)
    trainer.reporter.loggers = LoggerGroup([trainer.reporter.loggers, IterationFiles(run_dir)])
    trainer.after_saving.append(link_by_iteration)
    return trainer


class IterationFiles(MetricLogger):
    """``metrics/train_iter_NNN.json``: the earlier trainer's names, then all others.

    Args:
        run_dir: of the run.

    Examples:
        >>> import tempfile
        >>> run_dir = Path(tempfile.mkdtemp())
        >>> IterationFiles(run_dir).log(3, {"loss/total": 0.5, "reward/mean": 1.0})
        >>> row = json.loads((run_dir / "metrics" / "train_iter_003.json").read_text())
        >>> row["iteration"], row["loss_total"], row["loss_kl"], row["kl_divergence"]
        (3, 0.5, 0.0, None)
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the file of an iteration that has trained; a full disk costs the file."""
        if "loss/total" not in metrics:
            return
        known = {name: metrics.get(ours, 0.0 if name in _TERMS else None)
                 for name, ours in NAMES.items()}
        values = {name: None if value is None or not math.isfinite(value) else float(value)
                  for name, value in (known | dict(metrics)).items()}
        file = self.folder / f"train_iter_{step:03d}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps({"iteration": step, **values}) + "\n")
        except OSError as error:  # metrics.jsonl has all of it
            logger.warning("%s is not written: %s", file, error)


def link_by_iteration(checkpoint: Checkpoint) -> None:
    """``checkpoints/iter_NNN``, a link to the model or adapter of a checkpoint; links to those that
    were removed go. A full disk costs the link."""
    root = checkpoint.folder.parent
    target = checkpoint.model_folder if checkpoint.model_folder.is_dir() else (
        checkpoint.adapter_folder)
    link = root / f"iter_{checkpoint.step:03d}"
    try:
        for old in root.glob("iter_*"):
            if old.is_symlink() and not old.exists():
                old.unlink()
        link.unlink(missing_ok=True)
        link.symlink_to(target.relative_to(root), target_is_directory=True)
    except OSError as error:  # the checkpoint is there all the same
        logger.warning("%s does not lead to %s: %s", link, target, error)
