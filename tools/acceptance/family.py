"""Processes that a command has started, also those that left its process group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Process(NamedTuple):
    """A process; the start time tells it from a later one with the same number."""

    pid: int
    started: int


Table = Mapping[int, tuple[int, int]]
"""Number of each running process -> number of its parent, start time."""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent has ended, so that none of
    them is lost from sight. It lasts as long as this process."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> Table:
    """All running processes; those that have ended and wait for their parent are left out."""
    table = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            # The command's name, in parentheses, may itself hold spaces and parentheses.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                table[int(folder.name)] = int(fields[1]), int(fields[19])
    return table


def descendants(known: set[Process], table: Table) -> set[Process]:
    """Those of ``known`` that still run, and their descendants.

    Called now and then with its own last answer, it keeps those in sight whose parent has ended.
    """
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found, new = set(), [process for process in known
                         if process.pid in table and table[process.pid][1] == process.started]
    while new:
        process = new.pop()
        if process not in found:
            found.add(process)
            new += [Process(pid, table[pid][1]) for pid in children.get(process.pid, ())]
    return found


def kill(members: set[Process]) -> None:
    """End those that still are who they were."""
    table = processes()
    for process in members:
        if process.pid in table and table[process.pid][1] == process.started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def command_line(process: Process) -> str:
    """What it was started as, for messages."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")
        return text.replace("\0", " ").strip()[:120]
    return "?"
