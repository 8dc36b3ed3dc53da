"""How long the phases of a step take: measured constants, and how they grow with model and devices.

A phase's time is its arithmetic or its bytes over a measured rate, plus what was measured to take
the same time whatever the model. :data:`H200` has the rates and where each was measured;
:mod:`grpo.run.plan.calibrate` measures those of the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.plan.simulate import Phases, Work

#: Bytes of a weight and of a gradient that travel between ranks.
_WEIGHT, _GRADIENT = 2, 4


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Rates of one device of a kind, and of the ways between devices.

    Rates of arithmetic are floating-point operations a second.
    """

    source: str  # in words
    decode_floor: float  # seconds of a decode step, however few its rows: the engine's own process
    decode_rate: float  # of a decode step
    memory_rate: float  # bytes a second that a decode step reads
    decode_scale: float = 1.0  # by which decode steps were measured to take longer than these say
    train_rate: float  # of compiled layers, forward and backward
    eager_rate: float  # the same of layers that are not compiled
    optimizer: float  # seconds a trained parameter
    canary: float  # seconds a step
    driver_row: float  # seconds of the trainer's process for a row, in a step
    driver_row_apart: float  # the same of rows that come from workers
    score_share: float  # time of a reference's forward pass, in times of training
    lora_train: float  # time of training adapters, in times of training all
    lora_decode: float  # time of a decode step with an adapter, in times of one without
    link_rate: float  # bytes a second between devices of a host
    transfer_rate: float  # bytes a second of a weight update
    transfer_floor: float  # seconds of a weight update from several ranks
    gather: float  # seconds beside the bytes, for each pass of a layer that several ranks share
    network_rate: float  # bytes a second between hosts
    all_reduce: float  # seconds of one in a decode step; a layer has two

    def changed(self, **values: object) -> Costs:
        return Costs(**(vars(self) | values))


# Of the model that was measured: parameters, and operations of a trained token in rows of 320.
_PARAMETERS = 1.5437e9
_FLOP = 6 * (_PARAMETERS + 28 * 1536 * 320)

