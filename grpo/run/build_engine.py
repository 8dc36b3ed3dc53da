"""From the configuration to trainer and engine: model, policy, and how weights travel between them.

Needs no task and no environment. What each arrangement is for is in ``docs/weights.md``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.config.model import LORA_SLOTS, Sync
from grpo.config.schema import Config
from grpo.policies.base import Policy, Sampling
from grpo.policies.client import EngineClient
from grpo.policies.handle import EngineHandle, InProcessEngine
from grpo.policies.inprocess import engine_lora_rank, kv_cache_bytes, start_engine, stop_engine
from grpo.policies.server import ServerPolicy
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.run.build_model import eos_token_ids, load_model, prepare_model
from grpo.run.engine_attach import START_TIMEOUT, bring_to_start, check_device
from grpo.server.engine_process import EngineProcess, server_command
from grpo.system.child_process import package_environment
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.weights.channel import address_towards
from grpo.weights.lora import HTTPLoRASync, LoRASync
from grpo.weights.reload import CheckpointReload, EngineRestart
from grpo.weights.shared import SameModule, SharedCopy, SingleCopy, WeightSync
from grpo.weights.transfer import WeightTransfer

if TYPE_CHECKING:
    from vllm import LLM

_CALL_TIMEOUT = 120.0


@dataclass(frozen=True)
class Actor:
    """The model that is trained, what generates with it, and how its weights get there."""

    model: nn.Module
    policy: Policy
    weights: WeightSync


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What trainer and engine agree on.

    Attributes:
        config: the run's.
        path: folder or hub id of the weights that both start from.
        tokenizer: of the model.
        device: of the trainer, and of an engine that the run starts.
        dtype: of the weights on both sides.
        max_model_len: prompt plus response, in tokens.
        folder: for the engine's log, and for adapters and checkpoints on their way to it.
        adapter: folder of the adapter that a resumed run goes on with.
    """

    config: Config
    path: str
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    folder: Path
    adapter: Path | None = None

    @property
    def rows(self) -> int:
        """Rows that the engine generates at a time."""
        batch = self.config.env.num_envs * self.config.env.repeats
        return self.config.inference_model.max_num_seqs or min(batch, 1024)

    @property
    def fp32_head(self) -> bool:
        """Whether logits have another dtype than the weights."""
        return self.config.train_model.fp32_head and self.dtype != torch.float32

    @property
    def seeds_rows(self) -> bool:
        """Whether each row of an engine in another process needs a seed, as it draws there.

        On a GPU a run does not repeat to the bit anyway, and seeds cost time.
        """
        return self.config.inference_model.engine != "in_process" and self.device.type == "cpu"

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.config.max_tokens, seed=self.config.train.seed,
                        temperature=self.config.inference_model.temperature)

    def policy_options(self) -> dict[str, Any]:
        """What every policy is told."""
        return {"pad_token_id": self.tokenizer.pad_token_id,
                "ignore_eos": self.config.inference_model.ignore_eos,
                "eos_token_ids": eos_token_ids(self.path, self.tokenizer)}


def build_actor(setup: Setup, *, backend: str, server: RunServer | None = None) -> Actor:
    """Model, policy and the way of the weights between them.

    Args:
        setup: what both sides agree on.
        backend: ``vllm`` or ``transformers``.
        server: to start where the run starts one; None: one with :func:`server_options` on a free
            port.

    Returns:
        The actor; ``policy.close()`` ends what was started here.
    """
    if backend == "transformers":
        return _one_module(setup)
    with ExitStack() as on_failure:
        if setup.config.inference_model.engine == "server":
            actor = _with_server(setup, on_failure, server)
        else:
            actor = _with_engine(setup, on_failure)
        on_failure.pop_all()
    return actor


# -- the arrangements ------------------------------------------------------------------------------


def _one_module(setup: Setup) -> Actor:
    model = load_model(setup.path, setup.config, device=setup.device, dtype=setup.dtype)
    prepare_model(model, setup.config, adapter=setup.adapter)
    weights = SameModule(model, used=lambda: policy.model)
    policy = TransformersPolicy(model, setup.sampling, max_model_len=setup.max_model_len,
                                version=lambda: weights.version, **setup.policy_options())
    return Actor(model, policy, weights)


