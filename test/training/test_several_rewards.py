"""Rewards in a run: each in the metrics, failures that end it, the same numbers again."""

from __future__ import annotations

import io
import math
import threading
import time

import pytest
import torch
from rich.console import Console as RichConsole

from grpo.envs.rewards import RewardResult, RewardsFailed
from grpo.report.charts import charts_of
from grpo.report.console import Console
from grpo.report.history import History
from grpo.report.loggers import JsonlLogger, read_jsonl
from grpo.report.page import write_report
from grpo.training.checkpoint import find_checkpoint

from . import runs
from .runs import make_trainer, timeless, weights

_calls = [0]
_lock = threading.Lock()


def brevity(completion: str, problem) -> float:
    return -float(len(completion))


def broken(completion: str, problem) -> float:
    return {}[completion]


def mostly_broken(completion: str, problem) -> float:
    return 1.0 if sum(map(ord, completion)) % 5 == 0 else broken(completion, problem)


def in_another_order(completion: str, problem) -> RewardResult:
    """Whoever is asked first may answer last."""
    with _lock:
        _calls[0] += 1
        number = _calls[0]
    time.sleep(0.002 * (number * 7 % 5))
    if sum(map(ord, completion)) % 5 == 0:
        raise RuntimeError("no verifier")
    return runs.by_text(completion, problem)


def of(*names: str) -> list[str]:
    return [f"{__name__}:{name}" for name in names]


def test_each_reward_has_its_mean_and_they_add_up(make_config, tmp_path):
    config = make_config(iterations=2, env={
        "reward": [f"{runs.__name__}:by_text", *of("brevity")], "reward_weights": [2.0, -0.5]})
    make_trainer(config, tmp_path).fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(
            2 * row["reward/by_text/mean"] - 0.5 * row["reward/brevity/mean"], rel=1e-5)
        assert row["reward/brevity/mean"] < -1 and 0 < row["reward/by_text/mean"] < 1
    for row in (rows[0], rows[-1]):
        assert row["eval/reward"] == pytest.approx(
            2 * row["eval/reward/by_text/mean"] - 0.5 * row["eval/reward/brevity/mean"], rel=1e-5)
    shown = io.StringIO()
    with Console(2, console=RichConsole(file=shown, width=300)) as console:
        console.update(2, rows[2])
    parts = (f"(by_text {rows[2]['reward/by_text/mean']:.3f}, "
             f"brevity {rows[2]['reward/brevity/mean']:.3f})")
    assert f"reward {rows[2]['reward/mean']:.3f} {parts}" in shown.getvalue()
    history = History.read(tmp_path)
    (chart,) = [chart for chart in charts_of(history) if chart.name == "rewards"]
    assert [line.label for line in chart.lines] == ["brevity", "by_text"]


def short(completions, **kwargs):
    return [1.0 if len(text) < 4 else None for text in completions]


def long(completions, **kwargs):
    return [0.5 if len(text) >= 4 else None for text in completions]


def never(completions, **kwargs):
    return [None] * len(completions)


def test_the_mean_of_a_reward_is_over_the_rows_that_it_is_for(make_config, tmp_path):
    config = make_config(iterations=2, env={"reward": of("short", "long", "never")})
    make_trainer(config, tmp_path).fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    named = {f"{where}reward/{name}/mean": mean for where in ("", "eval/")
             for name, mean in (("short", 1.0), ("long", 0.5))}
    found = [(name, value) for row in rows for name, value in row.items() if name in named]
    assert {name for name, _ in found} >= {"reward/short/mean", "reward/long/mean"}
    assert all(value == named[name] for name, value in found)
    assert any(0.5 < row.get("reward/mean", 0) < 1 for row in rows)  # there were both
    # One that was for no row has no mean, and none is shown.
    assert not any("never/mean" in name or value is None for row in rows for name, value in
                   row.items())
    assert "<figure" in write_report(tmp_path, title="kinds", config={}).read_text()


