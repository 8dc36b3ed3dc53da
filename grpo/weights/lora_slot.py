"""A trainer's access to an adapter's slot, in an engine of this process or of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.policies.handle import EngineHandle, InProcessEngine
from grpo.policies.inprocess import engine_module
from grpo.weights.fingerprint import fingerprints
from grpo.weights.handover import Handover, export_shared_memory, map_tensors, release
from grpo.weights.worker import lora as lora_worker

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest


def lora_request(name: str = "policy", adapter_id: int = 1) -> LoRARequest:
    """What generation requests carry to use the adapter in a slot."""
    from vllm.lora.request import LoRARequest

    # Never read: the adapter is registered already. vLLM only wants the path to be there.
    return LoRARequest(name, adapter_id, f"memory:{name}")


class AdapterSlot:
    """An adapter's slot and what is written there; the values come from wherever they are trained.

    They are copied into the slot where it is, or, where each of several workers has a shard of it,
    taken up by the engine as a new adapter of the same id.

    Args:
        engine: see :class:`~grpo.weights.lora.LoRASync`.
        shapes: module name to ``[rank, in, out]``; the slot has zeros at first.
        name: of the adapter, for messages.
        adapter_id: of the adapter, positive.
        load: take up the values as a new adapter in any case.
        timeout: seconds that any call to the engine may take.

    Attributes:
        slot: its number.
        loads: whether values are taken up as a new adapter.
        held: the parts of the slot that the adapter's rank uses; none where ``loads``.

    Raises:
        RuntimeError: if the engine was started without LoRA.
        ValueError: for an adapter that does not fit the engine, naming each module.
    """

    def __init__(
        self, engine: EngineHandle, shapes: dict[str, tuple[int, int, int]], *,
        name: str = "policy", adapter_id: int = 1, load: bool = False, timeout: float = 60.0,
    ) -> None:
        self.name = name
        self.access = slot_access(engine, adapter_id, timeout=timeout)
        self.slot = self.access.open({module: list(shape) for module, shape in shapes.items()})
        self.loads, self.held = load or self.access.workers > 1, {}
        if not self.loads:
            buffers = self.access.map()
            self.held = {
                f"{module}.{part}": lora_worker.narrow(buffers[f"{module}.{part}"], part, shape)
                for module, (rank, inputs, outputs) in shapes.items()
                for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank)))}

    @torch.no_grad()
    def write(self, values: dict[str, Tensor]) -> None:
        """Bring new values there, scaling folded into B; those that lie there already may stay.

        Raises:
            RuntimeError: if the engine has dropped the adapter.
        """
        if self.loads:
            self.slot = self.access.load(values)
            return
        if (slot := self.access.slot()) != self.slot:
            raise RuntimeError(
                f"the engine moved adapter {self.name!r} from slot {self.slot} to {slot}; removing "
                "it or reloading the engine's weights does that. A new LoRASync gives it a "
                "slot again, and so does a run that goes on with resume=auto")
        targets = {name: held for name, held in self.held.items()
                   if held.data_ptr() != values[name].data_ptr()}
        if targets:
            torch._foreach_copy_(list(targets.values()), [values[name] for name in targets])
        for device in {held.device for held in self.held.values() if held.is_cuda}:
            torch.cuda.synchronize(device)

    def differing(self, values: dict[str, Tensor]) -> list[str]:
        """Names of the values that differ in the engine, by fingerprint of the slot it uses."""
        if not self.loads and self.access.slot() != self.slot:
            return list(values)
        return differing_factors(self.access.fingerprints(shapes_of(values)), values)


def shapes_of(values: dict[str, Tensor]) -> dict[str, list[int]]:
    """As JSON."""
    return {name: list(value.shape) for name, value in values.items()}


@torch.no_grad()
def differing_factors(
    held: list[dict[str, list]], values: dict[str, Tensor]
) -> list[str]:
    """Names of the trainer's values of which a worker's slot has others, or none.

    Args:
        held: from each worker, see :func:`~grpo.weights.worker.lora.slot_fingerprints`.
        values: scaling folded into B; rounded to the slot's dtype before they are compared.
    """
    wanted = [(name, of_worker[name]) for of_worker in held for name in values if name in of_worker]
    ours = fingerprints(
        values[name][row : row + rows, column : column + columns].to(getattr(torch, dtype))
        for name, (dtype, row, rows, column, columns, _) in wanted)
    found = {name for (name, (*_, theirs)), mine in zip(wanted, ours, strict=True)
             if theirs != mine}
    found |= {name for of_worker in held for name in values if name not in of_worker}
    return [name for name in values if name in found]


def slot_access(
    engine: EngineHandle, adapter_id: int, *, timeout: float
) -> LocalSlot | RemoteSlot:
    """Direct access to an engine of this process, or access through its workers' methods."""
    if isinstance(engine, InProcessEngine) and not engine.workers:
        model = engine_module(engine.llm)
        return LocalSlot(lora_worker.adapter_registry(model), adapter_id)
    return RemoteSlot(engine, adapter_id, timeout=timeout)


