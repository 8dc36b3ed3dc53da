"""docs/faults.md has the table of the last runs that a host was cut off from, and what is promised
of them is checked."""

from __future__ import annotations

import json
import re
import sys

import pytest

from ..support import REPO

sys.path.insert(0, str(REPO / "tools"))

import host_fault  # noqa: E402

PAGE = (REPO / "docs" / "faults.md").read_text()


class TestThePage:
    result = json.loads(host_fault.RESULT.read_text())

    def test_it_has_the_table_and_the_variables_of_the_result(self):
        assert host_fault.table(self.result) in PAGE
        for name, value in host_fault.WATCH["closely"].items():
            assert f"{name}={value}" in PAGE
        assert self.result["watch"] == host_fault.WATCH

    def test_nothing_was_lost(self):
        assert self.result["complete"] and re.fullmatch("[0-9a-f]{40}", self.result["commit"])
        for found in self.result["runs"]:
            assert host_fault.problems(found) == found["problems"] == []

    def test_the_page_of_asynchronous_runs_has_the_seconds_of_the_result(self):
        page = (REPO / "docs" / "async.md").read_text()
        first, second, _ = self.result["runs"]
        for seconds in (first["noticed_after"], second["noticed_after"], second["used_after"]):
            assert f"{seconds:.0f} s" in page


def figures(*, workers=(2, 2, 1, 1, 2), lost=3.0, finished=28.0, unfinished=3) -> dict:
    """Of a run whose host is cut off at 2.5 s, while another has joined at 4.2 s."""
    rows = [{"step": step, "time": float(step), "async/workers": count, "async/restarts": 1.0,
             "canary/max_abs_diff": step * 1e-7} for step, count in enumerate(workers, 1)]
    state = {"version": 5, "next": 31, "ready": [None] * 8, "unfinished": [None] * unfinished,
             "counts": {"finished": finished, "lost": lost, "dropped": 0}}
    return host_fault.figures(rows, state, cut=2.5, joined=4.2) | {"exit": 143}


def test_what_is_seen_of_a_run():
    found = figures()
    assert found["workers"] == [[-1.5, 1, 2], [0.5, 3, 1], [2.5, 5, 2]]
    assert (found["noticed_after"], found["used_after"]) == (0.5, 0.8)
    assert found["groups"] == {"started": 31, "acknowledged": 28, "trained": 20, "lost": 0,
                               "again": 3, "dropped": 0, "missing": 0}
    assert found["canary"] == pytest.approx(5e-7) and host_fault.problems(found) == []


@pytest.mark.parametrize("wrong, said", [
    ({"finished": 29.0}, "1 groups lost"), ({"unfinished": 2}, "1 groups missing"),
    ({"lost": 0.0}, "nothing in hand"), ({"workers": (2, 2, 1, 2, 1, 2)}, "workers")])
def test_each_broken_promise_is_a_problem(wrong, said):
    (problem,) = host_fault.problems(figures(**wrong))
    assert said in problem
