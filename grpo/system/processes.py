"""Which processes run on this machine, and whose they are, as ``/proc`` says."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Running(NamedTuple):
    """A process that runs: numbers of its parent and of its process group, and when it started, in
    clock ticks since boot, which tells it from a later process with the same number."""

    parent: int
    group: int
    started: int


def running(pid: int) -> Running | None:
    """What ``/proc`` says of a process; None if it is gone, has ended and waits for its parent, or
    is another user's and hidden.

    Examples:
        >>> import os
        >>> running(os.getpid()).parent == os.getppid()
        True
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # names are cut at 15 bytes
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Running(parent=int(fields[1]), group=int(fields[2]), started=int(fields[19]))


def all_running() -> dict[int, Running]:
    """All processes that run, by number; none where there is no ``/proc``."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (process := running(int(folder.name))) is not None:
            found[int(folder.name)] = process
    return found


def children() -> set[int]:
    """Numbers of the processes that this one has started and that run."""
    me = os.getpid()
    return {pid for pid, process in all_running().items() if process.parent == me}


def command_line(pid: int) -> str:
    """What a process was started as; nothing if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""
