"""End all that this process has started, when there is no time to ask any of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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
    while any(map(_runs, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _signal((pid for pid, tracks in found.items() if tracks and _runs(pid)), signal.SIGKILL)


def _descendants() -> dict[int, bool]:
    """Running processes below this one, each with whether it is Python's resource tracker."""
    parents, found, newest = {}, {}, {os.getpid()}
    for folder in Path("/proc").glob("[0-9]*"):
        if (fields := _fields(int(folder.name))) is not None:
            parents[int(folder.name)] = fields[1]
    while newest := {pid for pid, parent in parents.items() if int(parent) in newest}:
        found |= {pid: _TRACKER in _command(pid) for pid in newest if _runs(pid)}
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    fields = _fields(pid)
    return fields is not None and fields[0] not in "ZX"


def _fields(pid: int) -> list[str] | None:
    """State, parent and more of a process; None if it is gone."""
    try:
        # The command name, in parentheses, may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
