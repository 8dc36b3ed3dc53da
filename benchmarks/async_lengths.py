"""Which completions an asynchronous run trains on, by length, and what waiting for long ones costs.

    python benchmarks/async_lengths.py --before 7309f3a --out benchmarks/results/async_lengths.json
    python benchmarks/async_lengths.py --table   # of that file, as it stands in docs/async.md

No model: a clock that jumps from event to event drives the very
:class:`~grpo.collectors.schedule.RolloutSchedule` of a run, and with ``--before`` also that of an
older commit. Lengths of groups are log-normal with mean 1. An engine that generates ``n`` groups
gives each a token every ``1 + n / knee`` ticks, so that a group of mean length takes one unit of
time alone and two among ``knee`` others; training a batch takes ``--training`` units.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from machine import REPO, Recording

RESULT = REPO / "benchmarks" / "results" / "async_lengths.json"
SCHEDULE = REPO / "grpo" / "collectors" / "schedule.py"
HEADER = ("`update_at`", "`staleness`", "share of the longest 5 %", "in vain", "a step",
          "age of a token")
LONG = 0.05


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is simulated.

    Attributes:
        steps: batches that are trained.
        groups: of a batch.
        engines: that generate.
        slots: groups that an engine generates at a time.
        knee: groups at which a token takes an engine twice as long as for one group alone.
        sigma: standard deviation of the logarithm of the lengths.
        training: time of a step's training, in times of a group of mean length alone.
        seed: of the lengths.
    """

    steps: int = 400
    groups: int = 32
    engines: int = 2
    slots: int = 32
    knee: float = 32.0
    sigma: float = 0.6
    training: float = 1.5
    seed: int = 0

    def lengths(self) -> Iterator[float]:
        """Of the groups, in their order; without end."""
        draw = np.random.default_rng(self.seed)
        while True:
            yield float(np.exp(self.sigma * draw.standard_normal() - self.sigma**2 / 2))


@dataclass
class Group:
    """One that is generated; ``cuts`` are ``(version, done)`` at each update that it lived to see.
    """

    index: int
    length: float
    lease: int
    version: int
    done: float = 0.0
    cuts: list[tuple[int, float]] = field(default_factory=list)

    def age(self, version: int) -> float:
        """Mean age of its tokens when weights of a version are trained with them."""
        ends = [*self.cuts, (version, self.length)]
        starts = [self.version, *(new for new, _ in self.cuts)]
        before, total = 0.0, 0.0
        for sampled_by, (_, end) in zip(starts, ends, strict=True):
            total += (end - before) * (version - sampled_by)
            before = end
        return total / self.length


