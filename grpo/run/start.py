"""What every run begins with, and what all of them are put together from in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from grpo.config.schema import Config
from grpo.envs.tasks.base import Task
from grpo.policies.model_shape import ModelShape
from grpo.report.console import Console
from grpo.report.legacy_names import WithLegacyNames
from grpo.report.loggers import LoggerGroup, MetricLogger, make_loggers
from grpo.report.reporter import Reporter
from grpo.run import build, fast_defaults
from grpo.run.build_engine import Setup
from grpo.run.build_eval import HeldOut
from grpo.run.build_model import load_model
from grpo.run.device_memory import shards_reference
from grpo.run.ledger import Ledger
from grpo.run.placement import Places
from grpo.training.checkpoint import Checkpoint
from grpo.training.harness import HarnessTask
from grpo.training.trainer import Trainer


class Start(NamedTuple):
    """What a run begins with, before anything is launched."""

    setup: Setup  # whose configuration has the run's length
    backend: str  # of generation
    task: Task
    prompts: build.Prompts | None  # None where environments bring their own
    checkpoint: Checkpoint | None  # that the run goes on from
    asked: dict[str, Any]  # the configuration as given, by which a later run recognises its own
    console: Console
    benchmarks: Sequence[HeldOut | HarnessTask] = ()  # beside the run's own task


def with_fast_defaults(
    start: Start, ledger_of: Callable[[Config], Ledger], room: int, *, row_tokens: int | None = None
) -> tuple[Start, list[str]]:
    """With what the configuration leaves open chosen for speed, and what was chosen, in words.

    ``row_tokens`` are those of the longest row that is trained, where rows are cut; for the rest
    see :func:`grpo.run.fast_defaults.choose`.
    """
    setup = start.setup
    config, chosen = fast_defaults.choose(
        setup.config, ModelShape.of(setup.path), ledger_of, device=setup.device,
        dtype=setup.dtype, backend=start.backend, row_tokens=row_tokens or setup.max_model_len,
        room=room)
    return start._replace(setup=replace(setup, config=config)), chosen


def with_sharding(start: Start, places: Places) -> tuple[Start, list[str]]:
    """With ``ref_model.sharded`` chosen for some devices, and what was chosen, in words."""
    setup, plan = start.setup, places.plan
    if not shards_reference(setup.config, plan, setup.path, setup.device, setup.dtype,
                            start.backend, setup.max_model_len):
        return start, []
    count, asked = len(plan.reference), setup.config.ref_model.sharded
    why = ", because a whole copy does not fit" * (asked is None)
    config = setup.config.changed(ref_model={"sharded": True})
    return start._replace(setup=replace(setup, config=config)), [
        f"ref_model.sharded=true: each of its {count} devices has 1/{count} of the reference{why}"]


def open_loggers(start: Start, run_dir: Path, *own: MetricLogger) -> LoggerGroup:
    """Where the run's metrics go: what section ``logging`` names, and the run's ``own``."""
    options = start.setup.config.logging
    group = make_loggers(
        options.backends, run_dir=run_dir, config=start.asked,
        project=options.wandb_project or "grpo", name=options.wandb_run_name,
        group=options.wandb_group, wandb_mode=options.wandb_mode or "online",
        resume_step=start.checkpoint.step if start.checkpoint else None)
    if options.legacy_names:
        return LoggerGroup([WithLegacyNames(group, options.legacy_names), *own])
    return LoggerGroup([*group.loggers, *own])


def loader_of(setup: Setup) -> Callable[[str], nn.Module]:
    """Loads a model that is not trained."""
    return partial(load_model, config=setup.config, device=setup.device, dtype=setup.dtype)


def trainer_of(
    start: Start, loggers: LoggerGroup, run_dir: Path, *, kind: type[Trainer] = Trainer,
    unit: str = "iteration", **parts: Any,
) -> Trainer:
    """The trainer of a ``kind`` and some ``parts``, at the checkpoint that the run goes on from.

    ``unit`` is what its command calls an iteration.
    """
    setup, config = start.setup, start.setup.config
    trainer = kind(
        **parts,
        reporter=Reporter(start.console, loggers, setup.tokenizer, run_dir=run_dir,
                          num_samples=config.logging.num_samples),
        tokenizer=setup.tokenizer, run_dir=run_dir, config=start.asked,
        iterations=config.iterations,
        eval_frequency=0 if config.train.eval_frequency == "never" else config.train.eval_frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        keep_checkpoints=config.train.keep_checkpoints or 3,
        proof_interval=config.train.proof_interval)
    if start.checkpoint:
        trainer.restore(start.checkpoint)
        start.console.info(f"resumed at {unit} {start.checkpoint.step} from "
                           f"{start.checkpoint.folder}")
    return trainer
