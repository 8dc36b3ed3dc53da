"""Hugging Face parameter names as views into vLLM's fused tensors.

vLLM stores query, key and value of a layer in one matrix, gate and up projection in another, and
pads the vocabulary. Every Hugging Face parameter is therefore a row range of one engine tensor, and
a view of that range is the same memory.

The rules hold for dense decoders: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text) and Phi-3; and
for mixtures of experts: Qwen2-MoE, Qwen3-MoE, OLMoE and Mixtral, of which both sides keep all
experts of a layer in two tensors of one shape (:mod:`grpo.policies.unpacked` sees to that). They
follow ``packed_modules_mapping`` of vLLM's model classes but need only names and shapes. A module
with any other name is an error: equal names do not mean equal storage (vLLM transposes GPT-2's
matrices and reorders the rows of Bloom's fused attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor, nn

Params: TypeAlias = Mapping[str, Tensor]

#: What peft puts before the names of a model that it wraps whole.
PEFT_PREFIX = "base_model.model."

# Engine module -> the Hugging Face modules whose rows it holds, in order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
# Modules that both sides store alike.
_SAME = frozenset({
    "embed_tokens", "lm_head", "qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj",
    "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "norm", "gate", "shared_expert_gate"})
# Hugging Face's tensors ``[experts, out, in]`` of all experts of a layer, and vLLM's, which are
# parameters of the module itself or of one within.
EXPERTS = {".gate_up_proj": "w13_weight", ".down_proj": "w2_weight"}
_EXPERT_HOLDERS = ("experts.routed_experts.", "experts.")
PADDED_EXPERTS = ("the engine pads experts for its kernel, which is not supported for "
                  "mixture-of-experts models; start it with vLLM's moe_backend=triton")
SHUFFLED_EXPERTS = ("the engine's kernel keeps experts in an order of its own, which is not "
                    "supported for mixture-of-experts models; start it with vLLM's "
                    "moe_backend=triton")
# What Hugging Face calls a layer's feed-forward part, and what vLLM's Mixtral does.
_FEED_FORWARD = (".mlp.", ".block_sparse_moe.")
_HEAD = "lm_head.weight"
# Matrices whose rows are vocabulary entries; vLLM pads them to a multiple of 64.
_VOCABULARY, _VOCABULARY_BLOCK = ("embed_tokens.weight", _HEAD), 64


class LayoutError(ValueError):
    """The two models do not have the same parameters."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lives in the engine: rows ``start:stop`` of tensor ``name``."""

    name: str
    start: int
    stop: int


def engine_layout(trainer_params: Params, engine_params: Params) -> dict[str, Place]:
    """Find the place of every trainer parameter in the engine.

    Only names, shapes and dtypes are compared, and addresses to see which names are one tensor, so
    tensors on the ``meta`` device will do. A tied head may be listed under both names or only as
    the embedding. Rows of the engine's vocabulary beyond the trainer's are padding.

    Args:
        trainer_params: Hugging Face names to tensors.
        engine_params: vLLM names to tensors.

    Raises:
        LayoutError: naming each parameter that has no counterpart, differs in shape or dtype or has
            a name without a rule, each engine tensor of which some rows would be left without an
            owner or have two, and a head that only one side ties to the embedding.

    Examples:
        >>> import torch
        >>> hf = {"a.q_proj.weight": torch.zeros(4, 2), "a.k_proj.weight": torch.zeros(2, 2),
        ...       "a.v_proj.weight": torch.zeros(2, 2)}
        >>> engine_layout(hf, {"a.qkv_proj.weight": torch.zeros(8, 2)})["a.v_proj.weight"]
        Place(name='a.qkv_proj.weight', start=6, stop=8)
    """
    ours, theirs = _first_names(trainer_params), _first_names(engine_params)
    problems = _head_tied_on_one_side(ours, theirs)
    explained = {_HEAD} if problems else set()
    places: dict[str, Place] = {}
    for name in dict.fromkeys(ours.values()):
        if name not in explained:
            place = _place_of(name, trainer_params, engine_params)
            problems += _misfit(name, trainer_params[name], place, engine_params)
            places[name] = replace(place, name=theirs.get(place.name, place.name))
    parts = hf_names(places)
    for name in dict.fromkeys(theirs.values()):
        if name not in explained:
            problems += _wrongly_covered(name, engine_params[name], parts.get(name, []), places)
    if problems:
        raise LayoutError("the trainer's and the engine's parameters do not match:\n  "
                          + "\n  ".join(problems))
    return {name: places[first] for name, first in ours.items()}


def view(place: Place, engine_params: Params) -> Tensor:
    """The engine's memory at ``place``."""
    return engine_params[place.name].data[place.start : place.stop]


def hf_names(places: Mapping[str, Place]) -> dict[str, list[str]]:
    """Which Hugging Face parameters live in each engine tensor, in the order of their rows.

    Examples:
        >>> hf_names({"a.v_proj.weight": Place("a.qkv_proj.weight", 6, 8),
        ...           "a.q_proj.weight": Place("a.qkv_proj.weight", 0, 6)})
        {'a.qkv_proj.weight': ['a.q_proj.weight', 'a.v_proj.weight']}
    """
    names: dict[str, list[str]] = {}
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        names.setdefault(place.name, []).append(name)
    return names


