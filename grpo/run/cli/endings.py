"""How the scripts end early: in one line, which names the cause and how the run can go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from grpo.atropos.client import AtroposError
from grpo.atropos.launcher import EnvironmentProcessError
from grpo.collectors.ray import RolloutsFailed
from grpo.config.atropos_script import in_script_keys
from grpo.envs.rewards import RewardsFailed
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import WorkersLost
from grpo.report.loggers import METRICS_FILE, read_jsonl
from grpo.report.time_summary import bottleneck, phase_table
from grpo.system.command_line import errors_in_a_line
from grpo.training.checkpoint_files import NotSavedError
from grpo.training.going_on import how_to_go_on
from grpo.training.local_ranks import RankDied
from grpo.training.stopping import signals_end_the_process
from grpo.training.trainer import Trainer
from grpo.weights.canary import StaleWeightsError
from grpo.weights.channel import TransferError

#: What may end a run that is not a mistake in the code.
ENDINGS = (EngineError, StaleWeightsError, FloatingPointError, NotSavedError, RewardsFailed,
           AtroposError, EnvironmentProcessError, TimeoutError, TransferError)
ASYNC_ENDINGS = (*ENDINGS, RolloutsFailed, WorkersLost)


@contextmanager
def endings_in_a_line(said: Callable[[str], str] = in_script_keys) -> Iterator[None]:
    """Around a whole run: a signal, a lost rank or another of :data:`ENDINGS` has its exit code
    and one line; the trainer has said how the run can go on. ``said`` puts keys into the words of
    the command."""
    try:
        with signals_end_the_process():
            yield
    except RankDied as error:
        sys.exit(f"error: {error}\nthe run can go on from its newest checkpoint: resume=auto")
    except ENDINGS as error:
        sys.exit(f"error: {said(str(error))}")


def bad_input_in_a_line(
    said: Callable[[str], str] = in_script_keys
) -> AbstractContextManager[None]:
    """Around all done before a run begins; some of it shows first in engines and workers."""
    return errors_in_a_line(ValueError, OSError, ImportError, EngineError, WorkersLost,
                            switch="HYDRA_FULL_ERROR", said=said)


def fit_with_workers(trainer: Trainer, said: Callable[[str], str] = in_script_keys, *,
                     ahead: bool = True) -> None:
    """Run to the end and say what held it up; where the workers are lost, say why, and from which
    checkpoint it can go on. ``ahead``: the script can let workers run ahead of the trainer."""
    try:
        trainer.fit()
    except ASYNC_ENDINGS as error:
        go_on = trainer.saved and how_to_go_on(trainer.run_dir, trainer.saved, trainer.compared,
                                               error)
        sys.exit("\n".join(filter(None, [f"error: {said(str(error))}", go_on])))
    rows = read_jsonl(trainer.run_dir / METRICS_FILE)
    held_up = bottleneck(rows, in_flight=trainer.weights.in_flight, ahead=ahead)
    trainer.reporter.console.info("\n".join([*phase_table(rows), *map(said, held_up)]))
