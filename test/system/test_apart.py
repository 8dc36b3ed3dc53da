"""Calls in other processes: what they return, and that none holds up this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo.system.apart import ApartError, CallsApart, ComputingError
from grpo.system.deadline import LateError, call_with_deadline
from grpo.system.threads import in_background

from ..support import REPO, environment, runs, wait_until


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def apart():
    """One child, whose calls may compute for half a second."""
    return CallsApart(1, seconds=0.5, imports=["fractions"])


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
    calls = CallsApart(1, seconds=5, imports=["fractions"])
    pid = calls(os.getpid)
    calls._places[0].child.close()  # as the system does for a process that is gone
    wait_until(lambda: not runs(pid))


def test_a_child_ends_with_its_parent_while_it_computes():
    code = ("import os; from grpo.system.apart import CallsApart; from grpo.system.threads import "
            "in_background; calls = CallsApart(1, seconds=60, imports=[]); "
            "print(calls(os.getpid), flush=True); in_background(calls, eval, '9**9**9'); "
            "import time; time.sleep(0.5); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not runs(int(done.stdout)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_call_has_started_ends_with_the_callers_group(tmp_path, number):
    code = ("import sys; from grpo.system.apart import CallsApart; "
            "CallsApart(1, seconds=60, imports=[])"
            f"('apart_calls:leave_children_and_compute', {str(tmp_path)!r})")
    caller = subprocess.Popen([sys.executable, "-c", code], start_new_session=True,
                              env=environment(PYTHONPATH=f"{Path(__file__).parent}:{REPO}"))
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, alive=caller)
    os.killpg(caller.pid, number)
    caller.wait()
    wait_until(lambda: not any(runs(int(path.name)) for path in tmp_path.iterdir()))


def test_what_a_call_has_started_ends_with_it(apart, tmp_path):
    pid = apart("apart_calls:leave_children", tmp_path)
    assert [runs(int(path.name)) for path in tmp_path.iterdir()] == [False, False]
    assert apart(os.getpid) == pid


def test_what_a_call_has_started_ends_with_its_child(apart, tmp_path):
    with pytest.raises(ComputingError):
        apart("apart_calls:leave_children_and_compute", tmp_path)
    assert [runs(int(path.name)) for path in tmp_path.iterdir()] == [False, False]


def test_a_function_that_forks_answers_once(apart):
    assert apart("apart_calls:fork_and_return") == apart(os.getpid)


def test_memory_beyond_the_limit_is_an_error_of_the_call():
    calls = CallsApart(1, seconds=30, imports=[], memory=1 << 28)
    pid = calls(os.getpid)
    with pytest.raises(ApartError, match="MemoryError: .*its process may take 0.25 GiB"):
        calls("apart_calls:eat", 20)
    assert calls("apart_calls:eat", 0.1) == int(0.1 * 2**30)
    assert calls(os.getpid) != pid


def test_the_place_of_an_exception_comes_along(apart):
    with pytest.raises(ApartError, match="ZeroDivisionError: Fraction") as caught:
        apart("fractions:Fraction", 1, 0)
    assert caught.value.frames[-1][2] == "__new__"
    with pytest.raises(ApartError, match="SystemExit: 3"):
        apart(sys.exit, 3)


def test_a_seed_makes_a_call_repeatable(apart):
    first, again, other = (apart.call("apart_calls:draw", (), seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_call_is_late_by_itself(apart):
    with pytest.raises(LateError, match=r"took longer than 0\.2 s"):
        apart.call(time.sleep, (60,), within=0.2)
    assert apart(max, 1, 2) == 2


def test_a_forking_process_that_is_gone_is_replaced(apart):
    apart(max, 1, 2)
    apart._forker[0].kill()
    apart._forker[0].wait()
    apart._places[0].end_child()
    assert apart(max, 1, 2) == 2