def test_the_report_has_a_chart_of_all_rewards(tmp_path):
    with JsonlLogger(tmp_path / "metrics.jsonl") as logger:
        for step in (1, 2):
            logger.log(step, {"reward/mean": 0.5, "reward/<b>/mean": 0.1, "reward/two/mean": 0.4,
                              "reward/errors": 5, "reward/skipped": 1, "reward/timeouts": 2})
    page = write_report(tmp_path, title="two", config={}).read_text()
    assert '<figure id="rewards">' in page and "<b>" not in page.partition("</style>")[2]
    assert ("10 completions got no reward: for 4 the reward failed, for 4 it took too long, 2 were "
            "left out by it.") in page


def test_one_reward_is_not_told_twice(make_config, tmp_path):
    metrics = make_trainer(make_config(), tmp_path).iterate()
    assert not any(name.endswith("by_text/mean") for name in metrics)
    assert metrics["reward/skipped"] == metrics["reward/timeouts"] == 0


def test_a_function_that_always_fails_ends_the_run_before_it_is_trained(make_config, tmp_path):
    config = make_config(env={"reward": of("broken")})
    trainer = make_trainer(config, tmp_path)
    before = weights(trainer)
    with pytest.raises(RewardsFailed) as raised:
        trainer.fit()
    text = str(raised.value)
    assert text.startswith("evaluation: not one of 5 completions got a reward")
    assert "KeyError" in text and "in broken: return {}[completion]" in text
    assert torch.equal(weights(trainer), before) and trainer.step == 0


def test_above_the_limit_the_run_ends_and_names_the_place(make_config, tmp_path):
    config = make_config(env={"reward": of("mostly_broken")})
    trainer = make_trainer(config, tmp_path)
    trainer._looked = True
    before = weights(trainer)
    with pytest.raises(RewardsFailed, match=r"iteration 1: .* of 8 completions got a reward; "
                                            r"(.|\n)*1\. reward .*KeyError(.|\n)*in broken"):
        trainer.iterate()
    assert torch.equal(weights(trainer), before)


def test_below_the_limit_it_goes_on_without_those_rows(make_config, tmp_path):
    config = make_config(env={"reward": of("mostly_broken"), "max_reward_errors": 1.0,
                              "num_envs": 15}, train={"total_dialog_turns": 60})
    metrics = make_trainer(config, tmp_path).iterate()
    assert 30 < metrics["reward/errors"] < 60 and metrics["reward/mean"] == 1.0


def slow_for_some(completion: str, problem) -> float:
    time.sleep(5.0 if sum(map(ord, completion)) % 3 == 0 else 0.0)
    return float(len(completion))


def test_late_rows_are_counted_apart_and_left_out(make_config, tmp_path):
    config = make_config(env={"reward": of("slow_for_some"), "reward_timeout": 0.5,
                              "max_reward_errors": 1.0, "num_envs": 8})
    metrics = make_trainer(config, tmp_path).iterate()
    assert 0 < metrics["reward/timeouts"] == metrics["reward/errors"] < 32
    assert all(map(math.isfinite, metrics.values()))


def test_the_metrics_do_not_depend_on_the_order_of_the_answers_and_resume_exactly(
        make_config, tmp_path):
    config = make_config(iterations=4, env={
        "reward": [*of("in_another_order"), f"{runs.__name__}:by_text"],
        "max_reward_errors": 1.0, "num_envs": 4}, train={"total_dialog_turns": 64})
    rows = {}
    for name, first in (("one", 0), ("two", 3)):
        _calls[0] = first
        make_trainer(config, tmp_path / name).fit()
        rows[name] = timeless(read_jsonl(tmp_path / name / "metrics.jsonl"))
    assert rows["one"] == rows["two"] and rows["one"][1]["reward/errors"] > 0

    class Killed(Exception):
        pass

    stopped = make_trainer(config, tmp_path / "killed")
    log = stopped.reporter.step

    def killed(step, metrics):
        log(step, metrics)
        if step == 3:
            raise Killed

    stopped.reporter.step = killed
    with pytest.raises(Killed):
        stopped.fit()
    stopped.reporter.loggers.close()
    checkpoint = find_checkpoint("auto", root=tmp_path / "killed", exp_name="grpo")
    make_trainer(config, checkpoint.run_dir, checkpoint).fit()
    assert timeless(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) == rows["one"]
