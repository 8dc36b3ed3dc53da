"""What the table at the end of an asynchronous run says of a run's metrics."""

from __future__ import annotations

import json

import pytest

from grpo.report.bottleneck import bottleneck_table


def write(folder, rows: list[dict]) -> list[str]:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bottleneck_table(path)


def row(**changes) -> dict:
    return {"time/step": 2.0, "time/train": 1.0, "time/wait": 0.0, "time/eval": 9.0,
            "async/worker_0_idle": 0.0, "async/worker_0_tokens_per_second": 1000.0,
            "async/worker_10_idle": 0.1, "async/worker_10_tokens_per_second": 2000.0, **changes}


def test_every_role_has_a_line_and_the_first_steps_do_not_count(tmp_path):
    lines = write(tmp_path, [row(**{"time/step": 50.0})] * 3 + [
        row(**{"async/reference_idle": 0.25, "async/groups_lost": 4.0})] * 4)
    assert lines[0] == "a step took 2 s (median of 4)"
    assert "  train               1 s   50%" in lines and not any("eval" in line for line in lines)
    assert lines[2:6] == ["  worker 0: idle 0%, 1,000 tokens/s",
                          "  worker 10: idle 10%, 2,000 tokens/s", "  reference: idle 25%",
                          "  groups lost 4"]


@pytest.mark.parametrize("changes, says", [
    ({}, "nothing waited"),
    ({"time/wait": 1.0}, "generation was the bottleneck: the trainer waited 50%"),
    ({"async/worker_0_idle": 0.5}, "training was the bottleneck: the workers were idle 30%"),
    ({"async/worker_0_idle": 0.5, "time/reference": 1.0}, "or the reference, which took 50%"),
    ({"async/worker_0_idle": 0.5, "time/wait": 0.5}, "waited for each other"),
    ({"async/worker_0_idle": 0.5, "time/wait": 0.5, "async/reference_idle": 0.02},
     "the reference was the bottleneck: it was idle 2% of the time"),
    ({"time/wait": 0.8, "async/overtaken_wait": 0.5},
     "long groups were the bottleneck: for 25% of the time a batch was finished"),
    ({"time/wait": 0.8, "async/overtaken_wait": 0.3}, "generation was the bottleneck"),
    ({"async/worker_0_idle": 0.5, "time/wait": 0.5, "async/overtaken_wait": 0.5},
     "would become too old; raise train.staleness"),
    ({"time/sync": 0.3}, "weights and their proof took 15% of the time; raise env.num_envs")])
def test_the_last_line_names_what_was_waited_for_and_a_key(tmp_path, changes, says):
    assert says in write(tmp_path, [row(**changes)] * 2)[-1]


@pytest.mark.parametrize("reason", ["too_old", "expired"])
def test_a_run_that_favoured_short_completions_is_told_so(tmp_path, reason):
    lines = write(tmp_path, [row(**{f"async/groups_{reason}": 3.0})] * 2)
    assert any("favoured short completions" in line for line in lines)
    assert not any("favoured" in line for line in write(tmp_path, [row()] * 2))


def test_the_wait_for_overtaken_groups_has_a_line(tmp_path):
    lines = write(tmp_path, [row(**{"time/wait": 0.8, "async/overtaken_wait": 0.1})] * 2)
    assert ("  0.1 s of the wait, 5% of the step, for groups that shorter ones had overtaken"
            in lines)


def test_a_run_without_a_step_has_no_table(tmp_path):
    assert write(tmp_path, [{"step": 0, "eval/accuracy": 0.5}]) == []
