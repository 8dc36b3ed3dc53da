"""From the configuration to a trainer on Atropos environments, of the parts of every run.

Groups come from the API at ``atropos.url``. The environments' questions are answered by an engine
server (pull form), or by the policy of this process (``atropos.bridge``). The order in which API,
engine, environments and trainer start does not matter: each waits for the others, with a deadline.
The variable ``GRPO_SERVER_TOKEN`` is the access token of all of them, if they want one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.silence import SilenceCheck
from grpo.atropos.trainer import AtroposTrainer, GivenReference, GroupTeacher, loading_table
from grpo.config.atropos import AtroposConfig
from grpo.envs.tokenizer_files import environment_tokenizer
from grpo.report.watch import AlignmentWarning
from grpo.run import build, build_atropos, build_objective
from grpo.run.assemble import loader_of, open_loggers, trainer_of, with_fast_defaults
from grpo.run.device_memory import available
from grpo.run.memory_atropos import check_memory, trainer_ledger
from grpo.run.start_atropos import set_up
from grpo.training.checkpoint import Checkpoint
from grpo.weights.canary import Canary
from grpo.weights.factory import while_serving
from grpo.weights.in_flight import PausedUpdates

#: Folder in the run's that has the tokenizer as environments read it.
TOKENIZER = "tokenizer"


def assemble_atropos(
    config: AtroposConfig, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack, *,
    checks: list[Callable[[], None]] | None = None,
    on_serving: Callable[[], None] = lambda: None,
) -> AtroposTrainer:
    """A trainer whose rollouts are what environments send; see :func:`grpo.run.assemble.assemble`.

    Args:
        checks: called while the run waits for groups; each raises if something that the run
            depends on is gone, such as an environment. May grow.
        on_serving: called once, as soon as the environments' questions can be answered.

    Raises:
        EngineStartError: with the end of its log, if the engine does not come up.
    """
    build.quiet_libraries()
    checks = [] if checks is None else checks
    start = set_up(config, run_dir, checkpoint)
    setup, console = start.setup, start.console
    environment_tokenizer(setup.path, run_dir / TOKENIZER)

    # What it will take, before anything is launched
    start, chosen = with_fast_defaults(
        start, trainer_ledger(start), available(setup.config, setup.device),
        row_tokens=min(setup.max_model_len, config.atropos.seq_len))
    for line in chosen:
        console.info(line)
    check_memory(start)
    setup, config = start.setup, start.setup.config
    loggers = open_loggers(start, run_dir, AlignmentWarning(console.warn))
    if config.atropos.benchmark:
        at_end.callback(build_atropos.show_times, run_dir, setup.device, console)
    at_end.callback(loggers.close)
    # At once, for a port that is taken costs no engine's start
    build_atropos.forward_ports(config, at_end, console)

    # Trainer and engine, and how the weights travel between them
    actor, server = build_atropos.build_actor(start)
    at_end.callback(actor.policy.close)
    if server is not None:
        checks.append(server.check)
    if config.atropos.debug_loading:
        console.info(loading_table(actor.model, actor.weights))
    loss = build_objective.build_loss(config, actor.model, setup.tokenizer)
    learner = build_objective.build_learner(config, loss)
    weights = actor.weights
    if config.engine == "server":
        weights = while_serving(config, weights, actor.policy.client)
    canary = Canary(actor.policy, loss.scorer, weights,
                    prompts=build_atropos.canary_prompts(setup))
    if isinstance(weights, PausedUpdates):
        learner.before_step.pause_engine = weights.begin
        at_end.callback(build_atropos.let_go, weights)

    # The environments' side
    bridge, driver = None, None
    if config.atropos.bridge:
        bridge, driver = build_atropos.serve_policy(start, actor, at_end)
    checks.append(SilenceCheck(
        build_atropos.api_client(config, timeout=5.0),
        (lambda: bridge.counts["calls"]) if bridge else actor.policy.client.requests,
        url=config.engine_url, forwarded=config.atropos.forward_ports, say=console.warn))
    on_serving()
    collector = build_atropos.build_collector(
        start, actor, loss.scorer, run_dir, at_end, checks, driver=driver,
        records=bridge and bridge.records, version=lambda: weights.version)

    reference = build_objective.build_reference(
        config, actor.model, lambda: build.model_folder(config, start.task), loader_of(setup))
    advantage = build_objective.build_advantage(config)
    console.banner(build_atropos.describe(start, actor, run_dir))
    return trainer_of(
        start, loggers, run_dir, kind=AtroposTrainer, unit="step",
        collector=collector, advantage=GivenAdvantage(advantage), learner=learner,
        reference=reference and GivenReference(reference),
        teacher=None if config.distill.topk_coeff is None else GroupTeacher(),
        adaptations=build_objective.build_adaptations(config, loss, advantage),
        weights=weights, canary=canary,
        evaluator=build_atropos.build_evaluator(start, actor.policy))
