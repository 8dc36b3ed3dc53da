"""From the configuration to a trainer on Atropos environments, and what it leaves behind.

Groups come from the API at ``atropos.url``. The environments' questions are answered by an engine
server (pull form), or by the policy of this process (``atropos.bridge``). The order in which API,
engine, environments and trainer start does not matter: each waits for the others, with a deadline.
The variable ``GRPO_SERVER_TOKEN`` is the access token of all of them, if they want one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.assemble import GroupAssembler, StreamSource
from grpo.atropos.client import AtroposClient
from grpo.atropos.collector import Driver
from grpo.atropos.convert import GroupConverter
from grpo.atropos.forward import PortForwarder
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.atropos.records import Records
from grpo.atropos.schemas import Registration
from grpo.atropos.silence import SilenceCheck
from grpo.atropos.stream import BatchStream
from grpo.atropos.trainer import (
    AtroposTrainer,
    CheckedCollector,
    GivenReference,
    GroupTeacher,
    loading_table,
)
from grpo.config.atropos import AtroposConfig
from grpo.config.schema import ConfigError
from grpo.envs.prompts import render_all
from grpo.envs.text_tokens import text_tokens
from grpo.envs.tokenizer_files import environment_tokenizer
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Policy
from grpo.report.console import Console
from grpo.report.loggers import METRICS_FILE, LoggerGroup, make_loggers, read_jsonl
from grpo.report.reporter import Reporter
from grpo.report.time_summary import greatest_memory, phase_table
from grpo.report.watch import AlignmentWarning
from grpo.run import build
from grpo.run import build_engine as engine
from grpo.run import build_objective as objective
from grpo.run.build_bridge import serve_policy
from grpo.run.build_model import load_model
from grpo.run.engine_attach import engine_environment
from grpo.run.memory_atropos import check_memory, with_fast_defaults
from grpo.run.start_atropos import ENGINE_ROWS, Start, resolve
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.training.evaluation import Evaluator
from grpo.weights.canary import Canary
from grpo.weights.factory import while_serving
from grpo.weights.in_flight import PausedUpdates

TOKENIZER = "tokenizer"
# Plain text that any tokenizer knows; two tokens after each are compared.
_CANARY_TEXTS = ("The first even number after ten is", "12+30=", "To be or not to", "A B C D E")


@contextmanager
def atropos_trainer(
    config: AtroposConfig, *, checks: list[Callable[[], None]] | None = None,
    on_serving: Callable[[ExitStack], None] = lambda cleanup: None,
) -> Iterator[AtroposTrainer]:
    """A trainer that is ready to ``fit``; at the end of the context all that it started is ended.

    Args:
        config: the run's.
        checks: called while the run waits for groups; each raises if something that the run
            depends on is gone, such as an environment. May grow while the trainer is made.
        on_serving: called once when the environments' questions can be answered, with a stack for
            what is to end before the engine does.

    Raises:
        ValueError: for a configuration that cannot work, naming key and fix.
        EngineStartError: with the end of its log, if the engine does not come up.
    """
    with ExitStack() as cleanup:
        yield _build(config, cleanup, [] if checks is None else checks, on_serving)


def _build(
    config: AtroposConfig, cleanup: ExitStack, checks: list[Callable[[], None]],
    on_serving: Callable[[ExitStack], None],
) -> AtroposTrainer:
    build.quiet_libraries()
    console = Console(config.iterations)
    start = with_fast_defaults(resolve(config, console, cleanup), console)
    config = start.config
    environment_tokenizer(start.model, start.run_dir / TOKENIZER)
    check_memory(start, console)
    loggers = _loggers(start, console)
    if config.atropos.benchmark:
        cleanup.callback(_show_times, start, console)
    cleanup.callback(loggers.close)

    _forward(config, cleanup, console)  # at once, for a port that is taken costs no engine's start

    # Trainer and engine, and how the weights travel between them
    actor, server = _actor(start)
    cleanup.callback(actor.policy.close)
    if server is not None:
        checks.append(server.check)
    if config.atropos.debug_loading:
        console.info(loading_table(actor.model, actor.weights))
    loss = objective.build_loss(config, actor.model, start.tokenizer)
    learner = objective.build_learner(config, loss)
    weights = actor.weights
    if config.inference_model.engine == "server":
        weights = while_serving(config, weights, actor.policy.client)
    canary = Canary(actor.policy, loss.scorer, weights, prompts=_canary_prompts(start))
    if isinstance(weights, PausedUpdates):
        learner.before_step.pause_engine = weights.begin
        cleanup.callback(_let_go, weights)

    # The environments' side
    records, driver = None, None
    if config.atropos.bridge:
        bridge, driver = serve_policy(
            config, actor.policy, cleanup, tokenizer=start.tokenizer, backend=start.backend,
            model=actor.model, max_model_len=start.max_model_len)
        records = bridge.records
    checks.append(SilenceCheck(
        _api(config, timeout=5.0), (lambda: bridge.counts["calls"]) if config.atropos.bridge else
        actor.policy.client.requests, url=config.engine_url,
        forwarded=config.atropos.forward_ports, say=console.warn))
    on_serving(cleanup)
    collector = _collector(start, cleanup, checks, policy=actor.policy, driver=driver,
                           records=records, version=lambda: weights.version,
                           recompute=RecomputeLogProbs(
                               loss.scorer, max_tokens=objective.scoring_budget(config)),
                           vocab_size=actor.model.get_input_embeddings().num_embeddings)

    advantage = objective.build_advantage(config)
    reference = objective.build_reference(
        config, actor.model, lambda: build.model_folder(config, start.task),
        lambda path: load_model(path, config, device=start.device, dtype=start.dtype))
    console.banner(_describe(start, actor))
    trainer = AtroposTrainer(
        collector=collector, advantage=GivenAdvantage(advantage), learner=learner,
        weights=weights, canary=canary,
        evaluator=_evaluator(start, actor.policy),
        reference=reference and GivenReference(reference),
        teacher=GroupTeacher() if config.distill.topk_coeff is not None else None,
        adaptations=objective.build_adaptations(config, loss, advantage),
        reporter=Reporter(console, loggers, start.tokenizer, run_dir=start.run_dir,
                          num_samples=config.logging.num_samples),
        tokenizer=start.tokenizer, run_dir=start.run_dir, config=start.asked,
        iterations=config.iterations, eval_frequency=config.train.eval_frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        keep_checkpoints=config.train.keep_checkpoints or 3,
        proof_interval=config.train.proof_interval)
    if start.checkpoint:
        trainer.restore(start.checkpoint)
        console.info(f"resumed at step {start.checkpoint.step} from {start.checkpoint.folder}")
    return trainer


# -- the parts -------------------------------------------------------------------------------------


def _actor(start: Start) -> tuple[engine.Actor, engine.RunServer | None]:
    """Model, policy and weights; and the engine server, if it is the run's own."""
    config, atropos = start.config, start.config.atropos
    folder = Path(atropos.log_dir)
    setup = engine.Setup(config=config, path=start.model, tokenizer=start.tokenizer,
                         device=start.device, dtype=start.dtype,
                         max_model_len=start.max_model_len, adapter=start.adapter,
                         folder=start.run_dir / "engine")
    server = None
    if config.inference_model.engine == "server" and config.inference_model.url is None:
        shared = config.weight_sync == "single_copy"
        options = engine.server_options(setup) | {
            "served_model_name": config.model.name, "shared_weights": shared,
            "log_dir": str(folder) if shared else None}
        server = engine.RunServer(
            options, log_path=folder / "engine.log", port=atropos.vllm_port,
            token=os.environ.get(TOKEN_VARIABLE, ""),
            env=engine_environment(config, start.device))
    actor = engine.build_actor(setup, backend=start.backend, server=server)
    return replace(actor, policy=_with_length(actor.policy, start.max_model_len)), server


