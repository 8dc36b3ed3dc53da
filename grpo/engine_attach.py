"""Which engine server a run uses, and on which GPU one of its own is started."""

from __future__ import annotations

import os
import time

import torch

from grpo.config import ConfigError
from grpo.config_atropos import AtroposConfig
from grpo.engines.child import TOKEN_VARIABLE
from grpo.engines.client import EngineClient
from grpo.weights.handover_file import Handover, HandoverError

_PULSE = 0.2  # seconds


def find_engine(config: AtroposConfig, *, timeout: float = 900.0) -> str | None:
    """Address of the engine server that runs already; None if the run must start its own.

    Without ``atropos.bridge_config`` that is whatever engine answers at the port. With it, the run
    waits for the engine whose file this is.

    Args:
        config: the run's.
        timeout: seconds to wait for an engine that is named.

    Raises:
        TimeoutError: if it does not come.
        HandoverError: if the file is missing, malformed, stale, or of another engine.
    """
    url = f"http://127.0.0.1:{config.atropos.vllm_port}"
    client = EngineClient(url, token=os.environ.get(TOKEN_VARIABLE) or None, timeout=10.0)
    named = config.atropos.bridge_config
    if named is None:
        return url if client.alive() else None
    deadline = time.monotonic() + timeout
    while not client.alive():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for the engine server at {url}, which "
                               f"{named} is of; start it with --shared-weights --port "
                               f"{config.atropos.vllm_port}")
        time.sleep(_PULSE)
    handover = Handover.read(Handover.find(named))
    theirs = client.call("GET", "/bridge/state_dict_info")["handover"]
    if theirs is None or (theirs["pid"], theirs["process_start"]) != (
            handover.pid, handover.process_start):
        raise HandoverError(f"{named} is not of the engine server at {url}, which "
                            + ("shares no weights" if theirs is None else
                               f"is process {theirs['pid']}, not {handover.pid}")
                            + "; give the file that it wrote, or its port")
    return url


def trainer_gpu(device: torch.device) -> int:
    """Number of the trainer's GPU, as this process counts them."""
    return torch.cuda.current_device() if device.index is None else device.index


def engine_gpu(config: AtroposConfig, device: torch.device) -> int | None:
    """Number of the GPU of an engine that the run starts; None on a CPU.

    Raises:
        ConfigError: for a GPU that is not there, or not the trainer's where both share memory.
    """
    gpu = config.atropos.vllm_gpu
    if device.type != "cuda":
        if gpu is not None:
            raise ConfigError(f"atropos.vllm_gpu={gpu} is not read on a CPU; remove it")
        return None
    trainers = trainer_gpu(device)
    gpu = trainers if gpu is None else gpu
    if gpu >= len(_visible_gpus()):
        raise ConfigError(f"atropos.vllm_gpu={gpu} is not there: this process sees "
                          f"{len(_visible_gpus())} GPUs, numbered from 0")
    if gpu != trainers and config.shares_weights:
        raise ConfigError(f"atropos.vllm_gpu={gpu} is not the trainer's GPU {trainers}, but one "
                          "copy of the weights lies on one GPU; leave vllm_gpu out, or use "
                          "weight_sync=restart or reload")
    return gpu


def engine_environment(config: AtroposConfig, device: torch.device) -> dict[str, str]:
    """Variables that put an engine server on its GPU.

    Raises:
        ConfigError: see :func:`engine_gpu`.
    """
    verbose = {"VLLM_LOGGING_LEVEL": "INFO"} if config.atropos.debug_loading else {}
    gpu = engine_gpu(config, device)
    return verbose if gpu is None else {"CUDA_VISIBLE_DEVICES": _visible_gpus()[gpu], **verbose}


def _visible_gpus() -> list[str]:
    """Their names for a child, in the order in which this process counts them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
