"""The engine's end of a weight transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo.weights.channel import Channel, Deadline, Packing, as_words, buckets
from grpo.weights.fingerprint import fingerprints
from grpo.weights.handover import map_tensors
from grpo.weights.handover_file import Handover
from grpo.weights.layout import base_parameters

#: ``[local start, start in the whole tensor, length]`` along one dimension.
Segment = list[int]


@dataclass(frozen=True)
class Piece:
    """What one worker holds of a trainer's parameter: ``length`` entries along ``dim``."""

    dim: int
    local: int
    offset: int
    length: int


class TransferMethods:
    """Methods a vLLM worker gets through ``worker_extension_cls``; all arguments are JSON values.

    A plan has for each parameter, in the order of sending, ``name``, ``tensor`` (the engine's
    name), ``start`` (its first row there), ``shape`` and ``dtype``.
    """

    def transfer_describe(self) -> dict[str, Any]:
        """LoRA adapters, and of each tensor the whole that it is a part of."""
        model = self.model_runner.get_model()
        adapters = getattr(model, "lora_manager", None)
        return {"adapters": sorted(adapters.list_adapters()) if adapters else [],
                "tensors": describe_tensors(model)}

    def transfer_connect(self, config: dict[str, Any], plan: list[dict[str, Any]]) -> None:
        """Join the sender's group.

        Args:
            config: from :meth:`grpo.weights.channel.Channel.host`, with ``bucket_bytes`` and
                ``small_bytes``.
            plan: what will come.
        """
        self.transfer_close()
        self._transfer = _Receiving(self, config, plan)

    def transfer_receive(self, seconds: float) -> None:
        """Receive all parameters into the engine's memory."""
        self._transfer.receive(seconds)

    def transfer_map(self, handovers: list[dict[str, Any]], plan: list[dict[str, Any]]) -> None:
        """Map the trainer's memory, by one handover for all workers or one for each."""
        self.transfer_close()
        mine = handovers[self.rank if len(handovers) > 1 else 0]
        mapped = map_tensors(Handover.from_dict(mine))
        model = self.model_runner.get_model()
        tensors, described = engine_tensors(model), describe_tensors(model)
        self._mapped_pairs = [
            (local(tensors[item["tensor"]], piece),
             mapped[item["name"]].narrow(piece.dim, piece.offset, piece.length))
            for item in plan for piece in pieces_of(described.get(item["tensor"]), item)]

    @torch.no_grad()
    def transfer_copy(self) -> None:
        """Copy the mapped parameters into the engine's memory."""
        for target, source in self._mapped_pairs:
            target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def transfer_fingerprints(self, plan: list[dict[str, Any]]) -> list[list[str]]:
        """For each parameter of ``plan``, the fingerprints of the pieces this worker holds."""
        model = self.model_runner.get_model()
        tensors = engine_tensors(model)
        # What the tensors are parts of stays; the tensors themselves may have been replaced.
        if getattr(self, "_transfer_described", (None,))[0] is not model:
            self._transfer_described = model, describe_tensors(model)
        described = self._transfer_described[1]
        pieces = [pieces_of(described.get(item["tensor"]), item) for item in plan]
        found = iter(fingerprints(local(tensors[item["tensor"]], piece)
                                  for item, held in zip(plan, pieces, strict=True)
                                  for piece in held))
        return [[next(found) for _ in held] for held in pieces]

    def transfer_close(self) -> None:
        """Leave the sender's group."""
        if state := getattr(self, "_transfer", None):
            state.channel.close()
        self._transfer = self._mapped_pairs = None


@dataclass(frozen=True)
class _Arrival:
    """A parameter on its way: as what it comes, and where its parts belong in the engine."""

    whole: Tensor  # its shape and type, without memory
    landing: Tensor | None  # the engine's memory, where that holds the whole parameter
    parts: list[tuple[Tensor, Piece]]


class _Bucket:
    """Parameters that travel together: the large ones by themselves, the small ones packed."""

    def __init__(self, arrivals: list[_Arrival], small_bytes: int) -> None:
        self.large = [arrival for arrival in arrivals if arrival.whole.nbytes >= small_bytes]
        self.small = [arrival for arrival in arrivals if arrival.whole.nbytes < small_bytes]
        self.packed_sizes = [arrival.whole.nbytes for arrival in self.small]
        landings = [arrival.landing for arrival in self.small if arrival.landing is not None]
        # The engine's memory of all small ones, if it holds each of them whole.
        self.words = as_words(landings) if len(landings) == len(self.small) else []