def _api(config: AtroposConfig, **options: float) -> AtroposClient:
    return AtroposClient(config.atropos.url, token=os.environ.get(TOKEN_VARIABLE) or None,
                         **options)


def _forward(config: AtroposConfig, cleanup: ExitStack, console: Console) -> None:
    """Lead further ports to what answers the environments, until the run ends."""
    ports = config.atropos.forward_ports
    if not ports:
        return
    try:
        cleanup.enter_context(PortForwarder(ports, config.engine_url))
    except OSError as error:
        raise ConfigError(f"atropos.forward_ports={ports}: {error.strerror}; end what listens "
                          "there, or leave it out") from error
    if os.environ.get(TOKEN_VARIABLE):
        console.warn(f"the engine wants the token of {TOKEN_VARIABLE} at the ports {ports}, too; "
                     "environments with an address of their own often have a key of their own")


def _with_length(policy: Policy, max_model_len: int) -> Policy:
    """A server's own length may be greater than what this run asks of it."""
    policy.max_model_len = min(policy.max_model_len, max_model_len)
    return policy


def _loggers(start: Start, console: Console) -> LoggerGroup:
    config = start.config.logging
    group = make_loggers(
        config.backends, run_dir=start.run_dir, config=start.settings,
        project=config.wandb_project or "grpo", name=config.wandb_run_name,
        group=config.wandb_group, wandb_mode=config.wandb_mode or "online",
        resume_step=start.checkpoint.step if start.checkpoint else None)
    return LoggerGroup([*group.loggers, AlignmentWarning(console.warn)])


