"""Lines on a disk that is full for a while: a limit on the size of files stands in for it."""

from __future__ import annotations

import resource
import signal
from contextlib import contextmanager

import pytest

from grpo.training.line_file import LineFile
from grpo.training.loggers import JsonlLogger, read_jsonl


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
