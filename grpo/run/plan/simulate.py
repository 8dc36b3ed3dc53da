"""A run in simulated time: the scheduler is that of a real run, engines and trainer are a clock.

    outcome = Simulation(work, phases, engines=2, staleness=1).go()

What is simulated is who waits for whom. How long a phase takes is asked of :class:`Phases`, how
long completions are is drawn from :class:`Work`.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from grpo.collectors.schedule import Lease, RolloutSchedule


@dataclass(frozen=True, kw_only=True)
class Work:
    """The batches of a run, and how long its completions are.

    Their lengths are log-normal, cut at ``max_tokens``.
    """

    groups: int  # of a batch
    rows: int  # of a group
    prompt_tokens: int
    max_tokens: int
    mean_tokens: float  # of a completion, before the cut
    sigma: float  # of the logarithm of the lengths; 0: all alike
    seed: int = 0

    def lengths(self, draw: np.random.Generator) -> np.ndarray:
        """Tokens of the rows of one group, ``[rows]``."""
        drawn = self.mean_tokens * np.exp(
            self.sigma * draw.standard_normal(self.rows) - self.sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds of what happens in a run."""

    decode: Callable[[int], float]  # a step of an engine that has so many rows in hand
    prefill: float  # an engine's, for a group's prompt
    train: Callable[[float], float]  # of a batch whose completions have so many tokens
    publish: float  # in which engines stand still
    canary: float = 0.0
    driver: float = 0.0  # what else the trainer's process does in a step
    score: Callable[[float], float] | None = None  # of a group on a reference of its own


@dataclass
class Group:
    """One that is generated."""

    index: int
    lease: Lease
    version: int  # of its oldest token
    tokens: float
    left: int  # rows that are not finished


@dataclass(eq=False)
class Engine:
    """Rows in hand, and a clock that counts decode steps: each gives each row a token."""

    decode: Callable[[int], float]
    limit: int  # rows at a time
    rows: list[tuple[float, int, Group]] = field(default_factory=list)  # by their last step
    queue: deque[tuple[float, Group]] = field(default_factory=deque)
    steps: float = 0.0
    at: float = 0.0  # time of the last look
    debt: float = 0.0  # seconds of prefill to do first
    busy: float = 0.0
    paused: bool = False
    look: int = 0  # number of the look that counts
    _serial: itertools.count = field(default_factory=itertools.count)

    def advance(self, now: float) -> list[Group]:
        """Pass the time; returns the groups that are finished."""
        seconds, self.at = now - self.at, now
        if self.paused or not self.rows:
            return []
        self.busy += seconds
        paid = min(self.debt, seconds)
        self.debt -= paid
        self.steps += (seconds - paid) / self.decode(len(self.rows))
        done = []
        while self.rows and self.rows[0][0] <= self.steps + 1e-6:
            group = heapq.heappop(self.rows)[2]
            group.left -= 1
            if not group.left:
                done.append(group)
        self._fill()
        return done

    def add(self, group: Group, lengths: np.ndarray, prefill: float) -> None:
        self.queue.extend((float(length), group) for length in lengths)
        self.debt += prefill
        self._fill()

    def _fill(self) -> None:
        while self.queue and len(self.rows) < self.limit:
            length, group = self.queue.popleft()
            heapq.heappush(self.rows, (self.steps + length, next(self._serial), group))

    def next_look(self) -> float | None:
        """When the next row is finished, if nothing else happens; None: nothing is generated."""
        if self.paused or not self.rows:
            return None
        steps = max(0.0, self.rows[0][0] - self.steps)
        return self.at + self.debt + steps * self.decode(len(self.rows))


@dataclass(frozen=True)
class Outcome:
    """What came of the steady steps of a simulated run, in seconds a step."""

    step: float
    wait: float  # of the trainer for rollouts
    train: float
    generate: float  # that an engine is at work
    engine_idle: float  # share of the time
    reference_idle: float  # the same of references of their own; 0 without
    tokens: float  # of completions, a step
    longest: float  # seconds from handing out to finishing, of the slowest group of a step

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step


