"""What benchmarks/README.md says is what the results say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TEXT = (BENCHMARKS / "README.md").read_text()


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", BENCHMARKS / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
