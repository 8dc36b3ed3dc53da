"""The devices of a run: how much memory they have, and what the run will need of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.model import LORA_SLOTS
from grpo.config.schema import Config
from grpo.objectives.registry import get_objective
from grpo.policies.inprocess import engine_lora_rank, kv_cache_bytes
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.ledger import DoesNotFitError, Ledger, Row, Saving, check_fits, human
from grpo.run.memory import Head
from grpo.run.memory_plan import (
    MemoryPlan,
    Sharing,
    engine_bytes,
    engine_ledger,
    memory_ledger,
    reference_ledger,
)
from grpo.run.placement import DevicePlan
from grpo.training.learner import DEFAULT_TOKENS_PER_MICRO_BATCH, GPU_WIDTH_MULTIPLE


def run_ledger(
    config: Config, model_path: str, device: torch.device, dtype: torch.dtype, backend: str, *,
    max_model_len: int, trained_tokens: int | None = None, engine_apart: bool = False,
    memory: int | None = None,
) -> Ledger:
    """The ledger of a run, before its model and engine are started.

        ledger = run_ledger(config, model_path, device, dtype, backend, max_model_len=...)
        check_fits(ledger, available(config, device))  # grpo.run.ledger

    Args:
        model_path: folder or hub id of the model; only its ``config.json`` is read.
        device: that trains, and generates unless the engine is one that runs already.
        dtype: of the weights.
        backend: ``"vllm"`` or ``"transformers"``.
        max_model_len: prompt plus response in tokens.
        trained_tokens: of the longest row that is trained, where rows are cut; None: what the
            engine may make.
        engine_apart: the engine has another device, see :func:`server_ledger`.
        memory: bytes of a device; None: ``device``, which must be there, is asked.

    Raises:
        ValueError: for adapters of layers that the model does not have.
    """
    sharing = "apart" if engine_apart else _sharing(config, device, backend == "vllm")
    return memory_ledger(_memory_plan(config, model_path, device, dtype, backend, max_model_len,
                                      sharing=sharing, trained_tokens=trained_tokens,
                                      memory=memory))


def server_ledger(
    config: Config, model_path: str, device: torch.device, dtype: torch.dtype, *,
    max_model_len: int,
) -> Ledger:
    """The ledger of an engine server that the run starts on a ``device`` of its own."""
    return engine_ledger(_memory_plan(config, model_path, device, dtype, "vllm", max_model_len,
                                      sharing="two_copies"))


def role_ledgers(
    config: AsyncConfig, places: DevicePlan, model_path: str, device: torch.device,
    dtype: torch.dtype, backend: str, *, max_model_len: int, memory: int | None = None,
    trained_tokens: int | None = None,
) -> dict[str, Ledger]:
    """The ledgers of one device of each role: ``train``, ``engine`` and, where it has a device of
    its own, ``reference``. All devices are taken to be alike; see :func:`run_ledger`."""
    of_run = (config, places, model_path, device, dtype, backend, max_model_len)
    sizes = {"memory": memory, "trained_tokens": trained_tokens}
    return _role_ledgers(*of_run, **sizes, sharded=shards_reference(*of_run, **sizes))


def _role_ledgers(
    config: AsyncConfig, places: DevicePlan, model_path: str, device: torch.device,
    dtype: torch.dtype, backend: str, max_model_len: int, *, memory: int | None,
    trained_tokens: int | None, sharded: bool,
) -> dict[str, Ledger]:
    shared = (config, model_path, device, dtype, backend, max_model_len)
    trainer = _memory_plan(*shared, sharing="apart", memory=memory, trained_tokens=trained_tokens)
    engine = _memory_plan(*shared, sharing="two_copies", apart=True,
                          alone=not places.shared("engine"), memory=memory)
    # Transformers has the whole model on one, whatever the key says until it is refused.
    together = config.inference_model.tensor_parallel_size if backend == "vllm" else 1
    ledgers = {}
    if places.reference:
        frozen = dict(trainer.frozen)
        del frozen["reference"]
        ledgers["reference"] = reference_ledger(
            trainer, ModelShape.of(config.ref_model.name or model_path),
            devices=len(places.reference) if sharded else 1)
        trainer = replace(trainer, frozen=tuple(frozen.items()))
    return {"train": memory_ledger(trainer),
            "engine": engine_ledger(engine, devices=together),
            **ledgers}


def shards_reference(
    config: AsyncConfig, places: DevicePlan, model_path: str, device: torch.device,
    dtype: torch.dtype, backend: str, max_model_len: int, *, memory: int | None = None,
    trained_tokens: int | None = None,
) -> bool:
    """``ref_model.sharded``, resolved: whether the devices of the reference have a part of it each,
    because a whole copy does not fit; see :func:`role_ledgers`."""
    chosen = config.ref_model.sharded
    # A cluster may spread them over machines.
    if chosen is not None or len(places.reference) < 2 or config.ray.address is not None:
        return bool(chosen)
    whole = _role_ledgers(config, places, model_path, device, dtype, backend, max_model_len,
                          memory=memory, trained_tokens=trained_tokens, sharded=False)
    needed = [sum(whole[role].total for role in roles)
              for roles in places.roles().values() if "reference" in roles]
    if places.kind == "cpu":
        needed = [_together_on_a_cpu(whole, places).total]
    return max(needed) > (memory or capacity(device))


def check_roles_fit(
    ledgers: dict[str, Ledger], places: DevicePlan, capacity: int,
    advised: Callable[[str], Sequence[Saving]] = lambda role: (),
) -> None:
    """Refuse a run of which the roles of a device do not fit on it, or on a CPU all do not
    together; see :func:`grpo.run.ledger.check_fits`.

    Roles that share a device are at work at any time, so what they need is added up.

    Raises:
        DoesNotFitError: with the plan, where roles share devices.
    """
    if places.kind == "cuda":
        for roles in dict.fromkeys(places.roles().values()):
            if len(roles) == 1:
                check_fits(ledgers[roles[0]], capacity, who=f"{roles[0]}: a device of it",
                           advised=partial(advised, roles[0]))
            else:
                _check_together(ledgers, roles, places, capacity, advised)
        return
    check_fits(_together_on_a_cpu(ledgers, places), capacity)


def _together_on_a_cpu(ledgers: dict[str, Ledger], places: DevicePlan) -> Ledger:
    counts = {"train": 1, "engine": len(places.engines), "reference": len(places.reference)}
    return Ledger(tuple(
        Row(f"{role}s" if counts[role] > 1 else role, counts[role] * ledger.total,
            f"{counts[role]} x {human(ledger.total)}") for role, ledger in ledgers.items()))


def _check_together(
    ledgers: dict[str, Ledger], roles: tuple[str, ...], places: DevicePlan, capacity: int,
    advised: Callable[[str], Sequence[Saving]],
) -> None:
    rows = tuple(Row(role, ledgers[role].total, "at its greatest moment") for role in roles)
    try:
        check_fits(Ledger(rows), capacity, who=f"a device of {' and '.join(roles)}",
                   advised=lambda: [saving for role in roles for saving in advised(role)])
    except DoesNotFitError as error:
        plan = "\n  ".join(places.table())
        raise DoesNotFitError(f"{error}\n  or give each role devices of its own; the plan was\n  "
                              f"{plan}") from None


def _memory_plan(
    config: Config, model_path: str, device: torch.device, dtype: torch.dtype, backend: str,
    max_model_len: int, *, sharing: Sharing, apart: bool = False, alone: bool = False,
    trained_tokens: int | None = None, memory: int | None = None,
) -> MemoryPlan:
    shape = ModelShape.of(model_path)
    lora = adapters_of(config, enabled=config.train_model.lora.enabled)
    row = min(max_model_len, trained_tokens or max_model_len)
    if device.type == "cuda":
        row = -(-row // GPU_WIDTH_MULTIPLE) * GPU_WIDTH_MULTIPLE
    in_engine = backend == "vllm"
    rows = config.turns_per_batch if apart else config.env.num_envs * config.env.repeats
    slots = {} if lora is None or not in_engine else {
        "lora_slots": LORA_SLOTS[config.engine],
        "lora_slot_rank": engine_lora_rank(lora.rank)}
    plan = MemoryPlan(
        shape=shape, dtype=dtype, device=device.type, row_tokens=row,
        # On a CPU the ranks share one memory, and have all of the model in it together.
        ranks=config.train_model.ranks if device.type == "cuda" else 1,
        tokens=_micro_batch_tokens(config, row), sharing=sharing, in_engine=in_engine,
        cuda_graphs=not config.inference_model.enforce_eager, generated_rows=rows,
        prompt_tokens=max(1, max_model_len - config.max_tokens),
        frozen=tuple(_frozen(config, shape, lora)),
        gradient_checkpointing=config.train_model.gradient_checkpointing,
        compiled=bool(config.train_model.compile),
        eager_attention=(config.train_model.attn_implementation
                         or "eager" * shape.caps_attention) == "eager",
        head=_head(config, shape), head_chunk_size=config.train_model.head_chunk_size,
        fp32_head=config.train_model.fp32_head, lora=lora,
        quantization=config.train_model.quantization,
        optimizer=config.optimizer.name,
        trained_layers=config.train_model.layer_indices and tuple(config.train_model.layer_indices),
        **slots)
    return _with_kv_cache(plan, config, model_path, device, tokens=max_model_len, alone=alone,
                          memory=memory)


def _sharing(config: Config, device: torch.device, in_engine: bool) -> Sharing:
    """An engine that runs already has taken its memory, shared or not, before this run."""
    if not in_engine:
        return "one_copy"
    if config.inference_model.url is not None:
        # Of a GPU there is what that engine has left; a CPU's memory is counted as a whole.
        return "lent" if config.shares_weights and device.type == "cuda" else "apart"
    return "one_copy" if config.shares_weights else "two_copies"


def adapters_of(config: Config, *, enabled: bool) -> LoRA | None:
    """The adapters of a configuration, if they are ``enabled``."""
    lora = config.train_model.lora
    if not enabled:
        return None
    return LoRA(rank=lora.r, targets=lora.target_modules and tuple(lora.target_modules),
                layers=lora.layer_indices and tuple(lora.layer_indices))


def _micro_batch_tokens(config: Config, row: int) -> int:
    """Tokens that the largest micro-batch may have, whatever the lengths of the rows."""
    train, rows = config.train, config.rows_per_optimizer_step
    together = config.env.repeats if get_objective(train.objective).scope == "group" else 1
    if train.gradient_accumulation_steps is not None:
        units = -(-rows // together)
        return -(-units // min(units, train.gradient_accumulation_steps)) * together * row
    budget = train.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH
    return min(rows * row, max(budget, together * row))


def _frozen(config: Config, shape: ModelShape, lora: LoRA | None) -> Iterator[tuple[str, int]]:
    name = config.ref_model.name
    # The reference of adapters is the model without them.
    if config.needs_reference and (name or lora is None):
        yield "reference", (ModelShape.of(name) if name else shape).parameters
    if config.distill.teacher is not None:
        yield "teacher", ModelShape.of(config.distill.teacher).parameters


def _head(config: Config, shape: ModelShape) -> Head:
    chosen = config.train_model.head
    if chosen == "logits" or not shape.tiled:
        return "logits"
    fusible = (config.distill.topk_coeff is None
               and get_objective(config.train.objective).scope != "group")
    return "fused" if fusible and chosen != "chunked" else "chunked"


def _with_kv_cache(
    plan: MemoryPlan, config: Config, model_path: str, device: torch.device, *, tokens: int,
    alone: bool, memory: int | None,
) -> MemoryPlan:
    """The plan with the KV cache that :func:`grpo.policies.inprocess.start_engine` will take, for
    rows of so many ``tokens``."""
    inference, per_token = config.inference_model, plan.shape.kv_bytes_per_token(plan.dtype)
    if not plan.engine_counts:
        return plan
    if not plan.in_engine:
        return replace(plan, kv_cache_bytes=plan.generated_rows * tokens * per_token)
    rows = inference.max_num_seqs or min(plan.generated_rows, 1024)
    plan = replace(plan, generated_rows=rows)
    if inference.gpu_memory_utilization is not None:
        engine = int(inference.gpu_memory_utilization * (memory or capacity(device)))
        return replace(plan, kv_cache_bytes=max(0, engine - engine_bytes(plan)))
    return replace(plan, kv_cache_bytes=inference.kv_cache_memory_bytes or kv_cache_bytes(
        model_path, rows=rows, tokens=tokens, dtype=plan.dtype, device=device,
        devices=getattr(inference, "tensor_parallel_size", 1), alone=alone, memory=memory))


def capacity(device: torch.device) -> int:
    """Bytes of memory of a device: all of a GPU's, or the RAM this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def available(config: Config, device: torch.device) -> int:
    """Bytes of a device that a run may take: all, but on a GPU what an engine that runs already has
    left, whose part is in no ledger."""
    if config.inference_model.url is None or device.type != "cuda":
        return capacity(device)
    return torch.cuda.mem_get_info(device)[0]


def cgroup_limits(root: Path = Path("/")) -> list[int]:
    """Memory limits of the control groups this process is in, as a container sets them."""
    membership = root / "proc/self/cgroup"
    if not os.access(membership, os.R_OK):
        return []
    limits = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = top / group.strip("/")
        # A limit of any group above holds as well.
        for place in (folder, *folder.parents):
            if place.is_relative_to(top) and os.access(place / file, os.R_OK):
                text = (place / file).read_text().strip()
                limits += [int(text)] if text.isdigit() else []
    return limits