class LocalSlot:
    """The slot of an engine in this process.

    Factors are called ``module.lora_A`` and ``module.lora_B``.

    Attributes:
        workers: processes that hold a part of the engine's model.
    """

    workers = 1

    def __init__(self, registry: LoRAModelManager, adapter_id: int) -> None:
        self.registry, self.adapter_id = registry, adapter_id

    def open(self, shapes: dict[str, list[int]]) -> int:
        """Give the adapter a slot of zeros and return its number."""
        return lora_worker.open_slot(self.registry, self.adapter_id, shapes)

    def slot(self) -> int | None:
        """The adapter's slot now."""
        return lora_worker.slot_of(self.registry, self.adapter_id)

    def map(self) -> dict[str, Tensor]:
        """The slot's memory, at the engine's full rank."""
        return lora_worker.flat(lora_worker.slot_factors(self.registry, self.adapter_id))

    def load(self, values: dict[str, Tensor]) -> int:
        """Install the adapter anew and return its slot."""
        return lora_worker.load_slot(self.registry, self.adapter_id, lora_worker.nested(values))

    def fingerprints(self, shapes: dict[str, list[int]]) -> list[dict[str, list]]:
        """What each worker's slot holds of each factor."""
        return [lora_worker.slot_fingerprints(self.registry, self.adapter_id, shapes)]

    def close(self) -> None:
        """Give the slot back."""
        self.registry.remove_adapter(self.adapter_id)


class RemoteSlot:
    """As :class:`LocalSlot`, of workers with :class:`~grpo.weights.worker.lora.LoRAMethods`.

    Values that the workers are to copy are laid out in shared memory of this process; they are
    megabytes, so this is done on the CPU for GPUs as well.
    """

    def __init__(self, engine: EngineHandle, adapter_id: int, *, timeout: float) -> None:
        self.engine, self.adapter_id, self.timeout = engine, adapter_id, timeout
        self.workers = 1
        self.staged: dict[str, Tensor] = {}
        self.handover: Handover | None = None

    def open(self, shapes: dict[str, list[int]]) -> int:
        slots = self._call("lora_open", self.adapter_id, shapes)
        self.workers = len(slots)
        return slots[0]

    def slot(self) -> int | None:
        return self._call("lora_slot", self.adapter_id)[0]

    def map(self) -> dict[str, Tensor]:
        handover = Handover.from_dict(self._call("lora_export")[0])
        slot = self.slot()
        return {name: buffer[slot, 0] for name, buffer in map_tensors(handover).items()}

    def load(self, values: dict[str, Tensor]) -> int:
        return self._call("lora_load", self.adapter_id, self._stage(values))[0]

    def fingerprints(self, shapes: dict[str, list[int]]) -> list[dict[str, list]]:
        return self._call("lora_fingerprints", self.adapter_id, shapes)

    def close(self) -> None:
        self._call("lora_close", self.adapter_id)
        if self.handover is not None:
            release(self.handover)

    @torch.no_grad()
    def _stage(self, values: dict[str, Tensor]) -> dict[str, Any]:
        if self.handover is None:
            self.staged = {name: torch.empty(value.shape, dtype=value.dtype)
                           for name, value in values.items()}
            self.handover = export_shared_memory(self.staged, model="LoRA adapter", owner="trainer")
        for name, value in values.items():
            self.staged[name].copy_(value)
        return self.handover.to_dict()

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self.engine.collective_rpc(method, *args, timeout=self.timeout)
