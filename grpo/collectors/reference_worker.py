"""The reference model on devices of its own: a worker on each, and how they share groups, or the
rows of each."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from grpo import data
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, WorkerPool


@dataclass(frozen=True)
class Scored:
    """A scored group."""

    log_probs: Tensor | None  # float32 [B, T], on the CPU; None: another one has said it
    busy: float  # seconds that the worker has scored since it started
    seconds: float  # since then
    started: float  # Unix time of that start, which tells a worker from the one that it replaces


class ReferenceWorker:
    """Score groups with the frozen reference, while others generate and train.

    Args:
        build: loads the reference, or its part of one, in the process of the worker.
        path: folder or hub id of the reference.
        answers: of those that have a part each, one alone returns log-probs.
    """

    def __init__(
        self, build: Callable[[], Callable[[TensorDictBase], TensorDictBase]], path: str, *,
        answers: bool = True,
    ) -> None:
        self.scorer, self.path, self.answers = build(), path, answers
        self._busy, self._started, self._started_at = 0.0, time.monotonic(), time.time()

    def describe(self) -> dict[str, Any]:
        """Who and where this is; an answer proves that it has started."""
        return {"pid": os.getpid(), "host": os.uname().nodename, "model": self.path}

    def score(self, group: TensorDictBase) -> Scored:
        """Its log-probs of a group's tokens."""
        start = time.monotonic()
        log_probs_BT = self.scorer(group.clone())[data.REF_LOG_PROBS].cpu()
        now = time.monotonic()
        self._busy += now - start
        return Scored(log_probs_BT if self.answers else None, self._busy, now - self._started,
                      self._started_at)


class SharedScoring:
    """Groups that reference workers score, each of which has a whole copy of the reference.

    A group goes to the living worker with the fewest in hand. Those of a worker that died go to
    the others, or wait until one is there.

    Args:
        pool: of started workers.

    Attributes:
        reports: the last answer of each worker that has scored a group, by number.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.reports: dict[int, Scored] = {}
        self._waiting: dict[int, TensorDictBase] = {}  # by lease
        self._sent: dict[Call, tuple[int, TensorDictBase]] = {}  # with the lease
        self._before: dict[int, Scored] = {}  # what :meth:`idle` has looked at

    @property
    def calls(self) -> list[Call]:
        """That have not been answered yet, or whose answers have not been taken."""
        return list(self._sent)

    @property
    def leases(self) -> set[int]:
        """Of all groups that are here."""
        return {*self._waiting, *(lease for lease, _ in self._sent.values())}

    def who_scores(self, lease: int) -> str | None:
        """The workers that have yet to score a group; None if it is not here."""
        names = [self.pool.name(call.number) for call, (held, _) in self._sent.items()
                 if held == lease]
        return " and ".join(names) or (
            f"a {self.pool.kind} that is yet to come" if lease in self._waiting else None)

    @property
    def in_hand(self) -> Counter[int]:
        """How many groups each worker has been sent, by number."""
        return Counter(call.number for call in self._sent)

    def idle(self) -> list[float]:
        """Idle shares of the workers since the last call, as far as they are known."""
        reports, in_hand, shares = dict(self.reports), self.in_hand, []
        for number in range(self.pool.count):
            before, report = self._before.get(number), reports.get(number)
            if report is not before:
                busy, seconds = since(before, report)
                shares.append(max(0.0, 1.0 - busy / seconds))
            elif not in_hand[number]:  # else its next report will tell
                shares.append(1.0)
        self._before = reports
        return shares

    def add(self, lease: int, group: TensorDictBase) -> None:
        """Have a group scored; :meth:`send` gives it to a worker."""
        self._waiting[lease] = group

    def heal(self) -> None:
        """Replace workers that died; their weights never change, so a new one may begin at once."""
        if len(self.pool.present) < self.pool.count:
            self.pool.revive()

    def send(self) -> None:
        """Give waiting groups to the workers that live."""
        in_hand, there = self.in_hand, self.pool.present
        while there and self._waiting:
            number = min(there, key=in_hand.__getitem__)
            lease = next(iter(self._waiting))
            group = self._waiting.pop(lease)
            self._sent[self.pool.send(number, "score", group)] = lease, group
            in_hand[number] += 1

    def take(self) -> list[tuple[int, TensorDictBase]]:
        """Leases and groups that have been scored since the last call."""
        scored = []
        for report, lease, group in self._answers():
            group[data.REF_LOG_PROBS] = report.log_probs
            scored.append((lease, group))
        for call in self.calls:
            if self.pool.lost(call):
                lease, self._waiting[lease] = self._sent.pop(call)
        return scored

    def _answers(self) -> Iterator[tuple[Scored, int, TensorDictBase]]:
        """What workers have answered, each with the lease and the group that it is about; one that
        failed is of no use any more."""
        for call in self.pool.wait(self.calls, timeout=0) if self._sent else ():
            try:
                report = self.pool.result(call, timeout=60.0)
            except EngineError as error:
                self.pool.bury(call, str(error))
                continue
            self.reports[call.number] = report
            yield report, *self._sent.pop(call)


class ShardedScoring(SharedScoring):
    """Groups that workers score together, each of which has a part of one reference.

    All get each group, in one order, and each forwards a share of its rows. A worker that dies
    leaves the others nothing to go on with: the pool replaces all, and what they had is scored
    again.
    """

    def send(self) -> None:
        """Give waiting groups to all workers, as soon as all are there."""
        if len(self.pool.present) < self.pool.count:
            return
        while self._waiting:
            lease = next(iter(self._waiting))
            group = self._waiting.pop(lease)
            kept = self.pool.put(group)
            for number in range(self.pool.count):
                self._sent[self.pool.send(number, "score", kept)] = lease, group

    def take(self) -> list[tuple[int, TensorDictBase]]:
        """Leases and groups that all workers have scored since the last call."""
        scored = []
        for report, lease, group in self._answers():
            if report.log_probs is not None:
                group[data.REF_LOG_PROBS] = report.log_probs
            if lease not in self.leases:
                scored.append((lease, group))
        if any(map(self.pool.lost, self.calls)):
            again = dict(self._sent.values())
            self._sent.clear()
            self._waiting = again | self._waiting
        return scored


def scoring_of(pool: WorkerPool) -> SharedScoring:
    """How the workers of a pool share the scoring."""
    return ShardedScoring(pool) if pool.together else SharedScoring(pool)


def since(before: Any, report: Any, *counts: str) -> list[float]:
    """Seconds at work, seconds in all and other counts of a worker, since an earlier report."""
    names = ("busy", "seconds", *counts)
    if before is None or report.started != before.started:  # replaced in between
        return [getattr(report, name) for name in names]
    return [getattr(report, name) - getattr(before, name) for name in names]
