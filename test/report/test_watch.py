"""Warnings about drifting log-probs, and the summary of where time went."""

from __future__ import annotations

import pytest
import torch

from grpo.report.watch import AlignmentWarning, BenchmarkSummary

FAR = {"policy/log_prob_diff_abs_mean": 0.4, "policy/log_prob_diff_abs_max": 3.0}


def test_a_warning_says_what_to_check_and_is_not_repeated_at_every_step():
    said: list[str] = []
    watch = AlignmentWarning(said.append, every=5)
    watch.log(1, {"policy/log_prob_diff_abs_mean": 0.01})
    watch.log(2, {})
    assert not said
    for step in range(3, 9):
        watch.log(step, FAR)
    assert [text.split(" the ")[0] for text in said] == [
        "LogProb alignment: at step 3", "LogProb alignment: at step 8"]
    for part in ("0.400 nats", "3.00", "canary/max_abs_diff", "temperature",
                 "max_batches_offpolicy", "atropos/recomputed_tokens"):
        assert part in said[0]


def test_the_summary_has_every_phase_once():
    shown: list[str] = []
    summary = BenchmarkSummary(shown.append, device=torch.device("cpu"))
    summary.log(1, {"time/step": 3.0, "time/train": 2.0, "reward/mean": 1.0,
                    "tokens/per_second": 10.0})
    summary.log(2, {"time/step": 5.0, "time/train": 4.0, "tokens/per_second": 30.0})
    summary.close()
    summary.close()
    (text,) = shown
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["step"] == ["4.0s", "5.0s", "8.0s"] and rows["train"] == ["3.0s", "4.0s", "6.0s"]
    assert "median 20" in text and "reward" not in rows
    assert float(text.split("greatest: ")[1].split()[0]) == pytest.approx(0.5, abs=20)


def test_a_run_without_steps_has_no_summary():
    shown: list[str] = []
    BenchmarkSummary(shown.append, device=torch.device("cpu")).close()
    assert not shown
