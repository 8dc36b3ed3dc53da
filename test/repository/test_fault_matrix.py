"""docs/faults.md has the table of the last run of the matrix, and cells of it come out that way."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

from fault_matrix import RESULT  # noqa: E402
from faults import cells as matrix  # noqa: E402

PAGE = (REPO / "docs" / "faults.md").read_text()


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True).returncode == 0


def run(tmp_path: Path, *arguments: str, timeout: float) -> list[dict]:
    """Rows of a part of the matrix that is run now."""
    out = tmp_path / "faults.json"
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "fault_matrix.py"), *arguments, "--out", str(out),
         "--work", str(tmp_path / "work")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())["cells"]


class TestThePage:
    result = json.loads(RESULT.read_text())

    def test_it_has_the_table_of_the_result_and_why_cells_have_no_meaning(self):
        assert matrix.table(self.result) in PAGE
        assert matrix.reasons() in PAGE and matrix.columns() in PAGE

    def test_nothing_was_lost(self):
        assert [row for row in self.result["cells"] if row["problems"]] == []
        for row in self.result["cells"]:
            cell = matrix.Cell(row["mode"], row["fault"], row["phase"])
            assert matrix.problems(cell, row) == []

    def test_machine_versions_and_commit_are_there(self):
        assert self.result["machine"] and self.result["versions"]["torch"]
        assert all(re.fullmatch("[0-9a-f]{40}", row["commit"]) for row in self.result["cells"])


@pytest.fixture
def found() -> dict:
    """What is seen of a run that SIGTERM struck in its update, and that went on."""
    return {"struck": True, "exit": 143, "done": 4, "saved": 4, "report": True, "traceback": False,
            "says_resume": True, "warned": False, "resumed_at": 4, "steps": [1, 2, 3, 4, 5, 6],
            "equal": True, "left": []}


CELL = matrix.Cell("sync", "SIGTERM", "update")


def test_a_run_as_promised_has_no_problems(found):
    assert matrix.problems(CELL, found) == []
    assert matrix.words(CELL, found | {"problems": []}) == (
        "4 done, exit 143, on from 4, same")


@pytest.mark.parametrize("wrong", [
    {"struck": False}, {"exit": 1}, {"saved": 3}, {"report": False}, {"traceback": True},
    {"says_resume": False}, {"resumed_at": None}, {"steps": [1, 2, 3, 5, 6]}, {"equal": False},
    {"left": ["vllm"]}])
def test_each_broken_promise_is_a_problem(found, wrong):
    problems = matrix.problems(CELL, found | wrong)
    assert problems
    assert "**broken**" in matrix.words(CELL, found | wrong | {"problems": problems})


def test_metrics_are_compared_to_the_last_digit_but_those_of_a_server():
    ours, theirs = [{"step": 1, "loss": 0.25}], [{"step": 1, "loss": 0.2501}]
    server = matrix.Cell("server", "SIGTERM", "update")
    assert matrix.same(CELL, ours, ours) and not matrix.same(CELL, ours, theirs)
    assert matrix.same(server, ours, theirs)
    assert not matrix.same(server, ours, [{"step": 1, "loss": 0.26}])
    assert not matrix.same(server, ours, []) and not matrix.same(server, ours, [{"step": 1}])


@pytest.mark.parametrize("wrong", [{"lost": 1}, {"twice": 1}])
def test_a_group_that_is_lost_or_trained_twice_is_a_problem(found, wrong):
    cell = matrix.Cell("Atropos", "SIGTERM", "update")
    groups = {"sent": 9, "lost": 0, "twice": 0}
    assert matrix.problems(cell, found | {"groups": groups}) == []
    assert matrix.problems(cell, found | {"groups": groups | wrong})


def test_every_combination_has_a_meaning_or_a_reason():
    together = {(cell.fault, cell.phase) for cell in matrix.cells()} | matrix.NONSENSE.keys()
    assert together == {(fault, phase) for fault in matrix.FAULTS for phase in matrix.PHASES}


def test_the_command_of_the_page_runs_and_a_step_that_was_begun_is_finished_and_saved(tmp_path):
    (command,) = (line for line in re.findall(r"```bash\n(.*?)\n```", PAGE, flags=re.DOTALL))
    python, tool, *arguments = shlex.split(command)
    assert (python, tool) == ("python", "tools/fault_matrix.py")
    arguments = arguments[:arguments.index("--out")]
    (row,) = run(tmp_path, *arguments, timeout=250)
    assert (row["exit"], row["done"], row["resumed_at"], row["equal"]) == (143, 4, 4, True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", [
    ("--modes", "sync"),
    ("--modes", "Atropos", "--faults", "SIGTERM", "SIGKILL", "NaN"),
    pytest.param(("--modes", "process", "--faults", "SIGINT", "SIGKILL", "--phases", "update"),
                 marks=pytest.mark.vllm),
    pytest.param(("--modes", "server", "--faults", "SIGTERM", "SIGKILL", "--phases", "generation",
                  "update"), marks=pytest.mark.vllm),
    ("--modes", "async", "--faults", "SIGTERM", "NaN", "--phases", "generation"),
], ids=lambda arguments: arguments[1])
def test_a_wider_part_of_the_matrix(tmp_path, arguments):
    for option, package in (("process", "vllm"), ("server", "vllm"), ("async", "ray")):
        if option in arguments:
            pytest.importorskip(package)
    if "sync" in arguments and not may_mount():
        arguments = (*arguments, "--faults", *(f for f in matrix.FAULTS if f != "disk full"))
    assert all(row["problems"] == [] for row in run(tmp_path, *arguments, timeout=1700))
