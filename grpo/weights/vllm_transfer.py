"""vLLM's own weight-transfer engine as a way for :class:`~grpo.weights.transfer.WeightTransfer`.

The engine must be started with ``weight_transfer_config={"backend": "nccl"}``. The trainer's side
of vLLM changed between releases: up to 0.27 it is static methods of the transfer engine, from 0.28
on a class of its own. Both are built from the same functions, a group and a packing producer, which
are called here; what else differs is which message carries the packing's parameters, and that is
read from the messages' classes. Checked against 0.25.1 and 0.32.0.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.policies.first_import import import_vllm
from grpo.system.threads import in_background
from grpo.weights.channel import Deadline, TransferError

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle


class VLLMTransfer:
    """Connect once, then send any number of updates.

    Args:
        engine: whose workers receive.
        plan: name, shape and dtype of each parameter, in the order of sending.
        device: the trainer's GPU.
        host: interface of the rendezvous.
        workers: number of the engine's workers.
        bucket_bytes: size of a packed message.
        deadline: of the connection.

    Raises:
        TransferError: if the workers do not join in time, or refuse.
    """

    def __init__(self, engine: EngineHandle, plan: list[dict], *, device: torch.device, host: str,
                 workers: int, bucket_bytes: int, deadline: Deadline) -> None:
        import_vllm()
        from vllm.distributed.weight_transfer import nccl_common

        self.engine, self.device, self.bucket_bytes = engine, device, bucket_bytes
        init, self.update = messages(plan, bucket_bytes)
        address = {"master_address": host, "master_port": free_port(host),
                   "world_size": 1 + workers}
        joining = in_background(engine.collective_rpc, "init_weight_transfer_engine",
                                {**address, "rank_offset": 1, **init},
                                timeout=deadline.left("the connection"))
        opening = in_background(self._on_device, nccl_common.trainer_init, address)
        self.group = _both(deadline, joining, f"the engine's {workers} workers to join",
                           opening, "the trainer's end of the connection")

    def send(self, tensors: Iterator[Tensor], deadline: Deadline) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        self._call("start_weight_update", deadline)
        receiving = in_background(self.engine.collective_rpc, "update_weights", self.update,
                                  timeout=deadline.left("the first message"))
        pairs = ((item, tensor) for item, tensor in zip(self.update["names"], tensors, strict=True))
        sending = in_background(
            self._on_device, packed_nccl_broadcast_producer, pairs, group=self.group, src=0,
            post_iter_func=lambda pair: pair[1], buffer_size_bytes=self.bucket_bytes)
        _both(deadline, receiving, "the engine's workers to load the weights",
              sending, "the weights to be sent")
        self._call("finish_weight_update", deadline)

    def _call(self, method: str, deadline: Deadline) -> None:
        waiting_for = f"the engine's {method}"
        deadline.result(in_background(self.engine.collective_rpc, method,
                                      timeout=deadline.left(waiting_for)), waiting_for)

    def _on_device(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_device(self.device)  # of this thread
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        return result

    def close(self) -> None:
        """Forget the group; the engine replaces its end at the next connection."""
        self.group = None


def messages(plan: list[dict[str, Any]], bucket_bytes: int) -> tuple[dict, dict]:
    """The parts of vLLM's initial and update message that do not depend on the connection.

    Returns:
        ``(init, update)``, with the packing's parameters in the one whose class has them.
    """
    import_vllm()
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    packing = {"packed": True, "packed_buffer_size_bytes": bucket_bytes}
    update = {"names": [item["name"] for item in plan],
              "dtype_names": [item["dtype"] for item in plan],
              "shapes": [item["shape"] for item in plan]}
    fields = {field.name for field in dataclasses.fields(nccl_common.NCCLWeightTransferInitInfo)}
    if packing.keys() <= fields:
        return packing, update
    fields = {field.name for field in dataclasses.fields(nccl_engine.NCCLWeightTransferUpdateInfo)}
    if packing.keys() <= fields:
        return {}, {**update, **packing}
    raise TransferError("this vLLM's NCCL messages say nowhere how parameters are packed; use "
                        "loader='direct'")


def free_port(host: str) -> int:
    """A port of ``host`` that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _both(deadline: Deadline, theirs: Any, for_them: str, ours: Any, for_us: str) -> Any:
    """Wait for both sides; the first error of either ends the wait. Returns our side's result."""
    while not (theirs.done() and ours.done()):
        for future, waiting_for in ((theirs, for_them), (ours, for_us)):
            if future.done() and future.exception():
                deadline.result(future, waiting_for)
        deadline.pause(for_us if theirs.done() else for_them)
    deadline.result(theirs, for_them)
    return deadline.result(ours, for_us)
