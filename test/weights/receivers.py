"""Engines made of threads: the methods that vLLM's workers gain, around modules like vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from grpo.policies.handle import EngineHandle
from grpo.weights.handover import export_tensors
from grpo.weights.worker.receiver import TransferMethods


class Worker(TransferMethods):
    """One worker; its model has the names, shapes and attributes of vLLM's layers."""

    def __init__(self, model: nn.Module, rank: int = 0) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.model = model

    def export_weights(self) -> dict[str, Any]:
        """As the worker of :mod:`grpo.weights.worker.extension`."""
        return export_tensors(dict(self.model.named_parameters()), model="test",
                              owner="engine").to_dict()


class ThreadedEngine(EngineHandle):
    """Handle of several workers; everything passes through JSON, as over HTTP.

    Attributes:
        log: calls in their order.
        intercept: replaces a method by name.
    """

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.version, self.log = workers, 0, []
        self.cache_resets = True
        self.intercept: dict[str, Callable[..., Any]] = {}

    def collective_rpc(self, method: str, *args: Any, timeout: float) -> list[Any]:
        assert timeout > 0
        self.log.append(method)
        if method in self.intercept:
            return self.intercept[method](*args)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [pool.submit(getattr(worker, method), *json.loads(json.dumps(args)))
                     for worker in self.workers]
            return json.loads(json.dumps([call.result() for call in calls]))

    def pause(self, mode: str = "keep", *, timeout: float) -> None:
        self.log.append(f"pause {mode}")

    def reset_prefix_cache(self, timeout: float) -> bool:
        self.log.append("reset_prefix_cache")
        return self.cache_resets

    def set_version(self, version: int) -> None:
        self.log.append(f"version {version}")
        self.version = version

    def resume(self, *, timeout: float) -> None:
        self.log.append("resume")

    def alive(self) -> bool:
        return True


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a path, which is made if it is not there."""
    module = root
    for part in path.split("."):
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    return module


def vllm_like(hf: nn.Module, *, rank: int = 0, size: int = 1, vocabulary_block: int = 64
              ) -> nn.Module:
    """A module with the parameters of vLLM's Qwen2 for worker ``rank`` of ``size``, all zeros."""
    config = hf.config
    dim = config.hidden_size // config.num_attention_heads
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    root = nn.Module()

    def leaf(path: str, *, weight: tuple[int, ...], bias: int | None = None, **facts: Any) -> None:
        module = submodule(root, path)
        module.weight = nn.Parameter(torch.zeros(weight), requires_grad=False)
        if bias:
            module.bias = nn.Parameter(torch.zeros(bias), requires_grad=False)
        for key, value in facts.items():
            setattr(module, key, value)

    padded = -(-config.vocab_size // vocabulary_block) * vocabulary_block // size
    held = SimpleNamespace(org_vocab_start_index=min(rank * padded, config.vocab_size),
                           org_vocab_end_index=min((rank + 1) * padded, config.vocab_size))
    tp = {"tp_rank": rank, "tp_size": size}
    leaf("model.embed_tokens", weight=(padded, config.hidden_size), shard_indices=held,
         org_vocab_size=config.vocab_size, **tp)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        q, replicas = heads // size, max(1, size // kv)
        k = max(1, kv // size)
        leaf(f"{layer}.self_attn.qkv_proj", weight=((q + 2 * k) * dim, config.hidden_size),
             bias=(q + 2 * k) * dim, total_num_heads=heads, total_num_kv_heads=kv, num_heads=q,
             num_kv_heads=k, num_kv_head_replicas=replicas, head_size=dim, **tp)
        leaf(f"{layer}.self_attn.o_proj", weight=(config.hidden_size, heads * dim // size),
             input_size=heads * dim, output_size=config.hidden_size, **tp)
        leaf(f"{layer}.mlp.gate_up_proj",
             weight=(2 * config.intermediate_size // size, config.hidden_size),
             output_sizes=[config.intermediate_size] * 2, **tp)
        leaf(f"{layer}.mlp.down_proj",
             weight=(config.hidden_size, config.intermediate_size // size),
             input_size=config.intermediate_size, output_size=config.hidden_size, **tp)
        leaf(f"{layer}.input_layernorm", weight=(config.hidden_size,))
        leaf(f"{layer}.post_attention_layernorm", weight=(config.hidden_size,))
    leaf("model.norm", weight=(config.hidden_size,))
    return root


def expected_tensors(hf: nn.Module, *, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What worker ``rank`` must hold, by vLLM's rules for tensor parallelism, without padding."""
    config, ours = hf.config, dict(hf.named_parameters())
    kv_rank = rank // max(1, size // config.num_key_value_heads)
    kv_size = min(size, config.num_key_value_heads)

    def part(tensor: torch.Tensor, index: int, count: int, along: int = 0) -> torch.Tensor:
        return tensor.detach().chunk(count, along)[index]

    tensors = {}
    for name, tensor in ours.items():
        if "norm" in name:
            tensors[name] = tensor.detach()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = part(tensor, rank, size, 1)
        elif ".q_proj." in name:
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(
                [part(tensor, rank, size)] + [part(ours[name.replace("q_proj", other)], kv_rank,
                                                   kv_size) for other in ("k_proj", "v_proj")])
        elif ".gate_proj." in name:
            tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [part(tensor, rank, size),
                 part(ours[name.replace("gate_proj", "up_proj")], rank, size)])
        elif "embed_tokens" in name:
            padded = -(-config.vocab_size // 64) * 64 // size
            tensors[name] = tensor.detach()[rank * padded:(rank + 1) * padded]
    return tensors


def assert_holds(engine: ThreadedEngine, model: nn.Module) -> None:
    """Every worker holds exactly its part, and nothing was written beside it."""
    for worker in engine.workers:
        expected = expected_tensors(model, rank=worker.rank, size=len(engine.workers))
        held = dict(worker.model.named_parameters())
        assert held.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(held[name][:len(tensor)], tensor.to(held[name].dtype)), name
            assert not held[name][len(tensor):].any(), f"padding of {name} was written"
