"""The results of a sweep: which runs, what they differ in, a table and a plot."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from grpo.report.sweep import PLOT, plot, results_table
from grpo.run.cli.sweep import SweepResults, read_runs


@pytest.fixture
def sweep(tmp_path):
    for number, (rate, rewards) in enumerate([("1e-5", [0.0, 0.25]), ("1e-4", [0.5, 0.75])]):
        folder = tmp_path / str(number)
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(
            f"- train.lr={rate}\n- train.seed=3\n- ++run.a={{b:1}}\n")
        rows = [{"step": 0, "eval/accuracy": 0.1 + number}, *(
            {"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "10" / ".hydra").mkdir(parents=True)  # one that never got to its metrics
    (tmp_path / "10" / ".hydra" / "overrides.yaml").write_text("- train.lr=1\n- train.seed=3\n")
    return tmp_path


def shown(table) -> str:
    console = Console(width=100)
    with console.capture() as said:
        console.print(table)
    return said.get()


def test_the_table_has_what_differs_and_how_it_ended(sweep):
    runs = read_runs(sweep)
    assert [run.name for run in runs] == ["0", "1", "10"]
    text = shown(results_table(runs[:2]))
    assert "train.lr" in text and "train.seed" not in text
    assert "0.250" in text and "0.750" in text and "1.100" in text
    assert " - " in shown(results_table(runs))


def test_the_plot_is_drawn_and_a_sweep_ends_with_both(sweep, capsys):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "."}, "runtime": {"cwd": str(sweep)}}})
    SweepResults().on_multirun_end(config)
    said = capsys.readouterr().out
    assert "results of the sweep" in said and str(sweep / PLOT) in said
    before = (sweep / PLOT).read_bytes()
    assert before[:4] == b"\x89PNG"
    plot(read_runs(sweep)[:1], sweep / PLOT)
    assert (sweep / PLOT).read_bytes() != before


def test_a_single_run_needs_no_table(sweep, tmp_path, capsys):
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "10"}, "runtime": {"cwd": str(sweep)}}})
    SweepResults().on_multirun_end(config)
    assert capsys.readouterr().out == ""
