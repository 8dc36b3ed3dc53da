"""A run of the library's scripts as a child process, watched while it goes on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpu_memory import PeakMemory
from machine import REPO

from grpo.system.child_process import Child, log_tail

SCRIPTS = REPO / "sota-implementations" / "grpo"
_POLL = 0.1  # seconds
_GAP = 1.0  # seconds of silence after which a line of the start-up is worth its time


def add_run_options(parser: argparse.ArgumentParser, *, iterations: int, image: Path) -> None:
    """Options of a benchmark that compares whole runs over seeds, and draws its ``image``."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--work", type=Path, help="folder of the runs")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    parser.add_argument("--draw", action="store_true", help=f"draw {image.name} of the result")


class RunFailed(RuntimeError):
    """A run ended before its iterations, or took too long; the end of its log is in the message."""


class WatchedRun:
    """A run that is ended after so many iterations.

    It is planned as long as its configuration says, because what it chooses by itself can depend on
    that, and ended when enough of it was seen.

    Args:
        script: ``grpo.py`` or ``grpo-async.py``.
        overrides: of its configuration.
        folder: of the run; its log is beside it.
        seen: called with this object whenever another iteration has finished.
    """

    def __init__(self, script: str, overrides: list[str], folder: Path, *,
                 seen: Callable[[WatchedRun], None] = lambda run: None) -> None:
        self.script, self.folder, self.seen = script, folder, seen
        self.log = folder.with_suffix(".log")
        self.rows: list[dict] = []  # of finished iterations
        self.startup: list[tuple[float, str]] = []
        self.memory = PeakMemory()
        self._started = time.monotonic()
        self._lines = 0
        self._child = Child(
            [sys.executable, str(SCRIPTS / script), *overrides, f"hydra.run.dir={folder}"],
            log_path=self.log, cwd=folder.parent,
            env={"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"})

    def describe(self) -> dict:
        """What there is so far: iterations, memory, and the start-up.

        ``startup`` has the seconds at which lines came out after a silence: who reads it sees what
        the time went to.
        """
        return {"seconds_per_iteration": [row["time/step"] for row in self.rows],
                "startup": [[round(at, 1), line] for at, line in self.startup],
                "memory_gib": {"before": self.memory.before_gib, "peak": self.memory.peak_gib}}

    def follow(self, *, iterations: int, timeout: float) -> None:
        """Wait for so many iterations, then end the run.

        Raises:
            RunFailed: if it ends before, or takes longer than ``timeout`` seconds.
        """
        try:
            with self.memory:
                while len(self.rows) < iterations:
                    time.sleep(_POLL)
                    # Asked first: what it wrote before it ended is read below.
                    alive = self._child.alive()
                    self._look()
                    if len(self.rows) < iterations and not alive:
                        raise RunFailed(f"{self.script} ended with {self._child.ending()} after "
                                        f"{len(self.rows)} iterations{log_tail(self.log, 60)}")
                    if time.monotonic() - self._started > timeout:
                        raise RunFailed(f"{self.script}: {len(self.rows)} of {iterations} "
                                        f"iterations in {timeout:g} s{log_tail(self.log)}")
        finally:
            self._child.stop(timeout=2.0)

    def _look(self) -> None:
        from grpo.report.loggers import read_jsonl

        rows = [row for row in read_jsonl(self.folder / "metrics.jsonl") if "time/step" in row]
        if not self.rows:
            self._note_startup()
        if len(rows) > len(self.rows):
            self.rows = rows
            self.seen(self)

    def _note_startup(self) -> None:
        lines = self.log.read_text(errors="replace").splitlines()
        now = time.monotonic() - self._started
        if len(lines) > self._lines:
            new = next((line for line in lines[self._lines:] if line.strip()), "")
            if new and (not self.startup or now - self.startup[-1][0] > _GAP):
                self.startup.append((now, new.strip()[:120]))
            self._lines = len(lines)


def run_to_its_end(script: str, overrides: list[str], folder: Path, *, timeout: float
                   ) -> list[dict]:
    """All lines of ``metrics.jsonl`` of a run that ends by itself.

    Raises:
        RunFailed: if it fails, or takes longer than ``timeout`` seconds.
    """
    from grpo.report.loggers import read_jsonl

    log = folder.with_suffix(".log")
    child = Child([sys.executable, str(SCRIPTS / script), *overrides, f"hydra.run.dir={folder}"],
                  log_path=log, cwd=folder.parent, env={"HF_HUB_OFFLINE": "1"})
    try:
        if not child.wait(timeout=timeout):
            raise RunFailed(f"{script} was not done in {timeout:g} s{log_tail(log)}")
        if child.exit_code():
            raise RunFailed(f"{script} ended with {child.ending()}{log_tail(log, 60)}")
    finally:
        child.stop()
    return read_jsonl(folder / "metrics.jsonl")
