"""From the configuration to trainer and engine: model, policy, and how weights travel between them.

Needs no task and no environment. What each arrangement is for is in ``docs/weights.md``.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.config.model import LORA_SLOTS
from grpo.config.schema import Config, ConfigError
from grpo.config.unread import TRANSFORMERS, refuse_unread
from grpo.policies.base import Policy, Sampling
from grpo.policies.client import EngineClient
from grpo.policies.handle import EngineHandle, InProcessEngine
from grpo.policies.inprocess import engine_lora_rank, kv_cache_bytes, start_engine, stop_engine
from grpo.policies.server import ServerPolicy
from grpo.policies.stock_server import StockPolicy, StockServer
from grpo.policies.transformers import TransformersPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.run.build_model import eos_token_ids, load_model, prepare_model
from grpo.run.engine_attach import (
    START_TIMEOUT,
    bring_to_start,
    check_device,
    open_stock_server,
)
from grpo.server.engine_process import EngineProcess, server_command
from grpo.system.child_process import package_environment
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.weights.factory import describe_weights, make_weight_sync, share_weights
from grpo.weights.quantised import quantise_base, write_base
from grpo.weights.shared import SameModule, WeightSync
from grpo.weights.stock import StockLoRA

if TYPE_CHECKING:
    from vllm import LLM

_CALL_TIMEOUT = 120.0
_MORE_TIME = "raise train.rollout_timeout"  # advice of policies that wait for a server


@dataclass(frozen=True)
class Actor:
    """The model that is trained, what generates with it, and how its weights get there."""

    model: nn.Module
    policy: Policy
    weights: WeightSync


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What trainer and engine agree on."""

    config: Config
    path: str  # folder or hub id of the weights that both start from
    tokenizer: Any
    device: torch.device  # of the trainer, and of an engine that the run starts
    dtype: torch.dtype  # of the weights on both sides
    max_model_len: int  # prompt plus response, in tokens
    folder: Path  # for the engine's log, and for adapters and checkpoints on their way to it
    adapter: Path | None = None  # folder of the one that a resumed run goes on with

    @property
    def engine_path(self) -> str:
        """What engines start from: the same, or the values that a quantised base stands for."""
        if self.config.train_model.quantization is None:
            return self.path
        return str((self.folder / "base_model").absolute())

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
        """Whether each row needs a seed, because another process draws it. On a GPU a run does not
        repeat to the bit anyway, and seeds cost time."""
        return self.config.engine != "in_process" and self.device.type == "cpu"

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.config.max_tokens, seed=self.config.train.seed,
                        temperature=self.config.inference_model.temperature)

    def policy_options(self) -> dict[str, Any]:
        """What every policy is told."""
        return {"pad_token_id": self.tokenizer.pad_token_id,
                "ignore_eos": self.config.inference_model.ignore_eos,
                "eos_token_ids": eos_token_ids(self.path, self.tokenizer)}


def check_transformers(config: Config, dtype: torch.dtype) -> None:
    """Refuse what is not read, or cannot work, where Transformers generates in ``dtype``.

    Raises:
        ConfigError: naming key, value and fix.
    """
    refuse_unread(config, TRANSFORMERS)
    if config.train_model.fp32_head and dtype != torch.float32:
        raise ConfigError("train_model.fp32_head=true: inference_model.backend=transformers "
                          "samples from logits that are rounded to the model's dtype; use "
                          "backend=vllm, or set it to false")


def build_actor(setup: Setup, *, backend: str, server: RunServer | None = None) -> Actor:
    """Model, policy and the way of the weights between them; ``policy.close()`` ends what is
    started here.

    Args:
        setup: what both sides agree on.
        backend: ``vllm`` or ``transformers``.
        server: to start where the run starts one; None: one with :func:`server_options` on a free
            port.
    """
    if backend == "transformers":
        return _one_module(setup)
    with ExitStack() as on_failure:
        if setup.config.engine == "server":
            actor = _with_server(setup, on_failure, server)
        else:
            actor = _with_engine(setup, on_failure)
        on_failure.pop_all()
    return actor


def load_trained(setup: Setup, device: torch.device) -> nn.Module:
    """The model that is to be trained."""
    return load_model(setup.path, setup.config, device=device, dtype=setup.dtype)


def quantised_model(setup: Setup) -> nn.Module | None:
    """The model that is to be trained, on the CPU, if its base is quantised; then
    ``setup.engine_path`` is there, too, from which engines start, and they start after it."""
    kind = setup.config.train_model.quantization
    if kind is None:
        return None
    model = quantise_base(load_trained(setup, torch.device("cpu")), kind, device=setup.device)
    write_base(model, setup.tokenizer, Path(setup.engine_path))
    return model


def _one_module(setup: Setup) -> Actor:
    base = quantised_model(setup)
    model = load_trained(setup, setup.device) if base is None else base.to(setup.device)
    prepare_model(model, setup.config, adapter=setup.adapter)
    policy = TransformersPolicy(model, setup.sampling, max_model_len=setup.max_model_len,
                                **setup.policy_options())
    weights = SameModule(model, used=lambda: policy.model)
    policy.version = lambda: weights.version
    return Actor(model, policy, weights)


