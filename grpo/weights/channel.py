"""A connection between a trainer and an engine's workers that carries bytes, with deadlines.

It is a group of processes apart from ``torch.distributed``'s default group, so that neither the
trainer's own parallelism nor vLLM's is touched. The rendezvous is a ``TCPStore`` that carries
NCCL's or Gloo's addresses; nothing that comes from the network is unpickled.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.system.threads import in_background

Transport: TypeAlias = Literal["nccl", "gloo"]

#: NCCL's watchdog ends the whole process when its own timeout passes; ours has to come first.
_WATCHDOG_SECONDS = 24 * 3600
_POLL_SECONDS = 2e-4

#: Tensors of fewer bytes travel packed together: NCCL needs about 30 us a message, in which it
#: moves some 10 MB.
SMALL_BYTES = 64 << 20
# Parts of a packed message begin at multiples of the largest dtype.
_ALIGNMENT = 16


class TransferError(RuntimeError):
    """Weights did not reach the engine."""


class Deadline:
    """What is left of a span of time.

    Args:
        seconds: until it passes.
        doing: what the whole span is for; part of the error.
        fix: what the reader can do about it.
    """

    def __init__(self, seconds: float, doing: str, *, fix: str) -> None:
        self.seconds, self.doing, self.fix = seconds, doing, fix
        self.end = time.monotonic() + seconds

    def left(self, waiting_for: str) -> float:
        """Seconds until the deadline.

        Raises:
            TransferError: when it has passed, naming ``waiting_for``.
        """
        left = self.end - time.monotonic()
        if left <= 0:
            raise TransferError(f"{self.doing}: waited {self.seconds:.0f} s in all, at last for "
                                f"{waiting_for}; {self.fix}")
        return left

    def pause(self, waiting_for: str) -> None:
        """Sleep a moment, unless the deadline has passed; see :meth:`left`."""
        self.left(waiting_for)
        time.sleep(_POLL_SECONDS)

    def result(self, future: Future, waiting_for: str) -> Any:
        """The result of ``future``, or its error as a :class:`TransferError`."""
        while not future.done():
            self.pause(waiting_for)
        if error := future.exception():
            raise TransferError(f"{self.doing}: {waiting_for} failed: {error}") from error
        return future.result()


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent.

    Examples:
        >>> address_towards("127.0.0.1", 9001)
        '127.0.0.1'
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


class Channel:
    """One member of the group: the trainer's sender is rank 0, the engine's workers follow.

    Args:
        config: from :meth:`host`, the same on all sides.
        rank: of this member.
        device: whose tensors are sent; a GPU for NCCL, the CPU for Gloo.
        store: the sender's own end of the rendezvous; the others connect to it.

    Raises:
        RuntimeError: from the backend, when the others do not come in time.
    """

    def __init__(self, config: dict[str, Any], *, rank: int, device: torch.device,
                 store: dist.TCPStore | None = None) -> None:
        self.transport: Transport = config["transport"]
        self.rank, self.size, self.device = rank, config["size"], device
        self._works: list[Any] = []
        patience = timedelta(seconds=config["seconds"])
        self.store = store or dist.TCPStore(config["host"], config["port"], None, False, patience)
        if self.transport == "nccl":
            torch.cuda.set_device(device)
            self.group = dist.ProcessGroupNCCL(
                self.store, rank, self.size, timeout=timedelta(seconds=_WATCHDOG_SECONDS))
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = patience
            # Gloo listens there, so it has to be an address of this member's own machine.
            here = config["host"] if rank == 0 else address_towards(config["host"], config["port"])
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
            self.group = dist.ProcessGroupGloo(self.store, rank, self.size, options)
        # NCCL connects at the first message; it should not be the weights.
        hello = torch.zeros(1, dtype=torch.uint8, device=device)
        self.wait(self.broadcast([hello]),
                  Deadline(config["seconds"], "connecting trainer and engine",
                           fix="look at the other side's log"), "the first byte")

    @staticmethod
    def host(transport: Transport, size: int, *, host: str, seconds: float
             ) -> tuple[dict[str, Any], dist.TCPStore]:
        """Open the rendezvous on a free port of ``host``.

        Returns:
            The description for the other members, and the store that keeps the port open.
        """
        listener = socket.socket()
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        # The store would listen on every interface; the socket we hand over listens on one.
        store = dist.TCPStore(host, port, None, True, timedelta(seconds=seconds),
                              wait_for_workers=False, master_listen_fd=listener.detach())
        return {"transport": transport, "size": size, "host": host, "port": port,
                "seconds": seconds}, store

    def broadcast(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Start sending (rank 0) or receiving contiguous tensors; returns what to wait for.

        NCCL takes them as one operation, which hides the latency of the small ones.
        """
        grouped = self.transport == "nccl"
        if grouped:
            self.group._start_coalescing()
        # As bytes: Gloo does not know every dtype.
        works = [self.group.broadcast(tensor.view(-1).view(torch.uint8), 0) for tensor in tensors]
        if grouped:
            works = [self.group._end_coalescing()]
        self._works = [work for work in self._works if not work.is_completed()] + works
        return works

    def wait(self, works: Iterable[Any], deadline: Deadline, waiting_for: str, *,
             until: Future | None = None) -> None:
        """Wait until ``works`` are done.

        Args:
            works: from :meth:`broadcast`.
            deadline: of the whole update.
            waiting_for: for the error.
            until: the other side's call, whose failure ends the wait.

        Raises:
            TransferError: at the deadline, or with the other side's or the backend's error.
        """
        for work in works:
            while not work.is_completed():
                if until is not None and until.done() and until.exception():
                    deadline.result(until, "the engine's workers")
                deadline.pause(waiting_for)
            try:
                work.wait()
            except RuntimeError as error:
                raise TransferError(f"{deadline.doing}: {waiting_for} failed: {error}; "
                                    f"{deadline.fix}") from error

    def close(self) -> None:
        """Leave the group; sends that hang are given up."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()
            in_background(_outlive, group, self._works)


def _outlive(group: Any, works: list[Any]) -> None:
    """Keep ``group`` until its sends have ended: Gloo would block whoever drops it before."""
    while not all(work.is_completed() for work in works):
        time.sleep(100 * _POLL_SECONDS)


class Packing:
    """Several small tensors as one message: a message costs time, however small it is.

    Args:
        sizes: bytes of each tensor.
        device: of the message.

    Examples:
        >>> one, two = torch.tensor([1.0]), torch.tensor([[2, 3]])
        >>> packing = Packing([4, 16], device=torch.device("cpu"))
        >>> packing.fill(as_words([one, two]))
        >>> len(packing.message), packing.views([one, two])[1].tolist()
        (32, [[2, 3]])
    """

    def __init__(self, sizes: Iterable[int], *, device: torch.device) -> None:
        self._lengths: list[int] = []  # of a tensor, of the gap behind it, and so on
        for size in sizes:
            self._lengths += [size, -size % _ALIGNMENT]
        self.message = torch.empty(sum(self._lengths), dtype=torch.uint8, device=device)

    def fill(self, words: list[Tensor]) -> None:
        """Copy tensors, as from :func:`as_words`, into the message."""
        torch._foreach_copy_(self._parts(words[0].dtype), words)

    def unpack(self, words: list[Tensor]) -> None:
        """Copy the message into tensors, as from :func:`as_words`."""
        torch._foreach_copy_(words, self._parts(words[0].dtype))

    def views(self, like: Iterable[Tensor]) -> list[Tensor]:
        """The message's parts with the shapes and types of other tensors."""
        return [part.view(tensor.dtype).view(tensor.shape)
                for part, tensor in zip(self._parts(torch.uint8), like, strict=True)]

    def _parts(self, dtype: torch.dtype) -> list[Tensor]:
        lengths = [length // dtype.itemsize for length in self._lengths]
        return list(self.message.view(dtype).split(lengths)[::2])


def as_words(tensors: list[Tensor]) -> list[Tensor]:
    """The memory of contiguous tensors: eight bytes an element where that fits all, else one."""
    whole = all(tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0
                for tensor in tensors)
    return [tensor.view(-1).view(torch.int64 if whole else torch.uint8) for tensor in tensors]


def buckets(sizes: Iterable[int], limit: int) -> Iterator[int]:
    """How many tensors go together: as many as fit into ``limit`` bytes, at least one.

    Examples:
        >>> list(buckets([3, 3, 9, 1, 1, 1], 6))
        [2, 1, 3]
    """
    count = total = 0
    for size in sizes:
        if count and total + size > limit:
            yield count
            count = total = 0
        count, total = count + 1, total + size
    if count:
        yield count
