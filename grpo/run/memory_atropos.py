"""What a run on Atropos environments needs of its devices, checked before anything is started.

Where it does not fit, only such changes are advised as the run's mode takes: each is made in a copy
of the configuration, and the ledger of that says what it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from grpo.config.atropos import AtroposConfig
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.assemble import Start
from grpo.run.device_memory import available, run_ledger, server_ledger
from grpo.run.engine_attach import engine_gpu, trainer_gpu
from grpo.run.ledger import Ledger, Saving, check_fits

# What is advised in other runs, but is set by other keys and flags here.
_SET_OTHERWISE = (
    "train.gradient_accumulation_steps", "train_model.lora.enabled", "inference_model.weight_sync",
    "inference_model.kv_cache_memory_bytes", "inference_model.tensor_parallel_size")
#: What to change, in words, and the keys of each section that it changes.
Change = tuple[str, dict[str, dict[str, Any]]]


def check_memory(start: Start) -> None:
    """Show the ledgers of the run's devices, and refuse a run that does not fit.

    Raises:
        DoesNotFitError: naming the greatest rows and what would help by how much.
        ConfigError: for a GPU of the engine that cannot be used.
    """
    found = list(_ledgers(start))
    for who, ledger, room in found:
        title = [f"memory of {who}"] if len(found) > 1 else []
        start.console.info("\n".join([*title, *ledger.table(room)]))
    for who, ledger, room in found:
        check_fits(ledger, room, who=who)


def trainer_ledger(start: Start) -> Callable[[AtroposConfig], Ledger]:
    """What the trainer's device needs under a configuration."""
    setup = start.setup

    def ledger(config: AtroposConfig) -> Ledger:
        return run_ledger(
            config, setup.path, setup.device, setup.dtype, start.backend,
            max_model_len=setup.max_model_len, trained_tokens=config.atropos.seq_len,
            engine_apart=_own_gpu(config, setup.device) is not None)
    return ledger


def _ledgers(start: Start) -> Iterator[tuple[str, Ledger, int]]:
    """For each device who needs it, how much, and how much there is."""
    of_trainer, setup = trainer_ledger(start), start.setup
    config, gpu = setup.config, _own_gpu(setup.config, setup.device)
    room = available(config, setup.device)
    if gpu is None:
        ledger = of_trainer(config)
        changes = [*_smaller_batch(config), *_other_mode(start, apart=False),
                   *_smaller_cache(start, ledger, room)]
        yield "this run", _with_advice(ledger, config, changes, of_trainer), room
        return
    changes = [*_smaller_batch(config), *_other_mode(start, apart=True)]
    yield "the trainer", _with_advice(of_trainer(config), config, changes, of_trainer), room

    own = torch.device("cuda", gpu)

    def of_engine(config: AtroposConfig) -> Ledger:
        return server_ledger(config, setup.path, own, setup.dtype,
                             max_model_len=setup.max_model_len)

    ledger, room = of_engine(config), available(config, own)
    changes = list(_smaller_cache(start, ledger, room))
    yield f"the engine on GPU {gpu}", _with_advice(ledger, config, changes, of_engine), room


def _own_gpu(config: AtroposConfig, device: torch.device) -> int | None:
    """The GPU of an engine that the run starts, if that is not the trainer's."""
    if config.inference_model.url is not None:
        return None
    gpu = engine_gpu(config, device)
    return None if gpu is None or gpu == trainer_gpu(device) else gpu


# -- advice ----------------------------------------------------------------------------------------


def _with_advice(
    ledger: Ledger, config: AtroposConfig, changes: list[Change],
    ledger_of: Callable[[AtroposConfig], Ledger],
) -> Ledger:
    """The ledger with those changes as savings that are allowed and help."""
    savings = [saving for saving in ledger.savings
               if not saving.change.startswith(_SET_OTHERWISE)]
    for text, keys in changes:
        try:
            changed = ledger_of(config.changed(**keys))
        except ValueError:  # what the rest of the configuration rules out
            continue
        savings.append(Saving(text, ledger.total - changed.total))
    useful = sorted((saving for saving in savings if saving.bytes > 0),
                    key=lambda saving: saving.bytes, reverse=True)
    return replace(ledger, savings=tuple(useful))


def _smaller_batch(config: AtroposConfig) -> Iterator[Change]:
    """Smaller micro-batches, as many more of them."""
    rows, pieces = config.atropos.batch_size, config.train.gradient_accumulation_steps
    if rows == 1 or pieces is None:
        return
    fewer = max(count for count in range(1, rows // 2 + 1) if rows % count == 0)
    more = pieces * rows // fewer
    yield (f"atropos.batch_size={fewer} train.gradient_accumulation_steps={more}",
           {"atropos": {"batch_size": fewer}, "train": {"gradient_accumulation_steps": more}})


def _other_mode(start: Start, *, apart: bool) -> Iterator[Change]:
    """Other ways of the weights; an engine ``apart`` can only be one that is restarted."""
    config = start.setup.config
    lora, sync = config.train_model.lora.enabled, config.weight_sync
    adapters = f"(adapters of rank {LoRA().rank} instead of all weights)"
    # A run that is resumed trains what it has trained before.
    to_lora = {} if lora or start.checkpoint else {"train_model": {"lora": {"enabled": True}}}
    if config.atropos.bridge:
        yield f"train_model.lora.enabled=true {adapters}", to_lora
        yield ("inference_model.weight_sync=auto (one copy of the weights for trainer and engine)",
               {"inference_model": {"weight_sync": "auto"}})
        return
    if config.inference_model.url is not None:
        return  # which was started for the mode that it is in
    if apart:
        steps = config.atropos.restart_interval or 1
        if to_lora:
            yield (f"--weight-bridge-mode lora_restart --vllm-restart-interval {steps} {adapters}",
                   {**to_lora, "inference_model": {"weight_sync": "restart"}})
        return
    shared = "one copy of the weights for trainer and engine"
    if sync in ("restart", "reload"):
        shared += ", no --vllm-restart-interval"
    own = {"atropos": {"restart_interval": None}}
    if lora or to_lora:
        words = f"({shared})" if lora else f"({adapters[1:-1]}; {shared})"
        yield (f"--weight-bridge-mode lora_only {words}",
               {**own, **to_lora, "inference_model": {"weight_sync": "lora"}})
    if not lora:
        yield (f"--weight-bridge-mode shared_vllm ({shared})",
               {**own, "inference_model": {"weight_sync": "single_copy"}})


def _smaller_cache(start: Start, ledger: Ledger, room: int) -> Iterator[Change]:
    """Half the KV cache, by the key that sizes it."""
    setup, inference = start.setup, start.setup.config.inference_model
    half = sum(row.bytes for row in ledger.rows if row.name == "KV cache") // 2
    longest = setup.max_model_len * ModelShape.of(setup.path).kv_bytes_per_token(setup.dtype)
    if start.backend != "vllm" or half < longest:
        return  # the engine must be able to hold one row
    if inference.gpu_memory_utilization is None:
        changed: dict[str, Any] = {"kv_cache_memory_bytes": half}
    else:
        share = inference.gpu_memory_utilization - half / room
        changed = {"gpu_memory_utilization": math.ceil(100 * share) / 100}
    (key, value), = changed.items()
    yield f"inference_model.{key}={value} (rows then wait for each other)", {
        "inference_model": changed}
