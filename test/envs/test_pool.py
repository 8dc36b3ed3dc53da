"""Calls side by side: order, deadlines, threads and loops that hang, interrupts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.envs.rewards.pool import CallPool
from grpo.system.deadline import LateError

PATIENCE = 30.0


@pytest.fixture
def pool():
    return CallPool(4)


def submit(pool, fn, *args, seconds=PATIENCE):
    return pool.submit(fn, *args, seconds=seconds)


def test_as_many_calls_as_there_are_places_run_at_a_time(pool):
    together, lock, running, most = threading.Barrier(4), threading.Lock(), [0], [0]

    def call(number):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(PATIENCE)  # passed only by four at a time
        with lock:
            running[0] -= 1
        return number

    futures = [submit(pool, call, number) for number in range(12)]
    assert [future.result(PATIENCE) for future in futures] == list(range(12))
    assert most == [4]


def test_calls_of_a_share_leave_places_to_others_and_have_no_deadline_while_they_wait(pool):
    held, order = threading.Event(), []
    limited = [pool.submit(held.wait, seconds=PATIENCE, share=("a", 1)),
               pool.submit(order.append, "next of a", seconds=0.2, share=("a", 1))]
    submit(pool, order.append, "another's").result(PATIENCE)
    time.sleep(0.4)
    held.set()
    assert [future.result(PATIENCE) for future in limited] == [True, None]
    assert order == ["another's", "next of a"]


def test_one_place_keeps_the_order():
    pool, seen = CallPool(1), []
    for future in [submit(pool, seen.append, number) for number in range(50)]:
        future.result(PATIENCE)
    assert seen == list(range(50))


def test_coroutines_share_the_places_and_one_loop(pool):
    loops, running, most = set(), [0], [0]
    four = asyncio.Event()

    async def call(number):
        loops.add(asyncio.get_running_loop())
        running[0] += 1
        most[0] = max(most[0], running[0])
        if running[0] == 4:
            four.set()
        await four.wait()
        running[0] -= 1
        return number

    futures = [submit(pool, call, number) for number in range(12)]
    assert [future.result(PATIENCE) for future in futures] == list(range(12))
    assert len(loops) == 1 and most == [4]


async def fails_later():
    raise KeyError("mine")


def fails():
    raise KeyError("mine")


@pytest.mark.parametrize("fn", [fails, fails_later])
def test_what_a_call_raises_is_answered_and_costs_no_place(pool, fn):
    for _ in range(9):
        with pytest.raises(KeyError, match="mine"):
            submit(pool, fn).result(PATIENCE)
    assert submit(pool, max, 1, 2).result(PATIENCE) == 2


async def wrong_signature(one):
    return one


@pytest.mark.parametrize("fn", [lambda one: one, wrong_signature])
def test_a_function_with_other_arguments_is_answered_too(pool, fn):
    with pytest.raises(TypeError, match="argument"):
        submit(pool, fn, 1, 2).result(PATIENCE)


async def sleeps_later():
    await asyncio.sleep(60)


async def blocks_the_loop():
    time.sleep(3)


def spins():
    while True:
        pass


def sleeps():
    time.sleep(3)


@pytest.mark.parametrize("fn", [spins, sleeps, sleeps_later, blocks_the_loop])
def test_a_late_call_is_answered_and_gives_its_place_to_others(pool, fn):
    late = [submit(pool, fn, seconds=0.05) for _ in range(4)]
    behind = [submit(pool, max, 1, 2) for _ in range(8)]
    for future in late:
        with pytest.raises(LateError, match=r"took longer than 0\.05 s"):
            future.result(PATIENCE)
    assert [future.result(PATIENCE) for future in behind] == [2] * 8


def test_the_deadline_counts_from_the_start_of_the_call():
    pool = CallPool(1)
    futures = [submit(pool, time.sleep, 0.1, seconds=2.0) for _ in range(25)]
    for future in futures:  # the last one waits longer than that for its place
        future.result(PATIENCE)


def test_a_loop_that_is_blocked_is_replaced(pool):
    async def answers():
        return 7

    for fn in (blocks_the_loop, sleeps_later):
        with pytest.raises(LateError):
            submit(pool, fn, seconds=0.05).result(PATIENCE)
        assert submit(pool, answers).result(PATIENCE) == 7


def test_a_thread_that_is_late_ends_even_if_it_goes_on_after_an_exception(pool):
    threads = []

    def stubborn():
        threads.append(threading.current_thread())
        for _ in range(2):
            try:
                spins()
            except BaseException:  # noqa: S110
                pass

    with pytest.raises(LateError):
        submit(pool, stubborn, seconds=0.05).result(PATIENCE)
    threads[0].join(PATIENCE)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_reach_whoever_waits(pool, error):
    def interrupted():
        raise error

    async def interrupted_later():
        raise error

    for fn in (interrupted, interrupted_later):
        with pytest.raises(error):
            submit(pool, fn).result(PATIENCE)
    assert submit(pool, max, 1, 2).result(PATIENCE) == 2


HANGING = """
import sys, time, types
for name in ("grpo", "grpo.envs.rewards"):  # without what else they import, which takes seconds
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = ["/".join([sys.argv[1], *name.split(".")])]
from grpo.envs.rewards.pool import CallPool

async def later():
    time.sleep(600)

pool = CallPool(2)
for fn, args in ((time.sleep, [600]), (later, [])):
    assert pool.submit(fn, *args, seconds=0.05).exception() is not None
print("done")
"""


def test_calls_that_hang_do_not_hold_up_the_end_of_the_process():
    done = subprocess.run([sys.executable, "-c", HANGING, str(Path(__file__).parents[2])],
                          capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_pool_needs_a_place():
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        CallPool(0)
