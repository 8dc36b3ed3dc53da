"""Calls in other processes: what they return, and that none holds up this one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from grpo.system.apart import ApartError, CallsApart
from grpo.system.deadline import LateError, call_with_deadline
from grpo.system.threads import in_background

from ..support import runs, wait_until


@pytest.fixture
def apart():
    """One child, whose calls may compute for half a second."""
    return CallsApart(1, seconds=0.5, imports="fractions")


def test_calls_of_several_threads_share_a_child(apart):
    pids = {call.result(timeout=60) for call in [in_background(apart, os.getpid) for _ in range(9)]}
    assert len(pids) == 1 and os.getpid() not in pids


def test_large_values_come_through_both_ways(apart):
    assert apart(bytes.upper, b"a" * 3_000_000) == b"A" * 3_000_000


def test_what_a_function_prints_is_no_answer(apart):
    assert apart(print, "12345678" * 3) is None
    assert apart(max, 1, 2) == 2


def test_a_call_that_holds_the_interpreter_ends_with_its_child_alone(apart):
    started = time.monotonic()
    with pytest.raises(ApartError, match=r"took more than 0.5 s of computing"):
        apart(eval, "9**9**9")
    assert time.monotonic() - started < 30
    assert apart(max, 1, 2) == 2


def test_a_deadline_ends_the_child(apart):
    pid = apart(os.getpid)
    with pytest.raises(LateError):
        call_with_deadline(apart, time.sleep, 60, seconds=0.2)
    wait_until(lambda: not runs(pid))
    assert apart(max, 1, 2) == 2


def test_a_place_that_nobody_gives_back_is_taken_from_threads_that_have_ended(apart):
    pid = apart(os.getpid)
    in_background(apart._take).result(timeout=60)
    assert in_background(apart, max, 1, 2).result(timeout=60) == 2
    wait_until(lambda: not runs(pid))  # which might have been asked something
    apart._take()
    assert apart(max, 1, 2) == 2


def test_a_child_that_dies_is_named_and_replaced(apart):
    for number in (signal.SIGKILL, signal.SIGTERM):
        with pytest.raises(ApartError, match=f"its process has ended, exit code -{number:d}"):
            apart(signal.raise_signal, number)
    os.kill(apart(os.getpid), signal.SIGKILL)
    with pytest.raises(ApartError, match="its process has ended, exit code -9"):
        apart(max, 1, 2)
    assert apart(max, 1, 2) == 2


def test_a_child_ends_with_its_parent():
    calls = CallsApart(1, seconds=5, imports="fractions")
    pid = calls(os.getpid)
    child = calls._places[0].child
    child.stdin.close()  # as the system does for a process that is gone
    wait_until(lambda: not runs(pid))
    child.wait()
    child.stdout.close()
