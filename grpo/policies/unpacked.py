"""Engines whose weights keep the form of the checkpoint, so that updates in place reach them.

vLLM repacks weights for some of its kernels when it loads them. What is then in memory is neither
the trainer's nor can it be compared with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: The linear modules of attention, which alone get adapters in mixtures of experts.
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Classes of vLLM whose kernels have been changed in this process.
_CHANGED: list[type] = []


def keep_weights_unpacked() -> None:
    """Stop vLLM's CPU build from repacking linear weights and experts when it loads them.

    Repacking moves the values into a private layout and, of linear layers, empties
    ``layer.weight``, after which no in-place update could reach the engine. Here PyTorch's own
    kernels compute with the weights as they are.
    """
    from vllm.model_executor.layers import utils

    def plain_linear(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
    try:
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # the GPU build of an earlier version
        return
    CPUUnquantizedExperts.process_weights_after_loading = _leave_experts
    CPUUnquantizedExperts.apply = _apply_experts
    if CPUUnquantizedExperts not in _CHANGED:
        _CHANGED.append(CPUUnquantizedExperts)
        method.select_unquantized_moe_backend = _without_adapters(
            method.select_unquantized_moe_backend)


def plain_expert_options(
    model_path: str, *, device_type: str, adapters: bool = False
) -> dict[str, Any]:
    """Options of an engine that make it keep experts in the checkpoint's form.

    Of vLLM's kernels for unquantised experts on CUDA, Triton's reads them as they are. FlashInfer's
    swap or tile them, and pad their inner dimension.

    Args:
        model_path: folder or hub id.
        device_type: ``cuda`` or ``cpu``, where :func:`keep_weights_unpacked` does the same.
        adapters: whether the engine serves any, which then get no place on experts.
    """
    if not has_experts(model_path):
        return {}
    from vllm.engine.arg_utils import EngineArgs

    options: dict[str, Any] = {"moe_backend": "triton"} if device_type == "cuda" else {}
    if adapters:
        options["lora_target_modules"] = list(ATTENTION_LINEARS)
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    return {name: value for name, value in options.items() if name in known}


def has_experts(model_path: str) -> bool:
    """Whether a model is a mixture of experts."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    return bool(getattr(config, "num_experts_per_tok", None))


def _without_adapters(select: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of a kernel for experts, as if there were no adapters in the engine.

    With adapters vLLM takes Triton's, which no CPU has; here none sits on experts.
    """
    def choose(moe_config: Any) -> Any:
        return select(dataclasses.replace(moe_config, is_lora_enabled=False))

    return choose


def refuse_experts_after_dense(model_path: str) -> None:
    """Say in a sentence what vLLM fails with: its groups of workers are those of the first model.

    Raises:
        ValueError: for a mixture of experts in a process whose first engine had a dense model.
    """
    from vllm.distributed import parallel_state

    if (parallel_state.model_parallel_is_initialized()
            and getattr(parallel_state, "_EP", "") is None and has_experts(model_path)):
        raise ValueError(f"model.name={model_path} is a mixture of experts, and this process has "
                         "had an engine with a dense model, after which vLLM starts none with "
                         "experts; use inference_model.engine=process, or a run of its own")


def _leave_experts(self: Any, layer: nn.Module) -> None:
    """In the place of vLLM's ``process_weights_after_loading``, which pads and repacks."""


def _apply_experts(
    self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor,
    topk_weights: Tensor, topk_ids: Tensor, activation: Any, *args: Any,
    apply_router_weight_on_input: bool = False, **kwargs: Any,
) -> None:
    """In the place of vLLM's ``apply``: each expert on the tokens that were routed to it.

    Args:
        self: vLLM's kernel.
        output: ``[tokens, hidden]``, overwritten.
        hidden_states: ``[tokens, hidden]``; already weighted with ``apply_router_weight_on_input``.
        w1: gate and up projections ``[experts, 2 * inner, hidden]``.
        w2: down projections ``[experts, hidden, inner]``.
        topk_weights: ``[tokens, k]``.
        topk_ids: ``[tokens, k]``.
        activation: of gate and up projection.
    """
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        bias_1, bias_2 = (None if bias is None else bias[expert].to(hidden_states.dtype)
                          for bias in (self.w1_bias, self.w2_bias))
        both = nn.functional.linear(hidden_states[token], w1[expert], bias_1)
        inner = both.new_empty(len(both), w2.shape[2])
        apply_moe_activation(activation, inner, both)
        found = nn.functional.linear(inner, w2[expert], bias_2)
        output.index_add_(0, token, found * weights[token, slot, None].to(found.dtype))
