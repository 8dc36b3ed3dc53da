"""Tiny runs for the tests of the trainer: rewards, the trainer, what is compared."""

from __future__ import annotations

import random
from contextlib import ExitStack
from unittest import mock

import numpy as np
import torch
from tensordict import TensorDict
from transformers import GenerationConfig

from grpo.envs.rewards import RewardResult
from grpo.run import assemble
from grpo.training.trainer import Trainer

from ..conftest import make_tiny_model


def by_text(completion: str, problem, *, scale: float = 1.0) -> RewardResult:
    """Something that differs between completions of a random model."""
    return RewardResult(scale * (sum(map(ord, completion)) % 7 / 7), len(completion) > 2)


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


def again(state) -> str | None:
    """Answers most turns of a random model."""
    return "+" if sum(map(ord, state.completions[-1])) % 4 else None


def save_talker(folder, tokenizer, *, seed: int):
    """A tiny model that seldom says much: many tokens end its turn."""
    save_tiny(folder, tokenizer, seed=seed)
    GenerationConfig(eos_token_id=[1, *range(30, 90)]).save_pretrained(folder)
    return folder


def save_tiny(folder, tokenizer, *, seed: int):
    """A model that is small enough for many iterations a second, on disk."""
    make_tiny_model(dtype=torch.float32, vocab_size=len(tokenizer), seed=seed,
                    max_position_embeddings=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(config, run_dir, checkpoint=None, **options) -> Trainer:
    """A run as the script assembles it; ``options`` are the trainer's, where no key sets them."""
    trainer_of = assemble.trainer_of

    def with_options(*args, **parts) -> Trainer:
        return trainer_of(*args, **parts | options)

    with mock.patch.object(assemble, "trainer_of", with_options):
        return assemble.assemble(config, run_dir, checkpoint, ExitStack())


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
