"""Batches from the Atropos API, fetched ahead of the trainer by a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from grpo.atropos.client import (
    AtroposClient,
    AtroposError,
    AtroposTimeoutError,
    AtroposUnreachableError,
    Batch,
    NotRegisteredError,
)
from grpo.atropos.schemas import Registration, ScoredGroup

_AGAIN = (408, 425, 429)  # statuses below 500 after which a request may be repeated


@dataclass
class _Taken:
    batch: Batch  # without groups when all of them were used
    names: list[str]  # of its groups
    unused: list[ScoredGroup]


@dataclass(eq=False)
class BatchStream:
    """An iterator over batches, and a context manager that starts and stops fetching them.

    It registers the trainer, and does so again when the API has forgotten it. An API that is away
    is asked until it is back. The batch that was yielded last is acknowledged when the next one is
    asked for, or when the context is left without an error: a trainer that fails in between gets
    the batch again. What was not used is given back at the end. Leases are renewed, so they may be
    short, and what a killed trainer held is soon given to the next.

    A trainer that makes batches of its own takes those of the API by :meth:`take`, and says by
    :meth:`used` what it uses of them. ``hold`` is for trainers with checkpoints: what no checkpoint
    has stays unacknowledged.

    Args:
        client: of the API.
        registration: of the trainer.
        depth: batches fetched ahead of the one in use. More makes the data older.
        timeout: seconds that the iterator waits for a batch.
        lease_seconds: after which the API takes a batch back from a trainer that is silent.
        poll_seconds: between questions while there is no batch.
        hold: acknowledge only by :meth:`acknowledge` and at an end without an error.
        on_fetched: told by the thread of the groups of each batch, before they can be taken.

    Attributes:
        rejected: number of groups left out, by reason.
        messages: what was wrong with the first group of each reason.
        repeated: number of groups left out because they came twice.
        lost_leases: batches that were used and may nevertheless be handed out again.
        unreachable: why the API does not answer; None while it does.

    Raises:
        ValueError: for a number out of range.

    Examples:
        >>> with BatchStream(client, registration) as batches:           # doctest: +SKIP
        ...     for batch in batches:
        ...         train(batch.groups)
    """

    client: AtroposClient
    registration: Registration
    _: KW_ONLY
    depth: int = 1
    timeout: float = 1800.0
    lease_seconds: float = 120.0
    poll_seconds: float = 0.1
    hold: bool = False
    on_fetched: Callable[[Sequence[ScoredGroup]], None] = lambda groups: None
    rejected: Counter[str] = field(default_factory=Counter, init=False)
    messages: dict[str, str] = field(default_factory=dict, init=False)
    repeated: int = field(default=0, init=False)
    lost_leases: int = field(default=0, init=False)
    unreachable: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("depth", "timeout", "poll_seconds", "lease_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        self._taken = 0
        self._open: dict[str, _Taken] = {}  # by lease
        self._used_up: deque[_Taken] = deque()  # all used, and not acknowledged yet
        self._held: dict[str, Batch] = {}  # by lease, without groups; renewed
        self._renewed = time.monotonic()
        self._ready: queue.Queue[Batch | Exception] = queue.Queue()
        self._slots = threading.Semaphore(self.depth)
        self._ended = threading.Event()
        self._waiting_for = "the API was not asked yet"
        self._thread = threading.Thread(target=self._fetch, name="atropos-batches", daemon=True)

    def __enter__(self) -> BatchStream:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:  # else what is in use may be half used
            self.acknowledge()
            for lease, taken in list(self._open.items()):
                if len(taken.unused) < len(taken.names):
                    self._settle(partial(self.client.acknowledge, unused=taken.unused),
                                 self._open.pop(lease).batch)
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch with a group.

        Raises:
            AtroposTimeoutError: if there is none in time; says what the API answered last.
            AtroposError: if the API refuses, as for a wrong token, or its answer cannot be read.
        """
        while not (batch := self.take()).groups:
            pass
        self.used(batch.groups)
        return batch

    def take(self) -> Batch:
        """The next batch, which may have no group; raises as iterating does.

        What was used before is acknowledged first, unless the stream holds it.
        """
        if self.hold:
            self._acknowledge_used()
        else:
            self.acknowledge()
        batch = self._next()
        self._taken += 1
        self.repeated += batch.repeated
        self.rejected.update(batch.rejected)
        self.messages = batch.messages | self.messages
        if batch.lease is not None:
            self._open[batch.lease] = _Taken(
                batch, [group.group_uid for group in batch.groups], list(batch.groups))
        return batch

    def used(self, groups: Sequence[ScoredGroup]) -> None:
        """Say that groups of taken batches will be used before the next batch is taken, or are left
        out. A batch can be acknowledged when this was said of all of its groups."""
        self.client.leave_out(group.group_uid for group in groups)
        done = {id(group) for group in groups}
        for taken in self._open.values():
            taken.unused = [group for group in taken.unused if id(group) not in done]
            if not taken.unused:
                taken.batch = Batch([], taken.batch.lease)

    def unacknowledged(self) -> list[str]:
        """Names of used groups that are handed out again if this trainer is killed."""
        names = []
        for taken in (*self._used_up, *self._open.values()):
            unused = {group.group_uid for group in taken.unused}
            names += [name for name in taken.names if name not in unused]
        return names

    def _next(self) -> Batch:
        try:
            found = self._ready.get(timeout=self.timeout)
        except queue.Empty:
            raise AtroposTimeoutError(
                f"waited {self.timeout:g} s for a batch from {self.client.url}: "
                f"{self._waiting_for}; are environments running, and is the engine answering "
                "them?") from None
        if isinstance(found, Exception):
            raise found
        self._slots.release()
        # A run that goes on learns what its checkpoint has after this stream has begun to fetch.
        return self.client.without_left_out(found)

    def acknowledge(self) -> None:
        """Acknowledge what was used, as after a checkpoint that has it."""
        for lease in [lease for lease, taken in self._open.items() if not taken.unused]:
            self._used_up.append(self._open.pop(lease))
        self._acknowledge_used()

    def close(self, *, timeout: float = 10.0) -> None:
        """Stop fetching and give back what was not used; a batch in use stays on its lease."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._acknowledge_used()
        while not self._ready.empty():
            found = self._ready.get()
            if isinstance(found, Batch):
                self._settle(self.client.release, found)
        for taken in self._open.values():
            if taken.unused and len(taken.unused) == len(taken.names):
                self._settle(self.client.release, taken.batch)

    def _acknowledge_used(self) -> None:
        while self._used_up:
            known = self._settle(self.client.acknowledge, self._used_up[0].batch)
            if known is None:  # later
                return
            self.lost_leases += not known
            self._used_up.popleft()

    def _settle(self, call: Callable[[Batch], bool], batch: Batch) -> bool | None:
        """End a lease; whether the API knew it, or None if the API is away."""
        try:
            known = call(batch)
        except AtroposError as error:
            if _final(error):
                raise
            return None
        self._held.pop(batch.lease or "", None)
        return known

    def _fetch(self) -> None:
        registered = slot = False
        while not self._ended.is_set():
            slot = slot or self._slots.acquire(timeout=0.1)
            batch = None
            try:
                self._renew()
                if slot and not registered:
                    self._register()
                    registered = True
                if slot:
                    batch = self.client.batch(lease_seconds=self.lease_seconds)
                    self._waiting_for, self.unreachable = "it has too few groups", None
            except NotRegisteredError:
                registered, self.unreachable = False, None
            except AtroposError as error:
                if _final(error):
                    self._ready.put(error)
                    return
                self._waiting_for = str(error)
                if isinstance(error, (AtroposUnreachableError, AtroposTimeoutError)):
                    self.unreachable = str(error)
            except Exception as error:  # nobody else sees what ends this thread
                failure = AtroposError(
                    f"{self.client.url} gave an answer that cannot be used, "
                    f"{type(error).__name__}: {error}; does another program listen there, or "
                    "another version of the API?")
                failure.__cause__ = error
                self._ready.put(failure)
                return
            if batch is not None:
                if batch.lease is not None:
                    self._held[batch.lease] = Batch([], batch.lease)
                try:
                    self.on_fetched(batch.groups)
                except Exception as error:  # raised where the trainer waits
                    self._ready.put(error)
                    return
                self._ready.put(batch)
                slot = False
            elif slot:
                self._ended.wait(self.poll_seconds)

    def _renew(self) -> None:
        """Renew the leases of what is not settled, a few times in the length of a lease."""
        if time.monotonic() - self._renewed < self.lease_seconds / 4:
            return
        self._renewed = time.monotonic()
        for lease, batch in list(self._held.items()):
            if not self.client.renew(batch, lease_seconds=self.lease_seconds):
                self._held.pop(lease, None)

    def _register(self) -> None:
        step = self.registration.starting_step + self._taken
        self.client.register(self.registration.model_copy(update={"starting_step": step}))


def _final(error: AtroposError) -> bool:
    """Whether asking again would be answered in the same way."""
    return error.status is not None and error.status < 500 and error.status not in _AGAIN