def _show_times(start: Start, console: Console) -> None:
    table = phase_table(read_jsonl(start.run_dir / METRICS_FILE))
    if table:
        console.info("\n".join([*table, greatest_memory(start.device)]))


def _canary_prompts(start: Start) -> list[list[int]]:
    room = start.max_model_len - 2
    return [text_tokens(text, start.tokenizer)[:room] for text in _CANARY_TEXTS]


def _let_go(weights: PausedUpdates) -> None:
    """An engine that others use must not stay paused when the run ends in an error."""
    if weights.paused and weights.engine.alive():
        weights.end()


def _collector(
    start: Start, cleanup: ExitStack, checks: Sequence[Callable[[], None]], *, policy: Policy,
    driver: Driver | None, records: Records | None, version: Callable[[], int],
    recompute: RecomputeLogProbs, vocab_size: int,
) -> CheckedCollector:
    config, atropos = start.config, start.config.atropos
    registration = Registration(
        wandb_group=config.logging.wandb_group or "", wandb_project=config.logging.wandb_project
        or "", batch_size=config.turns_per_batch, max_token_len=atropos.seq_len,
        checkpoint_dir=str(start.run_dir), num_steps=config.iterations,
        save_checkpoint_interval=config.train.checkpoint_frequency,
        starting_step=start.checkpoint.step if start.checkpoint else 0)
    # Groups are the hub's until a checkpoint has what they taught: a run that is killed loses none.
    stream = cleanup.enter_context(BatchStream(
        _api(config), registration, poll_seconds=0.05, hold=config.train.checkpoint_frequency > 0))
    source = StreamSource(stream, checks)
    distill = config.distill
    converter = GroupConverter(
        pad_token_id=start.tokenizer.pad_token_id, vocab_size=vocab_size,
        seq_len=min(atropos.seq_len, start.max_model_len),
        temperature=config.inference_model.temperature, max_staleness=atropos.max_staleness,
        distill_topk=0 if distill.topk_coeff is None else distill.topk or 20)
    return CheckedCollector(
        GroupAssembler(source, converter, rows=config.turns_per_batch, version=version,
                       records=records),
        driver=driver, recompute=recompute, policy=policy, timeout=atropos.timeout,
        dump_to=start.run_dir / "temp.json" if atropos.dump_batch else None)


def _evaluator(start: Start, policy: Policy) -> Evaluator | None:
    """Accuracy on the task of section ``env``, which environments need not know."""
    config = start.config
    if not config.atropos.evaluate:
        return None
    tokens = config.atropos.eval_max_tokens or 128
    room = start.max_model_len - tokens
    prompts = render_all(start.task.split("test"), start.tokenizer,
                         max_prompt_tokens=min(room, config.env.max_prompt_tokens or room),
                         what=f"{start.task.name} test")
    env = VerifiableEnv(
        prompts, build.reward_function(config, start.task), start.tokenizer,
        num_prompts=min(len(prompts), ENGINE_ROWS), group_size=1, shuffle=False,
        max_prompt_tokens=max(len(prompt.tokens) for prompt in prompts),
        max_response_tokens=tokens, eos_token_ids=policy.eos_token_ids)
    return Evaluator(env, policy.with_sampling(max_tokens=tokens),
                     max_reward_errors=config.env.max_reward_errors)


def _describe(start: Start, actor: engine.Actor) -> dict[str, str]:
    config, atropos = start.config, start.config.atropos
    count = sum(param.numel() for param in actor.model.parameters())
    trained = sum(param.numel() for param in actor.model.parameters() if param.requires_grad)
    return {
        "model": f"{config.model.name}, {count / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M "
                 f"of them trained, {str(start.dtype)[6:]}",
        "groups": f"from {atropos.url}, {config.turns_per_batch} sequences a step",
        "answers": ("the policy in this process, at " if atropos.bridge else "engine server at ")
                   + ", ".join([config.engine_url, *map(str, atropos.forward_ports)]),
        "run": f"{config.iterations} steps, {config.optimizer.name} at {config.optimizer.lr:g}",
        "loss": objective.describe_loss(config),
        **engine.describe_engine(config, device=start.device, backend=start.backend),
        "folder": str(start.run_dir.absolute())}
