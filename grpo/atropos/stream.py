"""Batches from the Atropos API, fetched ahead of the trainer by a thread."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from grpo.atropos.client import (
    AtroposClient,
    AtroposError,
    AtroposTimeoutError,
    Batch,
    NotRegisteredError,
)
from grpo.atropos.schemas import Registration

_AGAIN = (408, 425, 429)  # statuses below 500 after which a request may be repeated


class BatchStream:
    """An iterator over batches, and a context manager that starts and stops fetching them.

    It registers the trainer, and does so again when the API has forgotten it. An API that is not
    there yet, or goes away, is asked until it is back. The batch that was yielded last is
    acknowledged when the next one is asked for, so that a trainer that ends in between is given it
    again. Batches that were fetched and not yielded are given back at the end.

    Args:
        client: of the API.
        registration: of the trainer.
        depth: batches fetched ahead of the one in use. More makes the data older.
        timeout: seconds that the iterator waits for a batch.
        lease_seconds: for a batch, from fetching it to its acknowledgement.
        poll_seconds: between questions while there is no batch.

    Attributes:
        rejected: number of groups left out, by reason.
        messages: what was wrong with the first of each reason.
        repeated: number of groups left out because they came twice.
        lost_leases: batches that were used, and may be handed out again all the same.

    Raises:
        ValueError: for a number out of range.

    Examples:
        >>> with BatchStream(client, registration) as batches:           # doctest: +SKIP
        ...     for batch in batches:
        ...         train(batch.groups)
    """

    def __init__(
        self,
        client: AtroposClient,
        registration: Registration,
        *,
        depth: int = 1,
        timeout: float = 1800.0,
        lease_seconds: float = 3600.0,
        poll_seconds: float = 0.1,
    ) -> None:
        for name, value in (("depth", depth), ("timeout", timeout), ("poll_seconds", poll_seconds),
                            ("lease_seconds", lease_seconds)):
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        self.client, self.registration = client, registration
        self.timeout, self.lease_seconds, self.poll_seconds = timeout, lease_seconds, poll_seconds
        self.rejected: Counter[str] = Counter()
        self.messages: dict[str, str] = {}
        self.repeated = self.lost_leases = 0
        self._used = 0
        self._in_use: Batch | None = None
        self._ready: queue.Queue[Batch | AtroposError] = queue.Queue()
        self._slots = threading.Semaphore(depth)
        self._ended = threading.Event()
        self._waiting_for = "the API was not asked yet"
        self._thread = threading.Thread(target=self._fetch, name="atropos-batches", daemon=True)

    def __enter__(self) -> BatchStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            AtroposTimeoutError: if there is none in time; says what the API answered last.
            AtroposError: if the API refuses, for example for a wrong token.
        """
        while True:
            self.acknowledge()
            batch = self._in_use = self._next()
            self._used += 1
            self.repeated += batch.repeated
            self.rejected.update(batch.rejected)
            self.messages = batch.messages | self.messages
            if batch.groups:
                return batch

    def _next(self) -> Batch:
        try:
            found = self._ready.get(timeout=self.timeout)
        except queue.Empty:
            raise AtroposTimeoutError(
                f"waited {self.timeout:g} s for a batch from {self.client.url}: "
                f"{self._waiting_for}; are environments running, and is the engine answering "
                "them?") from None
        if isinstance(found, AtroposError):
            raise found
        self._slots.release()
        return found

    def acknowledge(self) -> None:
        """Acknowledge the batch in use now, as after a checkpoint, and not with the next one."""
        batch, self._in_use = self._in_use, None
        if batch is not None:
            self.lost_leases += not self._settled(self.client.acknowledge, batch)

    def close(self, *, timeout: float = 10.0) -> None:
        """Stop fetching and give back what was not used; the batch in use stays on its lease."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        while not self._ready.empty():
            found = self._ready.get()
            if isinstance(found, Batch):
                self._settled(self.client.release, found)

    def _settled(self, call: Callable[[Batch], bool], batch: Batch) -> bool:
        """Whether the hub took note; if it is away, the lease will end by itself."""
        try:
            return call(batch)
        except AtroposError as error:
            if _final(error):
                raise
            return False

    def _fetch(self) -> None:
        registered = False
        while not self._ended.is_set():
            if not self._slots.acquire(timeout=0.1):
                continue
            batch = None
            while batch is None and not self._ended.is_set():
                try:
                    if not registered:
                        self._register()
                        registered = True
                    batch = self.client.batch(lease_seconds=self.lease_seconds)
                    self._waiting_for = "it has too few groups"
                except NotRegisteredError:
                    registered = False
                except AtroposError as error:
                    if _final(error):
                        self._ready.put(error)
                        return
                    self._waiting_for = str(error)
                if batch is None:
                    self._ended.wait(self.poll_seconds)
            if batch is not None:
                self._ready.put(batch)

    def _register(self) -> None:
        step = self.registration.starting_step + self._used
        self.client.register(self.registration.model_copy(update={"starting_step": step}))


def _final(error: AtroposError) -> bool:
    """Whether asking again would be answered in the same way."""
    return error.status is not None and error.status < 500 and error.status not in _AGAIN
