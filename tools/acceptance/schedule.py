"""Parts that run side by side: what fits, each within its time, and all within a deadline."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from acceptance.family import Process, descendants, kill

from grpo.system.child_process import Child
from grpo.system.processes import all_running, command_line

GRACE = 8.0  # seconds between asking a part to end and ending it
LINGER = 10.0  # seconds that processes of a part may outlive it
_POLL = 0.2  # seconds
_LAST_LINES = 40

Status = Literal["waiting", "running", "passed", "failed", "timed out", "not run", "skipped"]
Read = Callable[[Path], dict]


class Missed(Exception):
    """A part ended well and did not do what it should; the message says what, ``figures`` has what
    there is."""

    def __init__(self, message: str, figures: dict | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


@dataclass(frozen=True)
class Part:
    """One thing that is run.

    Attributes:
        name: in the table.
        script: for ``bash -euo pipefail -c``, in a folder of its own.
        limit: seconds after which it is ended.
        gpus: how many GPUs it takes; the emptiest ones.
        gib: memory of each that it may need.
        alone: nothing runs meanwhile but others of this kind on other GPUs, because it takes times.
        after: names of parts that must have passed before.
        behind: names of parts that must have ended before, because they fill the caches of compiled
            code that this one reads.
        claims: names of what one part at a time may have, such as a port.
        read: gets its folder when it has ended well, and returns figures or raises
            :class:`Missed`; it is also asked after a failure, for what there is.
        missing: why it cannot run here; empty if it can.
        covers: commands of the pages that it runs, as they stand there.
    """

    name: str
    script: str
    limit: float
    gpus: int = 1
    gib: float = 0.0
    alone: bool = False
    after: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    claims: frozenset[str] = frozenset()
    read: Read = field(default=lambda folder: {}, repr=False)
    missing: str = ""
    covers: tuple[str, ...] = ()


def needed(names: set[str], parts: Sequence[Part], *, behind: bool = False) -> set[str]:
    """These parts and all that they come after, or with ``behind`` wait for."""
    after = {part.name: (*part.after, *(part.behind if behind else ())) for part in parts}
    while more := {name for part in names for name in after[part]} - names:
        names = names | more
    return names


@dataclass
class Outcome:
    """What became of a part."""

    status: Status = "waiting"
    reason: str = ""
    seconds: float | None = None
    figures: dict = field(default_factory=dict)
    log_end: list[str] = field(default_factory=list)


@dataclass
class _Running:
    part: Part
    child: Child
    gpus: list[int]
    folder: Path
    started: float
    family: set[Process]
    asked: float | None = None  # when it was asked to end
    why: tuple[Status, str] | None = None
    ended: float | None = None  # when the command itself had ended


class Schedule:
    """Runs parts in their order, as many at a time as fit.

    Those that run ``alone`` go first, with what they wait for: once others have begun, they would
    wait for the longest of them, and nothing could begin meanwhile. Each has a GPU to itself, and
    where there are several they run beside each other. Another part that does not fit lets later
    ones go first. When the deadline comes, or after :meth:`stop`, what runs is ended and what waits
    is not run. Only processes that parts have started are ended, all of them.

    Args:
        parts: with different names.
        gpus: number or UUID of each GPU, for ``CUDA_VISIBLE_DEVICES``.
        gib: memory of each GPU that parts may take together.
        jobs: parts at a time.
        seconds: until the deadline, by which all processes have ended.
        folder: each part's folder is made in it.
        environment: further variables of all parts.
        changed: called with this object whenever a part has begun or ended.
    """

    def __init__(
        self, parts: Sequence[Part], *, gpus: Sequence[str], gib: float, jobs: int, seconds: float,
        folder: Path, environment: Mapping[str, str], changed: Callable[[Schedule], None],
    ) -> None:
        if len({part.name for part in parts}) < len(parts):
            raise ValueError("two parts have the same name")
        self.parts, self.gpus, self.gib, self.jobs = parts, gpus, gib, jobs
        self.folder, self.environment, self.changed = folder, environment, changed
        self.outcomes = {part.name: Outcome() for part in parts}
        self.deadline = time.monotonic() + seconds
        self._free = [gib] * len(gpus)
        self._running: list[_Running] = []
        self._stopped = ""

    def stop(self, reason: str) -> None:
        """End what runs, and start nothing more."""
        self._stopped = self._stopped or reason

    def run(self) -> None:
        """Return when all parts have an outcome and none of their processes is left."""
        try:
            while self._running or any(o.status == "waiting" for o in self.outcomes.values()):
                self._look()
                self._begin_what_fits()
                time.sleep(_POLL)
        finally:
            for running in self._running:
                running.child.stop(timeout=0.0)
                kill(running.family)

    # -- beginning ------------------------------------------------------------------------------

    def _begin_what_fits(self) -> None:
        if not self._stopped and time.monotonic() > self.deadline - GRACE:
            self.stop("time was up")
        first = self._first()
        for part in self.parts:
            outcome = self.outcomes[part.name]
            if outcome.status != "waiting":
                continue
            if part.missing:
                self._settle(part, "skipped", part.missing)
            elif bad := [name for name in part.after
                         if self.outcomes[name].status not in ("waiting", "running", "passed")]:
                self._settle(part, "not run", f"{bad[0]} did not pass")
            elif self._stopped:
                self._settle(part, "not run", self._stopped)
            elif (not first or part.name in first) and not any(
                    self.outcomes[name].status in ("waiting", "running")
                    for name in (*part.after, *part.behind)):
                if (chosen := self._place(part)) is not None:
                    self._begin(part, chosen)

    def _first(self) -> set[str]:
        """Parts that wait to run alone and can, and those that they come after."""
        return needed({
            part.name for part in self.parts if part.alone and not part.missing
            and self.outcomes[part.name].status == "waiting"
            and all(self.outcomes[name].status in ("waiting", "running", "passed")
                    for name in part.after)}, self.parts, behind=True)

    def _place(self, part: Part) -> list[int] | None:
        """GPUs for a part, or None if it does not fit now."""
        running = self._running
        if len(running) >= self.jobs or any(other.part.alone != part.alone for other in running):
            return None
        if any(part.claims & other.part.claims for other in running):
            return None
        emptiest = sorted(range(len(self.gpus)), key=lambda gpu: -self._free[gpu])[:part.gpus]
        # One that is larger than planned for has the GPU to itself.
        fits = all(self._free[gpu] >= min(self._gib(part), self.gib) for gpu in emptiest)
        return sorted(emptiest) if fits else None

    def _gib(self, part: Part) -> float:
        """Memory of a GPU that a part is given: one that runs alone has all."""
        return self.gib if part.alone else part.gib

    def _begin(self, part: Part, gpus: list[int]) -> None:
        # Numbered, because names may differ in what is no sign for a path.
        readable = re.sub(r"[^A-Za-z0-9.]+", "_", part.name).strip("_")[:60]
        folder = self.folder / f"{self.parts.index(part):02d}_{readable}"
        folder.mkdir(parents=True)
        for gpu in gpus:
            self._free[gpu] -= self._gib(part)
        environment = {**self.environment,
                       "CUDA_VISIBLE_DEVICES": ",".join(self.gpus[gpu] for gpu in gpus)}
        child = Child(["bash", "-euo", "pipefail", "-c", part.script], cwd=folder,
                      log_path=folder / "log", env=environment)
        table = all_running()
        self._running.append(_Running(
            part, child, gpus, folder, time.monotonic(),
            {Process(child.pid, table[child.pid].started)} if child.pid in table else set()))
        self.outcomes[part.name].status = "running"
        self.changed(self)

    # -- ending ---------------------------------------------------------------------------------

    def _look(self) -> None:
        table, now = all_running(), time.monotonic()
        for running in list(self._running):
            running.family = descendants(running.family, table)
            if running.ended is None and running.asked is None:
                self._ask_to_end(running, now)
            if running.ended is None and (not running.child.alive() or (
                    running.asked is not None and now > running.asked + GRACE)):
                self._ended(running, now)
            if running.ended is not None:
                self._see_off(running, now)

    def _ask_to_end(self, running: _Running, now: float) -> None:
        if now - running.started > running.part.limit:
            running.why = "timed out", f"not done in its {running.part.limit:g} s"
        elif self._stopped:
            running.why = "not run", f"{self._stopped} while it ran"
        if running.why and running.child.alive():
            running.asked = now
            # Its leader has not been waited for, so that the group is still its own.
            os.killpg(running.child.pid, signal.SIGTERM)

    def _ended(self, running: _Running, now: float) -> None:
        """The command has ended, or has had its time to: so does its process group."""
        running.ended = now
        code = running.child.exit_code()
        if running.why is None and code != 0:
            running.why = "failed", f"ended with {running.child.ending()}"
        running.child.stop(timeout=0.0)

    def _see_off(self, running: _Running, now: float) -> None:
        """What it started elsewhere may take a moment to notice; then it is ended, and a fault."""
        left = descendants(running.family, all_running())
        if left and running.asked is None and now < running.ended + LINGER:
            return
        if left and running.why is None:
            named = [command_line(process.pid)[:120] for process in sorted(left)]
            running.why = "failed", f"left processes behind: {'; '.join(named)}"
        kill(left)
        self._running.remove(running)
        for gpu in running.gpus:
            self._free[gpu] += self._gib(running.part)
        self._read(running)

    def _read(self, running: _Running) -> None:
        outcome = self.outcomes[running.part.name]
        try:
            outcome.figures = running.part.read(running.folder)
        except Missed as missed:
            outcome.figures = missed.figures
            running.why = running.why or ("failed", str(missed))
        outcome.seconds = round(running.ended - running.started, 1)
        if running.why:
            outcome.log_end = running.child.last_lines(_LAST_LINES)
        self._settle(running.part, *(running.why or ("passed", "")))

    def _settle(self, part: Part, status: Status, reason: str) -> None:
        outcome = self.outcomes[part.name]
        outcome.status, outcome.reason = status, reason
        self.changed(self)
