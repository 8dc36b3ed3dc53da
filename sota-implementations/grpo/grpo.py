"""GRPO, synchronous: generate, score, update, publish, repeat.

    python sota-implementations/grpo/grpo.py                        # embedded model, no GPU needed
    python sota-implementations/grpo/grpo.py --config-name grpo_gsm8k \\
        model.name=Qwen/Qwen2.5-1.5B-Instruct                       # one GPU

One process holds everything, unless told otherwise: a vLLM engine generates, a Hugging Face model
trains, and both read the same memory, so a weight update costs no copy. Engines elsewhere, adapters
and training on several GPUs are in ``docs/weights.md``. Every key is in ``config/``; unknown keys
and keys that the chosen mode would ignore are errors. ``resume=auto`` goes on where a run was
stopped.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

# A script's own folder is on its path, where this very file would be found as the package `grpo`.
HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[1] / "config"
sys.path = [str(HERE.parents[1]), *(p for p in sys.path if Path(p).resolve() != HERE)]

from grpo.system.cores import share_cores  # noqa: E402

share_cores()  # before PyTorch is imported

if __name__ == "__main__":  # help and misspelt keys take no time
    from grpo.training.stopping import interrupts_end_at_once

    interrupts_end_at_once()
    from grpo.run.cli.script import look_ahead

    look_ahead(CONFIG, "grpo")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from torch import nn  # noqa: E402

from grpo.collectors import SyncCollector  # noqa: E402
from grpo.config.presets import describe_preset  # noqa: E402
from grpo.config.schema import Config, load_config  # noqa: E402
from grpo.envs.rewards import RewardsFailed  # noqa: E402
from grpo.policies.handle import EngineError  # noqa: E402
from grpo.policies.model_shape import ModelShape  # noqa: E402
from grpo.report.console import Console  # noqa: E402
from grpo.report.loggers import make_loggers  # noqa: E402
from grpo.report.reporter import Reporter  # noqa: E402
from grpo.run import build, build_team, fast_defaults  # noqa: E402
from grpo.run import build_objective as objective  # noqa: E402
from grpo.run.build_engine import Setup  # noqa: E402
from grpo.run.build_model import load_model  # noqa: E402
from grpo.run.devices import available, run_ledger  # noqa: E402
from grpo.run.ledger import check_fits  # noqa: E402
from grpo.run.resume import open_run  # noqa: E402
from grpo.training import Trainer  # noqa: E402
from grpo.training.checkpoint import Checkpoint  # noqa: E402
from grpo.training.checkpoint_files import NotSavedError  # noqa: E402
from grpo.training.evaluation import Evaluator  # noqa: E402
from grpo.training.local_ranks import RankDied  # noqa: E402
from grpo.training.stopping import signals_end_the_process  # noqa: E402
from grpo.weights import Canary, StaleWeightsError  # noqa: E402
from grpo.weights.tolerance import canary_tolerance  # noqa: E402


def build_trainer(
    config: Config, run_dir: Path, checkpoint: Checkpoint | None, at_end: ExitStack
) -> Trainer:
    """Put the parts of a run together; ``at_end`` gets what ends them."""
    build.quiet_libraries()
    settings = config.model_dump(mode="json")

    # What is trained, on what, where
    backend = build.resolve_backend(config)
    devices = build_team.choose_devices(config, backend=backend)
    device = build.resolve_device(config)
    dtype = build.resolve_dtype(config, device)
    task = build.build_task(config)
    build.check(config, task, device=device, backend=backend)
    start_model, adapter = build.start_of(config, task, checkpoint)
    tokenizer = build.load_tokenizer(start_model)
    prompts = build.build_prompts(config, task, tokenizer, start_model)
    config = config.for_problems(len(prompts.train))

    # What it will take, before anything is launched
    console = Console(config.iterations)
    ledger_of = partial(run_ledger, model_path=start_model, device=device, dtype=dtype,
                        backend=backend, max_model_len=prompts.max_model_len)
    room = available(config, device)
    config, chosen = fast_defaults.choose(
        config, ModelShape.of(start_model), ledger_of, device=device, dtype=dtype,
        backend=backend, row_tokens=prompts.max_model_len, room=room)
    memory = ledger_of(config)
    console.info("\n".join([*chosen, *memory.table(room)]))
    check_fits(memory, room)

    loggers = make_loggers(
        config.logging.backends, run_dir=run_dir, config=settings,
        project=config.logging.wandb_project or "grpo", name=config.logging.wandb_run_name,
        group=config.logging.wandb_group, wandb_mode=config.logging.wandb_mode or "online",
        resume_step=checkpoint.step if checkpoint else None)

    # Trainer and engine, and how the weights travel between them
    actor = build_team.build_training_actor(Setup(
        config=config, path=start_model, tokenizer=tokenizer, device=device, dtype=dtype,
        max_model_len=prompts.max_model_len, folder=run_dir / "engine", adapter=adapter),
        devices, backend=backend, at_end=at_end, checkpoint=checkpoint)
    env = build.build_env(config, task, prompts, tokenizer, actor.policy)
    eval_env = build.build_eval_env(config, task, prompts, tokenizer, actor.policy)

    # Rollouts -> advantages -> loss -> weights -> proof
    collector = SyncCollector(env, actor.policy, turns_per_batch=config.turns_per_batch,
                              max_rounds=config.train.max_sampling_rounds)
    advantage = objective.build_advantage(config)
    canary = Canary(actor.policy, actor.scorer, actor.weights,
                    prompts=[prompt.tokens for prompt in prompts.test[:4]],
                    tolerance=canary_tolerance(dtype, device))

    def frozen_model(path: str) -> nn.Module:
        return load_model(path, config, device=device, dtype=dtype)

    reference = objective.build_reference(
        config, actor.model, lambda: build.model_folder(config, task), frozen_model,
        actor.learner)

    # What people see
    console.banner(build.describe(config, actor, task, prompts, device=device, dtype=dtype,
                                  backend=backend, run_dir=run_dir))

    trainer = Trainer(
        collector=collector,
        advantage=advantage,
        reference=reference,
        teacher=objective.build_teacher(config, actor.model, frozen_model),
        adaptations=objective.build_adaptations(config, actor.learner.loss, advantage),
        learner=actor.learner,
        weights=actor.weights,
        canary=canary,
        evaluator=Evaluator(eval_env, actor.policy,
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


@hydra.main(version_base=None, config_path="../../config", config_name="grpo")
def main(cfg: DictConfig) -> None:
    try:
        with signals_end_the_process(), ExitStack() as at_end:
            run(cfg, at_end)  # a sweep starts the next run in this process
    except RankDied as error:
        sys.exit(f"error: {error}\nthe run can go on from its newest checkpoint: resume=auto")
    except (EngineError, StaleWeightsError, FloatingPointError, NotSavedError,
            RewardsFailed) as error:
        sys.exit(f"error: {error}")  # the trainer has said how the run can go on


def run(cfg: DictConfig, at_end: ExitStack) -> None:
    try:
        config = load_config(cfg)
        preset = HydraConfig.get().runtime.choices.get("preset", "none")
        if preset != "none":
            print("preset", describe_preset(preset, cfg, config_folder=CONFIG))
        run_dir, checkpoint = open_run(
            config, Path(HydraConfig.get().runtime.output_dir), at_end)
        trainer = build_trainer(config, run_dir, checkpoint, at_end)
    except (ValueError, OSError, ImportError) as error:  # nearly always bad input
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}\n(set HYDRA_FULL_ERROR=1 to see where it was raised)")
    trainer.fit()


if __name__ == "__main__":
    main()
