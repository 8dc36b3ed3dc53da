"""End all that this process has started, when there is no time to ask any of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from grpo.system.processes import all_running, command_line, running

# Ends by itself when the others have, after it removed shared memory that they could not.
_TRACKER = "multiprocessing.resource_tracker"


def end_descendants(*, timeout: float = 5.0) -> None:
    """Kill what this process has started, and what that has; returns when it is gone, or after
    ``timeout`` seconds. Without effect where there is no ``/proc``."""
    found: dict[int, bool] = {}
    # Stopped first: what one of them starts meanwhile is nobody's descendant once that one is gone.
    while new := {pid: tracks for pid, tracks in _descendants().items() if pid not in found}:
        found |= new
        _signal((pid for pid, tracks in new.items() if not tracks), signal.SIGSTOP)
    _signal((pid for pid, tracks in found.items() if not tracks), signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while any(map(running, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal((pid for pid, tracks in found.items() if tracks and running(pid)), signal.SIGKILL)


def _descendants() -> dict[int, bool]:
    """Running processes below this one, each with whether it is Python's resource tracker."""
    processes, found, newest = all_running(), {}, {os.getpid()}
    while newest := {pid for pid, process in processes.items() if process.parent in newest}:
        found |= {pid: _TRACKER in command_line(pid) for pid in newest}
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
