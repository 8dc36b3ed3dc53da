"""Checkpoints and results that cannot be written: they cost themselves, not the run."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from grpo.report.loggers import read_jsonl
from grpo.training import checkpoint as checkpoint_module
from grpo.training.checkpoint import list_checkpoints
from grpo.training.checkpoint_files import NotSavedError

from .runs import make_trainer


def test_a_full_disk_costs_checkpoints_but_not_the_run_its_metrics_or_its_report(
        make_config, tmp_path, monkeypatch, capsys, reports):
    usage, free = shutil.disk_usage, iter([10, 10**12])
    monkeypatch.setattr("grpo.training.checkpoint_files.shutil.disk_usage",
                        lambda path: usage(path)._replace(free=next(free, 10**12)))
    trainer = make_trainer(make_config(iterations=4), tmp_path)
    trainer.fit()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"no checkpoint of step 2: {tmp_path}" in shown.replace("- ", "-")
    assert [found.step for found in list_checkpoints(tmp_path)] == [4]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5 and reports


def test_a_result_without_room_ends_the_run_after_its_report(
        make_config, tmp_path, monkeypatch, reports):
    config = make_config(iterations=1, train={"checkpoint_frequency": 0})
    trainer = make_trainer(config, tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_model", full)
    with pytest.raises(NotSavedError, match="final.partial could not be written .*No space left"):
        trainer.fit()
    assert reports == [tmp_path] and not (tmp_path / "final.partial").exists()
    assert not (tmp_path / "final_model").exists()


@pytest.mark.parametrize("refused", ["mkdir", "rmtree"])
def test_a_folder_that_is_neither_made_nor_removed_does_not_end_the_run(
        make_config, tmp_path, monkeypatch, caplog, reports, refused):
    """A quota that is used up, and on NFS an old checkpoint that somebody reads."""
    mkdir, rmtree, saved = Path.mkdir, shutil.rmtree, []

    def refusing_mkdir(path, *args, **kwargs):
        if path.name == "step_000001.partial":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        mkdir(path, *args, **kwargs)

    def refusing_rmtree(path, ignore_errors=False, **kwargs):
        if not str(path).endswith(".deleted.partial"):
            rmtree(path, ignore_errors, **kwargs)
        elif not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(*((Path, "mkdir", refusing_mkdir) if refused == "mkdir" else
                          (shutil, "rmtree", refusing_rmtree)))
    config = make_config(iterations=3, train={"checkpoint_frequency": 1, "keep_checkpoints": 1})
    trainer = make_trainer(config, tmp_path)
    trainer.after_saving.append(lambda found: saved.append(found.step))
    trainer.fit()
    assert trainer.step == 3 and reports == [tmp_path] and (tmp_path / "final_model").is_dir()
    assert saved == ([2, 3] if refused == "mkdir" else [1, 2, 3])
    assert [found.step for found in list_checkpoints(tmp_path)] == [3]
    assert ("step_000001.deleted.partial could not be removed" in caplog.text) == (
        refused == "rmtree")