class Simulation:
    """A trainer, its engines and references, driven by events.

    Args:
        work: what is generated.
        phases: how long what takes.
        engines: that generate.
        staleness: of the schedule; 0: engines wait while the trainer trains.
        in_flight: weights change between two tokens; or when what runs is finished.
        references: devices that score groups as they come.
        limit: rows that an engine generates at a time.
        oversample: of the schedule.
        rollout: groups that are generated together, and then the next; None: each group that is
            finished makes room for another.
        steps, skipped: batches that are trained, and those that do not count.

    Attributes:
        schedule: that of a real run.
        trained: ``(group, version)`` in the order of their training.
        started: numbers of all groups that were handed out.
    """

    def __init__(
        self, work: Work, phases: Phases, *, engines: int, staleness: int, in_flight: bool = True,
        references: int = 0, limit: int = 1024, oversample: float = 0.0, rollout: int | None = None,
        steps: int = 12, skipped: int = 4,
    ) -> None:
        self.work, self.phases, self.in_flight = work, phases, in_flight
        self.schedule = RolloutSchedule(work.groups, staleness=staleness, oversample=oversample)
        self.engines = [Engine(phases.decode, limit) for _ in range(engines)]
        self.each = rollout or max(1, min(limit, work.groups * work.rows) // work.rows)
        self.rollout = rollout
        self.references, self.steps, self.skipped = references, steps, skipped
        self.trained: list[tuple[Group, int]] = []
        self.started: set[int] = set()
        self.now = 0.0
        self._draw = np.random.default_rng(work.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._held: list[tuple[int, Group, np.ndarray]] = []  # until weights have arrived
        self._to_score: deque[Group] = deque()
        self._scoring, self._scored_seconds = 0, 0.0
        self._training = self._publishing = False
        self._asked = 0.0  # when the trainer began to wait
        self._ends: list[tuple[float, float, float, float, float, float]] = []  # of each step
        self._waited = self._trains = self._tokens = self._longest = 0.0

    def go(self) -> Outcome:
        """Train all batches.

        Raises:
            RuntimeError: if nothing can ever happen again.
        """
        self._hand_out()
        while len(self._ends) < self.steps:
            if not self._events:
                raise RuntimeError(f"stuck after {len(self._ends)} batches: nothing is generated "
                                   "and nothing trained")
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._outcome()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._serial), act))

    # -- engines -------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        if self.rollout is not None and self.schedule.running:
            return
        given = self.schedule.deal(range(len(self.engines)), each=self.each, now=self.now)
        for number, leases in given.items():
            for lease in leases:
                lengths = self.work.lengths(self._draw)
                group = Group(lease.ticket.index, lease, lease.version, float(lengths.sum()),
                              self.work.rows)
                self.started.add(group.index)
                if self._publishing:
                    self._held.append((number, group, lengths))
                else:
                    self._submit(number, group, lengths)
            self._look_again(self.engines[number])

    def _submit(self, number: int, group: Group, lengths: np.ndarray) -> None:
        engine = self.engines[number]
        self._finished(engine.advance(self.now))
        engine.add(group, lengths, self.phases.prefill)

    def _look_again(self, engine: Engine) -> None:
        engine.look += 1
        if (when := engine.next_look()) is not None:
            look = engine.look
            self._after(when - self.now, lambda: self._look(engine, look))

    def _look(self, engine: Engine, look: int) -> None:
        if look != engine.look:  # something has changed since
            return
        done = engine.advance(self.now)
        self._look_again(engine)
        self._finished(done)

    def _finished(self, groups: list[Group]) -> None:
        for group in groups:
            self._longest = max(self._longest, self.now - group.lease.since)
            if self.phases.score is None:
                self.schedule.finish(group.lease.id, group, version=group.version)
            else:
                self._to_score.append(group)
                self._score()
        if groups:
            self._after(0.0, self._go_on)

    # -- references ----------------------------------------------------------------------------

    def _score(self) -> None:
        while self._to_score and self._scoring < self.references:
            group = self._to_score.popleft()
            self._scoring += 1
            seconds = self.phases.score(group.tokens)
            self._scored_seconds += seconds
            self._after(seconds, lambda group=group: self._scored(group))

    def _scored(self, group: Group) -> None:
        self._scoring -= 1
        self.schedule.finish(group.lease.id, group, version=group.version)
        self._score()
        self._go_on()

    # -- the trainer ---------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._publishing and not self._training and not any(e.rows for e in self.engines):
            self._send()
        if not self._training and not self._publishing:
            self._take()
        self._hand_out()

    def _take(self) -> None:
        batch = self.schedule.take()
        if batch is None:
            return
        version, self._training = self.schedule.version, True
        self.trained += [(done.group, version) for done in batch]
        tokens = sum(done.group.tokens for done in batch)
        seconds = self.phases.train(tokens)
        self._waited += self.now - self._asked
        self._trains += seconds
        self._tokens += tokens
        self._after(seconds + self.phases.driver, self._publish)

    def _publish(self) -> None:
        self._training, self._publishing = False, True
        if self.in_flight or not any(engine.rows for engine in self.engines):
            self._send()

    def _send(self) -> None:
        """Weights travel; engines stand still."""
        self._training = True  # the trainer is not free before they have arrived
        for engine in self.engines:
            self._finished(engine.advance(self.now))
            engine.paused = True
            engine.look += 1
        self._after(self.phases.publish, self._sent)

    def _sent(self) -> None:
        version = self.schedule.version + 1
        self.schedule.publish(version)
        for engine in self.engines:
            engine.advance(self.now)
            engine.paused = False
        self._publishing = False
        held, self._held = self._held, []
        for number, group, lengths in held:
            group.version = version
            self._submit(number, group, lengths)
        for engine in self.engines:
            self._look_again(engine)
        self._after(self.phases.canary, self._stepped)
        self._hand_out()

    def _stepped(self) -> None:
        self._training, self._asked = False, self.now
        busy = statistics.fmean(engine.busy for engine in self.engines)
        self._ends.append((self.now, self._waited, self._trains, busy, self._scored_seconds,
                           self._tokens))
        self._go_on()

    def _outcome(self) -> Outcome:
        before, after = self._ends[self.skipped - 1], self._ends[-1]
        steps = len(self._ends) - self.skipped
        seconds, wait, train, busy, scored, tokens = (
            (b - a) / steps for a, b in zip(before, after, strict=True))
        return Outcome(
            step=seconds, wait=wait, train=train, generate=busy, engine_idle=1 - busy / seconds,
            reference_idle=1 - scored / seconds / self.references if self.references else 0.0,
            tokens=tokens, longest=self._longest)
