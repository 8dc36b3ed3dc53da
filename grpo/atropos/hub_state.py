"""What the hub remembers, as a function of the records of what happened.

The same records are applied when something happens and when the journal is read after a restart.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from grpo.atropos.hub_journal import Record
from grpo.atropos.hub_queue import GroupQueue, QueuedGroup
from grpo.atropos.schemas import EnvRegistration, Registration


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the hub keeps in memory at most, and how long it waits.

    Attributes:
        queue_bytes: of waiting groups; beyond, senders wait. At least one batch is always let in.
        env_seconds: an environment that was silent for so long counts as gone.
        minimum_seconds: an environment's ``min_batch_allocation`` is waited for this long after
            its last group; then batches are filled without it.
        retry_seconds: for this long after an answer that may be lost, the same request is taken
            for a retry.
        owner_seconds: a batch that was asked for without a lease is given to the next who asks
            if its asker does not come again within this time.

    Raises:
        ValueError: if one of them is not above 0.
    """

    queue_bytes: int = 1 << 30
    env_seconds: float = 120.0
    minimum_seconds: float = 60.0
    retry_seconds: float = 600.0
    owner_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r} must be above 0")


@dataclass
class Environment:
    """A registered environment; times are by the hub's clock."""

    id: int
    name: str
    registration: EnvRegistration
    last_seen: float  # when it sent something
    last_group: float  # when it sent a group, or else registered
    group_size: int  # sequences of its largest group so far
    left: bool = False  # it has said that it ends


@dataclass(frozen=True)
class Lease:
    """A batch that was handed out."""

    id: str
    groups: list[QueuedGroup]  # in the order they came
    owner: str | None  # the address that asked, if its next request acknowledges the batch
    seconds: float | None  # after which the batch is given to the next who asks
    deadline: float  # the end of that time, by the hub's clock

    def body(self) -> bytes:
        """The answer's JSON: the groups as they came, not decoded and encoded again."""
        name = b',"lease":"' + self.id.encode() + b'"' if self.owner is None else b""
        return b'{"batch":[' + b",".join(group.body for group in self.groups) + b"]" + name + b"}"


