"""What is said while a run starts, and when."""

from __future__ import annotations

import threading
import time

import pytest

from grpo.report.starting import Starting

from ..support import wait_until


def never() -> bool:
    return False


def test_a_part_that_starts_elsewhere_is_said_to_be_there_while_this_thread_is_busy():
    lines, there = [], threading.Event()
    with Starting(lines.append) as starting:
        starting.begin({"worker 0": there.is_set, "worker 1": never}, within=900)
        assert lines == ["starting worker 0, worker 1; each has 900 s"]
        with starting.part("model"):
            there.set()
            wait_until(lambda: len(lines) == 2)
            assert lines[1].startswith("worker 0: there after 0.")
        assert lines[2].startswith("model: there after 0.")
    assert len(lines) == 3, "of worker 1, and once of each"


def test_what_is_awaited_is_named_with_its_time_and_deadline_as_long_as_it_is_missing():
    lines, there = [], threading.Event()
    with Starting(lines.append, every=0.6) as starting:
        time.sleep(1.0)
        assert lines == [], "while nothing starts"
        starting.begin({"worker 0": there.is_set}, within=30)
        with starting.part("model"):
            wait_until(lambda: len(lines) == 3)
        wait_until(lambda: len(lines) == 5)
        there.set()
        wait_until(lambda: len(lines) == 6)
        time.sleep(1.0)
    assert lines[0] == "starting worker 0; it has 30 s"
    assert lines[1] == "still starting: worker 0 (1 of 30 s), model (1 s)"
    assert lines[3].startswith("model: there after 1.")
    assert lines[4] == "still starting: worker 0 (2 of 30 s)"
    assert lines[5].startswith("worker 0: there after ")
    assert len(lines) == 6


def test_what_fails_is_never_there_and_not_looked_at_when_the_start_is_over():
    lines, looks = [], []

    def look() -> bool:
        looks.append(time.monotonic())
        return False

    with pytest.raises(RuntimeError, match="no memory"), Starting(lines.append) as starting:
        starting.begin({"worker 0": look}, within=900)
        wait_until(lambda: looks)
        with starting.part("model"):
            raise RuntimeError("no memory")
    seen = len(looks)
    time.sleep(0.5)
    assert len(looks) == seen, "what it looks at may be gone"
    assert lines == ["starting worker 0; it has 900 s"]