def start_engine_of(setup: Setup) -> LLM:
    """vLLM, scheduled by this process; its model is here or in a process of its own."""
    config, inference = setup.config, setup.config.inference_model
    lora = config.train_model.lora
    return start_engine(
        setup.path, device=setup.device, dtype=setup.dtype, max_model_len=setup.max_model_len,
        max_num_seqs=setup.rows, seed=config.train.seed, enforce_eager=inference.enforce_eager,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_memory_bytes=inference.kv_cache_memory_bytes,
        separate_process=inference.engine == "process", fp32_head=setup.fp32_head,
        max_lora_rank=lora.r if lora.enabled else None)


def _with_engine(setup: Setup, on_failure: ExitStack) -> Actor:
    """A vLLM engine that this process schedules."""
    config = setup.config
    llm = start_engine_of(setup)
    on_failure.callback(stop_engine, llm)
    engine = InProcessEngine(llm)
    share = partial(SharedCopy, engine=engine) if engine.workers else partial(
        SingleCopy, engine=llm)
    model, shared = _trainer_model(setup, share)
    sync = config.weight_sync
    if sync == "lora":
        weights: WeightSync = LoRASync(model, engine)
    else:
        weights = shared or _copying(setup, model, engine)
    policy = VLLMPolicy(
        llm, setup.sampling, version=lambda: weights.version,
        lora_request=weights.lora_request if sync == "lora" else None,
        seeded=setup.seeds_rows, **setup.policy_options())
    return Actor(model, policy, weights)


def _with_server(setup: Setup, on_failure: ExitStack, server: RunServer | None) -> Actor:
    """An engine behind HTTP: the run's own, or one that runs already."""
    config, url = setup.config, setup.config.inference_model.url
    if url is None:
        server = server or RunServer(server_options(setup), log_path=setup.folder / "server.log")
        on_failure.callback(server.stop)
        client = server.start(setup.path)
        check_device(client.info(), setup.device, url=None)
    else:
        client = EngineClient(url, token=os.environ.get(TOKEN_VARIABLE), timeout=_CALL_TIMEOUT)
        bring_to_start(client, setup)
    model, shared = _trainer_model(setup, partial(SharedCopy, engine=client))
    if config.train_model.lora.enabled:
        weights: WeightSync = HTTPLoRASync(client, model, folder=setup.folder / "adapters",
                                           version=-1)
        weights.publish()  # a resumed adapter is not what the engine starts with
        if config.weight_sync == "restart":
            weights.client = FreshServer(server, setup.path, client)
    elif config.weight_sync == "restart":
        weights = EngineRestart(model, setup.tokenizer, setup.folder / "weights", engine=client,
                                stop=server.stop, start=server.start)
    else:
        weights = shared or _copying(setup, model, client)
    policy = ServerPolicy(
        client, setup.sampling, stop=server and server.stop,
        seeded=setup.seeds_rows, **setup.policy_options())
    return Actor(model, policy, weights)


def _trainer_model(
    setup: Setup, share: Callable[[nn.Module], WeightSync]
) -> tuple[nn.Module, WeightSync | None]:
    """The trainer's model; with its weights in the engine's memory where the two share it."""
    sharing = setup.config.shares_weights
    # On its way into the engine's memory a model needs none of the GPU's own.
    device = torch.device("cpu") if sharing else setup.device
    model = load_model(setup.path, setup.config, device=device, dtype=setup.dtype)
    shared = share(model) if sharing else None
    prepare_model(model, setup.config, adapter=setup.adapter)
    return model, shared


def _copying(setup: Setup, model: nn.Module, engine: EngineHandle) -> WeightSync:
    """Weights that are copied into an engine's own memory."""
    sync, inference = setup.config.weight_sync, setup.config.inference_model
    first = 0 if inference.url is None else -1
    if sync == "reload":
        weights: WeightSync = CheckpointReload(model, setup.tokenizer, engine,
                                               setup.folder / "weights", version=first)
    elif inference.url is None:  # on the same device, where NCCL cannot connect two processes
        weights = WeightTransfer(model, engine, backend="ipc")
    else:
        weights = WeightTransfer(
            model, engine, backend="nccl" if setup.device.type == "cuda" else "gloo",
            host=address_towards(engine.host, engine.port), version=first)
    if first < 0:
        weights.publish()  # whatever that server has served before
    return weights


# -- servers ---------------------------------------------------------------------------------------


