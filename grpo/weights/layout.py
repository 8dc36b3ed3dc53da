"""Hugging Face parameter names as views into vLLM's fused tensors.

vLLM stores query, key and value of a layer in one matrix, and gate and up projection in another;
it pads the vocabulary. Every Hugging Face parameter is therefore a row range of one engine tensor,
and a view of that range is the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Hugging Face module name -> (engine module name, its place among the fused parts).
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Matrices whose rows are vocabulary entries; vLLM pads them to a multiple of 64.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class LayoutError(ValueError):
    """The two models do not have the same parameters."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lives in the engine: rows ``start:stop`` of tensor ``name``."""

    name: str
    start: int
    stop: int


def engine_layout(
    trainer_params: dict[str, Tensor], engine_params: dict[str, Tensor]
) -> dict[str, Place]:
    """Find the place of every trainer parameter in the engine.

    Args:
        trainer_params: Hugging Face names to tensors, tied parameters once.
        engine_params: vLLM names to tensors.

    Returns:
        One :class:`Place` for every trainer parameter.

    Raises:
        LayoutError: naming each parameter that has no counterpart, differs in shape or dtype, or
            each engine tensor of which some rows would be left without an owner.

    Examples:
        >>> import torch
        >>> hf = {"a.q_proj.weight": torch.zeros(4, 2), "a.k_proj.weight": torch.zeros(2, 2),
        ...       "a.v_proj.weight": torch.zeros(2, 2)}
        >>> engine_layout(hf, {"a.qkv_proj.weight": torch.zeros(8, 2)})["a.v_proj.weight"]
        Place(name='a.qkv_proj.weight', start=6, stop=8)
    """
    places: dict[str, Place] = {}
    problems: list[str] = []
    for name, param in trainer_params.items():
        place = _place_of(name, param, trainer_params, engine_params)
        target = engine_params.get(place.name)
        if target is None:
            problems.append(f"{name}: the engine has no tensor {place.name}")
        elif param.dtype != target.dtype:
            problems.append(f"{name}: dtype {param.dtype} here, {target.dtype} in the engine")
        elif param.shape[1:] != target.shape[1:] or place.stop > target.shape[0]:
            problems.append(f"{name}: shape {tuple(param.shape)} does not fit rows "
                            f"{place.start}:{place.stop} of {place.name} {tuple(target.shape)}")
        places[name] = place
    problems += _uncovered(places, engine_params)
    if problems:
        raise LayoutError("the trainer's and the engine's parameters do not match:\n  "
                          + "\n  ".join(problems))
    return places


def view(place: Place, engine_params: dict[str, Tensor]) -> Tensor:
    """The engine's memory at ``place``."""
    return engine_params[place.name].data[place.start : place.stop]


def _place_of(
    name: str, param: Tensor, trainer_params: dict[str, Tensor], engine_params: dict[str, Tensor]
) -> Place:
    module, part, suffix = _split_fused(name)
    # Feed-forward layers without a gate have an up projection of their own.
    if part is None or name in engine_params:
        return Place(name, 0, param.shape[0])
    fused, index = FUSED[part]
    # A part that is missing leaves rows without an owner, which is reported for the whole tensor.
    before = (trainer_params.get(f"{module}{other}{suffix}") for other in _PARTS[fused][:index])
    start = sum(other.shape[0] for other in before if other is not None)
    return Place(f"{module}{fused}{suffix}", start, start + param.shape[0])


def _split_fused(name: str) -> tuple[str, str | None, str]:
    """``model.layers.0.self_attn.q_proj.weight`` -> its prefix, ``q_proj``, ``.weight``."""
    for part in FUSED:
        if f".{part}." in name:
            head, tail = name.split(f".{part}.")
            return head + ".", part, "." + tail
    return name, None, ""


def _uncovered(places: dict[str, Place], engine_params: dict[str, Tensor]) -> list[str]:
    covered: dict[str, int] = {}
    for place in places.values():
        covered[place.name] = covered.get(place.name, 0) + place.stop - place.start
    problems = []
    for name, tensor in engine_params.items():
        rows = covered.get(name, 0)
        padded = name.endswith(_VOCABULARY) and 0 < tensor.shape[0] - rows < 64 and rows
        if rows != tensor.shape[0] and not padded:
            problems.append(f"{name}: {rows} of the engine's {tensor.shape[0]} rows have a "
                            "counterpart in the trainer")
    return problems
