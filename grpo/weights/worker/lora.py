"""Inside the engine: a LoRA adapter's slot, opened, exported, filled and compared.

vLLM keeps the factors of active adapters in buffers with one slot an adapter. Their addresses never
change, so CUDA graphs see whatever is written into them. Checked with vLLM 0.25.1 and 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.weights.fingerprint import fingerprints
from grpo.weights.handover import export_tensors, map_tensors
from grpo.weights.handover_file import Handover

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

Factors = dict[str, Tensor]
"""``lora_A`` ``[rank, in]`` and ``lora_B`` ``[out, rank]`` of one module, scaling folded in B."""


class LoRAMethods:
    """Methods a vLLM worker gets through ``worker_extension_cls``; all arguments are JSON values.

    Adapters are known by the integer of their ``LoRARequest``, modules by their Hugging Face names.
    A handover is what ``Handover.to_dict`` returns; its tensors are called ``module.lora_A`` and
    ``module.lora_B``.
    """

    _exported_buffers: dict[str, Any] | None = None

    def lora_open(self, adapter_id: int, shapes: dict[str, list[int]]) -> int:
        """Register an adapter of zeros, activate it and pin it to its slot.

        Pinned, because an adapter that vLLM moved out and in again would come back with the values
        it was registered with.

        Args:
            adapter_id: a positive integer of its own for each adapter.
            shapes: module name to ``[rank, in, out]``.

        Returns:
            The slot's number.

        Raises:
            ValueError: naming each module the engine cannot adapt, or not with that shape or rank.
        """
        return self._install(adapter_id, {
            name: {"lora_A": torch.zeros(rank, inputs), "lora_B": torch.zeros(outputs, rank)}
            for name, (rank, inputs, outputs) in shapes.items()})

    def lora_slot(self, adapter_id: int) -> int | None:
        """Number of the slot an adapter is active in; None: it is in none."""
        return slot_of(self._adapter_registry(), adapter_id)

    def lora_close(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it was not known."""
        return self._adapter_registry().remove_adapter(adapter_id)

    def lora_export(self) -> dict[str, Any]:
        """A handover of the buffers, ``[slots, 1, ...]``, in which all adapters live."""
        # On a CPU the export moves the buffers, and must not move them away from those who mapped
        # them; on a GPU each process that maps them needs an export of its own.
        if self._exported_buffers is None or self._exported_buffers["kind"] == "cuda_ipc":
            buffers = {name: place.buffers()
                       for name, place in _places(self._adapter_registry()).items()}
            self._exported_buffers = export_tensors(
                flat(buffers), model="LoRA adapter slots", owner="engine").to_dict()
        return self._exported_buffers

    def lora_load(self, adapter_id: int, handover: dict[str, Any]) -> int:
        """Install an adapter with copies of these values, in place of the one of the same id.

        vLLM cuts the factors for tensor parallelism itself. Returns and raises as
        :meth:`lora_open`.
        """
        values = map_tensors(Handover.from_dict(handover))
        return self._install(adapter_id, nested({
            name: value.clone() for name, value in values.items()}))

    def lora_fingerprints(self, adapter_id: int, shapes: dict[str, list[int]]) -> dict[str, list]:
        """What the slot holds of each factor; see :func:`slot_fingerprints`."""
        return slot_fingerprints(self._adapter_registry(), adapter_id, shapes)

    def _install(self, adapter_id: int, tensors: dict[str, Factors]) -> int:
        registry = self._adapter_registry()
        _check_shapes(registry, tensors)
        return _install(registry, adapter_id, tensors)

    def _adapter_registry(self) -> LoRAModelManager:
        return adapter_registry(self.model_runner.get_model())


def adapter_registry(model: torch.nn.Module) -> LoRAModelManager:
    """What vLLM keeps the adapters of a model in.

    Raises:
        RuntimeError: if the engine was started without LoRA.
    """
    registry = getattr(model, "lora_manager", None)
    if registry is None:
        raise RuntimeError("the engine was started without LoRA; start it with enable_lora=True "
                           "and a max_lora_rank of at least the adapter's rank")
    return registry


def slot_of(registry: LoRAModelManager, adapter_id: int) -> int | None:
    """Number of the slot that an adapter is active in, if any."""
    ids = registry.lora_index_to_id
    return ids.index(adapter_id) if adapter_id in ids else None


def slot_factors(registry: LoRAModelManager, adapter_id: int) -> dict[str, Factors]:
    """The memory of an active adapter's slot, by module: ``lora_A`` ``[max_rank, in]`` and
    ``lora_B`` ``[out, max_rank]``, or this worker's shards of them.

    Raises:
        RuntimeError: if the adapter is in no slot.
    """
    slot = slot_of(registry, adapter_id)
    if slot is None:
        raise RuntimeError(f"adapter {adapter_id} is in no slot of the engine; it was removed, or "
                           "the engine's weights were reloaded, which drops adapters")
    return {name: {part: buffer[slot, 0] for part, buffer in place.buffers().items()}
            for name, place in _places(registry).items()}


