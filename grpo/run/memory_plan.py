"""What a run holds in a device's memory, row by row.

Weights, masters, moments, gradients and KV cache are exact, activations a formula
(:func:`grpo.run.memory.layer_bytes`), and what CUDA and Python take for themselves an allowance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from grpo.config.keys import OptimizerName
from grpo.config.model import Quantization
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.ledger import GIB, PHASES, Ledger, Row, human
from grpo.run.memory import DeviceType, Head, head_bytes, layer_bytes, outer_bytes, transient_bytes
from grpo.weights.quantised import quantised_bytes

#: Whether engine and trainer read the same weights, or each has its own on this device; ``apart``:
#: the engine is on another device, or was here before this run; ``lent``: it was here, and the
#: trainer reads its weights.
Sharing = Literal["one_copy", "two_copies", "apart", "lent"]

#: Allowances: a CUDA context with its libraries, captured CUDA graphs, a Python process on a CPU.
CONTEXT_BYTES, GRAPH_BYTES, PROCESS_BYTES = int(0.6 * GIB), GIB, GIB
#: Share of activations and head that a caching allocator loses in gaps.
FRAGMENTATION = 0.05
#: Bytes a value beside the result, while quantised values are written out: 8-bit ones in float32;
#: indices of 8 bytes, codes and scales of 4-bit ones.
WRITING_BYTES: dict[Quantization, int] = {"int8": 8, "nf4": 20}
#: Prompt tokens an engine works on at a time.
ENGINE_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Everything the ledger depends on."""

    shape: ModelShape  # of the model that is trained
    dtype: torch.dtype  # of its weights; masters and moments are float32 at least
    device: DeviceType
    tokens: int  # of a micro-batch, padding included
    row_tokens: int  # of the longest row
    ranks: int = 1  # that share the trainer's weights; the ledger is the first one's
    sharing: Sharing = "one_copy"
    # vLLM holds its KV cache all the time; the trainer's model frees it when training starts.
    in_engine: bool = True
    cuda_graphs: bool = True
    kv_cache_bytes: int = 0  # of the engine, or of all rows of a batch
    generated_rows: int = 0  # at a time
    prompt_tokens: int = 0  # of the longest prompt
    frozen: tuple[tuple[str, int], ...] = ()  # names and parameters of reference and teacher
    gradient_checkpointing: bool = False
    compiled: bool = False
    eager_attention: bool = False  # which keeps its [T, T] weights
    head: Head = "fused"
    head_chunk_size: int | None = None  # tokens; None: by device
    fp32_head: bool = False
    quantization: Quantization | None = None  # of the linear layers beneath adapters
    lora: LoRA | None = None
    lora_slots: int = 0  # of the engine, each for adapters of all linear layers
    lora_slot_rank: int = 16
    optimizer: OptimizerName = "adamw"
    trained_layers: tuple[int, ...] | None = None  # None: everything

    @property
    def engine_counts(self) -> bool:
        """Whether this run takes this device's memory for an engine."""
        return self.sharing in ("one_copy", "two_copies")


def memory_ledger(plan: MemoryPlan) -> Ledger:
    """Of a device that trains, and generates if the engine counts."""
    return Ledger(tuple(_rows(plan)))


def engine_ledger(plan: MemoryPlan, *, devices: int = 1) -> Ledger:
    """Of one of the ``devices`` that share each layer of an engine and do nothing else."""
    b, share = plan.dtype.itemsize, "" if devices == 1 else f"1/{devices} of "
    weights = Row("weights", plan.shape.parameters * b // devices,
                  f"{share}{_millions(plan.shape.parameters)} x {b} bytes")
    slots = [_adapter_slots(plan)] if plan.lora is not None and plan.lora_slots else []
    return Ledger((weights, *slots, *_generation_rows(plan),
                   _reserve(plan, working=0, graphs=True)))


def reference_ledger(plan: MemoryPlan, shape: ModelShape, *, devices: int = 1) -> Ledger:
    """Of one of the ``devices`` that have a part each of a reference of this shape, and do nothing
    but score."""
    b, share = plan.dtype.itemsize, "" if devices == 1 else f"1/{devices} of "
    rows = [Row("reference", shape.parameters * b // devices,
                f"{share}{_millions(shape.parameters)} x {b} bytes")]
    if devices > 1:
        rows.append(_gathered(shape, b))
    [head] = [row for row in _training_rows(plan) if row.name == "head"]
    return Ledger((*rows, head, _reserve(plan, working=head.bytes, graphs=False)))


