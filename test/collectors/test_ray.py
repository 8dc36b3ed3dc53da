"""An asynchronous run on Ray with two workers: its metrics, deaths of workers, resumption."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack

import pytest

from grpo.collectors.ray import RolloutsFailed
from grpo.policies.ray_engine import WorkerPool, WorkersLost
from grpo.run import build_async

from ..support import REPO, blocks, wait_until
from ..training.runs import make_trainer, save_tiny, timeless
from .asynchronous import LORA, async_config, make_async_trainer, rows_of, sync_config

ray = pytest.importorskip("ray")


def kill(pool, number: int) -> None:
    os.kill(pool.about[number]["pid"], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("sections", [
    pytest.param({}, id="weights"), pytest.param(LORA, id="adapters")])
def test_deaths_and_a_resumption_leave_the_metrics_of_a_synchronous_run(
        tmp_path, tokenizer, sections):
    """One of two workers is killed and replaced, then both are, which is one too many."""
    folder = save_tiny(tmp_path / "model", tokenizer, seed=0)
    make_trainer(sync_config(folder, **sections), tmp_path / "sync").fit()
    expected = comparable(tmp_path / "sync")
    assert len({row["reward/mean"] for row in expected[1:]}) > 1
    sections = sections | {"train": {**sections.get("train", {}), "staleness": 0}}

    with ExitStack() as at_end:
        trainer = make_async_trainer(
            async_config(folder, ray={"max_restarts": 1}, **sections), tmp_path / "async", at_end)
        pool = trainer.collector.pool
        trainer._first_look()
        trainer.iterate()
        kill(pool, 0)
        trainer.iterate()
        trainer.iterate()
        wait_until(lambda: trainer.weights.heal() or pool.whole, seconds=60)
        assert pool.restarts == 1
        for number in range(2):
            kill(pool, number)
        with pytest.raises((RolloutsFailed, WorkersLost),
                           match="rollout worker . died.*ray.max_restarts=1"):
            while True:
                trainer.iterate()
        checkpoint = trainer.save()
    assert 3 <= checkpoint.step < 6
    assert not ray.is_initialized()

    with ExitStack() as at_end:
        resumed = make_async_trainer(async_config(folder, **sections), tmp_path / "async", at_end,
                                     checkpoint)
        resumed.fit()
    found = {}
    for row in comparable(tmp_path / "async"):
        found.setdefault(row["step"], {}).update(row)
    # An update that nobody was left to be given is saved, but of its step there is at most the
    # evaluation, which was made up.
    assert {row["step"] for row in expected} - found.keys() <= {checkpoint.step}
    for theirs in expected:
        ours = found.get(theirs["step"], theirs)
        if theirs["step"] == checkpoint.step:
            theirs = {key: value for key, value in theirs.items() if key in ours}
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_trains_on_all_that_it_generates(tmp_path, tokenizer, staleness):
    folder = save_tiny(tmp_path / "model", tokenizer, seed=0)
    config = async_config(folder, train={"staleness": staleness, "eval_frequency": 0,
                                         "total_dialog_turns": 20 * 16})
    with ExitStack() as at_end:
        make_async_trainer(config, tmp_path / "run", at_end).fit()
    last = rows_of(tmp_path / "run")[-1]
    assert last["step"] == 20 and last["policy/age_max"] <= staleness
    assert last["async/groups_finished"] >= 20 * 4
    assert all(last[f"async/groups_{name}"] == 0
               for name in ("too_old", "expired", "failed", "lost", "dropped", "late"))


def comparable(run_dir) -> list[dict]:
    """Metrics that depend neither on the clock nor on the workers' own proofs."""
    return [{key: value for key, value in row.items()
             if not key.startswith(("canary/", "async/"))} for row in timeless(rows_of(run_dir))]


@pytest.mark.slow
def test_workers_and_references_start_while_the_trainer_loads_its_model(
        tmp_path, tokenizer, monkeypatch, capsys):
    folder = save_tiny(tmp_path / "model", tokenizer, seed=0)
    config = async_config(folder, train={"kl_to_ref_coeff": 0.1}, ref_model={"num_devices": 1})
    pools, launch, load = [], WorkerPool.launch, build_async.load_trained

    def launched(pool):
        pools.append(pool)
        launch(pool)

    def loaded(*args):
        assert [pool.kind for pool in pools] == ["rollout worker", "reference worker"]
        wait_until(lambda: all(pool.there(number) for pool in pools
                               for number in range(pool.count)), seconds=300)
        assert all(pool.present == [] for pool in pools), "met before the model was loaded"
        return load(*args)

    monkeypatch.setattr(WorkerPool, "launch", launched)
    monkeypatch.setattr(build_async, "load_trained", loaded)
    with ExitStack() as at_end:
        trainer = make_async_trainer(config, tmp_path / "run", at_end)
        assert [pool.present for pool in pools] == [[0, 1], [0]]
        assert trainer.iterate()["canary/max_abs_diff"] < 1e-4
    lines = capsys.readouterr().out.splitlines()
    begun = [line for line in lines if line.startswith("starting ")]
    assert begun == ["starting rollout worker 0, rollout worker 1; each has 900 s",
                     "starting reference worker 0; it has 900 s"]
    there = [line.partition(": there after ")[0] for line in lines if ": there after " in line]
    assert sorted(there) == ["Ray", "model of the trainer", "reference worker 0",
                             "rollout worker 0", "rollout worker 1", "tokenizer and prompts"]
    assert there.index("rollout worker 1") < there.index("model of the trainer")
    shown = blocks("text", (REPO / "docs" / "async.md").read_text())
    page = next(block for block in shown if "starting rollout worker" in block).splitlines()
    # A command says more before its own imports (test_errors.py), and what is late.
    more = ("starting Ray", "loading ", "still ")
    assert {_shape(line) for line in page if not line.startswith(more)} <= set(
        map(_shape, lines)), "the page shows other lines"
    assert lines.index(begun[-1]) < next(i for i, line in enumerate(lines) if "GRPO" in line)


def _shape(line: str) -> str:
    return re.sub(r"[0-9.]+ s", "N s", line)
