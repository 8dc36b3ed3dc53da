"""GRPO, asynchronous: workers generate all the time, the trainer trains all the time.

    python sota-implementations/grpo/grpo-async.py inference_model.num_devices=2   # no GPU needed
    python sota-implementations/grpo/grpo-async.py --config-name grpo_async_gsm8k \\
        model.name=Qwen/Qwen2.5-1.5B-Instruct                       # two GPUs: one trains

Ray starts and watches the workers; each has an engine, an environment and its rewards. Rollouts may
be ``train.staleness`` weight updates old and no older; at 0 the run is that of ``grpo.py``. New
weights reach the engines while they generate. Who gets which GPU is decided by ``num_devices`` or
``devices`` of ``train_model``, ``ref_model`` and ``inference_model``. A worker that dies is
replaced; a run that cannot go on leaves a checkpoint for ``resume=auto``.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

# A script's own folder is on its path, where `grpo.py` would be found as the package `grpo`.
HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "config"
sys.path = [str(HERE.parents[1]), *(p for p in sys.path if Path(p).resolve() != HERE)]

from grpo.system.cores import share_cores  # noqa: E402

share_cores()  # before PyTorch is imported

if __name__ == "__main__":  # help and misspelt keys take no time
    from grpo.training.stopping import interrupts_end_at_once

    interrupts_end_at_once()
    from grpo.run.cli.script import look_ahead

    look_ahead(CONFIG, "grpo_async")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from torch import nn  # noqa: E402

from grpo.collectors.ray import RolloutsFailed  # noqa: E402
from grpo.config.asynchronous import AsyncConfig  # noqa: E402
from grpo.config.schema import load_config  # noqa: E402
from grpo.envs.rewards import RewardsFailed  # noqa: E402
from grpo.policies.handle import EngineError  # noqa: E402
from grpo.policies.model_shape import ModelShape  # noqa: E402
from grpo.policies.ray_engine import WorkersLost  # noqa: E402
from grpo.report.bottleneck import bottleneck_table  # noqa: E402
from grpo.report.console import Console  # noqa: E402
from grpo.report.loggers import make_loggers  # noqa: E402
from grpo.report.reporter import Reporter  # noqa: E402
from grpo.run import build, build_async, fast_defaults  # noqa: E402
from grpo.run import build_objective as objective  # noqa: E402
from grpo.run.build_engine import Setup  # noqa: E402
from grpo.run.build_model import load_model  # noqa: E402
from grpo.run.devices import capacity, check_roles_fit, role_ledgers  # noqa: E402
from grpo.run.resume import open_run  # noqa: E402
from grpo.training import Trainer  # noqa: E402
from grpo.training.checkpoint import Checkpoint  # noqa: E402
from grpo.training.checkpoint_files import NotSavedError  # noqa: E402
from grpo.training.evaluation import Evaluator  # noqa: E402
from grpo.training.local_ranks import RankDied  # noqa: E402
from grpo.training.stopping import signals_end_the_process  # noqa: E402
from grpo.weights import Canary, StaleWeightsError  # noqa: E402
from grpo.weights.channel import TransferError  # noqa: E402
from grpo.weights.tolerance import canary_tolerance  # noqa: E402

#: What may end a run that is not a mistake in the code.
ENDINGS = (RolloutsFailed, WorkersLost, EngineError, TransferError, StaleWeightsError,
           FloatingPointError, NotSavedError, RewardsFailed)


def build_trainer(
    config: AsyncConfig, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack
) -> Trainer:
    """Put the parts of a run together; ``at_end`` gets what ends them."""
    build.quiet_libraries()
    settings = config.model_dump(mode="json")

    # What is trained, on what, where
    places = build_async.open_ray(config, at_end)
    device = build.resolve_device(config)
    dtype = build.resolve_dtype(config, device)
    backend = build.resolve_backend(config)
    task = build.build_task(config)
    build.check(config, task, device=device, backend=backend)
    start_model, adapter = build.start_of(config, task, checkpoint)
    tokenizer = build.load_tokenizer(start_model)
    prompts = build.build_prompts(config, task, tokenizer, start_model)
    config = config.for_problems(len(prompts.train))

    # What it will take, before anything is launched
    console = Console(config.iterations)
    console.info("\n".join(places.plan.table()))
    ledgers_of = partial(role_ledgers, places=places.plan, model_path=start_model, device=device,
                         dtype=dtype, backend=backend, max_model_len=prompts.max_model_len)
    config, chosen = fast_defaults.choose(
        config, ModelShape.of(start_model), lambda changed: ledgers_of(changed)["train"],
        device=device, dtype=dtype, backend=backend, row_tokens=prompts.max_model_len,
        room=capacity(device))
    memory = ledgers_of(config)
    for line in chosen:
        console.info(line)
    for role, ledger in memory.items():
        console.info("\n".join([f"{role}:", *ledger.table(capacity(device))]))
    check_roles_fit(memory, places.plan, capacity(device))

    loggers = make_loggers(
        config.logging.backends, run_dir=run_dir, config=settings,
        project=config.logging.wandb_project or "grpo", name=config.logging.wandb_run_name,
        group=config.logging.wandb_group, wandb_mode=config.logging.wandb_mode or "online",
        resume_step=checkpoint.step if checkpoint else None)

    # Workers, trainer, and how the weights travel between them
    actor = build_async.build_actor(Setup(
        config=config, path=start_model, tokenizer=tokenizer, device=device, dtype=dtype,
        max_model_len=prompts.max_model_len, folder=run_dir / "engine", adapter=adapter),
        prompts, places, backend=backend, at_end=at_end, checkpoint=checkpoint)
    reference_path = config.ref_model.name or build.model_folder(config, task)
    reference_pool = build_async.build_reference_pool(config, places, reference_path, dtype)
    if reference_pool is not None:
        at_end.callback(reference_pool.close)
    collector = build_async.build_collector(config, actor, reference_pool)
    at_end.callback(collector.close)

    # Rollouts -> advantages -> loss -> weights -> proof
    advantage = objective.build_advantage(config)
    checked = [prompt.tokens for prompt in prompts.test[:4]]
    canary = Canary(actor.policy, actor.scorer, actor.weights,
                    prompts=checked * actor.pool.count,  # each worker gets all of them
                    tolerance=canary_tolerance(dtype, device))

    def frozen_model(path: str) -> nn.Module:
        return load_model(path, config, device=device, dtype=dtype)

    reference = None if reference_pool else objective.build_reference(
        config, actor.model, lambda: reference_path, frozen_model, actor.learner)

    # What people see
    console.banner(build.describe(config, actor, task, prompts, device=device, dtype=dtype,
                                  backend=backend, run_dir=run_dir)
                   | build_async.describe(config, places, backend=backend))

    trainer = Trainer(
        collector=collector,
        advantage=advantage,
        reference=reference,
        teacher=objective.build_teacher(config, actor.model, frozen_model),
        adaptations=objective.build_adaptations(config, actor.learner.loss, advantage),
        learner=actor.learner,
        weights=actor.weights,
        canary=canary,
        overlap_canary=config.train.staleness > 0,
        evaluator=Evaluator(
            build.build_eval_env(config, task, prompts, tokenizer, actor.policy), actor.policy,
            max_reward_errors=config.env.max_reward_errors),
        reporter=Reporter(console, loggers, tokenizer, run_dir=run_dir,
                          num_samples=config.logging.num_samples),
        tokenizer=tokenizer,
        run_dir=run_dir,
        config=settings,
        iterations=config.iterations,
        eval_frequency=config.train.eval_frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        keep_checkpoints=config.train.keep_checkpoints or 3,
        proof_interval=config.train.proof_interval,
        max_reward_errors=config.env.max_reward_errors,
    )
    if checkpoint:
        trainer.restore(checkpoint)
        console.info(f"resumed at iteration {checkpoint.step} from {checkpoint.folder}")
    return trainer


def train(trainer: Trainer) -> None:
    """Run to the end; where the workers are lost, a checkpoint is left, and it is said why."""
    try:
        trainer.fit()
    except ENDINGS as error:
        go_on = f"\nthe run can go on: resume={trainer.saved.folder}" if trainer.saved else ""
        sys.exit(f"error: {error}{go_on}")
    trainer.reporter.console.info("\n".join(bottleneck_table(trainer.run_dir / "metrics.jsonl")))


@hydra.main(version_base=None, config_path="../../config", config_name="grpo_async")
def main(cfg: DictConfig) -> None:
    try:
        with signals_end_the_process(), ExitStack() as at_end:
            run(cfg, at_end)
    except RankDied as error:
        sys.exit(f"error: {error}\nthe run can go on from its newest checkpoint: resume=auto")


def run(cfg: DictConfig, at_end: ExitStack) -> None:
    try:
        config = load_config(cfg, AsyncConfig)
        run_dir, checkpoint = open_run(
            config, Path(HydraConfig.get().runtime.output_dir), at_end)
        trainer = build_trainer(config, run_dir, checkpoint, at_end)
    except (ValueError, OSError, ImportError, EngineError, WorkersLost) as error:
        # Nearly always bad input, some of which shows in the workers first.
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}\n(set HYDRA_FULL_ERROR=1 to see where it was raised)")
    train(trainer)


if __name__ == "__main__":
    main()
