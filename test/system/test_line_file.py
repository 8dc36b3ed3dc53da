"""Lines on a disk that is full for a while: a limit on the size of files stands in for it."""

from __future__ import annotations

import logging
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo.report.loggers import JsonlLogger, read_jsonl
from grpo.system.line_file import LineFile, LogFile

REPO = Path(__file__).resolve().parents[2]


@contextmanager
def full_at(size: int):
    """No file of this process may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_lines_wait_until_the_disk_has_room_and_keep_their_order(tmp_path, caplog):
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append("one\n")
    with full_at(6):
        file.append("two\n")
        file.append("three\n")
        assert path.read_text() == "one\n"  # no half line
    assert len(caplog.records) == 1 and str(path) in caplog.text
    file.append("four\n")
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
    file.close()
    file.close()


def test_lines_that_never_find_room_are_shown_at_the_end(tmp_path, caplog):
    file = LineFile(tmp_path / "lines")
    with full_at(1):
        file.append("one\n")
        file.close()
    assert "lacks its last 1 lines" in caplog.text and caplog.text.rstrip().endswith("one")


@pytest.mark.parametrize("reopened", [False, True])
def test_the_metrics_of_a_run_go_on_after_a_full_disk(tmp_path, reopened):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {"a": 1.0})
    with full_at((tmp_path / "metrics.jsonl").stat().st_size + 5):
        logger.log(2, {"a": 2.0})
    if reopened:
        logger.truncate_after(2)
    logger.log(3, {"a": 3.0})
    logger.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_log_on_a_full_disk_prints_no_traceback_of_its_own(tmp_path, capsys):
    handler = LogFile(tmp_path / "log")
    with full_at(0):
        handler.emit(logging.makeLogRecord({"msg": "no room for this"}))
        assert capsys.readouterr().err == ""
    handler.emit(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Traceback" in capsys.readouterr().err  # mistakes are shown as ever
    handler.close()
    assert "no room for this" in (tmp_path / "log").read_text()


def test_the_scripts_log_to_such_a_file():
    from hydra import compose, initialize_config_dir

    for name in ("grpo", "grpo_async"):
        with initialize_config_dir(str(REPO / "config"), version_base=None):
            config = compose(name, return_hydra_config=True)
        handler = config.hydra.job_logging.handlers.file
        assert handler["class"] == f"{LogFile.__module__}.{LogFile.__name__}"
