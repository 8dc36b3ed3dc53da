"""Runs of the offline trainer: its files, and what evaluations have in common."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from transformers import AutoModelForCausalLM

from grpo.config.offline import OfflineConfig, translate
from grpo.config.schema import load_config
from grpo.run.offline import NAMES, IterationFiles, build, link_by_iteration
from grpo.training.checkpoint import Checkpoint

from ..conftest import make_tiny_model
from ..policies.stand_in import StandIn
from ..training import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(vocab_size=len(tokenizer), max_position_embeddings=2048).float(
        ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def ran(folder, tmp_path, monkeypatch):
    """The folder of a run."""
    monkeypatch.setattr("grpo.report.reporter.write_report",
                        lambda run_dir, **_: run_dir / "none")

    def run(**sections):
        values = {
            "iterations": 3, "model": {"train_id": str(folder), "device": "cpu"},
            "generation": {"backend": "transformers", "max_new_tokens": 4},
            "data": {"difficulty": 0, "problems_per_iteration": 2, "num_train_seeds": 8},
            "eval": {"num_ids": 3, "replicates": 2, "interval": 2},
            "checkpoint": {"save_interval": 1, "keep_last_k": 2},
            "run": {"env": {"reward": f"{runs.__name__}:by_text"}}}
        for section, keys in sections.items():
            values[section] = {**values.get(section, {}), **keys}
        with ExitStack() as at_end:
            build(translate(load_config(values, OfflineConfig)), tmp_path, at_end).fit()
        return tmp_path

    return run


def read(path):
    return json.loads(path.read_text())


def test_the_files_of_a_run_are_those_of_the_earlier_trainer(ran):
    run = ran()
    trained = [read(run / "metrics" / f"train_iter_{i:03d}.json") for i in (1, 2, 3)]
    assert [row["iteration"] for row in trained] == [1, 2, 3]
    assert all(isinstance(row[name], float) for row in trained for name in NAMES)
    assert trained[1]["grad_norm"] > 0 and trained[2]["kl_divergence"] > 0
    for row in trained:
        assert row["loss_total"] == pytest.approx(
            row["loss_pg"] + row["loss_kl"] + row["loss_entropy"], abs=1e-6)
    evaluated = [read(run / "metrics" / f"eval_iter_{i:03d}.json") for i in (0, 2, 3)]
    assert all({"pass@2", "pass_ordered@2", "mean@2", "best@2"} <= row.keys() for row in evaluated)
    assert len({tuple(row["tasks"]["sat"]["ids"]) for row in evaluated}) == 1
    links = sorted(path.name for path in (run / "checkpoints").glob("iter_*"))
    assert links == ["iter_002", "iter_003"]
    AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "iter_003")


def test_a_run_without_evaluations_has_none_and_one_behind_a_server_does(ran, folder):
    with StandIn("sglang", folder) as there:
        there.context = 2048
        run = ran(generation={"backend": "sglang_server", "base_url": f"{there.url}/v1",
                              "batch_size": 3}, eval={"enabled": False, "replicates": 4,
                                                      "interval": 1},
                  checkpoint={"save_interval": 0, "keep_last_k": 3})
    assert not [*(run / "metrics").glob("eval_*")]
    assert not (run / "checkpoints").exists()
    rows = [read(path) for path in sorted((run / "metrics").glob("train_*"))]
    assert len(rows) == 3 and max(row["canary/max_abs_diff"] for row in rows) < 1e-3
    assert there.most_at_a_time <= 3


def test_files_that_cannot_be_written_cost_themselves_and_not_the_run(tmp_path, caplog):
    """As on a full disk; here, something else lies where they belong."""
    (tmp_path / "metrics").touch()
    IterationFiles(tmp_path).log(3, {"loss/total": 0.5})
    assert "train_iter_003.json is not written" in caplog.text
    folder = tmp_path / "checkpoints" / "step_3"
    (folder / "model").mkdir(parents=True)
    (folder.parent / "iter_003" / "kept").mkdir(parents=True)
    link_by_iteration(Checkpoint(folder, 3))
    assert "iter_003 does not lead to" in caplog.text
