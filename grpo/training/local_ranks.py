"""The other ranks of a trainer as child processes on this machine, started and watched.

    python -m grpo.training.local_ranks '{"config": ..., "path": ..., ...}'      # one of them

The rank that leads runs in the process of the script and starts them (:class:`LocalRanks`). Each
writes to a log of its own and ends with the script, however that ends.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo.processes import Child, log_tail
from grpo.training.rank_worker import TrainerRank
from grpo.training.ranks import Ranks
from grpo.weights.channel import in_background

_POLL = 0.2


class RankDied(RuntimeError):
    """A rank of the trainer ended before the run did."""


class LocalRanks:
    """Ranks 1, 2, ... of a trainer; a context manager around the part of the run that needs them.

    A rank that ends is reported as :class:`RankDied`: by :meth:`check`, and in the place of the
    error that its silence causes here. If this process hears no error, as it may wait in a GPU's
    queue for ever, it is ended ``patience`` seconds later with the reason on standard error.

    Args:
        orders: arguments of :class:`~grpo.training.rank_worker.TrainerRank`, one dictionary a rank.
        folder: for the logs, ``trainer_rank_1.log`` and so on.
        environments: further environment variables of each rank.
        patience: see above.
        settle: seconds after an error here until a rank whose death has caused it must have ended.
        module: what is run; others are for tests.
    """

    def __init__(
        self, orders: Sequence[Mapping[str, Any]], *, folder: Path,
        environments: Sequence[Mapping[str, str]], patience: float = 60.0,
        settle: float = 5.0, module: str = "grpo.training.local_ranks",
    ) -> None:
        self.patience, self.settle = patience, settle
        self._commands = [[sys.executable, "-m", module, json.dumps(order)] for order in orders]
        self._logs = [folder / f"trainer_rank_{rank}.log" for rank in range(1, 1 + len(orders))]
        self._environments = environments
        self._children: list[Child] = []
        self._over = threading.Event()

    def __enter__(self) -> LocalRanks:
        for command, log, env in zip(self._commands, self._logs, self._environments, strict=True):
            log.unlink(missing_ok=True)  # a resumed run's last error is its own
            self._children.append(Child(command, log_path=log, env=env))
        threading.Thread(target=self._watch, daemon=True, name="trainer-ranks").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._over.set()
        reason = None
        if isinstance(error, RuntimeError) and not isinstance(error, RankDied):
            reason = self._reason(within=self.settle)
        for child in self._children:
            child.stop(timeout=0.0)
        if reason is not None:
            raise RankDied(reason) from error

    @property
    def pids(self) -> list[int]:
        """Process ids, of rank 1 first."""
        return [child.pid for child in self._children]

    def check(self) -> None:
        """Raise if a rank has ended.

        Raises:
            RankDied: with how it ended and the last lines of its log.
        """
        if reason := self._reason():
            raise RankDied(reason)

    def meet(self, *, start_timeout: float = 1800.0, **join: Any) -> Ranks:
        """Join the ranks, as their leader.

        Args:
            start_timeout: seconds until all must have come; they load the model before.
            **join: of :meth:`grpo.training.ranks.Ranks.join`.

        Raises:
            RankDied: if one ends before all have met, or does not come.
        """
        meeting = in_background(Ranks.join, rank=0, **join)
        deadline = time.monotonic() + start_timeout
        while not meeting.done():
            self.check()
            if time.monotonic() > deadline:
                raise RankDied(f"the trainer's ranks did not meet within {start_timeout:g} s; "
                               f"rank 1 may say why{log_tail(self._logs[0])}")
            wait([meeting], timeout=_POLL)
        return meeting.result()

    def _reason(self, *, within: float = 0.0) -> str | None:
        """Why the ranks cannot go on, if one has ended or does so ``within`` some seconds."""
        deadline = time.monotonic() + within
        while True:
            for rank, child in enumerate(self._children, 1):
                if not child.alive():
                    return (f"rank {rank} of the trainer ended with {child.ending()}"
                            f"{log_tail(child.log_path)}")
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL)

    def _watch(self) -> None:
        while not self._over.wait(_POLL):
            if (reason := self._reason()) and not self._over.wait(self.patience):
                print(f"error: {reason}\nthe run waited {self.patience:g} s for it and ends",
                      file=sys.stderr, flush=True)
                os._exit(1)  # whoever waits for a dead rank in a GPU's queue cannot be interrupted


def main() -> None:
    """Be the rank that the command line describes."""
    logging.basicConfig(level=logging.WARNING)
    TrainerRank(**json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
