"""What would make a run need less memory, where it does not fit.

Each change is made in a copy of the configuration; the ledger of that says what it saves, and a
change that the rest of the configuration rules out is not advised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from grpo.config.atropos import AtroposConfig
from grpo.config.schema import AnyConfig, Config
from grpo.config.unread import typed
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.build_engine import Setup
from grpo.run.ledger import Ledger, Saving
from grpo.training.learner import DEFAULT_TOKENS_PER_MICRO_BATCH

#: What to change, in words, and the keys of each section that it changes.
Change = tuple[str, dict[str, dict[str, Any]]]

ADAPTERS = f"adapters of rank {LoRA().rank} instead of all weights"
ONE_COPY = "one copy of the weights for trainer and engine"


def savings(
    config: AnyConfig, ledger_of: Callable[[AnyConfig], Ledger], changes: Iterable[Change]
) -> list[Saving]:
    """Those changes that are allowed and help, the one that helps most first."""
    before, found = ledger_of(config).total, []
    for text, keys in changes:
        try:
            saved = before - ledger_of(config.changed(**keys)).total
        except ValueError:  # what the rest of the configuration rules out
            continue
        if saved > 0:
            found.append(Saving(text, saved))
    return sorted(found, key=lambda saving: saving.bytes, reverse=True)


def leaner_training(
    config: AnyConfig, ledger_of: Callable[[AnyConfig], Ledger], device: torch.device, backend: str
) -> Iterator[Change]:
    """Less for the backward pass, with the same gradients."""
    train = config.train_model
    if not train.gradient_checkpointing:
        yield _keys("train_model", gradient_checkpointing=True)
    yield from _smaller_micro_batches(config, ledger_of)
    if device.type == "cuda" and backend == "vllm" and not train.compile:
        yield _keys("train_model", compile=True)
    if train.head == "logits":
        yield _keys("train_model", head="auto")
    if train.head_chunk_size is None or train.head_chunk_size > 1024:
        yield _keys("train_model", head_chunk_size=1024)


def _smaller_micro_batches(
    config: AnyConfig, ledger_of: Callable[[AnyConfig], Ledger]
) -> Iterator[Change]:
    pieces = config.train.gradient_accumulation_steps
    if pieces is None:
        before = ledger_of(config).total
        budget = config.train.max_tokens_per_micro_batch or DEFAULT_TOKENS_PER_MICRO_BATCH
        while budget > 1:  # a batch may be smaller than the budget
            budget //= 2
            change = _keys("train", max_tokens_per_micro_batch=budget)
            if ledger_of(config.changed(**change[1])).total < before:
                yield change
                return
    elif not isinstance(config, AtroposConfig):
        yield _keys("train", gradient_accumulation_steps=2 * pieces)
    elif (rows := config.atropos.batch_size) > 1:  # there the pieces make the batch
        fewer = max(count for count in range(1, rows // 2 + 1) if rows % count == 0)
        smaller, keys = _keys("atropos", batch_size=fewer)
        more, others = _keys("train", gradient_accumulation_steps=pieces * rows // fewer)
        yield f"{smaller} {more}", keys | others


def less_held(config: Config) -> Iterator[Change]:
    """One copy of the weights, or adapters instead of them."""
    automatic, keys = _keys("inference_model", weight_sync="auto")
    if config.inference_model.url is None and not config.shares_weights:
        yield f"{automatic} ({ONE_COPY})", keys
    if not config.train_model.lora.enabled:
        # Where weights travel as they cannot as adapters, that has to change, too.
        by_hand = config.inference_model.weight_sync not in ("auto", "lora", "restart")
        yield (f"train_model.lora.enabled=true {f'{automatic} ' * by_hand}({ADAPTERS})",
               {"train_model": {"lora": {"enabled": True}}, **(keys if by_hand else {})})


def smaller_cache(setup: Setup, ledger: Ledger, *, room: int, backend: str) -> Iterator[Change]:
    """Half an engine's KV cache, by the key that sizes it, unless its longest row would not fit;
    the engine's device has ``room`` bytes."""
    config = setup.config
    row_bytes = setup.max_model_len * ModelShape.of(setup.path).kv_bytes_per_token(setup.dtype)
    cache = sum(row.bytes for row in ledger.rows if row.name == "KV cache")
    half = cache // 2**21 * 2**20  # in whole MiB
    if backend != "vllm" or half < row_bytes:
        return
    if (share := config.inference_model.gpu_memory_utilization) is None:
        text, keys = _keys("inference_model", kv_cache_memory_bytes=half)
    else:
        text, keys = _keys("inference_model", gpu_memory_utilization=math.ceil(
            100 * (share - half / room)) / 100)
    yield f"{text} (rows then wait for each other)", keys


def more_devices(config: Config) -> Iterator[Change]:
    """Layers divided over twice as many devices, where an engine has them to itself."""
    inference = config.inference_model
    devices, shared = inference.num_devices, inference.tensor_parallel_size
    yield (f"inference_model.tensor_parallel_size={2 * shared} (of as many more devices)",
           {"inference_model": {"num_devices": 2 * (devices or shared),
                                "tensor_parallel_size": 2 * shared}})


def _keys(section: str, **keys: Any) -> Change:
    text = " ".join(f"{section}.{key}={typed(value)}" for key, value in keys.items())
    return text, {section: keys}
