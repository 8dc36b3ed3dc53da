"""A trainer's access to an adapter's slot, in an engine of this process or of another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo.engines import lora_worker
from grpo.engines.handle import EngineHandle, InProcessEngine
from grpo.engines.inprocess import engine_module
from grpo.weights.handover import Handover, export_shared_memory, map_tensors, release

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


class SlotAccess(Protocol):
    """What can be done with the slot; factors are called ``module.lora_A`` and ``module.lora_B``.
    """

    workers: int
    """Processes that hold a part of the engine's model."""

    def open(self, shapes: dict[str, list[int]]) -> int:
        """Give the adapter a slot of zeros and return its number."""

    def slot(self) -> int | None:
        """The adapter's slot now."""

    def map(self) -> dict[str, Tensor]:
        """The slot's memory, at the engine's full rank."""

    def load(self, values: dict[str, Tensor]) -> int:
        """Install the adapter anew and return its slot."""

    def differing(self, values: dict[str, Tensor]) -> list[str]:
        """Names of the values that differ in the slot."""

    def close(self) -> None:
        """Give the slot back."""


def slot_access(engine: EngineHandle, adapter_id: int, *, timeout: float) -> SlotAccess:
    """Direct access to an engine of this process, or access through its workers' methods."""
    if isinstance(engine, InProcessEngine) and not engine.workers:
        model = engine_module(engine.llm)
        return LocalSlot(lora_worker.adapter_registry(model), adapter_id)
    return RemoteSlot(engine, adapter_id, timeout=timeout)


class LocalSlot:
    """The slot of an engine in this process."""

    workers = 1

    def __init__(self, registry: LoRAModelManager, adapter_id: int) -> None:
        self.registry, self.adapter_id = registry, adapter_id

    def open(self, shapes: dict[str, list[int]]) -> int:
        return lora_worker.open_slot(self.registry, self.adapter_id, shapes)

    def slot(self) -> int | None:
        return lora_worker.slot_of(self.registry, self.adapter_id)

    def map(self) -> dict[str, Tensor]:
        return lora_worker.flat(lora_worker.slot_factors(self.registry, self.adapter_id))

    def load(self, values: dict[str, Tensor]) -> int:
        return lora_worker.load_slot(self.registry, self.adapter_id, lora_worker.nested(values))

    def differing(self, values: dict[str, Tensor]) -> list[str]:
        return lora_worker.differing_factors(self.registry, self.adapter_id,
                                             lora_worker.nested(values))

    def close(self) -> None:
        self.registry.remove_adapter(self.adapter_id)


class RemoteSlot:
    """The slot of an engine whose workers run :class:`~grpo.engines.lora_worker.LoRAMethods`.

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

    def differing(self, values: dict[str, Tensor]) -> list[str]:
        found = self._call("lora_differing", self.adapter_id, self._stage(values))
        return list(dict.fromkeys(name for names in found for name in names))

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
