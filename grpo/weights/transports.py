"""How the bytes of an update travel; :class:`~grpo.weights.transfer.WeightTransfer` chooses.

* :class:`DirectPath`: broadcast over NCCL or Gloo into the engine's memory.
* :class:`MappedPath`: the engine's workers copy out of the trainer's memory.
* :class:`WrittenPath`: the ranks of a sharded trainer write into the memory of the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo.system.threads import in_background
from grpo.weights.channel import (
    SMALL_BYTES,
    Channel,
    Deadline,
    Packing,
    TransferError,
    as_words,
    buckets,
)
from grpo.weights.gather import TrainerRanks
from grpo.weights.handover import Handover, HandoverError, export_tensors, map_tensors, release
from grpo.weights.worker.receiver import Piece, local, part_of, pieces_of, plan_bytes

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle


class DirectPath:
    """Broadcast into the engine's memory; options as of
    :class:`~grpo.weights.transfer.WeightTransfer`."""

    def __init__(self, model: nn.Module, engine: EngineHandle, plan: list[dict], *,
                 transport: str, host: str, workers: int, bucket_bytes: int,
                 deadline: Deadline) -> None:
        self.model, self.engine = model, engine
        self.device = next(model.parameters()).device
        self.dtypes = [getattr(torch, item["dtype"]) for item in plan]
        self._addresses: list[int] = []
        self._arrangement: list[_Outgoing] | None = None
        self.counts = list(buckets((plan_bytes(item) for item in plan), bucket_bytes))
        patience = deadline.left("the connection")
        config, store = Channel.host(transport, 1 + workers, host=host, seconds=patience)
        config |= {"bucket_bytes": bucket_bytes, "small_bytes": SMALL_BYTES}
        joining = in_background(engine.collective_rpc, "transfer_connect", config, plan,
                                timeout=patience)
        opening = in_background(Channel, config, rank=0, device=self.device, store=store)
        deadline.result(joining, f"the engine's {workers} workers to join through "
                                 f"{host}:{config['port']}")
        self.channel: Channel = deadline.result(opening, "the trainer's end of the connection")

    def send(self, tensors: Iterator[Tensor], deadline: Deadline) -> None:
        outgoing = self._as_they_lie() or self._arranged(tensors)
        left = deadline.left("the first bucket")
        # The workers give up first, so that their engine still answers afterwards.
        receiving = in_background(self.engine.collective_rpc, "transfer_receive", 0.9 * left,
                                  timeout=left)
        flying: tuple[int, list, list] | None = None
        for number, bucket in enumerate(outgoing):
            messages = bucket.messages(self.device)
            works = self.channel.broadcast(messages)
            if flying:
                self._land(flying, deadline, receiving)
            flying = (number, works, messages)  # kept alive until they are sent
        if flying:
            self._land(flying, deadline, receiving)
        deadline.result(receiving, "the engine's workers to store the weights")

    def _as_they_lie(self) -> list[_Outgoing] | None:
        """All parameters, arranged once and again where they have moved; None if they are sent
        otherwise than they lie in memory: sharded, converted, or in another order.

        Arranging takes many calls into torch, for which this thread may have to wait its turn.
        """
        params = list(self.model.parameters())  # asked each time: somebody may replace one
        if any(isinstance(param, DTensor) for param in params):
            return None
        addresses = [param.data_ptr() for param in params]
        if addresses != self._addresses:
            fits = all(param.is_contiguous() and param.dtype == dtype
                       for param, dtype in zip(params, self.dtypes, strict=True))
            self._arrangement = list(self._arranged(p.data for p in params)) if fits else None
            self._addresses = addresses
        return self._arrangement

    def _arranged(self, tensors: Iterator[Tensor]) -> Iterator[_Outgoing]:
        for count in self.counts:
            yield _Outgoing(list(islice(tensors, count)), SMALL_BYTES)

    def _land(self, flying: tuple[int, list, list], deadline: Deadline, receiving: Any) -> None:
        number, works, _ = flying
        self.channel.wait(works, deadline, f"bucket {number + 1} of {len(self.counts)} to be sent",
                          until=receiving)

    def close(self) -> None:
        self.channel.close()
        self._arrangement, self._addresses = None, []


class _Outgoing:
    """Parameters that travel together: the large ones by themselves, the small ones packed."""

    def __init__(self, tensors: list[Tensor], small_bytes: int) -> None:
        self.large = [tensor for tensor in tensors if tensor.nbytes >= small_bytes]
        self.small = as_words([tensor for tensor in tensors if tensor.nbytes < small_bytes])
        self.packed_sizes = [tensor.nbytes for tensor in self.small]

    def messages(self, device: torch.device) -> list[Tensor]:
        if not self.small:
            return self.large
        packing = Packing(self.packed_sizes, device=device)
        packing.fill(self.small)
        return [*self.large, packing.message]


class MappedPath:
    """The workers copy out of the trainer's memory, which they map once."""

    def __init__(self, model: nn.Module, engine: EngineHandle, plan: list[dict], *,
                 workers: int, deadline: Deadline) -> None:
        self.model, self.engine, self.plan, self.workers = model, engine, plan, workers
        self.handovers: list[Any] = []
        self._export(deadline)

    def _export(self, deadline: Deadline) -> None:
        params = dict(self.model.named_parameters())
        # Torch counts the users of GPU memory: each process needs an export of its own.
        copies = self.workers if next(iter(params.values())).is_cuda else 1
        self.close()
        self.handovers = [
            export_tensors(params, model=type(self.model).__name__, owner="trainer")
            for _ in range(copies)]
        self.addresses = [param.data_ptr() for param in self.model.parameters()]
        described = [handover.to_dict() for handover in self.handovers]
        self._call("transfer_map", described, self.plan, deadline=deadline,
                   waiting_for="the engine's workers to map the trainer's memory")

    def send(self, tensors: Iterator[Tensor], deadline: Deadline) -> None:
        if self.addresses != [param.data_ptr() for param in self.model.parameters()]:
            self._export(deadline)
        self._call("transfer_copy", deadline=deadline,
                   waiting_for="the engine's workers to copy the weights")

    def _call(self, method: str, *args: Any, deadline: Deadline, waiting_for: str) -> None:
        deadline.result(in_background(self.engine.collective_rpc, method, *args,
                                      timeout=deadline.left(waiting_for)), waiting_for)

    def close(self) -> None:
        """Mappings end with the workers' next one, or with their process."""
        for handover in self.handovers:
            release(handover)
        self.handovers = []


