"""What benchmarks/README.md says is what the results say."""

from __future__ import annotations

import importlib
import importlib.util
import json
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


def proof_cost(monkeypatch, tmp_path, *ways: str) -> dict:
    """What benchmarks/proof_cost.py writes of a tiny model."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    out = tmp_path / "result.json"
    importlib.import_module("proof_cost").main([
        "--shape", "tiny", "--interval", "3", "--repeats", "1", "--out", str(out),
        "--ways", *ways])
    return json.loads(out.read_text())


def test_the_cost_of_the_hashes_is_measured(monkeypatch, tmp_path):
    found = proof_cost(monkeypatch, tmp_path, "memory")["ways"]["memory"]
    assert found["whole_milliseconds"] > 0 and found["gigabytes_per_second"] > 0
    assert found["share_of_step"] == pytest.approx(
        found["part_milliseconds_mean"] / 2200, abs=1e-6)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_cost_of_the_proof_is_measured_of_real_engines(monkeypatch, tmp_path):
    pytest.importorskip("vllm")
    ways = proof_cost(monkeypatch, tmp_path, "in_process", "process", "transfer")["ways"]
    assert {way: found["differing_afterwards"] for way, found in ways.items()} == {
        "in_process": [], "process": [], "transfer": []}
    assert ways["transfer"]["how"] == "gloo"
    assert all(found["self_test_milliseconds"] > 0 for found in ways.values())
