"""How weights travel in a run; ``docs/weights.md`` says what each way is for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from grpo.config.asynchronous import AsyncConfig
from grpo.config.atropos import AtroposConfig
from grpo.config.model import Sync
from grpo.config.schema import Config
from grpo.policies.client import EngineClient
from grpo.policies.handle import EngineHandle, InProcessEngine, PauseMode
from grpo.policies.ray_engine import WorkerPool
from grpo.policies.stock_server import StockServer
from grpo.weights.channel import Transport, address_towards
from grpo.weights.fleet import FleetLoRA, FleetSync, FleetTransfer, ObjectStoreSync
from grpo.weights.gather import Tell, tell_nobody
from grpo.weights.in_flight import PausedUpdates, PeriodicUpdates
from grpo.weights.lora import HTTPLoRASync, LoRASync
from grpo.weights.reload import CheckpointReload, EngineRestart
from grpo.weights.shared import SharedCopy, SingleCopy, WeightSync
from grpo.weights.stock import StockLoRA, StockReload
from grpo.weights.transfer import TransferBackend, WeightTransfer

# Seconds for one update of an asynchronous run, beside what it waits for groups.
_FLEET_SECONDS = 600.0
_WORDS: dict[Sync, str] = {
    "single_copy": "one copy, shared by trainer and engine",
    "transfer": "copied into the engine's memory after every update",
    "lora": "adapters alone travel",
    "reload": "a checkpoint on disk after every update, read by the engine in place",
    "restart": "a new server from disk after every update",
}


class Restartable(Protocol):
    """An engine server that can be stopped, and started from other weights."""

    def start(self, path: str | Path) -> EngineClient:
        """Start from a folder or hub id; returns when the server answers."""

    def stop(self) -> None:
        """End it; without effect if it does not run."""


def share_weights(config: Config, model: nn.Module, engine: EngineHandle) -> WeightSync | None:
    """Put the trainer's weights into the engine's memory, where both read one copy; before
    adapters, which take the device of the weights that they sit on."""
    if not config.shares_weights:
        return None
    if isinstance(engine, InProcessEngine) and not engine.workers:
        return SingleCopy(model, engine.llm)
    return SharedCopy(model, engine)


def make_weight_sync(
    config: Config, model: nn.Module, engine: Any, *, folder: Path, tokenizer: Any,
    shared: WeightSync | None = None, path: str | None = None, server: Restartable | None = None,
    tell: Tell = tell_nobody,
) -> WeightSync:
    """The way to one vLLM engine.

    An engine that has served others, or starts without the run's adapter, gets the trainer's
    weights at once.

    Args:
        config: of the run.
        model: the trainer's.
        engine: a handle, the client of a server, or a stock server.
        folder: for adapters and checkpoints on their way.
        tokenizer: saved beside a checkpoint.
        shared: from :func:`share_weights`.
        path: folder or hub id of the weights that a server starts from again beneath an adapter.
        server: what ``weight_sync=restart`` stops and starts.
        tell: the other ranks of a sharded trainer to take part.
    """
    if isinstance(engine, StockServer):
        weights: WeightSync = StockLoRA(
            model, engine, folder / "adapters", version=-1, tell=tell,
        ) if config.train_model.lora.enabled else StockReload(
            model, tokenizer, engine, folder / "weights", version=-1)
        weights.publish()  # whatever it serves
        return weights
    way, served = config.weight_sync, config.engine == "server"
    if config.train_model.lora.enabled:
        if not served:
            return LoRASync(model, engine, tell=tell)
        adapter = HTTPLoRASync(engine, model, folder=folder / "adapters", version=-1, tell=tell)
        adapter.publish()  # a resumed one is not what the engine starts with
        if way == "restart":
            adapter.restart = partial(_restarted, server, path)
        return adapter
    if way == "restart":
        return EngineRestart(model, tokenizer, folder / "weights", engine=engine,
                             stop=server.stop, start=server.start)
    if shared is not None:
        return shared
    url = config.inference_model.url
    first = 0 if url is None else -1
    if way == "reload":
        weights = CheckpointReload(model, tokenizer, engine, folder / "weights",
                                               version=first)
    else:
        host = "127.0.0.1" if url is None else address_towards(engine.host, engine.port)
        weights = WeightTransfer(
            model, engine, backend=transfer_of(config, next(model.parameters()).device),
            version=first, host=host, tell=tell)
    if url is not None:
        weights.publish()  # whatever that server has served before
    return weights


def _restarted(server: Restartable, path: str) -> EngineClient:
    server.stop()
    return server.start(path)


def transfer_of(config: Config, device: torch.device) -> TransferBackend | None:
    """What carries all weights to one engine, in whose transfer every rank of a sharded trainer
    takes part; None where adapters alone travel."""
    if config.train_model.lora.enabled:
        return None
    # On the same device NCCL cannot connect two processes.
    return "ipc" if config.inference_model.url is None else network_of(device)


def network_of(device: torch.device, *, together: bool = False) -> Transport:
    """What carries tensors of a device between processes, of which NCCL refuses those that are
    ``together`` on one GPU."""
    return "nccl" if device.type == "cuda" and not together else "gloo"


def make_fleet_sync(
    config: AsyncConfig, model: nn.Module, pool: WorkerPool, *, backend: str,
    device: torch.device, host: str, together: bool = False, tell: Tell = tell_nobody,
) -> FleetSync:
    """The way to all workers of an asynchronous run.

    Args:
        config: of the run.
        model: the trainer's.
        pool: of the workers.
        backend: that they generate with.
        device: of the trainer.
        host: address of the trainer that the workers can reach.
        together: whether a worker is on a device of the trainer's.
        tell: the other ranks of a sharded trainer to take part.
    """
    at_border = config.train.update_at == "group_border"
    # At a group's border an update waits for the longest answer that is being generated.
    patience = _FLEET_SECONDS + (
        config.train.rollout_timeout if at_border or backend == "transformers" else 0.0)
    if backend == "transformers":
        return ObjectStoreSync(model, pool, timeout=patience, tell=tell)
    pause: PauseMode = "wait" if at_border else "keep"
    if config.train_model.lora.enabled:
        return FleetLoRA(model, pool, pause_mode=pause, timeout=patience, tell=tell)
    return FleetTransfer(
        model, pool, host=host, backend=network_of(device, together=together),
        pause_mode=pause, timeout=patience, tell=tell,
        tensor_parallel_size=config.inference_model.tensor_parallel_size)


def while_serving(config: AtroposConfig, weights: WeightSync, client: EngineClient) -> WeightSync:
    """The same way to a server that answers environments all the time."""
    if config.weight_sync == "single_copy":
        return PausedUpdates(weights, client)
    if config.weight_sync == "restart":
        return PeriodicUpdates(weights, interval=config.atropos.restart_interval or 1)
    return weights


def describe_weights(config: Config, *, backend: str) -> str:
    """How weights travel, for the start-up banner."""
    way = _WORDS[config.weight_sync]
    if backend == "transformers":
        way = "one module trains and generates"
    elif config.weight_sync == "lora" and config.shares_weights:
        way += ", the weights beneath are one copy"
    if config.train_model.quantization is not None and backend == "vllm":
        way += ", the engine has the values that the trainer's quantised weights stand for"
    return f"{way}; a canary checks the engine after every update"
