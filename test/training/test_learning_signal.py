"""Runs whose rewards tell no completions apart say so: on the way, at the end, in the report."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console as RichConsole

from grpo import data
from grpo.objectives import GroupAdvantage
from grpo.report.history import History
from grpo.report.learning_signal import PATIENCE, SignalWarning, has_signal, silence_at_end
from grpo.training.rollout_metrics import advantage_counts, advantage_metrics, rollout_metrics

from .runs import make_rollout, make_trainer

EQUAL = {"reward/zero_variance_groups": 1.0, "advantage/zero_fraction": 1.0}
ZERO = {**EQUAL, "reward/mean": 0.0, "reward/std": 0.0, "reward/success_rate": 0.0}
GOOD = {**EQUAL, "reward/mean": 0.5, "reward/std": 0.4, "reward/zero_variance_groups": 0.9,
        "advantage/zero_fraction": 0.9}


def measured(rewards: list[float], *, estimator: str) -> dict[str, float]:
    """The metrics of a rollout of groups of three, as an iteration takes them."""
    rollout = make_rollout(rewards, [False] * len(rewards), [False] * len(rewards))
    rollout[data.GROUP_ID] = torch.arange(len(rewards)) // 3
    GroupAdvantage(estimator=estimator)(rollout)
    return rollout_metrics(rollout) | advantage_metrics(rollout) | advantage_counts(rollout)


@pytest.mark.parametrize(("rewards", "estimator", "expected"), [
    ([0.0] * 6, "group_norm", False),
    ([0.1] * 6, "group_norm", False),  # three times 0.1 has not quite the mean 0.1
    ([0.1] * 6, "global_norm", False),
    ([0.1] * 3 + [0.7] * 3, "group_norm", False),
    ([0.1] * 3 + [0.7] * 3, "batch_norm", False),
    ([0.1] * 3 + [0.7] * 3, "global_norm", True),  # groups are compared with each other
    ([0.1] * 3 + [0.7, 0.7, 0.1], "group_norm", True)])
def test_equal_rewards_are_no_signal_unless_groups_are_compared(rewards, estimator, expected):
    metrics = measured(rewards, estimator=estimator)
    assert has_signal(metrics) is expected
    assert (metrics["advantage/positive_rows"] > 0) is expected


@pytest.mark.parametrize(("more", "expected"), [
    ({"policy/kl_to_teacher": 0.3}, True), ({"loss/distill": 0.3}, True),
    ({"reward/shaped_mean": -0.1, "reward/zero_variance_groups": 0.0,
      "advantage/zero_fraction": 0.0}, False),  # shorter or longer, but none better
    ({"reward/rows_in_loss": 0.0, "reward/zero_variance_groups": 0.0}, False)])
def test_a_teacher_is_a_signal_and_shaping_of_nothing_is_none(more, expected):
    assert not has_signal(ZERO)
    assert has_signal({**ZERO, **more}) is expected


def test_a_warning_comes_after_some_iterations_and_seldom_again():
    said: list[str] = []
    watch = SignalWarning(said.append, every=10)
    for step in range(1, 2 * PATIENCE):
        watch.log(step, GOOD if step == PATIENCE else ZERO)
        watch.log(step, {"eval/accuracy": 0.0})
    assert not said
    for step in range(20):
        watch.log(step, ZERO)
    assert len(said) == 2
    assert said[0].startswith("nothing to learn from: every completion got the reward 0 in the "
                              f"last {PATIENCE} iterations. Check")
    for part in ("samples.jsonl", "reward function", "easier problems", "temperature",
                 "more completions a prompt", "warm-started"):
        assert part in said[0]


@pytest.mark.parametrize(("rows", "found"), [
    ([ZERO, GOOD], None), ([], None), ([{"eval/accuracy": 0.5}], None),
    ([GOOD, *[ZERO] * (PATIENCE - 1)], None),
    ([GOOD, *[ZERO] * PATIENCE], f"every completion got the reward 0 in the last {PATIENCE} "),
    ([{"eval/accuracy": 0.5}, ZERO], "every completion got the reward 0 in the only iteration"),
    ([{**ZERO, "reward/mean": 0.25}] * 2, "every completion got the reward 0.25 in all 2 "),
    ([{**ZERO, "reward/mean": 1.0, "reward/success_rate": 1.0}] * 2, "every completion succeeded"),
    ([{**EQUAL, "reward/mean": 0.5, "reward/std": 0.5}] * 2, "each prompt all got the same"),
    ([ZERO, {**ZERO, "reward/mean": 1.0}], "each prompt all got the same"),
    ([{**ZERO, "tokens/truncated_fraction": 0.9}], "90% of the completions were cut by the"),
    ([{**GOOD, "reward/rows_in_loss": 0.0}], "no completion entered the loss"),
    ([{**ZERO, "reward/mean": None, "reward/std": None}], "each prompt all got the same")])
def test_the_end_of_a_run_tells_what_was_missing(rows, found):
    history = History.from_rows([{**row, "step": i} for i, row in enumerate(rows)])
    silence = silence_at_end(history.rows)
    assert (silence is None) if found is None else (found in str(silence))


@pytest.mark.parametrize(("reward", "tick"), [("always_the_same", False), ("by_text", True)])
def test_a_run_without_a_signal_says_so_and_gets_no_tick(make_config, tmp_path, reward, tick):
    out = RichConsole(file=io.StringIO(), width=2_000)
    trainer = make_trainer(make_config(iterations=PATIENCE + 1, reward=reward,
                                       train={"eval_frequency": 0, "checkpoint_frequency": 0}),
                           tmp_path)
    trainer.reporter.console._out = out
    trainer.fit()
    lines = out.file.getvalue().splitlines()
    warnings = [line for line in lines if line.startswith("warning: nothing to learn from")]
    (end,) = [line for line in lines if "held-out accuracy" in line]
    if tick:
        assert end[0] == "✓" and not warnings
    else:
        assert end[0] == "✗"
        assert f"got the reward 0.5 in the last {PATIENCE} iterations" in warnings[0]
        assert f"got the reward 0.5 in all {PATIENCE + 1} iterations" in warnings[1]
        assert lines[-1] == warnings[1] and len(warnings) == 2