def server_options(setup: Setup) -> dict[str, Any]:
    """Options of :func:`~grpo.server.engine_process.server_command` for the run's own server."""
    config, inference = setup.config, setup.config.inference_model
    share, lora = inference.gpu_memory_utilization, config.train_model.lora
    cache = inference.kv_cache_memory_bytes
    if share is None and cache is None:
        cache = kv_cache_bytes(setup.path, rows=setup.rows, tokens=setup.max_model_len,
                               dtype=setup.dtype, device=setup.device)
    adapters = {} if not lora.enabled else {
        "enable_lora": True, "max_lora_rank": engine_lora_rank(lora.r),
        "max_loras": LORA_SLOTS["server"], "adapter_root": setup.folder.absolute()}
    return {"dtype": str(setup.dtype).removeprefix("torch."), "max_num_seqs": setup.rows,
            "max_model_len": setup.max_model_len, "gpu_memory_utilization": share,
            "kv_cache_memory_bytes": cache, "seed": config.train.seed,
            "enforce_eager": inference.enforce_eager, "fp32_head": setup.fp32_head, **adapters}


class RunServer:
    """An engine server of the run's own, which can be stopped and started from other weights.

    It listens on the loopback interface; its port and token stay the same.

    Args:
        options: of :func:`~grpo.server.engine_process.server_command`.
        log_path: where its output goes; each start begins it anew.
        port: 0 takes a free one.
        token: wanted from clients; None: one that only this process knows, "": none.
        env: further environment variables of the server.

    Examples:
        >>> server = RunServer({"max_model_len": 64}, log_path="run/server.log")
        >>> server.start("path/to/model").alive()                          # doctest: +SKIP
        True
        >>> server.stop()
    """

    def __init__(self, options: dict[str, Any], *, log_path: str | Path, port: int = 0,
                 token: str | None = None, env: dict[str, str] | None = None) -> None:
        self.options, self.log_path, self.port, self.env = options, log_path, port, env or {}
        self._running: EngineProcess | None = None
        self.token = secrets.token_urlsafe() if token is None else token
        self._process = ExitStack()

    def start(self, path: str | Path) -> EngineClient:
        """Start from a folder or hub id; returns when the server answers.

        Raises:
            EngineStartError: with the end of the log, if it ends or takes too long.
        """
        process = self._running = self._process.enter_context(EngineProcess(
            server_command(str(path), private=True, **self.options), port=self.port,
            token=self.token, log_path=self.log_path, start_timeout=START_TIMEOUT,
            env={**package_environment(), **self.env}))
        self.port = process.port
        return process.client(timeout=_CALL_TIMEOUT)

    def stop(self) -> None:
        """End it; without effect if it does not run."""
        self._running = None
        self._process.close()

    def check(self) -> None:
        """Raise if it has ended by itself.

        Raises:
            RuntimeError: with the last lines of its log.
        """
        if self._running is not None:
            self._running.check()


@dataclass
class FreshServer:
    """Takes up each adapter in a server that is started anew, for :class:`HTTPLoRASync`."""

    server: RunServer
    path: str
    client: EngineClient
    starts_engines = True

    def load_lora(self, path: str, *, name: str, version: int) -> str:
        self.server.stop()
        self.client = self.server.start(self.path)
        return self.client.load_lora(path, name=name, version=version)

    def lora_fingerprints(self, shapes: dict[str, list[int]]) -> list[dict[str, list]]:
        return self.client.lora_fingerprints(shapes)


# -- in words --------------------------------------------------------------------------------------

_WAYS: dict[Sync, str] = {
    "single_copy": "one copy, shared by trainer and engine",
    "transfer": "copied into the engine's memory after every update",
    "lora": "adapters alone travel",
    "reload": "a checkpoint on disk after every update, read by the engine in place",
    "restart": "a new server from disk after every update",
}


def describe_engine(config: Config, *, device: torch.device, backend: str) -> dict[str, str]:
    """Two lines of the start-up banner: ``engine`` and ``weights``."""
    inference, proof = config.inference_model, "a canary checks the engine after every update"
    if backend == "transformers":
        return {"engine": "transformers, in process",
                "weights": f"one module trains and generates; {proof}"}
    place = {"in_process": "in process", "process": "in a process of its own",
             "server": f"server at {inference.url}" if inference.url else "server of this run"}
    graphs = device.type == "cuda" and inference.url is None and not inference.enforce_eager
    engine = f"vllm, {place[inference.engine]}" + (", CUDA graphs" if graphs else "")
    way = _WAYS[config.weight_sync]
    if config.weight_sync == "lora" and config.shares_weights:
        way += ", the weights beneath are one copy"
    return {"engine": engine, "weights": f"{way}; {proof}"}
