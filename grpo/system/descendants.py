"""End what this process has started, and what that has, without asking any of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from grpo.system.processes import all_running, command_line, running

# Ends by itself when the others have, after it removed shared memory that they could not.
_TRACKER = "multiprocessing.resource_tracker"


def end_descendants(*, timeout: float = 5.0) -> None:
    """Kill what this process has started, and what that has; returns when it is gone, or after
    ``timeout`` seconds. Without effect where there is no ``/proc``."""
    _end({}, above={os.getpid()}, timeout=timeout)


@contextmanager
def gone_after(roots: Iterable[int], *, timeout: float = 10.0) -> Iterator[None]:
    """Some children of this process, and all below them, are gone when the block has ended.

    The block asks them to end. They have ``timeout`` seconds for it; what runs then is killed.
    """
    roots = set(roots)
    found = {pid: process for pid, process in all_running().items()
             if pid in roots | _below(roots).keys()}
    yield
    deadline = time.monotonic() + timeout

    def left() -> set[int]:  # its start tells a process from a later one with its number
        return {pid for pid, process in found.items()
                if (now := running(pid)) is not None and now.started == process.started}

    while (late := left()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if late:
        _end({pid: _tracks(pid) for pid in late}, above=late, timeout=5.0)


def _end(found: dict[int, bool], *, above: set[int], timeout: float) -> None:
    """Kill processes and all below ``above``."""
    # Stopped first: what one of them starts meanwhile is nobody's descendant once that one is gone.
    _signal((pid for pid, tracks in found.items() if not tracks), signal.SIGSTOP)
    while new := {pid: tracks for pid, tracks in _below(above).items() if pid not in found}:
        found = found | new
        _signal((pid for pid, tracks in new.items() if not tracks), signal.SIGSTOP)
    _signal((pid for pid, tracks in found.items() if not tracks), signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while any(map(running, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal((pid for pid, tracks in found.items() if tracks and running(pid)), signal.SIGKILL)


def _below(above: set[int]) -> dict[int, bool]:
    """Running processes below some, each with whether it is Python's resource tracker."""
    processes, found, newest = all_running(), {}, above
    while newest := {pid for pid, process in processes.items() if process.parent in newest}:
        found |= {pid: _tracks(pid) for pid in newest}
    return found


def _tracks(pid: int) -> bool:
    return _TRACKER in command_line(pid)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
