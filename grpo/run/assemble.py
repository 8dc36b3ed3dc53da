"""From a configuration to a trainer that is ready to ``fit``.

:func:`assemble` is for ``grpo.py``, :func:`assemble_async` for ``grpo-async.py``; they differ in
where rollouts come from. Where that is Atropos environments:
:mod:`grpo.run.assemble_atropos`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from grpo.collectors.base import Collector
from grpo.collectors.sync import SyncCollector
from grpo.config.asynchronous import AsyncConfig, with_workers
from grpo.config.schema import Config
from grpo.policies.model_shape import ModelShape
from grpo.report.console import Console
from grpo.report.loggers import LoggerGroup
from grpo.report.starting import Starting
from grpo.run import build, build_async, build_eval, build_objective, build_team
from grpo.run.build_async import AsyncActor
from grpo.run.build_engine import Setup
from grpo.run.build_eval import HeldOut
from grpo.run.build_team import TrainingActor
from grpo.run.device_memory import available, capacity, check_roles_fit, role_ledgers, run_ledger
from grpo.run.engine_attach import with_server_kind
from grpo.run.ledger import Ledger, Saving, check_fits
from grpo.run.memory_advice import leaner_training, less_held, more_devices, savings, smaller_cache
from grpo.run.placement import Places, unused_reference
from grpo.run.script_atropos import assemble_on_atropos
from grpo.run.start import (
    Start,
    loader_of,
    open_loggers,
    trainer_of,
    with_fast_defaults,
    with_sharding,
)
from grpo.training.checkpoint import Checkpoint
from grpo.training.trainer import Trainer
from grpo.weights.canary import Canary
from grpo.weights.tolerance import canary_tolerance


def assemble(
    config: Config, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack
) -> Trainer:
    """A trainer that asks an engine for each rollout, or, where engines or the reference have
    devices of their own, workers on Ray.

    Args:
        config: the run's.
        run_dir: its folder.
        checkpoint: that it goes on from.
        at_end: gets what ends the parts.

    Raises:
        ValueError: for a configuration that cannot work, naming key and fix.
    """
    if config.env.is_atropos:
        return assemble_on_atropos(config, run_dir, checkpoint, at_end)
    if config.has_workers:
        return assemble_async(with_workers(config), run_dir, checkpoint, at_end, asked=config)
    build.quiet_libraries()
    devices = build_team.choose_devices(config, backend=build.resolve_backend(config))
    start = _set_up(config, run_dir, checkpoint)

    # What it will take, before anything is launched
    setup, room = start.setup, available(config, start.setup.device)
    ledger_of = partial(run_ledger, model_path=setup.path, device=setup.device, dtype=setup.dtype,
                        backend=start.backend, max_model_len=setup.max_model_len,
                        trained_tokens=start.prompts.max_model_len)
    start, chosen = with_fast_defaults(start, ledger_of, room,
                                       row_tokens=start.prompts.max_model_len)
    memory = ledger_of(start.setup.config)
    start.console.info("\n".join([*unused_reference(config), *build_team.chosen_engine(config),
                                  *chosen, *memory.table(room)]))
    check_fits(memory, room, advised=lambda: _advised(start, ledger_of, memory, room))
    loggers = open_loggers(start, run_dir)

    # Trainer and engine, and how the weights travel between them
    setup, config = start.setup, start.setup.config
    actor = build_team.build_training_actor(setup, devices, backend=start.backend, at_end=at_end,
                                            checkpoint=checkpoint)
    env = build.build_env(config, start.task, start.prompts, setup.tokenizer, actor.policy)
    collector = SyncCollector(env, actor.policy, turns_per_batch=config.turns_per_batch,
                              max_rounds=config.train.max_sampling_rounds)
    reference = build_objective.build_reference(
        config, actor.model, lambda: build.model_folder(config, start.task), loader_of(setup),
        actor.learner)
    return _trainer(start, actor, collector, loggers, run_dir, reference=reference)


def assemble_async(
    config: AsyncConfig, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack, *,
    asked: Config | None = None,
) -> Trainer:
    """A trainer whose rollouts come from workers that generate all the time; see :func:`assemble`.

    ``asked`` is the configuration by which a later run recognises its own, if it is another.

    Raises:
        ValueError: for a configuration that cannot work, naming key and fix.
        EngineError: if a worker does not start.
    """
    if config.env.is_atropos:
        return assemble_on_atropos(config, run_dir, checkpoint, at_end)
    build.quiet_libraries()
    # The console of the run is made when its length is known.
    with Starting(Console(total_steps=1).info) as starting:
        places = build_async.open_ray(config, at_end, starting)
        with starting.part("tokenizer and prompts"):
            start = _set_up(config, run_dir, checkpoint)
        if asked is not None:
            start = start._replace(asked=asked.model_dump(mode="json"))
        start = _planned(start, places)
        loggers = open_loggers(start, run_dir)

        # Workers, trainer, and how the weights travel between them
        setup, config = start.setup, start.setup.config
        reference_path = config.ref_model.name or build.model_folder(config, start.task)
        pool = build_async.build_reference_pool(config, places, reference_path, setup.dtype,
                                                at_end)
        actor = build_async.build_actor(setup, start.prompts, places, backend=start.backend,
                                        at_end=at_end, starting=starting, reference=pool,
                                        checkpoint=checkpoint)
    collector = build_async.build_collector(config, actor, pool)
    at_end.callback(collector.close)
    reference = None if pool else build_objective.build_reference(
        config, actor.model, lambda: reference_path, loader_of(setup), actor.learner)
    return _trainer(start, actor, collector, loggers, run_dir, reference=reference,
                    workers=actor.pool.count, overlap_canary=config.train.staleness > 0,
                    described=build_async.describe(config, places, backend=start.backend))


def _planned(start: Start, places: Places) -> Start:
    """What it will take, said before anything is launched, and with fast defaults."""
    plan, (start, sharding) = places.plan, with_sharding(start, places)
    setup, room, say = start.setup, capacity(start.setup.device), start.console.info
    say("\n".join([*plan.table(), *unused_reference(setup.config), *sharding]))
    ledgers_of = partial(role_ledgers, places=plan, model_path=setup.path,
                         device=setup.device, dtype=setup.dtype, backend=start.backend,
                         max_model_len=setup.max_model_len,
                         trained_tokens=start.prompts.max_model_len)
    start, chosen = with_fast_defaults(start, lambda changed: ledgers_of(changed)["train"], room,
                                       row_tokens=start.prompts.max_model_len)
    memory = ledgers_of(start.setup.config)
    for line in chosen:
        say(line)
    for role, ledger in memory.items():
        say("\n".join([f"{role}:", *ledger.table(room)]))
    check_roles_fit(memory, plan, room, lambda role: _advised(
        start, lambda changed: ledgers_of(changed)[role], memory[role], room, role))
    return start


# -- what both have in common ----------------------------------------------------------------------


def _set_up(config: Config, run_dir: Path, checkpoint: Checkpoint | None) -> Start:
    """What is trained, on what, where."""
    asked, config = config.model_dump(mode="json"), with_server_kind(config)
    device, backend = build.resolve_device(config), build.resolve_backend(config)
    dtype, task = build.resolve_dtype(config, device), build.build_task(config)
    build.check(config, task, device=device, backend=backend)
    path, adapter = build.start_of(config, task, checkpoint)
    tokenizer = build.load_tokenizer(path)
    prompts = build.build_prompts(config, task, tokenizer, path)
    config = config.for_problems(len(prompts.train))
    benchmarks = build_eval.build_benchmarks(
        config, tokenizer, limit=config.inference_model.max_model_len or build.context_of(
            config, path) or prompts.max_model_len,
        trained=build_eval.questions(prompt.problem for prompt in prompts.train))
    setup = Setup(config=config, path=path, tokenizer=tokenizer, device=device, dtype=dtype,
                  max_model_len=max([prompts.max_model_len, *(one.length for one in benchmarks)]),
                  folder=run_dir / "engine", adapter=adapter)
    console = Console(config.iterations)
    if config.train.is_maxent and (
            warning := build_objective.tau_warning(config, ModelShape.of(path).vocabulary)):
        console.warn(warning)
    return Start(setup, backend, task, prompts, checkpoint, asked, console, benchmarks)


def _advised(
    start: Start, ledger_of: Callable[[Config], Ledger], ledger: Ledger, room: int,
    role: str | None = None,
) -> list[Saving]:
    """What would make a device fit that does everything, or has one role."""
    setup, config, backend = start.setup, start.setup.config, start.backend
    cache = [*smaller_cache(setup, ledger, room=room, backend=backend)]
    training = (*leaner_training(config, ledger_of, setup.device, backend), *less_held(config))
    changes = {None: (*training, *cache), "train": training, "reference": (),
               "engine": (*cache, *(more_devices(config) if role == "engine" else ()))}
    return savings(config, ledger_of, changes[role])


def _trainer(
    start: Start, actor: TrainingActor | AsyncActor, collector: Collector,
    loggers: LoggerGroup, run_dir: Path, *, reference: Any, workers: int = 1,
    overlap_canary: bool = False, described: dict[str, str] | None = None,
) -> Trainer:
    """Rollouts -> advantages -> loss -> weights -> proof, and what people see of it."""
    setup, config = start.setup, start.setup.config
    advantage = build_objective.build_advantage(config)
    checked: Sequence[list[int]] = [prompt.tokens for prompt in start.prompts.test[:4]]
    canary = Canary(actor.policy, actor.scorer, actor.weights,
                    prompts=checked * workers,  # each worker gets all of them
                    tolerance=canary_tolerance(setup.dtype, setup.device))
    own = HeldOut(start.task.name, config, start.task, start.prompts.test, start.prompts.width,
                  config.max_tokens, setup.tokenizer)
    evaluations = None if config.train.eval_frequency == "never" else build_eval.build_evaluations(
        config, [own, *start.benchmarks], actor.policy,
        rows=config.eval.batch_size or config.env.num_envs * config.env.repeats)
    start.console.banner(build.describe(
        config, actor, start.task, start.prompts, device=setup.device, dtype=setup.dtype,
        backend=start.backend, run_dir=run_dir) | (described or {}))
    return trainer_of(
        start, loggers, run_dir,
        collector=collector, advantage=advantage, reference=reference,
        teacher=build_objective.build_teacher(config, actor.model, loader_of(setup)),
        adaptations=build_objective.build_adaptations(config, actor.learner.loss, advantage),
        learner=actor.learner, weights=actor.weights, canary=canary, overlap_canary=overlap_canary,
        evaluator=evaluations,
        max_reward_errors=config.env.max_reward_errors)