@dataclass
class HubState:
    """All that survives a restart.

    Attributes:
        next_number: of the next group; it goes on after a reset.
        registration: the trainer's; None before it registers.
        started: a trainer has asked for a batch.
        step: batches handed out, on top of the trainer's first step.
        environments: by id.
        queue: groups that wait.
        leases: batches that are out, by the lease's id.
        returned: batches to hand out again before any other.
        latest: the last group that came.
        counts: of what happened.
    """

    next_number: int = 0
    registration: Registration | None = None
    started: bool = False
    step: int = 0
    environments: dict[int, Environment] = field(default_factory=dict)
    queue: GroupQueue = field(default_factory=GroupQueue)
    leases: dict[str, Lease] = field(default_factory=dict)
    returned: deque[Lease] = field(default_factory=deque)
    latest: bytes | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def apply(self, note: dict[str, Any], body: bytes, now: float) -> None:
        """Take in a record, by the method that its ``kind`` names; ``now`` is the hub's clock."""
        getattr(self, "_on_" + note["kind"])(note, body, now)

    def snapshot(self) -> Iterator[Record]:
        """Records that make this state."""
        for lease in (*self.returned, *self.leases.values()):
            yield self._groups_record(lease.groups)
            yield lease_note(lease.groups, id=lease.id, owner=lease.owner,
                             seconds=lease.seconds), b""
        for lease in self.returned:
            yield {"kind": "release", "id": lease.id}, b""
        for group in self.queue:
            yield self._groups_record([group])
        for env in self.environments.values():
            yield {"kind": "environment", "id": env.id, "name": env.name,
                   "registration": env.registration.model_dump()}, b""
        if self.registration is not None:
            yield {"kind": "register", "registration": self.registration.model_dump()}, b""
        yield {"kind": "summary", "started": self.started, "step": self.step,
               "next_number": self.next_number, "counts": dict(self.counts)}, self.latest or b""

    @property
    def live_bytes(self) -> int:
        """Bytes of all groups that are not yet acknowledged."""
        out = (*self.leases.values(), *self.returned)
        return self.queue.bytes + sum(len(group.body) for lease in out for group in lease.groups)

    @staticmethod
    def _groups_record(groups: list[QueuedGroup]) -> Record:
        return groups_note(groups), b"".join(group.body for group in groups)

    def _on_groups(self, note: dict[str, Any], body: bytes, now: float) -> None:
        start = 0
        for number, env_id, size, length in note["groups"]:
            # A slice of the whole body is no copy.
            group = QueuedGroup(number, env_id, size, body[start:start + length])
            start += length
            self.queue.push(group)
            self.latest = group.body
            self.next_number = max(self.next_number, number + 1)
            self.counts["received"] += 1
            if env := self.environments.get(env_id):
                env.last_seen = env.last_group = now
                env.group_size = max(env.group_size, size)

    def _on_lease(self, note: dict[str, Any], body: bytes, now: float) -> None:
        if note["again"]:
            groups = self.returned.popleft().groups
            self.counts["handed_out_again"] += 1
        else:
            groups = [self.queue.pop(env) for env in note["envs"]]
            self.step += 1
            self.counts["handed_out"] += 1
        seconds = note["seconds"]
        self.leases[note["id"]] = Lease(
            note["id"], groups, note["owner"], seconds,
            math.inf if seconds is None else now + seconds)

    def _on_acknowledge(self, note: dict[str, Any], body: bytes, now: float) -> None:
        lease = self.leases.pop(note["id"], None)
        if lease is None:
            lease = next(one for one in self.returned if one.id == note["id"])
            self.returned.remove(lease)
        self.counts["acknowledged"] += 1
        unused = set(note.get("unused", ()))
        if rest := [group for place, group in enumerate(lease.groups) if place in unused]:
            # By another name, so that a repeated acknowledgement does not end the rest, too.
            self.returned.append(replace(lease, id=f"rest of {lease.id}", groups=rest))

    def _on_release(self, note: dict[str, Any], body: bytes, now: float) -> None:
        if lease := self.leases.pop(note["id"], None):
            self.returned.append(lease)

    def _on_register(self, note: dict[str, Any], body: bytes, now: float) -> None:
        self.registration = Registration(**note["registration"])
        self.step = self.registration.starting_step

    def _on_start(self, note: dict[str, Any], body: bytes, now: float) -> None:
        self.started = True

    def _on_environment(self, note: dict[str, Any], body: bytes, now: float) -> None:
        registration = EnvRegistration(**note["registration"])
        self.environments[note["id"]] = Environment(
            note["id"], note["name"], registration, now, now, registration.group_size)

    def _on_reset(self, note: dict[str, Any], body: bytes, now: float) -> None:
        vars(self).update(vars(HubState(next_number=self.next_number)))

    def _on_summary(self, note: dict[str, Any], body: bytes, now: float) -> None:
        self.started, self.step = note["started"], note["step"]
        self.next_number, self.latest = note["next_number"], body or None
        self.counts = Counter(note["counts"])


def groups_note(groups: list[QueuedGroup], **more: Any) -> dict[str, Any]:
    """The record of groups that came in one request; its body is theirs, joined."""
    return {"kind": "groups", **more, "groups": [
        [group.number, group.env, group.size, len(group.body)] for group in groups]}


def lease_note(
    groups: list[QueuedGroup], *, id: str, owner: str | None, seconds: float | None,
    again: bool = False,
) -> dict[str, Any]:
    """The record of a batch that is handed out, for the first time or ``again``."""
    return {"kind": "lease", "id": id, "owner": owner, "seconds": seconds, "again": again,
            "envs": [group.env for group in groups]}
