"""The other ranks of a trainer as child processes on this machine, started and watched.

The rank that leads runs in the process of the script and starts them (:class:`LocalRanks`). Each
writes to a log of its own and ends with the script, however that ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo.system.child_process import Child, log_tail
from grpo.training.ranks import Ranks

_POLL = 0.2


class RankDied(RuntimeError):
    """A rank of the trainer ended before the run did."""


class LocalRanks:
    """Ranks 1, 2, ... of a trainer; a context manager around the part of the run that needs them.

    A rank that ends is reported as :class:`RankDied`: by :meth:`check`, and in the place of the
    error that its silence causes here. If this process hears no error, as it may wait in a GPU's
    queue for ever, it is ended ``patience`` seconds later with the reason on standard error.

    Args:
        module: what is run for each: ``python -m module READY ORDER`` reads the order, makes the
            file ``READY`` when there is nothing left to do but to meet, and meets the others.
        order: what the module needs, but for ``join``.
        count: ranks in all.
        device_type: ``"cuda"`` or ``"cpu"``.
        folder: for the logs, ``trainer_rank_1.log`` and so on.
        environments: further environment variables of each of the others; on GPUs they show it its
            own.
        timeout: seconds that a rank waits for another, as while the leader generates or evaluates.
        patience: see above.
        settle: seconds after an error here until a rank whose death has caused it must have ended.
    """

    def __init__(
        self, module: str, order: Mapping[str, Any], *, count: int, device_type: str, folder: Path,
        environments: Sequence[Mapping[str, str]], timeout: float = 24 * 3600.0,
        patience: float = 60.0, settle: float = 5.0,
    ) -> None:
        self.order, self.folder, self.module = order, folder, module
        self.environments, self.patience, self.settle = environments, patience, settle
        self._join = {"device_type": device_type, "count": count, "timeout": timeout}
        self._ready: list[Path] = []
        self._place: tempfile.TemporaryDirectory | None = None
        self._children: list[Child] = []
        self._over = threading.Event()

    def __enter__(self) -> LocalRanks:
        self._place = tempfile.TemporaryDirectory(prefix="grpo-ranks-")
        self._join["address"] = f"file://{self._place.name}/meet"
        for rank, env in enumerate(self.environments, 1):
            self._ready.append(Path(self._place.name, f"ready_{rank}"))
            log = self.folder / f"trainer_rank_{rank}.log"
            log.unlink(missing_ok=True)  # the last words of a run that was resumed are its own
            order = {**self.order, "join": {**self._join, "rank": rank, "device_index": 0}}
            command = [sys.executable, "-m", self.module, str(self._ready[-1]), json.dumps(order)]
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
        self._place.cleanup()
        if reason is not None:
            raise RankDied(reason) from error

    @property
    def pids(self) -> list[int]:
        """Process ids, of rank 1 first."""
        return [child.pid for child in self._children]

    def is_ready(self, rank: int) -> bool:
        """Whether a rank has nothing left to do but to meet the others."""
        return self._ready[rank - 1].exists()

    def check(self) -> None:
        """Raise :class:`RankDied` if one has ended, with the last lines of its log."""
        if reason := self._reason():
            raise RankDied(reason)

    def meet(self, *, device_index: int | None, start_timeout: float = 1800.0) -> Ranks:
        """Join the ranks, as their leader on a GPU of this number, when all have their model.

        Raises:
            RankDied: if one ends before, or is not ready after ``start_timeout`` seconds.
        """
        deadline = time.monotonic() + start_timeout
        while late := [path for path in self._ready if not path.exists()]:
            self.check()
            if time.monotonic() > deadline:
                rank = 1 + self._ready.index(late[0])
                raise RankDied(f"rank {rank} of the trainer was not ready within {start_timeout:g} "
                               f"s{log_tail(self._children[rank - 1].log_path)}")
            time.sleep(_POLL)
        return Ranks.join(**self._join, rank=0, device_index=device_index)

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
