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
    from vllm.lora.request import LoRARequest


def lora_request(name: str = "policy", adapter_id: int = 1) -> LoRARequest:
    """What generation requests carry to use the adapter in a slot."""
    from vllm.lora.request import LoRARequest

    # Never read: the adapter is registered already. vLLM only wants the path to be there.
    return LoRARequest(name, adapter_id, f"memory:{name}")


class AdapterSlot:
    """An adapter's slot and what is written there.

    New values are copied into the slot where it is, or, where each of several workers has a shard
    of it, taken up by the engine as a new adapter of the same id.

    Arguments that are not listed are those of :class:`~grpo.weights.lora.LoRASync`.

    Args:
        shapes: module name to ``[rank, in, out]``; the slot has zeros at first.
        load: take up the values as a new adapter in any case.

    Attributes:
        slot: its number.
        workers: how many have a part of the engine's model.
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
        self.engine, self.name, self.timeout = engine, name, timeout
        self.adapter_id = adapter_id
        slots = self._call("lora_open", {module: list(shape) for module, shape in shapes.items()})
        self.slot, self.workers = slots[0], len(slots)
        self.loads, self.held = load or self.workers > 1, {}
        self._staged: dict[str, Tensor] = {}
        self._handover: Handover | None = None
        if not self.loads:
            buffers = self._map()
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
            self.slot = self._call("lora_load", self._stage(values))[0]
            return
        if (slot := self._slot_now()) != self.slot:
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
        if not self.loads and self._slot_now() != self.slot:
            return list(values)
        return differing_factors(self._call("lora_fingerprints", shapes_of(values)), values)

    def close(self) -> None:
        """Give the slot back."""
        self._call("lora_close")
        if self._handover is not None:
            release(self._handover)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Each worker's answer, see :class:`~grpo.weights.worker.lora.LoRAMethods`."""
        return self.engine.collective_rpc(method, self.adapter_id, *args, timeout=self.timeout)

    def _slot_now(self) -> int | None:
        return self._call("lora_slot")[0]

    def _map(self) -> dict[str, Tensor]:
        """The slot's memory, at the engine's full rank."""
        if isinstance(self.engine, InProcessEngine) and not self.engine.workers:
            registry = lora_worker.adapter_registry(engine_module(self.engine.llm))
            return lora_worker.flat(lora_worker.slot_factors(registry, self.adapter_id))
        exported, = self.engine.collective_rpc("lora_export", timeout=self.timeout)
        return {name: buffer[self.slot, 0]
                for name, buffer in map_tensors(Handover.from_dict(exported)).items()}

    @torch.no_grad()
    def _stage(self, values: dict[str, Tensor]) -> dict[str, Any]:
        """A handover of values to copy; they are megabytes, so the CPU's memory will do."""
        if self._handover is None:
            self._staged = {name: torch.empty(value.shape, dtype=value.dtype)
                            for name, value in values.items()}
            self._handover = export_shared_memory(self._staged, model="LoRA adapter",
                                                  owner="trainer")
        for name, value in values.items():
            self._staged[name].copy_(value)
        return self._handover.to_dict()


def shapes_of(values: dict[str, Tensor]) -> dict[str, list[int]]:
    """As JSON."""
    return {name: list(value.shape) for name, value in values.items()}


@torch.no_grad()
def differing_factors(held: list[dict[str, list]], values: dict[str, Tensor]) -> list[str]:
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
