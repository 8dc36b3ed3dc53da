"""Warnings about drifting log-probs."""

from __future__ import annotations

from grpo.report.watch import AlignmentWarning

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