def _copy_parts(arrived: Iterable[tuple[_Arrival, Tensor]]) -> None:
    """Bring what a worker holds of whole parameters into the engine's memory."""
    pairs = [(target, part_of(whole, piece))
             for arrival, whole in arrived for target, piece in arrival.parts]
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


class _Receiving:
    def __init__(self, worker: Any, config: dict[str, Any], plan: list[dict[str, Any]]) -> None:
        model = worker.model_runner.get_model()
        self.device = torch.device(worker.device)
        tensors, described = engine_tensors(model), describe_tensors(model)
        arrivals = iter([self._arrival(item, tensors.get(item["tensor"]),
                                       pieces_of(described.get(item["tensor"]), item))
                         for item in plan])
        self.buckets = [
            _Bucket([next(arrivals) for _ in range(count)], config["small_bytes"])
            for count in buckets((plan_bytes(item) for item in plan), config["bucket_bytes"])]
        first = config.get("first_rank", 1)  # of this engine, where several join
        self.channel = Channel(config, rank=first + worker.rank, device=self.device)

    @torch.no_grad()
    def receive(self, seconds: float) -> None:
        deadline = Deadline(seconds, "receiving weights",
                            fix="look at the trainer, which stopped sending")
        flying: tuple[int, list, list[Tensor], Packing] | None = None
        for number, bucket in enumerate(self.buckets):
            landings = [arrival.landing if arrival.landing is not None else
                        torch.empty_like(arrival.whole, device=self.device)
                        for arrival in bucket.large]
            packing = Packing(bucket.packed_sizes, device=self.device)
            works = self.channel.broadcast(landings + [packing.message] * bool(bucket.small))
            if flying:  # the next bucket is on its way while this one is stored
                self._store(*flying, deadline)
            flying = (number, works, landings, packing)
        if flying:
            self._store(*flying, deadline)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _arrival(self, item: dict[str, Any], tensor: Tensor | None, pieces: list[Piece]
                 ) -> _Arrival:
        whole = torch.empty(tuple(item["shape"]), dtype=getattr(torch, item["dtype"]),
                            device="meta")
        parts = [(local(tensor, piece), piece) for piece in pieces]
        landing = next((target for target, _ in parts
                        if target.shape == whole.shape and target.is_contiguous()), None)
        return _Arrival(whole, landing, parts)

    def _store(self, number: int, works: list[Any], landings: list[Tensor], packing: Packing,
               deadline: Deadline) -> None:
        self.channel.wait(works, deadline, f"bucket {number + 1} of {len(self.buckets)}")
        bucket = self.buckets[number]
        _copy_parts((arrival, whole) for arrival, whole in zip(bucket.large, landings, strict=True)
                    if arrival.landing is None)
        if bucket.words:
            packing.unpack(bucket.words)
        else:
            _copy_parts(zip(bucket.small, packing.views(a.whole for a in bucket.small),
                            strict=True))


def engine_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The engine's parameters by name; an adapter's wrapper leaves no trace in the name."""
    return {name: param.data for name, param in base_parameters(model).items()}


def describe_tensors(model: nn.Module) -> dict[str, dict[str, Any]]:
    """For each parameter of a vLLM model: dtype, shape of the whole tensor, the segments held."""
    described = {}
    names = set(engine_tensors(model))  # a tied head is listed once
    for path, module in model.named_modules():
        for key, param in module.named_parameters(path, recurse=False):
            key = key.replace(".base_layer.", ".")
            if key not in names:
                continue
            dim, length, segments = _segments(module, param)
            whole = [length if d == dim else size for d, size in enumerate(param.shape)]
            described[key] = {"dtype": str(param.dtype).removeprefix("torch."), "shape": whole,
                              "dim": dim, "segments": segments}
    return described


def pieces_of(described: dict[str, Any] | None, item: dict[str, Any]) -> list[Piece]:
    """The parts of a parameter, which lies at rows ``start`` on, that a worker holds.

    Examples:
        A worker has rows 4:6 of a tensor of eight, whose rows 3:8 are the parameter.

        >>> pieces_of({"dim": 0, "segments": [[0, 4, 2]]}, {"start": 3, "shape": [5, 7]})
        [Piece(dim=0, local=0, offset=1, length=2)]
    """
    if described is None:  # a layer of another pipeline stage
        return []
    dim, shape = described["dim"], item["shape"]
    start = item["start"] if dim == 0 else 0
    stop = start + (shape[dim] if shape else 1)
    pieces = []
    for local, begin, length in described["segments"]:
        low, high = max(begin, start), min(begin + length, stop)
        if low < high:
            pieces.append(Piece(dim, local + low - begin, low - start, high - low))
    return pieces


def plan_bytes(item: dict[str, Any]) -> int:
    return math.prod(item["shape"]) * getattr(torch, item["dtype"]).itemsize


def local(tensor: Tensor, piece: Piece) -> Tensor:
    """The memory of ``piece`` in a worker's ``tensor``."""
    return tensor.narrow(piece.dim, piece.local, piece.length) if tensor.dim() else tensor


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """What of the trainer's ``whole`` parameter a worker's ``piece`` is."""
    return whole.narrow(piece.dim, piece.offset, piece.length) if whole.dim() else whole


