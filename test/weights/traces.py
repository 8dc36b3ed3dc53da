"""The end of an engine: killing it, and what must be gone then: processes and shared memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..support import wait_until


@contextmanager
def killed_while_it_waits(pid: int, *, after: float = 0.5) -> Iterator[None]:
    """Stop a process, so that whatever it is asked stays under way, and kill it a bit later."""
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(after, os.kill, (pid, signal.SIGKILL))
    killer.start()
    yield
    killer.join()


class Traces:
    """What was there before an engine; made before it starts."""

    def __init__(self) -> None:
        self.processes, self.before = processes(), mapped(os.getpid())
        self.memory: set[Path] = set()

    def watch(self, *pids: int) -> None:
        """Look at what these processes of the engine, and this one, have mapped by now."""
        self.memory |= set().union(*map(mapped, (*pids, os.getpid()))) - self.before
        assert self.memory, "a worker talks through shared memory"

    def check_nothing_is_left(self, *, within: float = 20.0) -> None:
        """Wait until everything is gone that was not there before."""
        wait_until(lambda: not self._left(), seconds=within, every=0.1,
                   said=lambda: str(self._left()))

    def _left(self) -> set:
        return {path for path in self.memory if path.exists()} | (processes() - self.processes)


def mapped(pid: int) -> set[Path]:
    """Files in the folder of shared memory that a process has mapped.

    Not all that are in the folder: other processes of this machine come and go.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {Path(line[line.index("/dev/shm/"):]) for line in lines if "/dev/shm/" in line}
    return {path for path in paths if path.exists()}  # not those that are "(deleted)"


def processes() -> set[str]:
    """Descendants of this process, by pid."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[folder.name] = stat.rpartition(")")[2].split()[1]

    def ours(pid: str) -> bool:
        return pid == str(os.getpid()) or (pid in parents and ours(parents[pid]))

    # multiprocessing keeps one helper of its own for the life of the interpreter.
    return {pid for pid in parents
            if ours(parents[pid]) and "multiprocessing.resource_tracker" not in _command(pid)}


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
