"""Which group is generated when, by whom, and whether it may still be trained on.

A pure state machine: no clock, no thread, no Ray. :class:`~grpo.collectors.ray.RayCollector` drives
it. Groups are numbered over the whole run; their number fixes prompt and random numbers, so a group
that has to be generated again is the same task, whoever gets it.

The bound on staleness is that of AReaL (arXiv:2505.24298, sec. 5.1): at version ``v`` at most
``(v + 1 + staleness) * batch_groups`` groups have been started. Groups finish out of order, so the
bound on what is *started* is not enough: short groups would overtake long ones until those are too
old, and a run would train on short completions only. So the oldest groups are taken first, and a
batch waits for a running group for which there would be no place left while it is fresh enough.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

COUNTS = ("finished", "awaited", "too_old", "expired", "failed", "lost", "dropped", "late",
          "filtered")


@dataclass(frozen=True, order=True)
class Ticket:
    """A group to generate."""

    index: int  # number of the group in the run
    attempt: int = 0  # how often it was given up on before: it took too long, or failed


@dataclass(frozen=True)
class Lease:
    """A ticket in the hands of a worker."""

    id: int  # each lease has its own
    ticket: Ticket
    worker: int
    since: float  # when it was handed out, in seconds
    version: int  # number of weight updates before; no token of the group can be older


@dataclass(frozen=True)
class Finished:
    """A group that waits to be trained on.

    It is meant to be if its rank is 0. Others fill a batch only where ``max_rounds`` did not
    suffice, the least rank first.
    """

    ticket: Ticket
    version: int  # number of weight updates before its oldest token
    group: Any = field(repr=False)  # the rows, of any type
    rank: int = 0


class RolloutSchedule:
    """Hand out groups, take them back finished, put batches together.

    Args:
        batch_groups: groups of a batch.
        staleness: weight updates that may lie between the oldest token of a group and its
            training; 0 generates each batch with the weights that it trains.
        group_deadline: seconds a worker may take for a group; None: any time.
        oversample: share of groups started beyond those a batch needs, so that it need not wait
            for its slowest ones. What is left over serves the next batch if it is fresh enough. If
            not, its prompt is sampled anew, which favours short completions: 0 trains on all.
        max_rounds: sample dynamically (DAPO, arXiv:2503.14476, sec. 3.2): only groups of rank 0
            make a batch, and others are started in place of the rest, until so many times the
            groups of a batch were generated for it. None: every group is used.
        max_attempts: a group that expired or failed so often is dropped.

    Attributes:
        version: weight updates so far; :meth:`publish` sets it.
        awaited: running groups of which the last :meth:`take` would have made too old ones, so that
            it took nothing, although a batch was there.
        counts: groups ``finished``; ``awaited``, as above, over all batches; ``too_old``, which
            happens with ``oversample`` and where a resumed run is given less ``staleness`` or
            smaller batches; ``expired`` at their deadline; ``failed`` in a worker; ``lost`` with a
            worker, or because the run was stopped and went on; ``dropped`` for good; answers that
            came ``late``, after their lease had ended; and, with ``max_rounds``, those ``filtered``
            out.
        generated: groups that the last batch took, with those that were filtered out for it.

    Raises:
        ValueError: for an option out of range.

    Examples:
        >>> schedule = RolloutSchedule(batch_groups=2, staleness=0)
        >>> first, second = schedule.lease(worker=0, now=0.0), schedule.lease(worker=1, now=0.0)
        >>> schedule.lease(worker=0, now=0.0) is None    # would belong to the next weights
        True
        >>> schedule.finish(second.id, "b", version=0), schedule.finish(first.id, "a", version=0)
        (True, True)
        >>> [done.group for done in schedule.take()]
        ['a', 'b']
        >>> schedule.publish(1)
        >>> schedule.lease(worker=0, now=0.0).ticket
        Ticket(index=2, attempt=0)
    """

    def __init__(
        self, batch_groups: int, *, staleness: int, group_deadline: float | None = None,
        oversample: float = 0.0, max_rounds: int | None = None, max_attempts: int = 3,
    ) -> None:
        for name, value, least in (("batch_groups", batch_groups, 1), ("staleness", staleness, 0),
                                   ("oversample", oversample, 0),
                                   ("max_attempts", max_attempts, 1)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if group_deadline is not None and group_deadline <= 0:
            raise ValueError(f"group_deadline={group_deadline} must be positive seconds")
        self.batch_groups, self.staleness = batch_groups, staleness
        self.group_deadline, self.max_attempts = group_deadline, max_attempts
        self.extra = round(oversample * batch_groups)
        self.max_rounds, self.generated = max_rounds, 0
        self.version = self.awaited = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self._taken = 0  # groups handed to the trainer
        self._next = 0  # first group that has no ticket yet
        self._again: list[Ticket] = []  # given back; before new ones
        self._leases: dict[int, Lease] = {}
        self._waiting: list[Finished] = []  # to be taken; with max_rounds of any rank
        self._training: list[Finished] = []  # taken since the last update
        self._ids = itertools.count()  # of leases

    # -- handing out ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Groups in the hands of workers."""
        return len(self._leases)

    @property
    def ready(self) -> int:
        """Groups that wait to be trained on."""
        if self.max_rounds is None:  # all have rank 0; asked for at every lease
            return len(self._waiting)
        return sum(not done.rank for done in self._waiting)

    def held_by(self, worker: int) -> int:
        """Groups in the hands of one worker."""
        return sum(lease.worker == worker for lease in self._leases.values())

    def holders(self) -> set[int]:
        """Workers that have groups in their hands."""
        return {lease.worker for lease in self._leases.values()}

    def slowest(self) -> Lease | None:
        """What has been running longest."""
        return min(self._leases.values(), key=lambda lease: lease.since, default=None)

    def admits(self) -> bool:
        """Whether one more group may be started and still be fresh when its turn comes."""
        wanted = (self.version + 1 + self.staleness) * self.batch_groups - self._taken
        if wanted <= 0 or self.running + self.ready >= wanted + self.extra:
            return False
        return self.max_rounds is None or (
            self.running + len(self._waiting) < self.max_rounds * wanted + self.extra)

    def lease(self, *, worker: int, now: float) -> Lease | None:
        """Give a worker the next group; None while no group may be started."""
        if not self.admits():
            return None
        if self._again:
            self._again.sort()
            ticket = self._again.pop(0)
        else:
            ticket, self._next = Ticket(self._next), self._next + 1
        lease = Lease(next(self._ids), ticket, worker, now, self.version)
        self._leases[lease.id] = lease
        return lease

    def deal(
        self, workers: Iterable[int], *, each: int, now: float,
        late: Mapping[int, int] | None = None,
    ) -> dict[int, list[Lease]]:
        """Give the next groups to the workers that have the fewest in hand.

        Args:
            workers: that may be given some.
            each: groups that a worker has in hand at a time.
            now: in seconds.
            late: how often a worker was late; those that were it least are given groups first.
        """
        if not self.admits():
            return {}
        held = Counter(lease.worker for lease in self._leases.values())
        order = [((late or {}).get(worker, 0), held[worker], number, worker)
                 for number, worker in enumerate(workers) if held[worker] < each]
        heapq.heapify(order)
        given: dict[int, list[Lease]] = {}
        while order and (lease := self.lease(worker=order[0][-1], now=now)) is not None:
            times, count, number, worker = heapq.heappop(order)
            given.setdefault(worker, []).append(lease)
            if count + 1 < each:
                heapq.heappush(order, (times, count + 1, number, worker))
        return given

    # -- taking back ---------------------------------------------------------------------------

    def finish(self, lease_id: int, group: Any, *, version: int, rank: int = 0) -> bool:
        """A worker has finished a group; False if its lease had ended, and the group is ignored.

        Raises:
            ValueError: for a version that does not exist yet, or that was gone when the group was
                handed out.
        """
        if version > self.version:
            raise ValueError(f"version={version} of a group is newer than the weights, which are "
                             f"at {self.version}")
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            self.counts["late"] += 1
            return False
        if version < lease.version:
            raise ValueError(f"version={version} of a group is older than the weights were when it "
                             f"was handed out, {lease.version}: worker {lease.worker} has missed "
                             "an update")
        self.counts["finished"] += 1
        self._waiting.append(
            Finished(lease.ticket, version, group, 0 if self.max_rounds is None else rank))
        return True

    def fail(self, lease_id: int) -> None:
        """A worker could not generate a group: it is tried again, but not for ever."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.counts["failed"] += 1
            self._retry(lease.ticket)

    def lose(self, worker: int) -> list[Lease]:
        """A worker is gone: what it held is somebody else's, for no fault of the groups."""
        gone = [lease for lease in self._leases.values() if lease.worker == worker]
        for lease in gone:
            del self._leases[lease.id]
            self._again.append(lease.ticket)
        self.counts["lost"] += len(gone)
        return gone

    def expire(self, now: float, *, but: Container[int] = ()) -> list[Lease]:
        """End the leases past their deadline at ``now``, in seconds; the workers need not go on.

        Those in ``but`` are spared: their groups are generated already.
        """
        if self.group_deadline is None:
            return []
        late = [lease for lease in self._leases.values()
                if now - lease.since > self.group_deadline and lease.id not in but]
        for lease in late:
            del self._leases[lease.id]
            self._retry(lease.ticket)
        self.counts["expired"] += len(late)
        return late

    def take(self) -> list[Finished] | None:
        """A batch in the order of its numbers, or None while too few fresh groups are finished, or
        a running one could no longer be trained after it.

        Those that would soon be too old go first.
        """
        self._refuse_old()
        if self.ready < self.batch_groups and (
                self.max_rounds is None
                or len(self._waiting) < self.max_rounds * self.batch_groups):
            return None
        found = sorted(self._waiting,
                       key=lambda done: (done.rank, done.version, done.ticket.index))
        batch, left = found[: self.batch_groups], found[self.batch_groups :]
        first, self.awaited = not self.awaited, self._overtaken(left)
        if self.awaited:
            self.counts["awaited"] += self.awaited * first
            return None
        self._waiting = [done for done in left if not done.rank]
        filtered = len(left) - len(self._waiting)
        self.counts["filtered"] += filtered
        self.generated = len(batch) + filtered
        self._taken += self.batch_groups
        self._training += batch
        return sorted(batch, key=lambda done: done.ticket.index)

    def _overtaken(self, left: list[Finished]) -> int:
        """Running groups that would find no place while they are fresh, if ``left`` was what
        remained of the finished ones; beyond ``extra``, which need not find one.

        A group of version ``w`` is fresh in the batches up to that of version ``w + staleness``.
        All groups that old have to find places in these, not only those that are due next.
        """
        running = [lease.version for lease in self._leases.values()]
        waiting = [*running, *(done.version for done in left if not done.rank)]
        beyond = [sum(other <= version for other in waiting) - self.extra
                  - self.batch_groups * (version + self.staleness - self.version)
                  for version in set(running)]
        return max([0, *beyond])

    def publish(self, version: int) -> None:
        """There are new weights; what has been taken is in them.

        Raises:
            ValueError: if versions go back.
        """
        if version < self.version:
            raise ValueError(f"version={version} is older than {self.version}")
        self.version, self._training = version, []
        self._refuse_old()

    def _refuse_old(self) -> None:
        oldest = self.version - self.staleness
        old = [done for done in self._waiting if done.version < oldest]
        self._waiting = [done for done in self._waiting if done.version >= oldest]
        again = [done.ticket for done in old if not done.rank]
        self._again += again
        self.counts["too_old"] += len(again)
        self.counts["filtered"] += len(old) - len(again)

    def _retry(self, ticket: Ticket) -> None:
        if ticket.attempt + 1 < self.max_attempts:
            self._again.append(Ticket(ticket.index, ticket.attempt + 1))
        else:
            self.counts["dropped"] += 1

    # -- what others see -----------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Fill of the buffer and the counts, under the names of ``metrics.jsonl``."""
        capacity = (1 + self.staleness) * self.batch_groups + self.extra
        return {"async/buffer_fill": self.ready / capacity, "async/groups_ready": self.ready,
                "async/groups_running": self.running,
                **{f"async/groups_{name}": float(value) for name, value in self.counts.items()}}

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: finished groups as they are, unfinished ones as tickets.

        What has been taken but is in no weights yet is finished.
        """
        unfinished = sorted([*self._again, *(lease.ticket for lease in self._leases.values())])
        return {"version": self.version, "taken": self._taken, "next": self._next,
                "unfinished": [[ticket.index, ticket.attempt] for ticket in unfinished],
                "ready": [[done.ticket.index, done.ticket.attempt, done.version, done.rank,
                           done.group] for done in [*self._training, *self._waiting]],
                # What workers have in hand is lost to whoever goes on from here.
                "counts": self.counts | {"lost": self.counts["lost"] + self.running}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; what was in flight is handed out again, first of all.

        The batch size may have changed in between; what has been taken counts as whole batches.
        """
        self.version, self._next = state["version"], state["next"]
        self._taken = self.version * self.batch_groups
        self._again = [Ticket(*ticket) for ticket in state["unfinished"]]
        ranked = self.max_rounds is not None
        self._waiting = [Finished(Ticket(index, attempt), version, group, rank * ranked)
                         for index, attempt, version, rank, group in state["ready"]]
        self.counts = dict.fromkeys(COUNTS, 0) | state["counts"]
        self._leases, self._training = {}, []
