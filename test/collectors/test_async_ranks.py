"""Several ranks train, and workers of their own generate and score: the metrics are those of one
process that does it all."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from grpo.run import build
from grpo.run.assemble import assemble
from grpo.training.parallel import ParallelLearner

from ..training.runs import make_trainer, save_tiny
from .asynchronous import LORA, async_config, make_async_trainer, rows_of, sync_config
from .test_ray import comparable, kill

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, LORA], ids=["weights", "adapters"])
def test_two_ranks_make_the_updates_of_one_process_and_their_checkpoint_fits_one(
        tmp_path, tokenizer, sections):
    folder = save_tiny(tmp_path / "model", tokenizer, seed=0)
    make_trainer(sync_config(folder, **sections), tmp_path / "sync").fit()
    expected = comparable(tmp_path / "sync")
    alone = {"train": {**sections.get("train", {}), "staleness": 0},
             "train_model": sections.get("train_model", {}), "inference_model": {"num_devices": 1}}
    two = {**alone, "train_model": {**alone["train_model"], "num_devices": 2}}
    with ExitStack() as at_end:
        trainer = make_async_trainer(async_config(folder, **two), tmp_path / "async", at_end)
        trainer._first_look()
        for _ in range(3):
            trainer.iterate()
        assert trainer.weights.differing() == []
        checkpoint = trainer.save()
    with ExitStack() as at_end:
        trainer = make_async_trainer(async_config(folder, **alone), tmp_path / "async", at_end,
                                     checkpoint)
        trainer.iterate()
        checkpoint = trainer.save()
    with ExitStack() as at_end:
        trainer = make_async_trainer(async_config(folder, **two), tmp_path / "async", at_end,
                                     checkpoint)
        trainer.fit()
    result = tmp_path / "async" / ("final_adapter" if sections else "final_model")
    assert {path.suffix for path in result.iterdir()} > {".safetensors", ".json"}
    found = comparable(tmp_path / "async")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert rows_of(tmp_path / "async")[-1]["canary/max_abs_diff"] < 1e-4


@pytest.mark.slow
def test_ranks_compile_their_layers_while_workers_start(tmp_path, tokenizer, monkeypatch):
    # Refused on a CPU, where it is slow and not wrong.
    monkeypatch.setattr(build, "check", lambda *_, **__: None)
    began, warm_up = [], ParallelLearner.warm_up
    monkeypatch.setattr(ParallelLearner, "warm_up", lambda *args: (
        began.append(args), warm_up(*args)))
    folder = save_tiny(tmp_path / "model", tokenizer, seed=0)
    make_trainer(sync_config(folder), tmp_path / "sync").fit()
    compiled = {"train_model": {"num_devices": 2, "compile": True}, "train": {"staleness": 0},
                "inference_model": {"num_devices": 1}}
    with ExitStack() as at_end:
        trainer = make_async_trainer(async_config(folder, **compiled), tmp_path / "async", at_end)
        assert len(began) == 1
        trainer.fit()
    for ours, theirs in zip(comparable(tmp_path / "async"), comparable(tmp_path / "sync"),
                            strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("script, sharded", [
    ("grpo.py", False), ("grpo.py", True), ("grpo-async.py", True)])
def test_two_devices_for_each_role_make_the_updates_of_one_process(
        tmp_path, tokenizer, script, sharded):
    """Also when one of the two that have the reference, or a part of it, dies on the way."""
    folder, train = save_tiny(tmp_path / "model", tokenizer, seed=0), {"kl_to_ref_coeff": 0.1}
    make_trainer(sync_config(folder, train=train), tmp_path / "sync").fit()
    expected, two = comparable(tmp_path / "sync"), {"num_devices": 2}
    roles = {"train_model": two, "ref_model": {**two, "sharded": sharded},
             "inference_model": two}
    with ExitStack() as at_end:
        if script == "grpo.py":
            config = sync_config(folder, train=train, **roles)
            trainer = assemble(config, tmp_path / "async", None, at_end)
        else:
            config = async_config(folder, train={**train, "staleness": 0}, **roles)
            trainer = make_async_trainer(config, tmp_path / "async", at_end)
        reference, collect = trainer.collector.reference, trainer.collector.collect

        def collect_after_a_death():
            if trainer.step == 2:
                kill(reference.pool, 0)
            return collect()

        trainer.collector.collect = collect_after_a_death
        trainer.fit()
        assert reference.pool.restarts == 1 and set(reference.reports) == {0, 1}
    rows = rows_of(tmp_path / "async")
    assert all(0 <= row["async/reference_idle"] <= 1 for row in rows[1:])
    for ours, theirs in zip(comparable(tmp_path / "async"), expected, strict=True):
        assert {key: ours[key] for key in theirs} == pytest.approx(theirs, rel=1e-3, abs=1e-5)
