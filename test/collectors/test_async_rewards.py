"""Rewards of rollout workers: side by side, several of them, and what fails in them."""

from __future__ import annotations

import threading

import pytest

from grpo.envs.rewards import RewardsFailed
from grpo.run.cli.endings import fit_with_workers

from .asynchronous import rows_of

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


def test_each_of_several_rewards_has_its_mean_and_they_add_up(start, tmp_path):
    start(env={"reward": [f"{__name__}:vowels", "negative_length"], "reward_weights": [1.0, 0.5]},
          train={"staleness": 0, "total_dialog_turns": 2 * 16}).fit()
    rows = rows_of(tmp_path / "0")
    for prefix, total, some in (("", "reward/mean", rows[1:]), ("eval/", "eval/reward", rows[::2])):
        for row in some:
            assert row[total] == pytest.approx(
                row[f"{prefix}reward/vowels/mean"]
                + 0.5 * row[f"{prefix}reward/negative_length/mean"], rel=1e-4, abs=1e-4)
    assert all(row["reward/errors"] == row["reward/timeouts"] == 0 for row in rows[1:])


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
        fit_with_workers(trainer)