def _first_names(params: Params) -> dict[str, str]:
    """Each name mapped to one name of the same tensor: itself, unless it is a tied head."""
    first: dict[tuple, str] = {}
    # Tensors without memory have no address; two names of one are then one object.
    return {name: first.setdefault((t.device, t.data_ptr() or id(t), t.shape), name)
            for name, t in sorted(params.items(), key=lambda item: item[0] == _HEAD)}


def _head_tied_on_one_side(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """One Parameter cannot lie in two tensors, nor two Parameters in one."""
    own_here, own_there = ours.get(_HEAD) == _HEAD, theirs.get(_HEAD) == _HEAD
    if own_here == own_there:
        return []
    tied, apart = ("the engine", "the trainer") if own_here else ("the trainer", "the engine")
    return [f"{_HEAD}: {tied} ties it to the embedding, {apart} keeps a tensor of its own; load "
            "both with the same tie_word_embeddings"]


def is_experts(name: str, param: Tensor) -> bool:
    """Whether a Hugging Face parameter is all experts of a layer in one tensor.

    Examples:
        >>> import torch
        >>> is_experts("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(8, 96, 64))
        True
    """
    _, module, kind = _split(name)
    return module == "experts" and kind in EXPERTS and param.dim() == 3


def _place_of(name: str, trainer_params: Params, engine_params: Params) -> Place:
    prefix, module, kind = _split(name)
    rows, experts = _rows(trainer_params[name]), is_experts(name, trainer_params[name])
    if experts or module == "gate":
        ends = ([holder + EXPERTS[kind] for holder in _EXPERT_HOLDERS] if experts
                else [module + kind])
        names = [path + end for path in (prefix, prefix.replace(*_FEED_FORWARD)) for end in ends]
        return Place(next((n for n in names if n in engine_params), names[0]), 0, rows)
    fused = _FUSED_OF.get(module)
    # Feed-forward layers without a gate have an up projection of their own.
    if fused is None or name in engine_params:
        return Place(name, 0, rows)
    # A part that is missing leaves rows without an owner, which is reported for the whole tensor.
    parts = FUSED[fused]
    before = (trainer_params.get(f"{prefix}{part}{kind}") for part in parts[:parts.index(module)])
    start = sum(_rows(part) for part in before if part is not None)
    return Place(f"{prefix}{fused}{kind}", start, start + rows)


def _split(name: str) -> tuple[str, str, str]:
    """``model.layers.0.self_attn.q_proj.weight`` -> its prefix, ``q_proj``, ``.weight``."""
    path, _, kind = name.rpartition(".")
    module = path.rpartition(".")[2]
    return path.removesuffix(module), module, f".{kind}"


def _misfit(name: str, param: Tensor, place: Place, engine_params: Params) -> list[str]:
    module = _split(name)[1]
    target = engine_params.get(place.name)
    if module not in _SAME and module not in _FUSED_OF and not is_experts(name, param):
        return [f"{name}: it is not known how the engine stores a module called {module!r}; this "
                "architecture needs weights that are copied, not shared"]
    if target is None:
        return [f"{name}: the engine has no tensor {place.name}"]
    if param.dtype != target.dtype:
        return [f"{name}: dtype {param.dtype} here, {target.dtype} in the engine"]
    if param.shape[1:] != target.shape[1:] or place.stop > _rows(target):
        own_form = is_experts(name, param)
        return [f"{name}: shape {tuple(param.shape)} does not fit rows {place.start}:{place.stop} "
                f"of {place.name} {tuple(target.shape)}" + own_form * f"; {PADDED_EXPERTS}"]
    return []


def _wrongly_covered(
    name: str, tensor: Tensor, parts: list[str], places: dict[str, Place]
) -> list[str]:
    end = 0
    for ours in parts:
        if places[ours].start < end:
            return [f"{name}: row {places[ours].start} belongs to {ours} and to another parameter "
                    "of the trainer"]
        end = places[ours].stop
    ownerless = _rows(tensor) - end
    padded = end > 0 and name.endswith(_VOCABULARY) and ownerless < _VOCABULARY_BLOCK
    if ownerless > 0 and not padded:
        return [f"{name}: {end} of the engine's {_rows(tensor)} rows have a counterpart in the "
                "trainer"]
    return []


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a trainer's or an engine's model under the names they have without LoRA.

    Both peft and vLLM put a ``base_layer`` between an adapted module and its weight; peft may also
    wrap the whole model.
    """
    return {_without_wrappers(name): param
            for name, param in model.named_parameters() if ".lora_" not in name}


def parameter_reader(model: nn.Module) -> Callable[[], dict[str, Tensor]]:
    """:func:`base_parameters` for one who asks after each update.

    Walking through 400 modules takes a millisecond, so where they keep their parameters is looked
    up once. A parameter that has been replaced is seen; one whose whole module was replaced is not.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False))
        >>> read = parameter_reader(model)
        >>> model[0].weight = nn.Parameter(torch.ones(1, 1))
        >>> read()["0.weight"].item()
        1.0
    """
    kept = {}
    for name, _ in model.named_parameters():
        if ".lora_" in name:
            continue
        path, _, key = name.rpartition(".")
        kept[_without_wrappers(name)] = (model.get_submodule(path)._parameters, key)
    return lambda: {name: parameters[key] for name, (parameters, key) in kept.items()}


def _without_wrappers(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the modules that an engine has wrapped for LoRA back in their places, for vLLM's loaders:
    the wrappers of its older versions do not have the names that these look for."""
    wrapped = [(parent, name, child) for parent in model.modules()
               for name, child in parent.named_children() if hasattr(child, "base_layer")]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)
