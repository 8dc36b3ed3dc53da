"""Nothing that scores a completion can hold a run up for ever."""

from __future__ import annotations

import signal
import time

import pytest

from grpo.envs.rewards import RewardScorer
from grpo.envs.tasks import Problem
from grpo.system.deadline import call_with_deadline
from grpo.system.threads import in_background

PROBLEM = Problem(prompt="1+1=", answer="2", id="p1")


def spins_on_request(completion, problem):
    while completion == "hang":
        pass
    return 1.0


def sleeps_on_request(completion, problem):
    time.sleep(60.0 if completion == "hang" else 0.0)
    return 1.0


def scorer(fn, timeout=0.1):
    """One that calls the function in this thread, in the order of the completions."""
    return RewardScorer([(fn, 1.0)], timeout=timeout, workers=1)


@pytest.mark.parametrize("fn", [spins_on_request, sleeps_on_request])
def test_a_late_row_is_an_error_and_the_others_keep_their_reward(fn):
    start = time.monotonic()
    batch = scorer(fn)(["fine", "hang", "fine"], [PROBLEM] * 3)
    assert time.monotonic() - start < 5
    assert batch.error.tolist() == [False, True, False]
    assert batch.reward.tolist() == [1.0, 0.0, 1.0]
    assert "took longer than 0.1 s" in batch.messages[0] and "'p1'" in batch.messages[0]


def test_the_deadline_holds_outside_the_main_thread():
    found = in_background(scorer(sleeps_on_request), ["hang", "fine"], [PROBLEM] * 2).result(5)
    assert found.error.tolist() == [True, False]


def test_errors_surface_unchanged_in_both_places():
    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call_with_deadline(fails, seconds=1.0)
    with pytest.raises(KeyError, match="mine"):
        in_background(call_with_deadline, fails, seconds=1.0).result(5)


def test_an_alarm_of_somebody_else_goes_on():
    rung = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert call_with_deadline(lambda: 7, seconds=0.05) == 7
        time.sleep(0.6)
        assert len(rung) == 1
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="timeout=0"):
        scorer(spins_on_request, timeout=0)
