"""The parts of a run on Atropos environments that no other run has, one function a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from grpo.atropos.assemble import GroupAssembler, GroupSource, StreamSource
from grpo.atropos.bridge import Bridge
from grpo.atropos.bridge_driver import BridgeDriver
from grpo.atropos.bridge_server import BridgeServer
from grpo.atropos.client import AtroposClient
from grpo.atropos.convert import GroupConverter
from grpo.atropos.forward import PortForwarder
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.atropos.records import Records
from grpo.atropos.reference import ReferenceSource
from grpo.atropos.schemas import Registration
from grpo.atropos.stream import BatchStream
from grpo.atropos.trainer import CheckedCollector
from grpo.collectors.reference_worker import scoring_of
from grpo.config.atropos import AtroposConfig
from grpo.config.schema import ConfigError
from grpo.envs.text_tokens import text_tokens
from grpo.policies.base import Policy
from grpo.policies.fleet import FleetSampler
from grpo.policies.ray_engine import WorkerPool
from grpo.policies.samplers import TransformersSampler, VLLMSampler
from grpo.report.console import Console
from grpo.report.loggers import METRICS_FILE, read_jsonl
from grpo.report.starting import Starting
from grpo.report.time_summary import greatest_memory, phase_table
from grpo.run import build_async
from grpo.run import build_engine as engine
from grpo.run.build_async import AsyncActor
from grpo.run.build_eval import build_evaluations, held_out
from grpo.run.build_objective import describe_loss, scoring_budget
from grpo.run.build_team import TrainingActor, build_training_actor
from grpo.run.engine_attach import engine_environment
from grpo.run.placement import Places
from grpo.run.start import Start
from grpo.run.start_atropos import ENGINE_ROWS
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.training.evaluations import Evaluations
from grpo.weights.in_flight import PausedUpdates

AnyActor = TrainingActor | AsyncActor
# Plain text that any tokenizer knows; two tokens after each are compared.
_CANARY_TEXTS = ("The first even number after ten is", "12+30=", "To be or not to", "A B C D E")
# Requests that a policy without continuous batching answers at a time, and seconds that it waits
# for more of them.
_ROWS, _LINGER = 64, 0.005
# Batches that no run comes to.
_UNENDING = 1_000_000_000


def build_actor(
    start: Start, places: Places | tuple[int, ...], at_end: ExitStack, *,
    reference: WorkerPool | None = None,
) -> tuple[AnyActor, engine.RunServer | None]:
    """Model, learner, policy and weights; and the engine server, if it is the run's own.

    ``places`` are those of workers on Ray, or else the GPUs that train; ``at_end`` gets what ends
    all that is started here, as are the workers of the ``reference``.
    """
    setup, config, atropos = start.setup, start.setup.config, start.setup.config.atropos
    server = None
    if config.engine == "server" and config.inference_model.url is None:
        shared = config.weight_sync == "single_copy"
        options = engine.server_options(setup) | {
            "served_model_name": config.model.name, "shared_weights": shared,
            "log_dir": atropos.log_dir if shared else None}
        server = engine.RunServer(
            options, log_path=Path(atropos.log_dir) / "engine.log", port=atropos.vllm_port,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            env=engine_environment(config, setup.device))
    options = {"backend": start.backend, "at_end": at_end, "checkpoint": start.checkpoint}
    if isinstance(places, Places):
        with Starting(start.console.info) as starting:
            actor = build_async.build_actor(setup, None, places, starting=starting,
                                            reference=reference, **options)
        at_end.callback(actor.policy.close)
    else:
        actor = build_training_actor(setup, places, server=server, **options)
    # A server's own length may be greater than what this run asks of it.
    actor.policy.max_model_len = min(actor.policy.max_model_len, setup.max_model_len)
    return actor, server


def api_client(config: AtroposConfig, **options: float) -> AtroposClient:
    """A client of the run's API, with the access token of all servers."""
    return AtroposClient(config.atropos.url, token=os.environ.get(TOKEN_VARIABLE) or None,
                         **options)


def forward_ports(config: AtroposConfig, at_end: ExitStack, console: Console) -> None:
    """Lead further ports to what answers the environments, until the run ends."""
    ports = config.atropos.forward_ports
    if not ports:
        return
    try:
        at_end.enter_context(PortForwarder(ports, config.engine_url))
    except OSError as error:
        raise ConfigError(f"atropos.forward_ports={ports}: {error.strerror}; end what listens "
                          "there, or leave it out") from error
    if os.environ.get(TOKEN_VARIABLE):
        console.warn(f"the engine wants the token of {TOKEN_VARIABLE} at the ports {ports}, too; "
                     "environments with an address of their own often have a key of their own")


def canary_prompts(setup: engine.Setup) -> list[list[int]]:
    """Prompts that both sides are compared on: environments' own are not known beforehand."""
    room = setup.max_model_len - 2
    return [text_tokens(text, setup.tokenizer)[:room] for text in _CANARY_TEXTS]


def show_times(run_dir: Path, device: torch.device, console: Console) -> None:
    """Where the time of the run went, and what it took of the memory."""
    table = phase_table(read_jsonl(run_dir / METRICS_FILE))
    if table:
        console.info("\n".join([*table, greatest_memory(device)]))


def let_go(weights: PausedUpdates) -> None:
    """An engine that others use must not stay paused when the run ends in an error."""
    if weights.paused and weights.engine.alive():
        weights.end()


