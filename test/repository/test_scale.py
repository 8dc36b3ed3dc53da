"""docs/scale.md: its commands print what it shows, its table of keys is that of the plan, and its
figures are those of the results."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from dataclasses import replace

import pytest

from grpo.run.plan.__main__ import main
from grpo.run.plan.costs import H200, Layout
from grpo.run.plan.options import PlanOptions

from ..support import BENCHMARKS, REPO, benchmark, commands, table_rows

PAGE = (REPO / "docs" / "scale.md").read_text()
#: Commands, and what the page says that they print.
SHOWN = re.findall(r"```bash\n(python -m grpo\.run\.plan [^\n]*)\n```\n\n```text\n(.*?)\n```", PAGE,
                   re.DOTALL)
SCALING = benchmark("scaling")


@pytest.mark.parametrize(("command", "shown"), [
    SHOWN[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SHOWN[1:])],
    ids=[re.search(r"num_gpus=\d+", command)[0] for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, shown, capsys):
    main(shlex.split(command)[3:])
    assert capsys.readouterr().out.rstrip() == shown


def test_no_command_is_left_out():
    assert [command for command, _ in SHOWN] == commands(PAGE)
    assert [re.search(r"num_gpus=(\d+)", command)[1] for command, _ in SHOWN] == [
        "2", "8", "64", "1024"]


def test_the_table_of_keys_is_that_of_the_plan():
    keys = [row[0].strip("`") for row in table_rows(PAGE, "Its keys")]
    assert keys == list(PlanOptions.model_fields)


def result(name: str) -> dict:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())


def test_the_table_beside_what_was_measured_is_that_of_the_results():
    costs, pair = SCALING.costs_of_one_gpu(), result("async_step_2h200")
    runs = {
        "`grpo.py`, one GPU": (pair["sync"]["seconds"], Layout(train=1, engines=0)),
        "`grpo.py`, 2 to train": (
            result("step_time_2h200_ranks")["seconds"]["step"], Layout(train=2, engines=0)),
        "`grpo-async.py`, 1+1": (
            pair["async"]["seconds"], Layout(train=1, engines=1, staleness=1)),
        "`grpo-async.py`, 2+2, iterations 2 to 4": (
            statistics.fmean(result("async_step_4h200")["async"]["seconds_per_iteration"][1:4]),
            Layout(train=2, engines=2, staleness=1))}
    for name, (measured, layout) in runs.items():
        predicted = SCALING.predicted(layout, SCALING.EAGER, costs).step
        assert f"| {name} | {measured:.2f} s | {predicted:.2f} s |" in PAGE
    scored = Layout(train=2, engines=1, reference=1, staleness=1)
    found = SCALING.predicted(scored, replace(SCALING.EAGER, scores=True), costs)
    trained = result("async_step_4h200_reference")["async"]["medians"]["time/train"]
    assert f"own {found.step:.2f} s" in PAGE
    assert f"{trained:.2f} s, predicted {found.train:.2f} s" in PAGE


def test_the_figures_of_the_process_are_those_of_the_results():
    found = result("driver_rate_cpu")
    assert found["command"] in PAGE
    assert f"{round(found['ray_calls_per_second'], -1):,.0f} calls a second" in PAGE
    _, middle, great = (row["seconds_a_step"] for row in found["schedule"])
    assert f"{great:.1f} s a step" in PAGE and f"{middle:.2f} s for 64 and 512" in PAGE
    row = H200.driver_row_apart
    assert f"{row * 1e3:.2f} ms for each row" in PAGE and f"{row * 8192:.1f} s for the" in PAGE


def test_the_rate_is_measured():
    rate = benchmark("driver_rate")
    few, many = (rate.schedule_seconds(engines, 64, steps=2) for engines in (4, 64))
    assert 0 < few < 1 and 0 < many < 1