class WrittenPath:
    """A sharded trainer on the engine's GPUs: every rank writes what lies on its own.

    NCCL refuses two processes on one GPU, and no rank sees the memory of all workers. So each rank
    maps the memory of the worker on its GPU and, while the ranks gather their parameters one after
    another, copies that worker's part into it. Only the gathering crosses a link.
    """

    def __init__(self, model: nn.Module, trainer: TrainerRanks, engine: EngineHandle | None, *,
                 plan: list[dict[str, Any]], workers: list[dict[str, Any]],
                 deadline: Deadline) -> None:
        self.model, self.trainer = model, trainer
        memory: list[Any] | None = None
        with trainer.agreed():
            if trainer.leads:
                memory = engine.collective_rpc(
                    "export_weights", timeout=deadline.left("the engine to hand over its memory"))
        plan, workers, handovers = trainer.tell(plan, workers, memory)
        mine = [(worker, Handover.from_dict(raw)) for worker, raw in
                zip(workers, handovers, strict=True) if self._is_mine(raw)]
        if (covered := trainer.total(len(mine))) != len(handovers):
            raise TransferError(f"the trainer's ranks share the devices of {covered} of the "
                                f"engine's {len(handovers)} workers; place them on the same GPUs, "
                                "or use backend='nccl' between separate ones")
        self.targets: list[list[tuple[Tensor, Piece]]] = [[] for _ in plan]
        failure = None
        try:
            for worker, handover in mine:
                mapped = map_tensors(handover)
                for targets, item in zip(self.targets, plan, strict=True):
                    tensor = item["tensor"]
                    targets += [(local(mapped[tensor], piece), piece)
                                for piece in pieces_of(worker["tensors"].get(tensor), item)]
        except HandoverError as error:
            failure = error
        self._raise_on_all(failure, "map the engine's memory")

    @torch.no_grad()
    def send(self) -> None:
        """Gather all parameters and write them; every rank calls it, the engine being paused."""
        failure = None
        wholes = self.trainer.whole(self.model.named_parameters())
        for targets, (name, whole) in zip(self.targets, wholes, strict=True):
            try:
                for target, piece in targets:
                    target.copy_(part_of(whole, piece))
            except RuntimeError as error:  # the gathering goes on: other ranks wait in it
                failure = failure or RuntimeError(f"{name}: {error}")
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        self._raise_on_all(failure, "write its part of the weights")

    def close(self) -> None:
        """Unmap the engine's memory."""
        self.targets = []

    def _raise_on_all(self, failure: Exception | None, doing: str) -> None:
        if self.trainer.total(failure is not None):
            whose = "this rank" if failure else "another rank"
            raise TransferError(f"{whose} could not {doing}: {failure or 'see its error'}"
                                ) from failure

    def _is_mine(self, handover: dict[str, Any]) -> bool:
        if self.trainer.device.type == "cpu":
            return self.trainer.leads
        uuid = str(torch.cuda.get_device_properties(self.trainer.device).uuid)
        return handover["storages"][0]["handle"]["gpu"] == uuid
