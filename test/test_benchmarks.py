"""What benchmarks/README.md says is what the results say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TEXT = (BENCHMARKS / "README.md").read_text()


def load_benchmark(name: str) -> ModuleType:
    """A benchmark as a module; they import each other from their folder."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scaling():
    return load_benchmark("scaling")


@pytest.fixture(scope="module")
def lengths():
    return load_benchmark("async_lengths")


def test_the_scaling_table_is_the_one_of_the_results(scaling):
    assert scaling.table() in TEXT


def test_every_run_on_several_gpus_has_a_line(scaling):
    runs = [*BENCHMARKS.glob("results/async_step_*"), *BENCHMARKS.glob("results/*_ranks.json")]
    assert len(scaling.table().splitlines()) == 2 + len(runs) > 2


def test_each_benchmark_is_named_with_what_it_says_of_itself():
    for path in BENCHMARKS.glob("*.py"):
        if path.name != "machine.py":
            first = path.read_text().split('"""')[1].splitlines()[0]
            assert f"- `{path.name}`: {first[0].lower()}{first[1:]}" in TEXT


class TestAsyncLengths:
    """The table of ``docs/async.md``."""

    def test_the_page_has_the_table_and_the_command_of_the_result(self, lengths):
        page = (BENCHMARKS.parent / "docs" / "async.md").read_text()
        result = json.loads(lengths.RESULT.read_text())
        assert lengths.table(result) in page and result["command"] in page

    def test_the_script_measures_what_the_page_says(self, lengths, capsys, monkeypatch, tmp_path):
        """A part of it again."""
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [
            "async_lengths.py", "--steps", "40", "--staleness", "1", "--out", str(out)])
        lengths.main()
        found, kept = json.loads(out.read_text()), json.loads(lengths.RESULT.read_text())
        assert lengths.table(found) in capsys.readouterr().out
        kept["after"] = [row for row in kept["after"] if row["staleness"] == 1]
        assert [row["update_at"] for row in found["after"]] == ["in_flight", "group_border"]
        for ours, theirs in zip(found["after"], kept["after"], strict=True):
            assert ours["longest"] == pytest.approx(theirs["longest"], abs=0.003)
            assert ours["in_vain"] < 1e-9 and ours["oldest"] == 1 and ours["dropped"] == 0
            assert ours["step"] == pytest.approx(theirs["step"], rel=0.05)
            assert ours["age"] == pytest.approx(theirs["age"], rel=0.05)