def _segments(module: nn.Module, param: Tensor) -> tuple[int, int, list[Segment]]:
    """Dimension, whole length and held segments of a parameter.

    vLLM's layers know how they are divided between workers; read by attribute, because these
    attributes are older and steadier than the classes' names.
    """
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    rows = param.shape[0] if param.dim() else 1
    if hasattr(module, "shard_indices"):  # embeddings and heads, padded
        held = module.shard_indices
        begin, end = held.org_vocab_start_index, held.org_vocab_end_index
        return 0, module.org_vocab_size, [[0, begin, end - begin]]
    if hasattr(module, "w13_weight"):
        return _expert_segments(module, param)
    if hasattr(module, "total_num_kv_heads"):
        return 0, *_attention_segments(module, rank)
    if size > 1 and hasattr(module, "output_sizes"):
        parts = [(whole // size, rank * whole // size, whole) for whole in module.output_sizes]
        return 0, *_fused_segments(parts)
    if size > 1 and param.dim() == 2 and param.shape[1] * size == getattr(module, "input_size", 0):
        columns = param.shape[1]
        return 1, columns * size, [[0, rank * columns, columns]]
    if size > 1 and rows * size == getattr(module, "output_size", 0):
        return 0, rows * size, [[0, rank * rows, rows]]
    return 0, rows, [[0, 0, rows]]


def _attention_segments(module: nn.Module, rank: int) -> tuple[int, list[Segment]]:
    """Query heads are divided; key and value heads are divided or, where scarce, repeated."""
    value_size = getattr(module, "v_head_size", module.head_size)
    queries, heads = module.num_heads * module.head_size, module.num_kv_heads
    first = rank // module.num_kv_head_replicas * heads
    parts = [(queries, rank * queries, module.total_num_heads * module.head_size)]
    parts += [(heads * width, first * width, module.total_num_kv_heads * width)
              for width in (module.head_size, value_size)]
    return _fused_segments(parts)


def _expert_segments(module: nn.Module, param: Tensor) -> tuple[int, int, list[Segment]]:
    """A worker has all experts, and of each a share of the inner dimension."""
    parallel = module.moe_config.moe_parallel_config
    rank, size, rows = parallel.tp_rank, parallel.tp_size, param.shape[0]
    if rows != module.moe_config.num_experts:
        raise ValueError("inference_model.weight_sync is not supported for mixture-of-experts "
                         "models whose experts are divided among workers (expert parallelism); "
                         "start the engine without it")
    if size == 1:
        return 0, rows, [[0, 0, rows]]
    if param is module.w2_weight:
        columns = param.shape[2]
        return 2, columns * size, [[0, rank * columns, columns]]
    inner = param.shape[1] // 2  # of the gate, and as much of the up projection
    return 1, *_fused_segments([(inner, rank * inner, inner * size)] * 2)


def _fused_segments(parts: list[tuple[int, int, int]]) -> tuple[int, list[Segment]]:
    """``(held rows, first held row, all rows)`` of each fused part to one list of segments.

    Examples:
        >>> _fused_segments([(4, 0, 4), (2, 0, 2)])  # one worker holds all: one segment
        (6, [[0, 0, 6]])
        >>> _fused_segments([(2, 2, 4), (1, 1, 2)])
        (6, [[0, 2, 2], [2, 5, 1]])
    """
    local = whole = 0
    segments: list[Segment] = []
    for held, first, rows in parts:
        begin = whole + first
        if segments and segments[-1][1] + segments[-1][2] == begin:
            segments[-1][2] += held
        else:
            segments.append([local, begin, held])
        local, whole = local + held, whole + rows
    return whole, segments