H200 = Costs(
    source="H200, measured with 1.5 B parameters and vLLM 0.25.1: grpo/run/plan/costs.py names the "
           "files in benchmarks/results",
    # step_time_h200.json: generate 1.181 s for 256 tokens, less 0.016 s for the prompts. 64 rows
    # take as long (server_overhead_h100.json): the GPU waits for the engine's process.
    decode_floor=(1.1814 - 0.016) / 256,
    # benchmarks/README.md: of 256 decode steps the GPU needs 0.97 s, of which reading weights and
    # cache takes 0.24 s at the memory rate of an H200.
    decode_rate=256 * 256 * 2 * _PARAMETERS / (0.97 - 0.24), memory_rate=4.8e12,
    # step_time_h200.json, packed: 32 x 64 + 256 x 256 tokens in 1.2135 s.
    train_rate=67_584 * _FLOP / 1.2135,
    # async_step_2h200.json, synchronous: 81,920 tokens in 2.0217 s.
    eager_rate=81_920 * _FLOP / 2.0217,
    optimizer=0.0234 / _PARAMETERS, canary=0.0244,  # step_time_h200.json
    # async_step_2h200.json, synchronous: what is left of 3.649 s beside the phases that are timed.
    driver_row=0.0475 / 256,
    # async_step_2h200.json, asynchronous: the same of 2.231 s.
    driver_row_apart=0.1455 / 256,
    # async_step_4h200_reference.json: busy for 0.2855 of 2.666 s; training alone takes 2.0217 s.
    score_share=0.761 / 2.0217,
    lora_train=2.2255 / 2.0090,  # async_lora_2h200.json beside async_step_2h200.json
    lora_decode=44_286 / 37_496,  # arrangements_h200.json beside arrangements_lora_h200.json
    link_rate=262e9,  # weight_update_2h200.json, one tensor after another by NCCL
    transfer_rate=110e9,  # the same, direct_256_mib_small_16
    transfer_floor=0.1448,  # sharded_update_tiny_2h200.json
    # step_time_2h200_ranks.json: 1.351 s, of which half of one device's 2.0217 s and 70 ms for
    # bytes; 5 micro-batches of 2 passes of 28 layers.
    gather=(1.3512 - 2.0217 / 2 - 0.070) / (5 * 2 * 28),
    network_rate=50e9,  # 400 Gbit/s a device, as hosts of eight have; not measured
    all_reduce=20e-6,  # not measured
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who computes where.

    Examples:
        >>> str(Layout(train=2, engines=2, tensor_parallel=2, reference=1))
        '2+4+1'
        >>> str(Layout(train=2, engines=0))
        '2'
    """

    train: int
    engines: int  # of their own; 0: one on the first device that trains
    tensor_parallel: int = 1
    reference: int = 0  # devices of its own
    lora: LoRA | None = None
    staleness: int = 0  # above 0: grpo-async.py

    @property
    def has_workers(self) -> bool:
        """Whether the trainer waits for others at all."""
        return self.engines > 0 or self.reference > 0

    @property
    def devices(self) -> int:
        return self.train + self.engines * self.tensor_parallel + self.reference

    def __str__(self) -> str:
        parts = [self.train, self.engines * self.tensor_parallel, self.reference]
        return "+".join(str(part) for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the trainer computes."""

    compiled: bool
    packed: bool
    micro_batch: int  # tokens at a time on a device
    optimizer_steps: int = 1  # a batch
    epochs: int = 1
    scores: bool = False  # whether anything is compared with a reference
    own_scores: int = 0  # further forward passes over a batch before its first optimizer step
    checkpointing: bool = False  # whether each layer is computed again in the backward pass


def phases_of(
    costs: Costs, shape: ModelShape, work: Work, layout: Layout, training: Training, *,
    hosts: int = 1,
) -> Phases:
    """Seconds of the phases of a layout over so many ``hosts``."""
    def train(tokens: float) -> float:
        return train_seconds(costs, shape, work, layout, training, tokens)

    def score(tokens: float) -> float:
        return costs.score_share * _compute_seconds(
            costs, shape, work, tokens + work.rows * work.prompt_tokens, training)

    rows = work.groups * work.rows
    prefill = 2 * shape.parameters * work.prompt_tokens / costs.decode_rate
    publish = publish_seconds(costs, shape, layout, hosts=hosts)
    # A sharded model scores the canary's tokens in one more forward pass.
    canary = costs.canary + (layout.train > 1) * 2 * shape.layers * costs.gather
    if not layout.engines:  # the engine answers it before it generates
        publish, canary = publish + canary, 0.0
    return Phases(
        decode=lambda rows: decode_seconds(costs, shape, work, layout, rows),
        prefill=prefill / layout.tensor_parallel, train=train,
        publish=publish, canary=canary,
        driver=rows * (costs.driver_row_apart if layout.engines else costs.driver_row),
        score=score if layout.reference else None)


def decode_seconds(costs: Costs, shape: ModelShape, work: Work, layout: Layout, rows: int) -> float:
    """Of a step of one engine: the GPU's time, but at least what the engine's process takes."""
    context = work.prompt_tokens + work.mean_tokens / 2
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * _WEIGHT * context
    read = shape.parameters * _WEIGHT + rows * cache
    gpu = read / costs.memory_rate + rows * 2 * shape.parameters / costs.decode_rate
    seconds = costs.decode_scale * gpu / layout.tensor_parallel
    seconds += (layout.tensor_parallel > 1) * 2 * shape.layers * costs.all_reduce
    seconds = max(costs.decode_floor, seconds)
    return seconds * (costs.lora_decode if layout.lora else 1.0)


def train_seconds(costs: Costs, shape: ModelShape, work: Work, layout: Layout, training: Training,
                  tokens: float) -> float:
    """Of all optimizer steps on a batch whose completions have so many ``tokens``, and of what it
    is scored with before: by the policy, a teacher, or a reference without devices of its own."""
    prompts = work.groups * (1 if training.packed else work.rows) * work.prompt_tokens
    computed = tokens + prompts
    once = _compute_seconds(costs, shape, work, computed, training)
    scores = training.own_scores + (training.scores and not layout.reference)
    updates = training.epochs * (costs.lora_train if layout.lora else 1.0)
    if training.checkpointing:
        updates *= 1 + costs.score_share
    ranks, trained = layout.train, shape.parameters
    seconds = once * (updates + scores * costs.score_share) / ranks
    if layout.lora:
        trained = sum(shape.adapter_sizes(layout.lora))
    if ranks > 1:
        pieces = -(-computed // (ranks * training.micro_batch))
        passes = 2 * training.epochs * max(training.optimizer_steps, pieces) + scores * pieces
        share = (ranks - 1) / ranks
        seconds += passes * (shape.layers * costs.gather
                             + shape.parameters * _WEIGHT * share / costs.link_rate)
        seconds += (training.optimizer_steps * training.epochs * trained * _GRADIENT * share
                    / costs.link_rate)
    return seconds + (training.optimizer_steps * training.epochs * trained * costs.optimizer
                      / ranks)


def _compute_seconds(
    costs: Costs, shape: ModelShape, work: Work, tokens: float, training: Training
) -> float:
    """Of a forward and backward pass of all weights on one device."""
    row = work.prompt_tokens + work.mean_tokens
    flop = 6 * shape.parameters + 6 * shape.layers * shape.heads * shape.head_dim * row
    return tokens * flop / (costs.train_rate if training.compiled else costs.eager_rate)


def publish_seconds(costs: Costs, shape: ModelShape, layout: Layout, *, hosts: int = 1) -> float:
    """Of a weight update, while engines stand still."""
    size = shape.parameters * _WEIGHT
    if layout.lora:
        size = sum(shape.adapter_sizes(layout.lora)) * _WEIGHT
    if layout.train == 1 and not layout.engines:
        return 0.001  # one copy: nothing travels (step_time_h200.json)
    rate = costs.transfer_rate if hosts == 1 else min(costs.transfer_rate, costs.network_rate)
    return size / rate + (costs.transfer_floor if layout.train > 1 else 0.0)
