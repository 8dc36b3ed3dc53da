"""The hub: which groups wait, which batches are out on lease, who is registered.

It takes the place of atroposlib's ``run-api``, and promises more:

* The groups of an environment leave whole and in the order they came. A batch has ``batch_size``
  sequences or a few more (see :meth:`~grpo.atropos.hub_queue.GroupQueue.choose`), and never waits
  for a group of a size that may not come.
* A batch is handed out until it is acknowledged, by its lease or because the same address asks for
  the next one. So each group is trained on at least once; ``group_uid`` tells repeats.
* The queue is bounded. An environment sees a long queue in ``/status-env`` and stops by itself;
  if it does not, its requests wait.
* ``min_batch_allocation`` of a silent environment is waited for only so long.
* With a journal, all of it survives the end of the process.

There are neither threads nor network here. Every change is a record that is written to the journal
and then applied to the :class:`~grpo.atropos.hub_state.HubState`.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from grpo.atropos.hub_journal import Journal
from grpo.atropos.hub_queue import QueuedGroup
from grpo.atropos.hub_state import (
    Environment,
    HubState,
    Lease,
    Limits,
    groups_note,
    lease_note,
)
from grpo.atropos.schemas import EnvRegistration, Registration

_COMPACT_BYTES = 64 << 20  # of a journal, at least, before it is rewritten
_MIN_ENV_WEIGHT = 0.01  # run-api's
_MAX_ENVIRONMENTS = 1 << 16
# An answer to a request that came so long before the end of a hub may not have arrived.
_UNCERTAIN_SECONDS = 5.0
logger = logging.getLogger(__name__)


class NotRegisteredError(RuntimeError):
    """No trainer has registered, so the batch size is unknown."""


class UnknownLeaseError(LookupError):
    """The lease was never given, is over, or its batch went to somebody else."""


class UnknownEnvironmentError(LookupError):
    """There is no environment of this id."""


@dataclass(eq=False, kw_only=True)
class Hub:
    """State machine behind the hub's routes. Not safe for use from several threads.

    Args:
        limits: of memory and time.
        journal: what it holds is restored, and every change is added.
        clock: seconds, never going back.

    Examples:
        >>> hub = Hub()
        >>> hub.add([(None, 2, b'{"n":1}'), (None, 2, b'{"n":2}')])
        >>> hub.register(Registration(
        ...     wandb_group="", wandb_project="", batch_size=4, max_token_len=64,
        ...     checkpoint_dir="", save_checkpoint_interval=0, starting_step=0, num_steps=9), "me")
        >>> lease = hub.next_batch("me")
        >>> lease.body()
        b'{"batch":[{"n":1},{"n":2}]}'
        >>> hub.acknowledge(lease.id)
    """

    limits: Limits = field(default_factory=Limits)
    journal: Journal | None = None
    clock: Callable[[], float] = time.monotonic
    state: HubState = field(default_factory=HubState, init=False)
    rejected: Counter[str] = field(default_factory=Counter, init=False)
    last_rejected: dict[str, str] = field(default_factory=dict, init=False)
    duplicates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._retries: dict[str, float] = {}  # digest of a request -> until when it is a retry
        # Digest -> when it came, by the wall clock, and whether its sender named its groups. After
        # a restart these are taken for retries.
        self._received: dict[str, tuple[float, bool]] = {}
        self._compact_at = 0
        if self.journal is not None:
            self._restore(self.journal)

    # Trainers.

    def register(self, registration: Registration, owner: str) -> None:
        """A trainer starts, or starts again: the settings are the latest one's.

        Batches that only the next request of ``owner`` would have acknowledged are handed out
        again, because it has forgotten them.
        """
        self._record({"kind": "register", "registration": registration.model_dump()})
        for lease in self._leases_of(owner):
            self._record({"kind": "release", "id": lease.id})

    def next_batch(self, owner: str, *, lease_seconds: float | None = None) -> Lease | None:
        """Hand out a batch, or None if there is none yet.

        Args:
            owner: the address that asks.
            lease_seconds: the asker acknowledges within this time, or the batch is given to the
                next who asks. None: its next request acknowledges, within the limits'
                ``owner_seconds``.

        Raises:
            NotRegisteredError: if no trainer has registered.
        """
        if self.state.registration is None:
            raise NotRegisteredError
        if not self.state.started:
            self._record({"kind": "start"})
        if lease_seconds is None:
            for lease in self._leases_of(owner):
                self._record({"kind": "acknowledge", "id": lease.id})
        self._expire_leases()
        again = bool(self.state.returned)
        groups = self.state.returned[0].groups if again else self._choose()
        if groups is None:
            return None
        id = uuid.uuid4().hex
        seconds = self.limits.owner_seconds if lease_seconds is None else lease_seconds
        self._record(lease_note(groups, id=id, seconds=seconds, again=again,
                                owner=owner if lease_seconds is None else None))
        return self.state.leases[id]

    def acknowledge(self, lease: str, *, unused: Sequence[int] = ()) -> None:
        """Forget a batch that was used; its groups at the places ``unused`` are handed out again.

        Raises:
            UnknownLeaseError: if there is no such lease.
            ValueError: for a place that no group of the batch has.
        """
        self._end_lease("acknowledge", lease, unused)

    def release(self, lease: str) -> None:
        """Give a batch that was not used to the next who asks; raises as :meth:`renew`."""
        self._end_lease("release", lease)

    def renew(self, lease: str, *, lease_seconds: float) -> None:
        """Let a lease begin anew, as after a restart.

        Raises:
            UnknownLeaseError: if there is no such lease.
        """
        self._expire_leases()
        if lease not in self.state.leases:
            raise UnknownLeaseError(lease)
        self.state.leases[lease] = replace(self.state.leases[lease],
                                           deadline=self.clock() + lease_seconds)

    # Environments.

    def register_env(self, registration: EnvRegistration) -> Environment | None:
        """Take in an environment; None until a trainer has asked for a batch. It gets the id and
        the name of one with the same desired name that is gone."""
        environments = self.state.environments
        if not self.state.started:
            return None
        alike = [env for env in environments.values()
                 if env.registration.desired_name == registration.desired_name]
        gone = next((env for env in alike if not self.connected(env)), None)
        return self._take_in(
            gone.id if gone else max(environments, default=-1) + 1,
            gone.name if gone else f"{registration.desired_name}_{len(alike)}", registration)

    def disconnect(self, id: int) -> None:
        """Note that an environment ends; UnknownEnvironmentError if there is none of this id."""
        if id not in self.state.environments:
            raise UnknownEnvironmentError(id)
        self.state.environments[id].left = True

    def connected(self, env: Environment) -> bool:
        """Whether it has sent something lately and has not said that it ends."""
        return not env.left and self.clock() - env.last_seen <= self.limits.env_seconds

    # Groups.

    def has_room(self) -> bool:
        """Whether groups are let in; always, while less than a batch waits."""
        registration, queue = self.state.registration, self.state.queue
        needed = registration.batch_size if registration else 1
        return queue.bytes < self.limits.queue_bytes or queue.sequences < needed

    def add(self, groups: list[tuple[int | None, int, bytes]], *, digest: str = "",
            named: bool = False) -> None:
        """Queue the groups of one request: all, or none if the journal cannot be written.

        Args:
            groups: sender, number of sequences and JSON object of each.
            digest: of the request, to know a retry of it after a restart.
            named: the sender has given its groups names, so that another request with this digest
                is a retry in any case.
        """
        first = self.state.next_number
        queued = [QueuedGroup(first + index, *group) for index, group in enumerate(groups)]
        now = time.time()
        self._received.pop(digest, None)  # keeps the oldest first
        self._received[digest] = now, named
        while next(iter(self._received.values()))[0] < now - self.limits.retry_seconds:
            del self._received[next(iter(self._received))]
        self._record(groups_note(queued, digest=digest, named=named, time=now),
                     b"".join([body for _, _, body in groups]))
        if named:
            self.expect_retry(digest)

    def is_retry(self, digest: str) -> bool:
        """Whether this request was queued before and its sender may not have been told."""
        now = self.clock()
        while self._retries and (oldest := next(iter(self._retries.items())))[1] <= now:
            del self._retries[oldest[0]]
        return digest in self._retries

    def expect_retry(self, digest: str) -> None:
        """Note that the answer to this request may not have reached its sender."""
        self._retries.pop(digest, None)  # keeps the oldest first
        self._retries[digest] = self.clock() + self.limits.retry_seconds

    def reject(self, reason: str, message: str) -> None:
        """Count a group that was refused."""
        self.rejected[reason] += 1
        # It may quote what has no UTF-8, and it is shown in `/status`.
        self.last_rejected[reason] = message.encode("utf-8", "replace").decode()

    def reset(self) -> None:
        """Forget everything, as at the first start."""
        self._record({"kind": "reset"})
        self.rejected.clear()
        self.last_rejected.clear()
        self._retries.clear()
        self._received.clear()
        self.duplicates = 0

    # What is shown.

    def status_env(self, id: int) -> dict[str, Any]:
        """How an environment should pace itself; keys and sums are run-api's.

        An unknown id was given before a restart or a reset: it is taken in with neutral settings,
        so that the environment can go on.

        Raises:
            UnknownEnvironmentError: for an id that no hub can have given.
        """
        env = self._known(id)
        env.last_seen, env.left = self.clock(), False
        queue, registration = self.state.queue, self.state.registration
        others = [other for other in self.state.environments.values() if self.connected(other)]
        minima = {other.id: other.registration.min_batch_allocation for other in others
                  if other.registration.min_batch_allocation is not None}
        batch_size = registration.batch_size if registration else 0
        own, available, pack = queue.sequences_by_env[id], 0, queue.max_size
        for other, sequences in queue.sequences_by_env.items():
            if other != id:
                packed = math.ceil(sequences / pack) * pack
                available += max(0, packed - int(batch_size * minima.get(other, 0.0)))
        total = sum(_weight(other) for other in others)
        return {"current_step": self.state.step,
                "queue_size": (own + available) // env.group_size,
                "unallocated_fraction": 1.0 - min(sum(minima.values()), 1.0),
                "self_queue_size": own // env.group_size, "max_group_size": pack,
                "env_weight": max(_MIN_ENV_WEIGHT, _weight(env) / total if total else 0.0)}

    def status(self) -> dict[str, Any]:
        """run-api's two figures, and under ``hub`` those that run-api lacks."""
        self._expire_leases()
        state, queue = self.state, self.state.queue
        return {"current_step": state.step, "queue_size": queue.groups, "hub": {
            "queued_sequences": queue.sequences, "queued_bytes": queue.bytes,
            "full": not self.has_room(), "leases": len(state.leases),
            "to_hand_out_again": len(state.returned),
            **{name: state.counts[name] for name in (
                "received", "handed_out", "handed_out_again", "acknowledged")},
            "duplicates": self.duplicates, "rejected": dict(self.rejected),
            "last_rejected": dict(self.last_rejected),
            "environments": [
                {"env_id": env.id, "name": env.name, "connected": self.connected(env),
                 "queued_sequences": queue.sequences_by_env[env.id]}
                for env in state.environments.values()]}}

    def _choose(self) -> list[QueuedGroup] | None:
        minima = self._minima()
        batch_size = self.state.registration.batch_size
        return None if minima is None else self.state.queue.choose(batch_size, minima)

    def _minima(self) -> dict[int, int] | None:
        """Sequences due to each environment; None while one of them is worth waiting for."""
        batch_size = self.state.registration.batch_size
        minima = {env.id: int(batch_size * (env.registration.min_batch_allocation or 0.0))
                  for env in self.state.environments.values() if self.connected(env)}
        asked = sum(minima.values())
        if asked > batch_size:
            minima = {env: minimum * batch_size // asked for env, minimum in minima.items()}
        if not self.has_room():  # its groups might be held because the queue is full
            return minima
        recent = self.clock() - self.limits.minimum_seconds
        for env, minimum in minima.items():
            if (self.state.queue.sequences_by_env[env] < minimum
                    and self.state.environments[env].last_group > recent):
                return None
        return minima

    def _known(self, id: int) -> Environment:
        if id in self.state.environments:
            return self.state.environments[id]
        if not 0 <= id < _MAX_ENVIRONMENTS:
            raise UnknownEnvironmentError(id)
        length = self.state.registration.max_token_len if self.state.registration else 1
        return self._take_in(id, f"environment_{id}", EnvRegistration(
            max_token_length=max(length, 1), desired_name="environment", weight=1.0, group_size=1))

    def _take_in(self, id: int, name: str, registration: EnvRegistration) -> Environment:
        self._record({"kind": "environment", "id": id, "name": name,
                      "registration": registration.model_dump()})
        return self.state.environments[id]

    def _leases_of(self, owner: str) -> list[Lease]:
        return [lease for lease in self.state.leases.values() if lease.owner == owner]

    def _end_lease(self, kind: str, lease: str, unused: Sequence[int] = ()) -> None:
        self._expire_leases()
        known = self.state.leases | {one.id: one for one in self.state.returned}
        if lease not in known:
            raise UnknownLeaseError(lease)
        if max(unused, default=-1) >= (size := len(known[lease].groups)):
            raise ValueError(f"unused={unused}: the batch has {size} groups, counted from 0")
        self._record({"kind": kind, "id": lease, **({"unused": [*unused]} if unused else {})})

    def _expire_leases(self) -> None:
        now = self.clock()
        for lease in [lease for lease in self.state.leases.values() if lease.deadline <= now]:
            self._record({"kind": "release", "id": lease.id})

    def _record(self, note: dict[str, Any], body: bytes = b"") -> None:
        if self.journal is not None:
            self.journal.append(note, body)
        self.state.apply(note, body, self.clock())
        if self.journal is not None and self.journal.size > self._compact_at:
            self._compact(self.journal)

    def _compact(self, journal: Journal) -> None:
        live = self.state.live_bytes
        if journal.size > _COMPACT_BYTES + 2 * live:
            try:
                journal.compact(chain(self.state.snapshot(), [(
                    {"kind": "received", "requests": self._received}, b"")]))
            except OSError as error:
                # Nothing is lost: the records are in the old file.
                logger.warning("the journal stays as it is, %d bytes: %s", journal.size, error)
        self._compact_at = journal.size + _COMPACT_BYTES

    def _restore(self, journal: Journal) -> None:
        received = self._received
        for note, body in journal.replay():
            if note["kind"] == "received":
                received |= {digest: tuple(one) for digest, one in note["requests"].items()}
                continue
            self.state.apply(note, body, self.clock())
            if digest := note.get("digest"):
                received.pop(digest, None)
                received[digest] = note["time"], note.get("named", False)
        last = max((at for at, _ in received.values()), default=0.0)
        for digest, (at, named) in received.items():
            if named or at >= last - _UNCERTAIN_SECONDS:
                self.expect_retry(digest)


def _weight(env: Environment) -> float:
    return env.registration.max_token_length * max(0.0, env.registration.weight)
