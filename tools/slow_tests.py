"""Run as many of the slow tests as a budget of seconds allows, others at each commit.

    make test-slow ARGS="--budget 1700"
    make test-slow ARGS="--budget 900 --passed"    # of those that have been seen to pass
    python tools/slow_tests.py --list              # in which order, and what each may take

First come those that every commit is held to (``ALWAYS``): they run to their end, and one that is
skipped counts as failed. Then come files that the last commit has changed, then the others,
beginning at a place that the commit's hash says: it is the same whenever that commit is tested, and
another at the next one. Two run at a time, one a core. What ran and what did not is printed;
pytest's counts, added up, come last. test/slow_seconds.json has the seconds that files took, those
that passed and others; ``--record`` writes those of this run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from grpo.system.child_process import Child  # noqa: E402

SECONDS = REPO / "test" / "slow_seconds.json"
UNKNOWN = 60.0  # seconds of a file that was not recorded
LONG = 300.0  # files that take longer are run test by test
START = 15.0  # seconds until the first test of a call of pytest
# Whole runs with environments of each world, whose reward rises, and the tokens that they train on.
ALWAYS = (
    "test/end_to_end/test_atropos.py::test_grpo_py_learns_from_an_environment_that_it_starts[1]",
    "test/end_to_end/test_atropos.py::test_grpo_py_learns_from_an_environment_that_it_starts[2]",
    "test/end_to_end/test_atropos.py::"
    "test_grpo_async_learns_from_it_and_bounds_the_age_of_groups[1]",
    "test/end_to_end/test_atropos.py::"
    "test_grpo_async_learns_from_it_and_bounds_the_age_of_groups[2]",
    "test/end_to_end/test_runs.py::"
    "test_the_verifiers_reward_rises_on_problems_of_reasoning_gym",
    "test/envs/test_verifiers_installed.py",
    "test/end_to_end/test_conversations.py",
)
NOTHING_SELECTED = 5  # pytest's exit status when no test was chosen
LANES = min(2, os.cpu_count() or 1)
# One thread each: the threads of several processes would wait for each other.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Unit:
    """What one call of pytest runs: a file's slow tests, or one of a file that takes long."""

    name: str
    expected: float

    @property
    def file(self) -> str:
        """Path of its file."""
        return self.name.partition("::")[0]


def make_units(tests: Sequence[str], recorded: Mapping[str, float]) -> list[Unit]:
    """Units of these tests, in their order.

    Examples:
        >>> make_units(["a.py::one", "a.py::two", "b.py::one"], {"a.py": 400.0, "b.py": 20.0})
        [Unit(name='a.py::one', expected=215.0), Unit(name='a.py::two', expected=215.0), \
Unit(name='b.py', expected=20.0)]
    """
    counts = Counter(test.partition("::")[0] for test in tests)
    apart = {test.partition("::")[0] for test in tests if test in ALWAYS}
    units: dict[str, Unit] = {}
    for test in tests:
        file = test.partition("::")[0]
        seconds = recorded.get(file, UNKNOWN)
        if file in apart or (seconds > LONG and counts[file] > 1):
            units[test] = Unit(test, START + seconds / counts[file])
        else:
            units[file] = Unit(file, seconds)
    return list(units.values())


def in_order(units: Sequence[Unit], *, changed: Iterable[str], commit: str,
             always: Sequence[str] = ()) -> list[Unit]:
    """Those that always run, then changed files, then others from a place that the hash says.

    Examples:
        >>> units = [Unit(name, 1.0) for name in "abcd"]
        >>> [unit.name for unit in in_order(units, changed=["c"], commit="2", always=["b"])]
        ['b', 'c', 'a', 'd']

    Raises:
        ValueError: one that always runs is not there.
    """
    named = {unit.name: unit for unit in units}
    if missing := [name for name in always if name not in named]:
        raise ValueError(f"no such slow test: {', '.join(missing)}; was it renamed? "
                         "ALWAYS in tools/slow_tests.py names those that every commit runs")
    first = [named[name] for name in always]
    touched = set(changed)
    first += [unit for unit in units if unit.file in touched and unit not in first]
    others = [unit for unit in units if unit not in first]
    start = int(commit or "0", 16) % max(1, len(others))
    return first + others[start:] + others[:start]


class Running:
    """A call of pytest."""

    def __init__(self, unit: Unit, log: Path) -> None:
        self.unit, self.started = unit, time.monotonic()
        self.child = Child(
            [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
             "--show-capture=no", "-m", "slow and not gpu", unit.name], log_path=log, cwd=REPO,
            env=ENVIRONMENT | {"GRPO_TEST_MODELS": str(log.parent / "models")})

    def counts(self) -> Counter:
        """Passed, failed, skipped tests, by pytest's closing line."""
        for line in reversed(self.child.last_lines(150)):
            if re.search(r" in [\d.]+s", line):
                return Counter({what: int(number) for number, what in re.findall(
                    r"(\d+) (passed|failed|skipped|errors?)\b", line)})
        return Counter(errors=1)