def slot_fingerprints(
    registry: LoRAModelManager, adapter_id: int, shapes: dict[str, list[int]]
) -> dict[str, list]:
    """Hashes of an adapter's values in its slot, and of which rows and columns they are.

    Args:
        registry: from :func:`adapter_registry`.
        adapter_id: of the adapter.
        shapes: ``module.lora_A`` or ``module.lora_B`` to the whole factor's ``[rows, columns]``.

    Returns:
        Name to ``[dtype, first row, rows, first column, columns, fingerprint]``, JSON values; with
        tensor parallelism rows and columns are those of this worker's shard. Empty if the engine
        does not have the adapter.
    """
    if slot_of(registry, adapter_id) is None:
        if adapter_id not in registry.list_adapters():
            return {}
        # Running requests of older ones took all slots; vLLM moves each in when it is asked for.
        _forget_mapping(registry)
        registry.activate_adapter(adapter_id)
    held, places = slot_factors(registry, adapter_id), _places(registry)
    shards, buffers = {}, []
    for name, shape in shapes.items():
        module, part = name.rsplit(".", 1)
        shards[name] = _shard_of(places[module], part, shape)
        _, rows, _, columns = shards[name]
        buffers.append(narrow(held[module][part], part, (rows, columns)))
    return {name: [str(buffer.dtype).removeprefix("torch."), *shard, hash]
            for (name, shard), buffer, hash in
            zip(shards.items(), buffers, fingerprints(buffers), strict=True)}


def _shard_of(place: _Place, part: str, shape: list[int]) -> tuple[int, int, int, int]:
    """First row, rows, first column and columns of what this worker has of a factor."""
    rows, columns = (
        place.shard(part, torch.arange(size).view(view).expand(tuple(shape)))
        for size, view in zip(shape, ((-1, 1), (1, -1)), strict=True))
    return int(rows[0, 0]), len(rows), int(columns[0, 0]), columns.shape[1]


def narrow(buffer: Tensor, part: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """The rows of A, or the columns of B, that an adapter of a lower rank uses."""
    return buffer[: shape[0]] if part == "lora_A" else buffer[:, : shape[1]]


def flat(tensors: dict[str, Factors]) -> Factors:
    """``{module: {part: tensor}}`` as ``{"module.part": tensor}``."""
    return {f"{name}.{part}": tensor for name, factors in tensors.items()
            for part, tensor in factors.items()}


def nested(tensors: Factors) -> dict[str, Factors]:
    """The inverse of :func:`flat`.

    Examples:
        >>> nested(flat({"layers.0.q_proj": {"lora_A": 1, "lora_B": 2}}))
        {'layers.0.q_proj': {'lora_A': 1, 'lora_B': 2}}
    """
    modules: dict[str, Factors] = {}
    for name, tensor in tensors.items():
        module, part = name.rsplit(".", 1)
        modules.setdefault(module, {})[part] = tensor
    return modules


@dataclass(frozen=True)
class _Place:
    """Where a module's factors live: part ``index`` of an engine module with ``count`` parts."""

    module: Any
    index: int
    count: int

    def buffers(self) -> Factors:
        """``lora_A`` ``[slots, 1, max_rank, in]`` and ``lora_B`` ``[slots, 1, out, max_rank]``."""
        return {"lora_A": self.module.lora_a_stacked[self.index],
                "lora_B": self.module.lora_b_stacked[self.index]}

    def shard(self, part: str, tensor: Tensor) -> Tensor:
        """This worker's share of a factor, cut by the engine's own module."""
        if self.module.tp_size == 1:
            return tensor
        cut = self.module.slice_lora_a if part == "lora_A" else self.module.slice_lora_b
        if self.count == 1:
            return cut(tensor)
        return cut([tensor if i == self.index else None for i in range(self.count)])[self.index]


def _places(registry: LoRAModelManager) -> dict[str, _Place]:
    """The place of every module, fused ones apart, that has factors of two dimensions."""
    places: dict[str, _Place] = {}
    for name, module in registry.modules.items():
        parts = registry.packed_modules.get(name, [name])
        stacked = getattr(module, "lora_a_stacked", None)
        # Embeddings and experts keep their factors in other shapes.
        if isinstance(stacked, tuple) and len(stacked) == len(parts) and stacked[0].ndim == 4:
            places.update((part, _Place(module, i, len(parts))) for i, part in enumerate(parts))
    return places


def _check_shapes(registry: LoRAModelManager, tensors: dict[str, Factors]) -> None:
    places, max_rank = _places(registry), registry.lora_config.max_lora_rank
    problems = []
    for name, factors in tensors.items():
        if name not in places:
            problems.append(f"{name}: the engine has no adapter slot for this module")
            continue
        (rank, inputs), outputs = factors["lora_A"].shape, len(factors["lora_B"])
        held = places[name].buffers()
        theirs = held["lora_A"].shape[-1], held["lora_B"].shape[-2]
        if rank > max_rank:
            problems.append(f"{name}: rank {rank} is above the engine's max_lora_rank={max_rank}")
        elif places[name].module.tp_size == 1 and (inputs, outputs) != theirs:
            problems.append(f"{name}: {inputs} inputs and {outputs} outputs here, {theirs[0]} and "
                            f"{theirs[1]} in the engine")
    if problems:
        raise ValueError("the adapter does not fit the engine:\n  " + "\n  ".join(problems))


def _install(registry: LoRAModelManager, adapter_id: int, tensors: dict[str, Factors]) -> int:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    rank = max(len(factors["lora_A"]) for factors in tensors.values())
    # alpha = r: the scaling is in B already.
    helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
    adapter = LoRAModel.from_lora_tensors(
        adapter_id, {f"base_model.model.{name}.weight": t for name, t in flat(tensors).items()},
        helper, device="cpu", dtype=registry.lora_config.lora_dtype)
    registry.remove_adapter(adapter_id)
    _forget_mapping(registry)
    if len(registry) >= registry.capacity:
        registry.remove_oldest_adapter()
    registry.add_adapter(adapter)
    registry.activate_adapter(adapter_id)
    registry.pin_adapter(adapter_id)
    return slot_of(registry, adapter_id)


def _forget_mapping(registry: LoRAModelManager) -> None:
    """Before slots change: vLLM 0.25 keeps the assignment of rows to slots while the requests stay
    the same."""
    registry._last_mapping = None
