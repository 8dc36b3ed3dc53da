"""Processes that a command has started, also those that left its process group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from grpo.system.processes import Running, all_running

_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Process(NamedTuple):
    """A process; the start time tells it from a later one with the same number."""

    pid: int
    started: int


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent has ended, so that none of
    them is lost from sight. It lasts as long as this process."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(known: set[Process], table: Mapping[int, Running]) -> set[Process]:
    """Those of ``known`` that still run, and their descendants.

    Called now and then with its own last answer, it keeps those in sight whose parent has ended.
    """
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found, new = set(), [process for process in known
                         if process.pid in table and table[process.pid].started == process.started]
    while new:
        process = new.pop()
        if process not in found:
            found.add(process)
            new += [Process(pid, table[pid].started) for pid in children.get(process.pid, ())]
    return found


def kill(members: set[Process]) -> None:
    """End those that still are who they were."""
    table = all_running()
    for process in members:
        if process.pid in table and table[process.pid].started == process.started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
