"""Rewards of rollout workers: side by side, several of them, and what fails in them."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from grpo.rewards import RewardsFailed

from ..training.runs import make_trainer, save_tiny
from .asynchronous import LocalRay, async_config, make_async_trainer, rows_of, script, sync_config

TOGETHER = 8
_waiting = threading.Barrier(TOGETHER)


def vowels(completion: str, problem) -> float:
    return float(sum(letter in "aeiou0123" for letter in completion))


def together(completion: str, problem) -> float:
    """Answers only while seven others, of more than one group, are being answered."""
    _waiting.wait(60.0)
    return float(len(completion))


def broken(completion: str, problem) -> float:
    return {}[completion]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return save_tiny(tmp_path_factory.mktemp("model"), tokenizer, seed=0)


@pytest.fixture
def start(folder, tmp_path, monkeypatch):
    """Builds a run by options; ends it after the test."""
    LocalRay(monkeypatch)
    with ExitStack() as at_end:
        yield lambda **options: make_async_trainer(
            async_config(folder, **options), tmp_path / "async", at_end)


def test_several_rewards_have_the_means_of_a_synchronous_run(start, folder, tmp_path):
    sections = {"env": {"reward": [f"{__name__}:vowels", "negative_length"],
                        "reward_weights": [1.0, 0.5]},
                "train": {"total_dialog_turns": 2 * 16}}
    make_trainer(sync_config(folder, **sections), tmp_path / "sync").fit()
    start(**{**sections, "train": {**sections["train"], "staleness": 0}}).fit()
    names = ("reward/mean", "reward/vowels/mean", "reward/negative_length/mean",
             "eval/reward/vowels/mean", "reward/errors", "reward/timeouts")
    sync, ours = ([{name: row[name] for name in names if name in row}
                   for row in rows_of(tmp_path / run)] for run in ("sync", "async"))
    assert ours == [pytest.approx(row, rel=1e-5) for row in sync]
    assert all(row["reward/vowels/mean"] for row in sync[1:])
    assert all(set(names) <= set(row) for row in sync[2::2])  # with an evaluation


def test_calls_of_several_groups_run_side_by_side(start):
    trainer = start(inference_model={"num_devices": 1}, train={"staleness": 0},
                    env={"reward": f"{__name__}:together", "repeats": 2, "num_envs": 8})
    assert trainer.iterate()["reward/errors"] == 0


def test_what_always_fails_in_the_workers_ends_the_run_with_the_place(start):
    trainer = start(env={"reward": f"{__name__}:broken"})
    trainer._looked = True  # the evaluation would say so before
    with pytest.raises(RewardsFailed, match="iteration 1: not one of 16 completions got a reward(.|"
                                            "\n)*1. reward .*KeyError(.|\n)* in broken: return"):
        trainer.iterate()
    with pytest.raises(SystemExit, match="evaluation: not one of"):
        trainer._looked = False
        script().train(trainer)
