"""What benchmarks/README.md says is what the results say, and a benchmark that is ended leaves what
it has measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support import BENCHMARKS, REPO, benchmark, wait_until

TEXT = (BENCHMARKS / "README.md").read_text()


@pytest.fixture(scope="module")
def scaling():
    return benchmark("scaling")


@pytest.fixture(scope="module")
def lengths():
    return benchmark("async_lengths")


@pytest.fixture(scope="module")
def plots():
    return benchmark("plot_results")


def test_the_scaling_table_is_the_one_of_the_results(scaling):
    assert scaling.table() in TEXT


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


class TestMeasuredPage:
    """docs/measured.md and its charts."""

    def test_the_numbers_are_those_of_the_results(self, plots):
        assert plots.PAGE.read_text() == plots.page()
        for figure in plots.FIGURES:
            assert plots.digest(figure) in (plots.IMAGES / f"{figure.name}.svg").read_text()
        shown = [figure for figure in plots.FIGURES if figure.name in ("embedded", "step")]
        overview = plots.OVERVIEW.read_text()
        assert len(shown) == 2 and all(plots.digest(figure) in overview for figure in shown)

    def test_a_chart_shows_its_names_and_numbers(self, plots, tmp_path):
        figure = next(figure for figure in plots.FIGURES if figure.name == "step")
        drawn = plots.draw(figure, tmp_path).read_text()
        assert all(name in drawn and f">{value:.2f}<" in drawn
                   for name, value in figure.data().items())
        assert {path.stem for path in plots.IMAGES.glob("*.svg")} == {
            figure.name for figure in plots.FIGURES}

    def test_what_the_text_says_of_staleness_is_what_the_result_says(self, plots):
        (result,) = next(figure for figure in plots.FIGURES if figure.name == "staleness").read()
        assert result["last"]["within_two_standard_errors"]
        assert all(len(runs) == 3 for runs in result["runs"].values())


# -- results before the end -----------------------------------------------------------------------


def test_a_benchmark_that_is_ended_leaves_what_it_recorded(tmp_path):
    source = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from machine import Recording
sys.argv = ["benchmarks/hub.py", "--groups", "9 9"]
recording = Recording("hub", Path({str(tmp_path)!r}, "result.json"), work="a piece")
try:
    recording.add(seconds=[1.5])
    time.sleep(60)
    recording.finish()
finally:
    Path({str(tmp_path)!r}, "tidied").touch()
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.DEVNULL)
    try:
        until(process, tmp_path, lambda found: "seconds" in found)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "benchmark": "hub", "complete": False, "work": "a piece", "seconds": [1.5],
        "command": "python benchmarks/hub.py --groups '9 9'"}
    assert (tmp_path / "tidied").exists()  # as after Ctrl-C


def until(process: subprocess.Popen, folder: Path, ready) -> None:
    """The result that a benchmark has written so far has what is waited for."""
    path, errors = folder / "result.json", folder / "errors"
    wait_until(lambda: path.exists() and ready(json.loads(path.read_text())), seconds=120.0,
               alive=process, said=lambda: errors.exists() and errors.read_text()[-3000:])


#: Stands in for grpo.py: an iteration after another, until it is ended or fails.
SCRIPT = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[-1].partition("=")[2])
folder.mkdir()
print("memory plan", flush=True)
time.sleep(0.3)
for step in range(100):
    if "fail" in sys.argv and step == 2:
        sys.exit("out of memory")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time/step": 0.5} if step else {"step": 0}) + "\\n")
    time.sleep(0.1)
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    import grpo.report.loggers  # noqa: F401  takes seconds, in which the stand-in would be done

    runs = benchmark("runs")
    (tmp_path / "grpo.py").write_text(SCRIPT)
    monkeypatch.setattr(runs, "SCRIPTS", tmp_path)
    return runs


def test_a_run_is_watched_and_ended_when_enough_was_seen(scripts, tmp_path):
    seen = []
    run = scripts.WatchedRun("grpo.py", [], tmp_path / "run",
                             seen=lambda run: seen.append(len(run.describe()[
                                 "seconds_per_iteration"])))
    run.follow(iterations=3, timeout=60.0)
    assert len(run.rows) == 3 == seen[-1] and seen == sorted(set(seen))
    (seconds, line), *_ = run.describe()["startup"]
    assert line == "memory plan" and 0 <= seconds < 30
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    time.sleep(0.3)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before  # it has ended


@pytest.mark.parametrize(("arguments", "timeout", "message"), [
    (["fail"], 60.0, "(?s)ended with exit code 1 after 1 iterations.*out of memory"),
    ([], 1.5, "(?s)of 99 iterations in 1.5 s.*memory plan")])
def test_a_run_that_fails_or_takes_too_long_says_so_with_its_log(
        scripts, tmp_path, arguments, timeout, message):
    run = scripts.WatchedRun("grpo.py", arguments, tmp_path / "run")
    with pytest.raises(scripts.RunFailed, match=message):
        run.follow(iterations=99, timeout=timeout)
    assert run.describe()["seconds_per_iteration"][0] == 0.5


@pytest.fixture
def begin(tmp_path):
    """Start a benchmark that writes ``result.json``."""
    started = []

    def start(name: str, *arguments: str) -> subprocess.Popen:
        started.append(subprocess.Popen(
            [sys.executable, str(BENCHMARKS / name), *arguments, "--out",
             str(tmp_path / "result.json")],
            env=os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)},
            stdout=subprocess.DEVNULL, stderr=(tmp_path / "errors").open("w"), cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_step_benchmark_that_is_ended_leaves_the_iterations_that_were_done(begin, tmp_path):
    process = begin("step_time.py", "--shape", "tiny", "--prompts", "2", "--group", "2",
                    "--prompt-tokens", "32", "--response-tokens", "4", "--iterations", "100000",
                    "inference_model.backend=transformers")
    until(process, tmp_path, lambda found: len(found.get("seconds_per_iteration", ())) > 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False
    assert result["steady_iterations"] == len(result["seconds_per_iteration"]) - 3
    assert 0 < result["seconds"]["generate"] < result["seconds"]["step"]
    # What the start-up took, by what was printed when.
    assert [at for at, _ in result["startup"]] == sorted(at for at, _ in result["startup"])
    assert result["startup"] and result["machine"] and result["commit"]
    assert "inference_model.backend=transformers" in result["run"]
    assert not list(tmp_path.glob("*/problems"))  # its own folder is gone


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_what_was_measured(begin, tmp_path):
    process = begin("step_time.py", "--shape", "tiny", "--prompts", "2", "--group", "2",
                    "inference_model.backend=transformers", "train.clip_epsilon=-1")
    assert process.wait(timeout=120) == 1
    errors = (tmp_path / "errors").read_text()
    assert "grpo.py ended with exit code 1 after 0 iterations" in errors
    assert "clip_epsilon" in errors
    assert json.loads((tmp_path / "result.json").read_text())["complete"] is False


@pytest.mark.slow
def test_the_losses_that_were_measured_stay(begin, tmp_path):
    process = begin("loss_memory.py", "--vocabulary", "512", "--rows", "2")
    until(process, tmp_path, lambda found: "losses" in found)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False
    assert all(loss["peak_bytes"] > 0 for loss in result["losses"].values())


def test_a_copy_without_git_says_what_it_was_told(monkeypatch):
    commit = benchmark("machine").commit
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GRPO_COMMIT", raising=False)
    assert commit() == "unknown"
    monkeypatch.setenv("GRPO_COMMIT", "1234abc")
    assert commit() == "1234abc"


def proof_cost(tmp_path, *ways: str) -> dict:
    """What benchmarks/proof_cost.py writes of a tiny model."""
    out = tmp_path / "result.json"
    benchmark("proof_cost").main([
        "--shape", "tiny", "--interval", "3", "--repeats", "1", "--out", str(out),
        "--ways", *ways])
    return json.loads(out.read_text())


def test_the_cost_of_the_hashes_is_measured(tmp_path):
    found = proof_cost(tmp_path, "memory")["ways"]["memory"]
    assert found["whole_milliseconds"] > 0 and found["gigabytes_per_second"] > 0
    assert found["share_of_step"] == pytest.approx(
        found["part_milliseconds_mean"] / 2200, abs=1e-6)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_cost_of_the_proof_is_measured_of_real_engines(tmp_path):
    pytest.importorskip("vllm")
    ways = proof_cost(tmp_path, "in_process", "process", "transfer")["ways"]
    assert {way: found["differing_afterwards"] for way, found in ways.items()} == {
        "in_process": [], "process": [], "transfer": []}
    assert ways["transfer"]["how"] == "gloo"
    assert all(found["self_test_milliseconds"] > 0 for found in ways.values())