def engine_bytes(plan: MemoryPlan) -> int:
    """What an engine takes beside its KV cache: weights and the greatest step of generation."""
    work = sum(row.bytes for row in _generation_rows(replace(plan, kv_cache_bytes=0)))
    return plan.shape.parameters * plan.dtype.itemsize + work


def _rows(plan: MemoryPlan) -> Iterator[Row]:
    shape, dtype, b = plan.shape, plan.dtype, plan.dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    copies = {"one_copy": "one copy", "two_copies": "the trainer's", "apart": "the trainer's",
              "lent": "in the engine's memory already"}
    note = f"{_millions(shape.parameters)} x {b} bytes ({name}), {copies[plan.sharing]}"
    weights = 0 if plan.sharing == "lent" else shape.parameters * b
    if plan.quantization is not None:
        weights, note = _quantised(plan)
    yield from _shards(plan) if plan.ranks > 1 else [Row("weights", weights, note)]
    if plan.sharing == "two_copies":
        yield Row("engine", shape.parameters * b,
                  f"{_millions(shape.parameters)} x {b} bytes, the engine's own copy")
    for role, parameters in plan.frozen:
        yield Row(role, parameters * b, f"{_millions(parameters)} x {b} bytes ({name})")
    if plan.quantization is not None:
        yield _written_out(plan)
    yield from _optimizer_rows(plan)
    yield from _training_rows(plan)
    if plan.engine_counts:
        yield from _generation_rows(plan)
    yield _reserve(plan, working=sum(row.bytes for row in _training_rows(plan)),
                   graphs=plan.engine_counts)


def _quantised(plan: MemoryPlan) -> tuple[int, str]:
    """Bytes of weights of which the linear layers are quantised, and a note."""
    shape, b, kind = plan.shape, plan.dtype.itemsize, plan.quantization
    sizes = [(outs, ins) for *_, ins, outs in shape.linears]
    count = sum(outs * ins for outs, ins in sizes)
    held = sum(quantised_bytes(kind, out=outs, width=ins, itemsize=b) for outs, ins in sizes)
    return held + (shape.parameters - count) * b, (
        f"{_millions(count)} in {kind}, {_millions(shape.parameters - count)} x {b} bytes, "
        "the trainer's")


def _written_out(plan: MemoryPlan) -> Row:
    """Of the layer whose product runs."""
    largest = max(ins * outs for *_, ins, outs in plan.shape.linears)
    size = plan.dtype.itemsize + WRITING_BYTES[plan.quantization]
    return Row("written out", largest * size, f"{_millions(largest)} x {size} bytes: the largest "
               "linear layer in its dtype, and what it takes to write it out")


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _shards(plan: MemoryPlan) -> Iterator[Row]:
    """Of a model that :func:`grpo.training.parallel.shard_model` has sharded."""
    shape, b = plan.shape, plan.dtype.itemsize
    size = b if plan.lora else max(4, b)  # what is frozen keeps its dtype
    yield Row("weights", shape.parameters * size // plan.ranks, f"1/{plan.ranks} of "
              f"{_millions(shape.parameters)} x {size} bytes: slices"
              + ("" if plan.lora else ", which are the masters"))
    yield _gathered(shape, b)


def _gathered(shape: ModelShape, b: int) -> Row:
    """What a rank of a sharded model has of it at a time, at ``b`` bytes a parameter."""
    layers = sum(ins * outs for *_, ins, outs in shape.linears)
    whole = shape.parameters - layers + 2 * layers // shape.layers
    return Row("gathered", whole * b, f"{_millions(whole)} x {b} bytes: embeddings, a layer and "
               "the next", ("head", "backward"))