def start_engine_of(setup: Setup, **own: Any) -> LLM:
    """vLLM, scheduled by this process; its model is here or in a process of its own. Options of
    :func:`~grpo.policies.inprocess.start_engine` given here win over those of the setup."""
    config, inference = setup.config, setup.config.inference_model
    lora = config.train_model.lora
    options = {
        "max_num_seqs": setup.rows, "seed": config.train.seed,
        "separate_process": config.engine == "process", "model_path": setup.engine_path, **own}
    return start_engine(
        options.pop("model_path"), device=setup.device, dtype=setup.dtype,
        max_model_len=setup.max_model_len, enforce_eager=inference.enforce_eager,
        fp32_head=setup.fp32_head,
        gpu_memory_utilization=inference.gpu_memory_utilization,
        kv_cache_memory_bytes=inference.kv_cache_memory_bytes,
        max_lora_rank=lora.r if lora.enabled else None, **options)


def _with_engine(setup: Setup, on_failure: ExitStack) -> Actor:
    """A vLLM engine that this process schedules."""
    base = quantised_model(setup)
    llm = start_engine_of(setup)
    on_failure.callback(stop_engine, llm)
    model, weights = _connected(setup, InProcessEngine(llm), base)
    return Actor(model, vllm_policy(setup, llm, weights), weights)


def vllm_policy(setup: Setup, llm: LLM, weights: WeightSync) -> VLLMPolicy:
    """What generates with an engine that this process schedules."""
    return VLLMPolicy(
        llm, setup.sampling, version=lambda: weights.version,
        lora_request=weights.lora_request if setup.config.train_model.lora.enabled else None,
        seeded=setup.seeds_rows, **setup.policy_options())


def _with_server(setup: Setup, on_failure: ExitStack, server: RunServer | None) -> Actor:
    """An engine behind HTTP."""
    if setup.config.inference_model.is_stock:
        stock = open_stock_server(setup)
        model, weights = _connected(setup, stock, None)
        return Actor(model, stock_policy(setup, stock, weights), weights)
    base = quantised_model(setup)
    client, server = open_server(setup, on_failure, server)
    model, weights = _connected(setup, client, base, server)
    return Actor(model, server_policy(setup, client, server), weights)


def open_server(
    setup: Setup, at_end: ExitStack, server: RunServer | None = None
) -> tuple[EngineClient, RunServer | None]:
    """A client of the run's own server, which is started and whose end ``at_end`` gets, or of one
    that runs already. For ``server`` see :func:`build_actor`."""
    url = setup.config.inference_model.url
    if url is not None:
        client = EngineClient(url, token=os.environ.get(TOKEN_VARIABLE), timeout=_CALL_TIMEOUT)
        bring_to_start(client, setup)
        return client, None
    server = server or RunServer(server_options(setup), log_path=setup.folder / "server.log")
    at_end.callback(server.stop)
    client = server.start(setup.engine_path)
    check_device(client.info(), setup.device, url=None)
    return client, server


def server_policy(setup: Setup, client: EngineClient, server: RunServer | None) -> ServerPolicy:
    """What generates by a server; the run's own ends with it."""
    policy = ServerPolicy(client, setup.sampling, stop=server and server.stop,
                          timeout=setup.config.train.rollout_timeout,
                          seeded=setup.seeds_rows, **setup.policy_options())
    policy.more_time = _MORE_TIME
    return policy


def stock_policy(setup: Setup, server: StockServer, weights: WeightSync) -> StockPolicy:
    """What generates by a server that is none of this library."""
    policy = StockPolicy(
        server, setup.sampling, tokenizer=setup.tokenizer, seeded=setup.seeds_rows,
        connections=setup.config.inference_model.connections or 64,
        timeout=setup.config.train.rollout_timeout,
        max_model_len=setup.max_model_len, version=lambda: weights.version,
        stop=weights.close if isinstance(weights, StockLoRA) else None, **setup.policy_options())
    policy.more_time = _MORE_TIME
    return policy


def _connected(
    setup: Setup, engine: EngineHandle | StockServer, base: nn.Module | None,
    server: RunServer | None = None,
) -> tuple[nn.Module, WeightSync]:
    """The trainer's model, and the way of its weights to a vLLM engine."""
    config = setup.config
    # On its way into the engine's memory a model needs none of the GPU's own.
    device = torch.device("cpu") if config.shares_weights else setup.device
    model = load_trained(setup, device) if base is None else base.to(device)
    shared = share_weights(config, model, engine)
    prepare_model(model, config, adapter=setup.adapter)
    return model, make_weight_sync(config, model, engine, shared=shared, folder=setup.folder,
                                   tokenizer=setup.tokenizer, path=setup.engine_path,
                                   server=server)


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
    """

    def __init__(self, options: dict[str, Any], *, log_path: str | Path, port: int = 0,
                 token: str | None = None, env: dict[str, str] | None = None) -> None:
        self.options, self.log_path, self.port, self.env = options, log_path, port, env or {}
        self._running: EngineProcess | None = None
        self.token = secrets.token_urlsafe() if token is None else token
        self._process = ExitStack()

    def start(self, path: str | Path) -> EngineClient:
        """Start from a folder or hub id; returns when the server answers, or raises
        :class:`EngineStartError` with the end of the log."""
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
        """Raise :class:`RuntimeError` with the last lines of its log if it has ended by itself."""
        if self._running is not None:
            self._running.check()


def describe_engine(config: Config, *, device: torch.device, backend: str) -> dict[str, str]:
    """Two lines of the start-up banner: ``engine`` and ``weights``."""
    inference, weights = config.inference_model, describe_weights(config, backend=backend)
    if backend == "transformers":
        return {"engine": "transformers, in process", "weights": weights}
    place = {"in_process": "in process", "process": "in a process of its own",
             "server": f"server at {inference.url}" if inference.url else "server of this run"}
    graphs = device.type == "cuda" and inference.url is None and not inference.enforce_eager
    engine = f"vllm, {place[config.engine]}" + (", CUDA graphs" if graphs else "")
    return {"engine": engine, "weights": weights}