class Run:
    """A trainer, its engines and a clock.

    Args:
        schedule: that is driven; anything with the methods of a ``RolloutSchedule``.
        work: what is simulated.
        in_flight: weights change while groups are generated; or when those that run are finished.

    Attributes:
        started: groups, by number: their length and the version at which each was first started.
        trained: groups, in the order of their training, each with its age then.
        batches: trained so far.
        now: the time.
    """

    def __init__(self, schedule: Any, work: Work, *, in_flight: bool) -> None:
        self.schedule, self.work, self.in_flight = schedule, work, in_flight
        self.engines: list[list[Group]] = [[] for _ in range(work.engines)]
        self.held: list[tuple[int, Group]] = []  # what comes while engines finish what they have
        self.started: dict[int, tuple[float, int]] = {}
        self.trained: list[tuple[Group, int]] = []
        self.now, self.batches, self.finished, self.age = 0.0, 0, 0.0, 0.0
        self._until: float | None = None  # end of the training that is going on
        self._publishing = False
        self._lengths = work.lengths()

    def go(self) -> Run:
        """Train all batches.

        Raises:
            RuntimeError: if nothing can ever happen again.
        """
        while self.batches < self.work.steps:
            self._hand_out()
            if self._until is None and not self._publishing:
                self._take()
            rates = [1 / (1 + len(engine) / self.work.knee) for engine in self.engines]
            ends = [(group.length - group.done) / rate
                    for engine, rate in zip(self.engines, rates, strict=True) for group in engine]
            if self._until is not None:
                ends.append(self._until - self.now)
            if not ends:
                raise RuntimeError(f"stuck after {self.batches} batches: nothing is generated and "
                                   "nothing trained")
            self._pass(min(ends), rates)
        return self

    def _hand_out(self) -> None:
        """To the engine with the fewest groups, as the collector does."""
        while True:
            held = [self.schedule.held_by(engine) for engine in range(self.work.engines)]
            engine = min(range(self.work.engines), key=held.__getitem__)
            if held[engine] >= self.work.slots:
                return
            lease = self.schedule.lease(worker=engine, now=self.now)
            if lease is None:
                return
            index = lease.ticket.index
            if index not in self.started:
                self.started[index] = next(self._lengths), self.schedule.version
            group = Group(index, self.started[index][0], lease.id, self.schedule.version)
            if self._publishing:
                self.held.append((engine, group))
            else:
                self.engines[engine].append(group)

    def _take(self) -> None:
        batch = self.schedule.take()
        if batch is not None:
            version = self.schedule.version
            self.trained += [(done.group, version - done.version) for done in batch]
            self.age += sum(done.group.age(version) * done.group.length for done in batch)
            self._until = self.now + self.work.training

    def _pass(self, seconds: float, rates: list[float]) -> None:
        self.now += seconds
        for number, (engine, rate) in enumerate(zip(self.engines, rates, strict=True)):
            for group in engine:
                group.done += seconds * rate
            for group in engine:
                if group.done >= group.length * (1 - 1e-9):
                    self.finished += group.length
                    self.schedule.finish(group.lease, group, version=group.version)
            self.engines[number] = [group for group in engine
                                    if group.done < group.length * (1 - 1e-9)]
        if self._until is not None and self.now >= self._until * (1 - 1e-12):
            self._until, self._publishing = None, True
        if self._publishing and (self.in_flight or not any(self.engines)):
            self._publish()

    def _publish(self) -> None:
        self.batches, self._publishing = self.batches + 1, False
        self.schedule.publish(self.batches)
        for engine in self.engines:
            for group in engine:
                group.cuts.append((self.batches, group.done))
        for engine, group in self.held:
            group.version = self.batches
            self.engines[engine].append(group)
        self.held = []

    def outcome(self) -> dict[str, float]:
        """Figures of the whole run.

        Returns:
            ``longest``: share of training of the longest 5 % of the groups that were started;
            ``in_vain``: share of what was generated that was thrown away; ``step``: time of one, in
            times of its training; ``age``: mean over the trained tokens; ``oldest``: age of the
            oldest token; ``dropped``: share of groups.
        """
        lengths = np.array([length for length, _ in self.started.values()])
        threshold = np.quantile(lengths, 1 - LONG)
        trained = np.array([group.length for group, _ in self.trained])
        waiting = sum(entry[-1].length for entry in self.schedule.state_dict()["ready"])
        return {"longest": float((trained > threshold).mean()),
                "in_vain": max(0.0, float(1 - (trained.sum() + waiting) / self.finished)),
                "step": self.now / self.batches / self.work.training,
                "age": self.age / float(trained.sum()),
                "oldest": max(age for _, age in self.trained),
                "dropped": self.schedule.counts["dropped"] / len(self.started)}


def simulate(make: Callable[..., Any], work: Work, *, staleness: int, in_flight: bool) -> Run:
    """A whole run with a schedule that ``make`` makes."""
    return Run(make(work.groups, staleness=staleness), work, in_flight=in_flight).go()


def schedule_now() -> Callable[..., Any]:
    """The class of this tree; without the packages that a run needs, so that it is there at once.
    """
    return _load(SCHEDULE).RolloutSchedule


def schedule_of(commit: str) -> Callable[..., Any]:
    """The class of a commit.

    Raises:
        CalledProcessError: if this is no clone, or has no such commit.
    """
    text = subprocess.run(["git", "show", f"{commit}:{SCHEDULE.relative_to(REPO)}"], cwd=REPO,
                          capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule_before.py"
        path.write_text(text)
        return _load(path).RolloutSchedule


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)  # dataclasses look
    spec.loader.exec_module(module)
    return module


def measure(make: Callable[..., Any], work: Work, stalenesses: list[int]) -> list[dict[str, Any]]:
    """One row for each staleness and way to update."""
    return [{"update_at": "in_flight" if in_flight else "group_border", "staleness": staleness,
             **simulate(make, work, staleness=staleness, in_flight=in_flight).outcome()}
            for in_flight in (True, False) for staleness in stalenesses]


def table(result: dict[str, Any]) -> str:
    """Markdown; figures in brackets are those of the older commit."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for number, row in enumerate(result["after"]):
        before = result["before"][number] if "before" in result else None

        def cell(key: str, form: str, row: dict = row, before: dict | None = before) -> str:
            old = "" if before is None else f" ({before[key]:{form}})"
            return f"{row[key]:{form}}{old}"

        lines.append((row["update_at"], str(row["staleness"]), cell("longest", ".1%"),
                      cell("in_vain", ".0%"), cell("step", ".2f"), f"{row['age']:.2f}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--before", help="commit whose schedule is simulated, too")
    parser.add_argument("--table", action="store_true", help="only print that of the result")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RESULT.read_text())))
        return
    work = Work(**{name: getattr(args, name) for name in asdict(Work())})
    recording = Recording("async_lengths", args.out, work=asdict(work))
    recording.describe_machine()
    if args.before:
        recording.add(before_commit=args.before,
                      before=measure(schedule_of(args.before), work, args.staleness))
    recording.add(after=measure(schedule_now(), work, args.staleness))
    print(table(recording.result))
    recording.finish()


if __name__ == "__main__":
    main()