class Session:
    """All calls within the budget.

    Args:
        units: in the order in which they are begun; one that would not end in time lets later,
            shorter ones go first.
        budget: seconds, after which what still runs is ended.
        always: names of units that run whatever the budget, and whose tests may not be skipped.
        lanes: calls at a time.
        folder: for logs.
    """

    def __init__(self, units: Sequence[Unit], *, budget: float, lanes: int, folder: Path,
                 always: Iterable[str] = ()) -> None:
        self.waiting, self.lanes, self.folder = list(units), lanes, folder
        self.always = frozenset(always)
        self.end = time.monotonic() + budget
        self.running: list[Running] = []
        self.counts: Counter = Counter()
        self.seconds: dict[str, float] = {}  # by name, of those that ended
        self.failed: list[str] = []
        self.unfinished: list[Unit] = []

    def run(self) -> None:
        """Return when the time is up, or all has run."""
        try:
            while self._begin() or self._goes_on():
                time.sleep(0.1)
                for running in [r for r in self.running if not r.child.alive()]:
                    self._ended(running)
        finally:
            for running in self.running:
                running.child.stop(timeout=5.0)
                self.unfinished.append(running.unit)

    def _goes_on(self) -> bool:
        """Whether something runs that has time left."""
        held = any(running.unit.name in self.always for running in self.running)
        return held or bool(self.running) and time.monotonic() < self.end

    def _begin(self) -> bool:
        """Begin what fits; True if anything was begun."""
        begun = False
        while len(self.running) < self.lanes:
            left = self.end - time.monotonic()
            unit = next((unit for unit in self.waiting
                         if unit.name in self.always or unit.expected <= left), None)
            if unit is None:
                break
            self.waiting.remove(unit)
            number = len(self.seconds) + len(self.running)
            self.running.append(Running(unit, self.folder / f"{number}-{time.monotonic_ns()}"))
            begun = True
        return begun

    def _ended(self, running: Running) -> None:
        code, counts = running.child.exit_code(), running.counts()
        self.running.remove(running)
        running.child.stop(timeout=5.0)
        self.seconds[running.unit.name] = seconds = time.monotonic() - running.started
        said = ", ".join(f"{number} {what}" for what, number in counts.items())
        print(f"{seconds:6.0f} s  {running.unit.name}: {said}", flush=True)
        missed = running.unit.name in self.always and (counts["skipped"] or not counts["passed"])
        if missed or code not in (0, NOTHING_SELECTED):
            self.failed.append(running.unit.name)
            print("\n".join(running.child.last_lines(150)), flush=True)
        if missed and code in (0, NOTHING_SELECTED):
            print("it was skipped, and is to run at every commit; has `make atropos-env` run, and "
                  "are PyPI and npm there?", flush=True)
        self.counts += counts


def closing_line(session: Session, seconds: float) -> str:
    """As pytest's own of a single call."""
    order = ("failed", "passed", "skipped", "errors")
    counts = Counter({"errors": session.counts["error"]}) + session.counts
    said = [f"{counts[what]} {what}" for what in order if counts[what]]
    return f"{', '.join(said) or 'no tests ran'} in {seconds:.2f}s"


def collect() -> list[str]:
    """Names of all slow tests that need no GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow and not gpu"],
        cwd=REPO, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\npytest could not collect the tests")
    return [line for line in done.stdout.splitlines() if "::" in line]


def git(*arguments: str) -> list[str]:
    """Lines that git says of this repository; none where it cannot."""
    if shutil.which("git") is None:
        return []
    asked = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, text=True)
    return asked.stdout.split() if asked.returncode == 0 else []


def record(
    seconds: Mapping[str, float], units: Sequence[Unit], failed: Iterable[str] = (),
    path: Path = SECONDS,
) -> None:
    """Write the seconds of files of which all units ran, and whether all passed."""
    recorded = json.loads(path.read_text())
    for file in {unit.file for unit in units}:
        names = [unit.name for unit in units if unit.file == file]
        if all(name in seconds for name in names):
            for files in recorded.values():
                files.pop(file, None)
            # A file that is run as a whole starts pytest once.
            recorded["others" if set(names) & set(failed) else "passed"][file] = round(
                sum(seconds[name] for name in names) - START * (len(names) - 1))
    recorded = {kind: dict(sorted(files.items())) for kind, files in recorded.items()}
    path.write_text(json.dumps(recorded, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1700.0, help="seconds (1700)")
    parser.add_argument("--lanes", type=int, default=LANES, help="calls of pytest at a time")
    parser.add_argument("--passed", action="store_true",
                        help="those alone that passed when they were last recorded")
    parser.add_argument("--list", action="store_true", help="print the order, and end")
    parser.add_argument("--record", action="store_true", help="write test/slow_seconds.json")
    args = parser.parse_args()
    started = time.monotonic()
    commit = next(iter(git("rev-parse", "--verify", "HEAD")), "0")
    recorded = json.loads(SECONDS.read_text())
    units = in_order(make_units(collect(), recorded["passed"] | recorded["others"]), commit=commit,
                     changed=git("log", "-1", "--format=", "--name-only"), always=ALWAYS)
    if args.passed:
        units = [unit for unit in units
                 if unit.file in recorded["passed"] or unit.name in ALWAYS]
    if args.list:
        print("\n".join(f"{unit.expected:6.0f} s  {unit.name}" for unit in units))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        session = Session(units, budget=args.budget - (time.monotonic() - started),
                          lanes=args.lanes, folder=Path(folder), always=ALWAYS)
        session.run()
    if args.record:
        record(session.seconds, units, session.failed)
    for unit in session.unfinished:
        print(f"not finished in time: {unit.name}")
    for unit in session.waiting:
        print(f"not run: {unit.name}")
    print(f"{len(session.seconds)} of {len(units)} parts of the slow tests ran"
          + f"; failed: {', '.join(session.failed)}" * bool(session.failed))
    print(closing_line(session, time.monotonic() - started))
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
