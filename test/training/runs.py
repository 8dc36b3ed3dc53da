"""Tiny runs for the tests of the trainer: rewards, a model on disk, the parts put together."""

from __future__ import annotations

import random

import numpy as np
import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo.collectors.sync import SyncCollector
from grpo.envs.rewards import RewardResult
from grpo.report.console import Console
from grpo.report.loggers import make_loggers
from grpo.report.reporter import Reporter
from grpo.run import build, build_objective
from grpo.run.build_engine import Setup, build_actor
from grpo.run.build_model import load_model
from grpo.training.evaluation import Evaluator
from grpo.training.trainer import Trainer
from grpo.weights.canary import Canary


def by_text(completion: str, problem) -> RewardResult:
    """Something that differs between completions of a random model."""
    return RewardResult(sum(map(ord, completion)) % 7 / 7, len(completion) > 2)


def by_text_and_chance(completion: str, problem) -> RewardResult:
    """A reward that draws from every generator of the process, as a sampling judge may."""
    chance = random.random() + np.random.rand() + torch.rand(()).item()
    return RewardResult(by_text(completion, problem).reward + chance, chance > 1.5)


def fails_sometimes(completion: str, problem) -> RewardResult:
    if sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("no verifier")
    return by_text(completion, problem)


def fails(completion: str, problem) -> None:
    return None


def always_the_same(completion: str, problem) -> float:
    return 0.5


def many_letters(completion: str, problem) -> float:
    return sum(character.isalpha() for character in completion) / 4


def save_tiny(folder, tokenizer, *, seed: int):
    """A model that is small enough for many iterations a second, on disk."""
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(config, run_dir, checkpoint=None, **options) -> Trainer:
    """The parts of a run, as the script builds them."""
    device, dtype = torch.device("cpu"), torch.float32
    base = config.model.name
    task = build.build_task(config)
    path, adapter = build.start_of(config, task, checkpoint)
    tokenizer = build.load_tokenizer(path)
    prompts = build.build_prompts(config, task, tokenizer, path)
    actor = build_actor(Setup(
        config=config, path=path, tokenizer=tokenizer, device=device, dtype=dtype,
        max_model_len=prompts.max_model_len, folder=run_dir / "engine", adapter=adapter),
        backend="transformers")
    loss = build_objective.build_loss(config, actor.model, tokenizer)
    advantage = build_objective.build_advantage(config)

    def load(path: str) -> torch.nn.Module:
        return load_model(path, config, device=device, dtype=dtype)

    settings = config.model_dump(mode="json")
    loggers = make_loggers([], run_dir=run_dir, config=settings,
                           resume_step=checkpoint.step if checkpoint else None)
    trainer = Trainer(
        collector=SyncCollector(build.build_env(config, task, prompts, tokenizer, actor.policy),
                                actor.policy, turns_per_batch=config.turns_per_batch,
                                max_rounds=config.train.max_sampling_rounds),
        advantage=advantage,
        learner=build_objective.build_learner(config, loss),
        weights=actor.weights,
        canary=Canary(actor.policy, loss.scorer, actor.weights,
                      prompts=[prompt.tokens for prompt in prompts.test[:4]]),
        evaluator=Evaluator(build.build_eval_env(config, task, prompts, tokenizer, actor.policy),
                            actor.policy, max_reward_errors=config.env.max_reward_errors),
        reporter=Reporter(Console(config.iterations), loggers, tokenizer, run_dir=run_dir,
                          num_samples=2),
        tokenizer=tokenizer, run_dir=run_dir, config=settings, iterations=config.iterations,
        eval_frequency=config.train.eval_frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        keep_checkpoints=config.train.keep_checkpoints or 3,
        max_reward_errors=config.env.max_reward_errors,
        reference=build_objective.build_reference(config, actor.model, lambda: base, load),
        teacher=build_objective.build_teacher(config, actor.model, load),
        adaptations=build_objective.build_adaptations(config, loss, advantage), **options)
    if checkpoint:
        trainer.restore(checkpoint)
    return trainer


def make_rollout(rewards, errors, truncated) -> TensorDict:
    """A rollout of rows of different lengths, with what the metrics are made of."""
    rows = len(rewards)
    mask = torch.arange(6) < torch.arange(2, 2 + rows)[:, None]
    return TensorDict({
        "masks": {"all_attention_mask": mask, "all_assistant_mask": mask & (torch.arange(6) > 0)},
        "next": {"reward": torch.tensor(rewards)[:, None],
                 "reward_error": torch.tensor(errors)[:, None],
                 "success": torch.tensor(rewards)[:, None] > 0.5,
                 "truncated": torch.tensor(truncated)[:, None]}}, [rows])


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items()
             if not key.startswith("time") and key != "tokens/per_second"} for row in rows]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