def serve_policy(
    start: Start, actor: AnyActor, at_end: ExitStack
) -> tuple[Bridge, BridgeDriver]:
    """Serve the policy at ``atropos.vllm_port`` until ``at_end``; returns the bridge, and what
    answers its calls: the engine of this process, or workers on Ray."""
    setup, config, policy = start.setup, start.setup.config, actor.policy
    in_engine = start.backend == "vllm"
    bridge = Bridge(
        tokenizer=setup.tokenizer, eos_token_ids=policy.eos_token_ids,
        max_model_len=setup.max_model_len,
        vocab_size=actor.model.get_input_embeddings().num_embeddings,
        model_names=(config.model.name,), temperature_only=not in_engine)
    at_end.enter_context(BridgeServer(
        bridge, port=config.atropos.vllm_port, token=os.environ.get(TOKEN_VARIABLE) or None))
    if isinstance(actor, AsyncActor):
        # A model of Transformers answers what comes together, and nothing else before.
        sampler = FleetSampler(policy, together=not in_engine, heals=config.train.staleness == 0)
        return bridge, BridgeDriver(bridge, sampler, linger=0.0 if in_engine else _LINGER)
    if in_engine:
        return bridge, BridgeDriver(bridge, VLLMSampler(policy, seeded=False))
    return bridge, BridgeDriver(bridge, TransformersSampler(policy), max_running=_ROWS,
                                linger=_LINGER)


def build_collector(
    start: Start, actor: AnyActor, run_dir: Path, at_end: ExitStack,
    checks: Sequence[Callable[[], None]], *, driver: BridgeDriver | None,
    records: Records | None, version: Callable[[], int], explain: Callable[[], str],
    ended: Callable[[], bool], reference: WorkerPool | None = None,
) -> CheckedCollector:
    """Batches of the groups that environments send to the API.

    ``driver`` answers the bridge's calls while groups are waited for, if nobody else does;
    ``records`` are the bridge's, if there is one; for ``checks`` see
    :class:`~grpo.atropos.assemble.StreamSource`. Workers of the ``reference`` score groups as they
    come.
    """
    setup, config, atropos = start.setup, start.setup.config, start.setup.config.atropos
    registration = Registration(
        wandb_group=config.logging.wandb_group or "", wandb_project=config.logging.wandb_project
        or "", batch_size=config.turns_per_batch, max_token_len=atropos.seq_len,
        checkpoint_dir=str(run_dir),
        # Those that were started by hand end after so many, of which what is stale is not trained.
        num_steps=config.iterations if atropos.max_staleness is None else _UNENDING,
        save_checkpoint_interval=config.train.checkpoint_frequency,
        starting_step=start.checkpoint.step if start.checkpoint else 0)
    # Groups are the hub's until a checkpoint has what they taught: a killed run loses none.
    stream = BatchStream(api_client(config), registration, poll_seconds=0.05,
                         hold=config.train.checkpoint_frequency > 0)
    rows = {"pad_token_id": setup.tokenizer.pad_token_id,
            "vocab_size": actor.model.get_input_embeddings().num_embeddings,
            "seq_len": min(atropos.seq_len, setup.max_model_len)}
    source: GroupSource = StreamSource(stream, checks)
    if reference is not None:
        source = ReferenceSource(source, scoring_of(reference),
                                 GroupConverter(**rows, distill_topk=0))
        stream.on_fetched = source.begin
    at_end.enter_context(stream)
    distill = config.distill
    converter = GroupConverter(
        **rows, temperature=config.inference_model.temperature, max_staleness=atropos.max_staleness,
        # A teacher of the run's own scores whole batches.
        distill_topk=0 if distill.topk_coeff is None or distill.teacher else distill.topk or 20)
    return CheckedCollector(
        GroupAssembler(source, converter, rows=config.turns_per_batch,
                       version=version, records=records),
        driver=driver, policy=actor.policy, timeout=atropos.timeout, explain=explain,
        ended=ended,
        recompute=RecomputeLogProbs(actor.scorer, max_tokens=scoring_budget(config)),
        dump_to=run_dir / "temp.json" if atropos.dump_batch else None)


def build_evaluator(start: Start, policy: Policy) -> Evaluations | None:
    """Accuracy on the task of section ``env``, which environments need not know."""
    setup, config = start.setup, start.setup.config
    if not config.atropos.evaluate:
        return None
    problems = held_out(start.task.name, config, setup.tokenizer, limit=setup.max_model_len,
                        max_tokens=config.atropos.eval_max_tokens or 128, task=start.task)
    return build_evaluations(config, [problems], policy, rows=ENGINE_ROWS)


def describe(
    start: Start, actor: AnyActor, run_dir: Path, places: Places | tuple[int, ...]
) -> dict[str, str]:
    """What was resolved, for the start-up banner."""
    setup, config, atropos = start.setup, start.setup.config, start.setup.config.atropos
    count = sum(param.numel() for param in actor.model.parameters())
    trained = sum(param.numel() for param in actor.model.parameters() if param.requires_grad)
    return {
        "model": f"{config.model.name}, {count / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M "
                 f"of them trained, {str(setup.dtype)[6:]}",
        "groups": f"from {atropos.url}, {config.turns_per_batch} sequences a step",
        "answers": ("workers on Ray, at " if config.has_workers else
                    "the policy in this process, at " if atropos.bridge else "engine server at ")
                   + ", ".join([config.engine_url, *map(str, atropos.forward_ports)]),
        "run": f"{config.iterations} steps, {config.optimizer.name} at {config.optimizer.lr:g}",
        "loss": describe_loss(config),
        **(build_async.describe(config, places, backend=start.backend)
           if isinstance(places, Places) else
           engine.describe_engine(config, device=setup.device, backend=start.backend)),
        "folder": str(run_dir.absolute())}
