"""Engines with devices of their own in ``grpo.py``: the run is that of one process."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from grpo.config.schema import ConfigError
from grpo.run.assemble import assemble
from grpo.training.checkpoint import list_checkpoints

from ..training.runs import make_trainer
from .asynchronous import LORA, LocalRay, rows_of, sync_config

SAVED = {"checkpoint_frequency": 3}


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Runs ``grpo.py`` with two engines in a folder, from a checkpoint if asked."""
    LocalRay(monkeypatch)

    def run(checkpoint=None, **sections):
        config = sync_config(folder, **{"inference_model": {"num_devices": 2}, **sections})
        with ExitStack() as at_end:
            trainer = assemble(config, tmp_path / "workers", checkpoint, at_end)
            trainer.fit()
        return config
    return run


@pytest.mark.parametrize("sections", [{}, LORA], ids=["weights", "adapters"])
def test_batches_are_of_the_present_weights_and_the_run_goes_on_as_one_of_grpo_py(
        run, tmp_path, sections):
    """On real processes its updates are those of one process: test_async_ranks.py."""
    saved = {**sections, "train": {**sections.get("train", {}), **SAVED}}
    config = run(**saved)
    # By which `resume` recognises the run: nothing that grpo.py does not know.
    first = list_checkpoints(tmp_path / "workers")[0]
    assert first.step == 3 and first.info()["config"] == config.model_dump(mode="json")
    whole = rows_of(tmp_path / "workers")
    run(first, **saved)
    again = rows_of(tmp_path / "workers")
    assert [row["step"] for row in whole] == [row["step"] for row in again] == list(range(7))
    for row in whole[1:] + again[1:]:
        assert row["policy/age_max"] == 0 and row["policy/version"] == row["step"]
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
        assert row["canary/max_abs_diff"] < 1e-4


def test_a_checkpoint_of_workers_is_refused_without_them_with_what_to_do(run, folder, tmp_path):
    run(train=SAVED)
    checkpoint = list_checkpoints(tmp_path / "workers")[0]
    with pytest.raises(ValueError, match="of a run with workers.*go on with the devices"):
        make_trainer(sync_config(folder, train=SAVED), tmp_path / "one", checkpoint)


@pytest.mark.parametrize("key, value", [
    ("engine", "process"), ("url", "http://127.0.0.1:9001"), ("weight_sync", "transfer")])
def test_what_workers_do_not_read_is_refused(run, key, value):
    inference = {"backend": "vllm", "num_devices": 2, key: value}
    if key == "url":
        inference["engine"] = "server"
    with pytest.raises(ConfigError, match="is not read where engines are workers on Ray.*remove"):
        run(inference_model=inference)
