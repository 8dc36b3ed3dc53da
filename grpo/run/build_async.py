"""From the configuration to the parts of an asynchronous run that a synchronous one has not: Ray,
workers on their devices, and the way of the weights to them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo.collectors.ray import RayCollector
from grpo.collectors.reference_worker import ReferenceWorker
from grpo.collectors.rollout_worker import WorkerSetup
from grpo.collectors.schedule import RolloutSchedule
from grpo.collectors.worker_actor import start_worker
from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import ConfigError
from grpo.envs.prompts import template_text
from grpo.policies.fleet import FleetPolicy
from grpo.policies.ray_engine import WorkerPool, require_ray
from grpo.policies.scoring import ReferenceScorer
from grpo.report.starting import Starting
from grpo.run import ahead
from grpo.run.ahead import Imports
from grpo.run.build import Prompts, resolve_backend, uses_cuda
from grpo.run.build_engine import Setup, load_trained, quantised_model
from grpo.run.build_model import prepare_model
from grpo.run.build_objective import build_learner, build_loss, rows_like_a_batch
from grpo.run.build_team import TrainingActor, start_others
from grpo.run.build_worker import build_reference, build_worker
from grpo.run.identity import group_settings
from grpo.run.local_ray import start_own_ray, start_ray
from grpo.run.placement import Kind, Places, plan_devices
from grpo.training.checkpoint import Checkpoint
from grpo.training.parallel import ShardedReference
from grpo.training.team import Leader, LedLearner
from grpo.weights.factory import make_fleet_sync, network_of
from grpo.weights.fleet import FleetSync
from grpo.weights.gather import tell_nobody


@dataclass(frozen=True)
class AsyncActor(TrainingActor):
    """The model that is trained and how, its policy and weights, and the workers behind them."""

    weights: FleetSync
    pool: WorkerPool


def open_ray(config: AsyncConfig, at_end: ExitStack, starting: Starting) -> Places:
    """Plan who computes where, start Ray or connect to it, and select the trainer's GPU here.

    ``at_end`` gets what gives all of it back, ``starting`` is told of Ray.
    """
    require_ray()
    import ray

    kind: Kind = "cuda" if uses_cuda(config) else "cpu"
    cluster = config.ray.address is not None
    available = None
    if cluster:
        with starting.part(f"Ray at {config.ray.address}"):
            at_end.callback(start_ray(address=config.ray.address))
        available = int(ray.cluster_resources().get("GPU", 0)) if kind == "cuda" else None
    elif kind == "cuda":
        available = torch.cuda.device_count()
    plan = plan_devices(config, kind=kind, available=available)
    waiting = None if cluster else ahead.taken(plan, _imports(config, kind))
    if waiting is not None:
        at_end.callback(waiting.end)
    elif not cluster:
        with starting.part("Ray"):
            at_end.callback(start_own_ray(plan))
    places = Places(plan, cluster=cluster)
    places.ahead = {} if waiting is None else waiting.actors
    at_end.callback(places.release)
    if kind == "cuda":
        torch.cuda.set_device(places.trainer[0])
    return places


def build_actor(
    setup: Setup, prompts: Prompts | None, places: Places, *, backend: str, at_end: ExitStack,
    starting: Starting, reference: WorkerPool | None = None, checkpoint: Checkpoint | None = None,
) -> AsyncActor:
    """Start the workers and the trainer's other ranks, load the model, connect them.

    All of them start at the same time, but where an engine shares its device.

    Args:
        setup: what trainer and workers agree on.
        prompts: to train on; None where workers begin no groups themselves.
        places: from :func:`open_ray`.
        backend: ``vllm`` or ``transformers``.
        at_end: gets what ends all that is started here.
        starting: is told of it.
        reference: from :func:`build_reference_pool`; started here.
        checkpoint: that the run goes on from; the other ranks read their own part.

    Raises:
        EngineError: if a worker does not start.
        RankDied: if another rank ends before all have met.
    """
    config: AsyncConfig = setup.config
    if backend == "transformers" and config.train.update_at == "in_flight":
        raise ConfigError("train.update_at=in_flight: workers with the transformers backend take "
                          "new weights between two groups only; set inference_model.backend=vllm, "
                          "or train.update_at=auto")
    gpus = places.trainer if places.plan.kind == "cuda" else ()
    lora, others = config.train_model.lora.enabled, None
    together = places.plan.shared("train", "engine")
    # Compiled while the engines start, unless that would take their GPU.
    width = None if together or not config.train_model.compile else (
        prompts.max_model_len if prompts else config.atropos.seq_len)
    if len(places.plan.train) > 1:
        others = at_end.enter_context(start_others(
            setup, gpus, checkpoint, transfer=None if lora or backend == "transformers"
            else network_of(setup.device, together=together), warm_up=width))
        starting.begin({f"rank {rank} of the trainer": partial(others.is_ready, rank)
                        for rank in range(1, len(places.plan.train))},
                       within=config.ray.start_timeout)
    base = quantised_model(setup)
    pool = WorkerPool(_make_worker(setup, prompts, places, backend),
                      count=len(places.plan.engines), **_restart_options(config))
    _launch(pool, at_end, starting)
    if places.plan.shared("engine"):
        # vLLM measures the memory that is free, and fails where a neighbour changes it meanwhile.
        pool.meet()
    if reference is not None:
        _launch(reference, at_end, starting)
    with starting.part("model of the trainer"):
        # On its way to being sharded a model needs none of the GPU's own memory.
        device = setup.device if others is None else torch.device("cpu")
        model = load_trained(setup, device) if base is None else base.to(device)
        prepare_model(model, config, adapter=setup.adapter)
        loss = build_loss(config, model, setup.tokenizer)
    leader = others and at_end.enter_context(Leader(
        others.meet(device_index=gpus[0] if gpus else None,
                    start_timeout=config.ray.start_timeout), others.check))
    learner = build_learner(config, loss, leader and leader.ranks)
    if width is not None:
        with starting.part("compiled layers of the trainer"):
            learner.warm_up(*rows_like_a_batch(config, width))
    scorer, tell = loss.scorer, tell_nobody
    if leader is not None:
        learner, tell = LedLearner(learner, leader), leader.together
        scorer = learner.scorer
    pool.meet()
    weights = make_fleet_sync(config, model, pool, backend=backend, device=setup.device,
                              host=_own_address(config), together=together, tell=tell)
    if lora:
        weights.start()
    options = setup.policy_options()
    del options["ignore_eos"]  # the workers' own
    policy = FleetPolicy(pool, setup.sampling, heal=weights.heal,
                         timeout=config.train.rollout_timeout, max_model_len=setup.max_model_len,
                         version=lambda: weights.version, **options)
    if reference is not None:
        reference.meet()
    return AsyncActor(model, policy, weights, learner, scorer, pool)


def _launch(pool: WorkerPool, at_end: ExitStack, starting: Starting) -> None:
    at_end.callback(pool.close)
    pool.launch()
    starting.begin({pool.name(number): partial(pool.there, number)
                    for number in range(pool.count)}, within=pool.start_timeout)


def describe(config: AsyncConfig, places: Places, *, backend: str) -> dict[str, str]:
    """The lines of the start-up banner that differ from those of a synchronous run."""
    plan, size = places.plan, config.inference_model.tensor_parallel_size
    lora = config.train_model.lora.enabled
    waits = backend == "transformers" or config.train.update_at == "group_border"
    when = "between two groups" if waits else "in flight"
    way = "adapters alone travel, " * lora + "through Ray's object store"
    if backend == "vllm" and not lora:
        nccl = plan.kind == "cuda" and not plan.shared("train", "engine")
        way = f"one {'NCCL' if nccl else 'Gloo'} broadcast to all"
    parallel = f", {size} devices each" if size > 1 else ""
    return {"engine": f"{backend}, {len(plan.engines)} workers on Ray{parallel}; rollouts at most "
                      f"{config.train.staleness} updates old",
            "weights": f"{way}, {when}; a canary checks each worker after every update"}


def build_reference_pool(
    config: AsyncConfig, places: Places, path: str, dtype: torch.dtype, at_end: ExitStack
) -> WorkerPool | None:
    """A copy of the reference model on each device of its own, or a part of one, for
    :func:`build_actor` to start; None if it has none. ``at_end`` gets what is left to tidy."""
    count, sharded = len(places.plan.reference), bool(config.ref_model.sharded)
    if not count:
        return None
    path = _absolute(path)
    build = partial(build_reference, _sent(config), path, places.plan.kind,
                    str(dtype).removeprefix("torch."))
    if sharded:
        folder = at_end.enter_context(tempfile.TemporaryDirectory(prefix="grpo-reference-"))
        make = _make_part(build, path, places, Path(folder), timeout=config.ray.start_timeout)
    else:
        make = _make_reference(build, path, places)
    return WorkerPool(make, count=count, kind="reference worker", together=sharded,
                      **_restart_options(config))


def _make_reference(
    build: Callable[[], ReferenceScorer], path: str, places: Places
) -> Callable[[int], Any]:
    """Starts the reference worker of a number."""
    import ray

    actor_class = ray.remote(ReferenceWorker)
    return lambda number: actor_class.options(**places.reference(number)).remote(build, path)


def _make_part(
    build: Callable[..., ShardedReference], path: str, places: Places, folder: Path, *,
    timeout: float,
) -> Callable[[int], Any]:
    """The same where each has a part. They meet in a ``folder``, anew each time that all are
    started."""
    import ray

    actor_class, count, starts = ray.remote(ReferenceWorker), len(places.plan.reference), Counter()

    def start(number: int) -> Any:
        starts[number] += 1
        join = {"rank": number, "count": count, "timeout": timeout,
                "address": f"file://{folder}/meet_{starts[number]}"}
        return actor_class.options(**places.reference(number)).remote(
            partial(build, join=join), path, answers=number == 0)

    return start


def build_collector(
    config: AsyncConfig, actor: AsyncActor, reference: WorkerPool | None = None
) -> RayCollector:
    """The collector, told of each new version of the weights."""
    train = config.train
    schedule = RolloutSchedule(config.groups_per_batch, staleness=train.staleness,
                               oversample=train.oversample, group_deadline=train.group_deadline,
                               max_rounds=train.max_sampling_rounds)
    collector = RayCollector(
        actor.pool, schedule, actor.policy, heal=actor.weights.heal,
        groups_each=max(1, _rows(config) // config.env.repeats), timeout=train.rollout_timeout,
        reference=reference,
        layout={**group_settings(config.model_dump(mode="json")),
                "scored": reference is not None})
    actor.weights.on_publish = collector.published
    return collector


def _rows(config: AsyncConfig) -> int:
    """Rows that an engine generates at a time."""
    return config.inference_model.max_num_seqs or min(config.turns_per_batch, 1024)


def _restart_options(config: AsyncConfig) -> dict[str, Any]:
    return {"max_restarts": config.ray.max_restarts, "start_timeout": config.ray.start_timeout}


def _own_address(config: AsyncConfig) -> str:
    """Of this machine, as the workers can reach it."""
    if config.ray.address is None:
        return "127.0.0.1"
    from ray.util import get_node_ip_address

    return get_node_ip_address()


def worker_setup(
    setup: Setup, prompts: Prompts | None, places: Places, backend: str
) -> WorkerSetup:
    """What all rollout workers are built from."""
    config = setup.config
    return WorkerSetup(
        config=_sent(config), path=_absolute(setup.engine_path),
        prompt_width=prompts.width if prompts else 0,
        max_model_len=setup.max_model_len, rows=_rows(config), backend=backend,
        device=places.plan.kind, dtype=str(setup.dtype).removeprefix("torch."),
        tensor_parallel_size=config.inference_model.tensor_parallel_size,
        alone=not places.plan.shared("engine"))


def _sent(config: AsyncConfig) -> dict[str, Any]:
    """A configuration as workers get it."""
    values = config.model_dump(mode="json")
    if (folder := values["env"]["data_path"]) is not None:
        values["env"]["data_path"] = _absolute(folder)
    if (template := values["env"]["chat_template"]) is not None:
        values["env"]["chat_template"] = template_text(template)  # whose file may be here alone
    return values


def _absolute(name: str) -> str:
    """A folder's whole path, because workers on a cluster run in another folder; else the name."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name


def _make_worker(
    setup: Setup, prompts: Prompts | None, places: Places, backend: str
) -> Callable[[int], Any]:
    """Starts the worker of a number."""
    import ray

    worker = worker_setup(setup, prompts, places, backend)
    prepare, train = _imports(setup.config, places.plan.kind), ray.put(
        prompts.train if prompts else [])

    def make(number: int) -> Any:
        # Where the trainer hands on what environments ask, each request waits in a thread.
        actor = places.ahead.pop(number, None) or start_worker(
            places.engine(number), prepare, asked_at_a_time=0 if prompts else worker.rows)
        actor.build.remote(build_worker, worker, number, train)
        return actor

    return make


def _imports(config: AsyncConfig, kind: Kind) -> Imports:
    """What workers import, whether ahead or not."""
    return Imports(resolve_backend(config), kind, config.inference_model.enforce_eager)
