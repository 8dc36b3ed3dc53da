"""From the configuration to a trainer on Atropos environments, of the parts of every run.

Groups come from the API at ``atropos.url``. The environments' questions are answered by an engine
server (pull form), or by the policy of this process (``atropos.bridge``). The order in which API,
engine, environments and trainer start does not matter: each waits for the others, with a deadline.
The variable ``GRPO_SERVER_TOKEN`` is the access token of all of them, if they want one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.bridge_driver import DriverThread
from grpo.atropos.silence import SilenceCheck
from grpo.atropos.trainer import AtroposTrainer, GivenReference, GroupTeacher, loading_table
from grpo.config.atropos import AtroposConfig
from grpo.config.schema import Config
from grpo.envs.tokenizer_files import environment_tokenizer
from grpo.report.console import Console
from grpo.report.starting import Starting
from grpo.report.watch import AlignmentWarning
from grpo.run import build, build_async, build_atropos, build_objective, build_team
from grpo.run.build_async import AsyncActor
from grpo.run.device_memory import available
from grpo.run.memory_atropos import check_memory, trainer_ledger
from grpo.run.placement import Places, unused_reference
from grpo.run.start import loader_of, open_loggers, trainer_of, with_fast_defaults, with_sharding
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
    on_serving: Callable[[], None] = lambda: None, asked: Config | None = None,
    explain: Callable[[], str] = str, ended: Callable[[], bool] = lambda: False,
) -> AtroposTrainer:
    """A trainer whose rollouts are what environments send; see :func:`grpo.run.assemble.assemble`.

    Args:
        checks: called while the run waits for groups; each raises if something that the run
            depends on is gone, such as an environment. May grow.
        on_serving: called once, as soon as the environments' questions can be answered.
        explain: says why no groups come, as far as it can be known; asked when that is an error.
        ended: whether all environments have ended, so that no group comes any more.
        asked: the configuration by which a later run recognises its own, if it is another.

    Raises:
        EngineStartError: with the end of its log, if the engine does not come up.
    """
    build.quiet_libraries()
    checks = [] if checks is None else checks
    if config.has_workers:
        with Starting(Console(total_steps=1).info) as starting:
            places = build_async.open_ray(config, at_end, starting)
    else:
        places = build_team.choose_devices(config, backend=build.resolve_backend(config))
    start = set_up(config, run_dir, checkpoint)
    if asked is not None:
        start = start._replace(asked=asked.model_dump(mode="json"))
    setup, console = start.setup, start.console
    environment_tokenizer(setup.path, run_dir / TOKENIZER)

    # What it will take, before anything is launched
    start, sharding = with_sharding(start, places) if isinstance(places, Places) else (start, [])
    start, chosen = with_fast_defaults(
        start, trainer_ledger(start, places), available(setup.config, setup.device),
        row_tokens=min(setup.max_model_len, config.atropos.seq_len))
    engine = [] if asked is None else build_team.chosen_engine(config)  # atropos-grpo has one way
    for line in (*unused_reference(config), *engine, *sharding, *chosen):
        console.info(line)
    check_memory(start, places)
    setup, config = start.setup, start.setup.config
    loggers = open_loggers(start, run_dir, AlignmentWarning(console.warn))
    if config.atropos.benchmark:
        at_end.callback(build_atropos.show_times, run_dir, setup.device, console)
    at_end.callback(loggers.close)
    # At once, for a port that is taken costs no engine's start
    build_atropos.forward_ports(config, at_end, console)

    # Trainer and engine, and how the weights travel between them
    reference_path = partial(build.model_folder, config, start.task)
    pool = build_async.build_reference_pool(
        config, places, config.ref_model.name or reference_path(), setup.dtype, at_end
    ) if isinstance(places, Places) else None
    actor, server = build_atropos.build_actor(start, places, at_end, reference=pool)
    if server is not None:
        checks.append(server.check)
    if config.atropos.debug_loading:
        console.info(loading_table(actor.model, actor.weights))
    learner, weights = actor.learner, actor.weights
    if config.engine == "server":
        weights = while_serving(config, weights, actor.policy.client)
    fleet = actor.pool if isinstance(actor, AsyncActor) else None
    canary = Canary(actor.policy, actor.scorer, weights,  # each worker gets all of the prompts
                    prompts=build_atropos.canary_prompts(setup) * (fleet.count if fleet else 1))
    if isinstance(weights, PausedUpdates):
        learner.before_step.pause_engine = weights.begin
        at_end.callback(build_atropos.let_go, weights)

    # The environments' side
    bridge, driver, ahead = None, None, False
    if config.atropos.bridge:
        bridge, driver = build_atropos.serve_policy(start, actor, at_end)
    if fleet is not None and (ahead := config.train.staleness > 0):
        checks.append(lambda: fleet.whole or weights.heal())
        checks.append(at_end.enter_context(DriverThread(driver)).check)
    checks.append(SilenceCheck(
        build_atropos.api_client(config, timeout=5.0),
        (lambda: bridge.counts["calls"]) if bridge else actor.policy.client.requests,
        url=config.engine_url, forwarded=config.atropos.forward_ports, say=console.warn))
    on_serving()
    collector = build_atropos.build_collector(
        start, actor, run_dir, at_end, checks, driver=None if ahead else driver, explain=explain,
        ended=ended, records=bridge and bridge.records, version=lambda: weights.version,
        reference=pool)

    reference = None if pool else build_objective.build_reference(
        config, actor.model, reference_path, loader_of(setup), actor.learner)
    advantage = build_objective.build_advantage(config)
    console.banner(build_atropos.describe(start, actor, run_dir, places))
    return trainer_of(
        start, loggers, run_dir, kind=AtroposTrainer, unit="step",
        collector=collector, learner=learner,
        # Weights of a group's rows have no place for advantages that it brings.
        advantage=advantage if config.train.is_maxent else GivenAdvantage(advantage),
        reference=reference and GivenReference(reference),
        teacher=build_objective.build_teacher(config, actor.model, loader_of(setup)) or (
            None if config.distill.topk_coeff is None else GroupTeacher()),
        adaptations=build_objective.build_adaptations(config, learner.loss, advantage),
        weights=weights, canary=canary, overlap_canary=ahead,
        evaluator=build_atropos.build_evaluator(start, actor.policy))
