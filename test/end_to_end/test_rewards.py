"""Whole runs whose reward functions do what none should: they go on, and tell."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from grpo.system.sandbox import missing_isolation

from ..support import runs, wait_until, with_variable

BAD = [("loops_in_c", "timeouts"), ("backtracks", "timeouts"), ("raises", "raised"),
       ("exits", "raised"), ("is_nan", "invalid"), ("eats_20_gib", "raised"), ("ends", "ended"),
       ("forks", "timeouts")]
WORK = ["model.warm_start_steps=20", "env.num_envs=2", "env.repeats=4", "env.task.num_test=8",
        "inference_model.backend=transformers", "inference_model.max_tokens=3",
        "train.max_steps=2", "train.checkpoint_frequency=0", "train.eval_frequency=0",
        "env.reward_processes=4", "env.max_reward_errors=1", "hydra.run.dir=outputs/run"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), BAD)
def test_a_run_outlives_its_reward_function(runner, name, kind):
    left = runner.folder / "left"
    left.mkdir()
    _prepare(runner, left)
    runner.run(f"env.reward=ill_behaved:{name}", "env.reward_timeout=2", *WORK)
    folder = runner.folder / "outputs" / "run"
    rows = [row for row in runner.metrics(folder) if "reward/errors" in row]
    assert len(rows) == 2
    errors = [row["reward/errors"] for row in rows]
    assert errors == [row[f"reward/{kind}"] for row in rows] and sum(errors) > 0
    assert all(row["reward/mean"] == 1.0 for row in rows if row["reward/errors"] < 8)
    report = (folder / "report.html").read_text()
    assert f"{sum(errors)} completions got no reward" in report
    assert f"ill_behaved:{name}" in report.partition("What reward functions failed by")[2]
    wait_until(lambda: not with_variable("GRPO_TEST_FOLDER", left))
    pids = [int(path.name) for path in left.iterdir()]
    assert bool(pids) == (name == "forks") and not any(map(runs, pids))


def _prepare(runner, left: Path, **more: str) -> None:
    """Let the run find the functions, and say where they may leave something."""
    runner.environment |= more | {
        "PYTHONPATH": f"{Path(__file__).parents[1] / 'envs'}:{runner.environment['PYTHONPATH']}",
        "GRPO_TEST_FOLDER": str(left)}


@pytest.mark.slow
def test_programs_of_a_run_reach_neither_its_files_nor_a_server(runner):
    if missing_isolation():
        pytest.skip(f"this system cannot isolate programs: {missing_isolation()}")
    left = runner.folder / "left"
    left.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        _prepare(runner, left, GRPO_TEST_PORT=str(server.getsockname()[1]))
        runner.run("env.reward=ill_behaved:program_writes_outside", *WORK)
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    rows = [row for row in runner.metrics(runner.folder / "outputs" / "run")
            if "reward/errors" in row]
    assert [row["reward/errors"] for row in rows] == [0, 0]
    assert 0 < sum(row["reward/mean"] for row in rows) < 2  # some programs ended early, as errors
    assert not list(left.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 4])
def test_too_many_errors_end_the_run_with_the_first_three_tracebacks(runner, processes):
    (runner.folder / "faulty.py").write_text("""
from zlib import crc32


def deeper(number):
    kinds = {0: KeyError, 1: ValueError, 2: IndexError, 3: OSError}
    raise kinds[number % 4](f"number {number}")


def score(completion, problem):
    return deeper(crc32(problem.prompt.encode()))
""")
    runner.environment["PYTHONPATH"] = f"{runner.folder}:{runner.environment['PYTHONPATH']}"
    runner.environment["COLUMNS"] = "500"
    work = [one for one in WORK if "reward" not in one and "max_tokens" not in one]
    output = runner.run("env.reward=faulty:score", f"env.reward_processes={processes}", *work,
                        "inference_model.max_tokens=12", "inference_model.ignore_eos=false",
                        expect=1)
    told = output.partition("The first that differ:")[2]
    assert "env.max_reward_errors" in output and told
    for number in (1, 2, 3):
        one = told.partition(f"\n  {number}. ")[2].partition(f"\n  {number + 1}. ")[0]
        assert "in score: return deeper(crc32(problem.prompt.encode()))" in one, output
        assert "in deeper: raise kinds[number % 4]" in one, output
    assert "\n  4. " not in told
