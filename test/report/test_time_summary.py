"""What the table at the end of a run says of its metrics, and of who waited for whom."""

from __future__ import annotations

import pytest
import torch

from grpo.report.time_summary import bottleneck, greatest_memory, phase_table


def row(**changes) -> dict:
    return {"time/step": 2.0, "time/train": 1.0, "time/wait": 0.0, "time/eval": 9.0,
            "async/worker_0_idle": 0.0, "async/worker_0_tokens_per_second": 1000.0,
            "async/worker_10_idle": 0.1, "async/worker_10_tokens_per_second": 2000.0, **changes}


def test_the_first_steps_do_not_count_in_medians_but_in_totals():
    head, names, *lines = phase_table([row(**{"time/step": 50.0})] * 3 + [row()] * 4)
    assert head == "a step took 2 s (median of 4)"
    assert names.split() == ["phase", "median", "share", "greatest", "total"]
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells["step"] == ["2", "s", "100%", "50.0s", "2m", "38s"]
    assert cells["train"] == ["1", "s", "50%", "1.0s", "7.0s"]
    assert cells["eval"] == ["9", "s", "9.0s", "1m", "03s"]  # no part of a step
    assert list(cells) == ["step", "eval", "train", "wait"]  # by their totals


def test_a_phase_of_the_warm_up_alone_is_in_the_table():
    first = row(**{"time/compile": 30.0})
    assert any(line.split()[:2] == ["compile", "30"] for line in phase_table([first, *[row()] * 9]))


def test_throughput_and_memory_have_a_line():
    rows = [{"time/step": 3.0, "tokens/per_second": speed} for speed in (10.0, 30.0)]
    assert phase_table(rows)[-1] == "tokens a second: median 20"
    line = greatest_memory(torch.device("cpu"))
    assert float(line.split("greatest: ")[1].split()[0]) == pytest.approx(0.5, abs=20)


def test_every_role_has_a_line():
    rows = [row(**{"async/reference_idle": 0.25, "async/groups_lost": 4.0})] * 4
    assert bottleneck(rows)[:4] == [
        "  worker 0: idle 0%, 1,000 tokens/s", "  worker 10: idle 10%, 2,000 tokens/s",
        "  reference: idle 25%", "  groups lost 4"]


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
    ({"time/sync": 0.3}, "weights and their proof took 15% of the time; raise env.num_envs"),
    ({"time/border": 0.3}, "updates waited 15% of the time for groups that were being generated")])
def test_the_last_line_names_what_was_waited_for_and_a_key(changes, says):
    assert says in bottleneck([row(**changes)] * 2)[-1]


def test_workers_that_take_weights_between_groups_alone_are_not_told_to_take_them_in_flight():
    rows = [row(**{"time/border": 0.3})] * 2
    assert "train.update_at=in_flight" in bottleneck(rows)[-1]
    said = bottleneck(rows, in_flight=False)[-1]
    assert "in_flight" not in said and "inference_model.backend=vllm" in said


def test_a_script_whose_workers_cannot_run_ahead_names_the_one_that_has_the_key():
    rows = [row(**{"async/worker_0_idle": 0.5, "time/wait": 0.5})] * 2
    said = bottleneck(rows, ahead=False)[-1]
    assert "start grpo-async.py" in said and "train.staleness" not in said


@pytest.mark.parametrize("reason", ["too_old", "expired"])
def test_a_run_that_favoured_short_completions_is_told_so(reason):
    lines = bottleneck([row(**{f"async/groups_{reason}": 3.0})] * 2)
    assert any("favoured short completions" in line for line in lines)
    assert not any("favoured" in line for line in bottleneck([row()] * 2))


def test_the_wait_for_overtaken_groups_has_a_line():
    lines = bottleneck([row(**{"time/wait": 0.8, "async/overtaken_wait": 0.1})] * 2)
    assert ("  0.1 s of the wait, 5% of the step, for groups that shorter ones had overtaken"
            in lines)


def test_a_run_without_a_step_has_no_table():
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    assert phase_table(rows) == bottleneck(rows) == []