def _optimizer_rows(plan: MemoryPlan) -> Iterator[Row]:
    """Of :class:`grpo.training.optim.MasterAdamW`."""
    b = plan.dtype.itemsize
    count, tensors = plan.shape.parameters, plan.shape.tensors
    if plan.lora is not None:
        sizes = plan.shape.adapter_sizes(plan.lora)
        count, tensors = sum(sizes), len(sizes)
        held = count * b if plan.ranks == 1 else count * max(4, b) // plan.ranks  # the masters
        yield Row("adapters", held, f"{count / 1e6:,.2f} M, rank {plan.lora.rank}")
        if plan.lora_slots and plan.engine_counts:
            yield _adapter_slots(plan)
    elif plan.trained_layers is not None:
        sizes = [ins * outs for layer, _, ins, outs in plan.shape.linears
                 if layer in plan.trained_layers]
        count, tensors = sum(sizes), len(sizes)
    exact = max(4, b)
    if plan.optimizer == "adamw_cpu" and plan.device != "cpu":
        yield Row("gradients", count * b, f"{_millions(count)} x {b} bytes, until each has been "
                  "sent to the host, where masters and moments take "
                  f"{3 * exact * count / GIB:.2f} GiB", ("backward",))
        return
    if b < exact and plan.ranks == 1:
        yield Row("masters", exact * count, f"{_millions(count)} x {exact} bytes")
    share = f"1/{plan.ranks} of " if plan.ranks > 1 else ""
    if plan.optimizer == "adamw_8bit":
        moments, formula = 2 * count + 8 * count // 256, "2 bytes, and scales for 256 values each"
    elif plan.optimizer == "adafactor":
        moments = 2 * exact * count // plan.shape.hidden
        formula = f"{2 * exact} / {plan.shape.hidden} bytes, about: of rows and columns"
    else:  # AdamW counts the steps of each tensor in a float32 of its own
        moments, formula = 2 * exact * count + 4 * tensors, f"{2 * exact} bytes"
    yield Row("moments", moments // plan.ranks, f"{share}{_millions(count)} x {formula}")
    yield Row("gradients", exact * count, f"{_millions(count)} x {exact} bytes, added up in the "
              "masters' dtype", ("head", "backward"))


def _adapter_slots(plan: MemoryPlan) -> Row:
    slot = sum(plan.shape.adapter_sizes(LoRA(rank=plan.lora_slot_rank))) * plan.dtype.itemsize
    return Row("adapter slots", plan.lora_slots * slot,
               f"{plan.lora_slots} of the engine x {human(slot)}: rank {plan.lora_slot_rank}, "
               "all linear layers")


def _training_rows(plan: MemoryPlan) -> Iterator[Row]:
    shape, dtype = plan.shape, plan.dtype
    layer = layer_bytes(shape, dtype, row_tokens=plan.row_tokens, compiled=plan.compiled,
                        eager_attention=plan.eager_attention)
    of_layer = shape.hidden * dtype.itemsize if plan.gradient_checkpointing else layer
    kept = shape.layers * of_layer + outer_bytes(shape, dtype)
    yield Row("activations", plan.tokens * kept,
              f"{plan.tokens:,} tokens x {human(kept)} in {shape.layers} layers",
              ("head", "backward"))
    in_work = transient_bytes(shape, dtype) + (layer if plan.gradient_checkpointing else 0)
    yield Row("layer at work", plan.tokens * in_work, f"{plan.tokens:,} tokens x {human(in_work)}: "
              "the layer whose backward pass runs", ("backward",))
    head = head_bytes(shape, dtype, head=plan.head, tokens=plan.tokens, device=plan.device,
                      chunk_size=plan.head_chunk_size, weight_gradient=plan.lora is None,
                      fp32_head=plan.fp32_head)
    yield Row("head", head.work, f"logits, {plan.head}, vocabulary {shape.vocabulary:,}", ("head",))
    matrix = "" if plan.lora else f" and {shape.vocabulary:,} entries of the output matrix"
    yield Row("head gradients", head.gradients, f"{plan.tokens:,} hidden states{matrix} x "
              f"{shape.hidden * dtype.itemsize} bytes", ("head", "backward"))


def _generation_rows(plan: MemoryPlan) -> Iterator[Row]:
    shape, b = plan.shape, plan.dtype.itemsize
    per_token = shape.kv_bytes_per_token(plan.dtype)
    yield Row("KV cache", plan.kv_cache_bytes,
              f"{plan.kv_cache_bytes // per_token:,} tokens x {human(per_token)}",
              PHASES if plan.in_engine else ("generate",))
    prompts = plan.generated_rows * plan.prompt_tokens
    if plan.in_engine:
        prompts = min(prompts, ENGINE_TOKENS)
    widths = b * (4 * max(1, shape.experts) * shape.intermediate + 4 * shape.hidden)
    logits = shape.vocabulary * (b + 16)  # float32 logits, noise, softmax
    yield max(
        Row("generation", prompts * widths,
            f"{prompts:,} prompt tokens x {human(widths)} to read them", ("generate",)),
        Row("generation", plan.generated_rows * logits,
            f"{plan.generated_rows:,} rows x {human(logits)} to draw tokens", ("generate",)),
        key=lambda row: row.bytes)


def _reserve(plan: MemoryPlan, *, working: int, graphs: bool) -> Row:
    """What CUDA and Python take for themselves, and what is lost in gaps between ``working`` bytes.
    """
    if plan.device == "cpu":
        return Row("reserve", PROCESS_BYTES, "allowance: Python and its libraries")
    captured = GRAPH_BYTES * (graphs and plan.in_engine and plan.cuda_graphs)
    return Row("reserve", int(CONTEXT_BYTES + captured + FRAGMENTATION * working),
               "allowance: CUDA context, graphs, gaps between allocations")
