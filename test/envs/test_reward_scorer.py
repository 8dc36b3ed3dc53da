"""Rewards side by side: the forms a function can have, its deadline, its failures."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch

from grpo import data
from grpo.envs.rewards import RewardResult, RewardScorer, batch_reward, exact_match
from grpo.envs.rewards.batch import RewardBatch, RewardsFailed, check_failures
from grpo.envs.rewards.generators import GlobalGenerators
from grpo.envs.rewards.scorer import labels
from grpo.envs.tasks import Problem


def problems(count):
    return [Problem(prompt="6*7=", answer="42", id=f"p{i}") for i in range(count)]


def score(*functions, completions, **options):
    weighted = [fn if isinstance(fn, tuple) else (fn, 1.0) for fn in functions]
    return RewardScorer(weighted, **options)(completions, problems(len(completions)))


def slow(completion, problem):
    time.sleep(0.1)
    return float(completion)


async def slow_judge(completion, problem):
    await asyncio.sleep(0.1)
    return float(completion)


@pytest.mark.parametrize("fn", [slow, slow_judge])
def test_64_rewards_of_a_tenth_of_a_second_take_less_than_one(fn):
    completions = [str(i) for i in range(64)]
    for _ in range(5):  # others may have the processor at times
        start = time.monotonic()
        batch = score(fn, completions=completions)
        seconds = time.monotonic() - start
        assert batch.reward.tolist() == [float(i) for i in range(64)]
        if seconds < 1:
            break
    assert seconds < 1


def by_number(completion, problem):
    return float(completion) / 4


async def by_number_later(completion, problem):
    return float(completion) / 4


@batch_reward
def by_numbers(completions, problems):
    return [float(completion) / 4 for completion in completions]


@batch_reward
async def by_numbers_later(completions, problems):
    return [float(completion) / 4 for completion in completions]


@batch_reward
def by_tensor(completions, problems):
    return torch.tensor([float(completion) / 4 for completion in completions])


class Judge:
    takes_lists = True

    async def __call__(self, completions, problems):
        return tuple(RewardResult(float(c) / 4, True) for c in completions)


@pytest.mark.parametrize("workers", [1, 2, 16])
@pytest.mark.parametrize("fn", [by_number, by_number_later, by_numbers, by_numbers_later,
                                by_tensor, Judge()])
def test_all_forms_of_a_function_give_the_same_in_the_order_of_the_rows(fn, workers):
    batch = score((fn, 2.0), (exact_match, 1.0), completions=["3", "42", "1"], workers=workers)
    assert batch.reward.tolist() == [1.5, 22.0, 0.5]
    assert batch.messages == []


def test_a_function_that_takes_lists_is_called_once_with_all_of_them():
    calls = []

    @batch_reward
    def together(completions, problems):
        calls.append((completions, [problem.id for problem in problems]))
        return [0.0] * len(completions)

    score(together, completions=["a", "b"])
    assert calls == [(["a", "b"], ["p0", "p1"])]
    assert score(together, completions=[]).reward.shape == (0,)
    assert len(calls) == 1


@pytest.mark.parametrize(("value", "text"), [
    ([1.0], "returned 1 rewards for 2 completions; a function that takes lists returns a list"),
    (1.0, "returned 1.0 for 2 completions"), (RewardResult(1.0, True), "for 2 completions"),
    (torch.ones(3), "returned 3 rewards")])
def test_a_function_that_takes_lists_returns_as_many(value, text):
    batch = score(batch_reward(lambda completions, problems: value), completions=["a", "b"])
    assert batch.error.tolist() == [True, True]
    assert all(text in message for message in batch.messages)


def test_rows_of_a_list_fail_alone_and_with_the_call():
    @batch_reward
    def some(completions, problems):
        if "raise" in completions:
            raise KeyError("whole call")
        return [None if c == "none" else float("nan") if c == "nan" else 1.0 for c in completions]

    batch = score(some, completions=["a", "none", "nan"])
    assert batch.fault.tolist() == [data.FAULT_NONE, data.FAULT_SKIPPED, data.FAULT_INVALID]
    assert score(some, completions=["a", "raise"]).fault.tolist() == [data.FAULT_FAILED] * 2


def test_a_slow_row_is_late_alone_and_is_counted_as_such():
    def sometimes(completion, problem):
        time.sleep(2.0 if completion == "slow" else 0.0)
        return 1.0

    batch = score(sometimes, completions=["a", "slow", "b"], timeout=0.2)
    assert batch.fault.tolist() == [data.FAULT_NONE, data.FAULT_LATE, data.FAULT_NONE]
    assert batch.reward.tolist() == [1.0, 0.0, 1.0]
    assert "'p1': took longer than 0.2 s" in batch.messages[0]


def test_the_result_does_not_depend_on_who_finishes_first():
    def backwards(completion, problem):
        time.sleep(0.02 * (8 - int(completion)))
        return float(completion)

    def in_pairs(completion, problem):
        time.sleep(0.02 * (int(completion) % 2))
        if completion == "5":
            raise RuntimeError("five")
        return float(completion)

    completions = [str(i) for i in range(8)]
    whole = [score(fn, (exact_match, 0.5), completions=completions, workers=workers)
             for fn in (in_pairs, backwards) for workers in (1, 8)]
    for one, other in (whole[:2], whole[2:]):
        assert torch.equal(one.reward, other.reward) and torch.equal(one.fault, other.fault)
        assert one.messages == other.messages and one.failures == other.failures
    assert whole[0].error.tolist() == [i == 5 for i in range(8)]


def test_each_of_several_rewards_is_kept_before_its_weight():
    batch = score((by_number, 2.0), (exact_match, -1.0), completions=["42", "4", "x"])
    assert {name: part.tolist() for name, part in batch.parts.items()} == {
        "by_number": [10.5, 1.0, 0.0], "exact_match": [1.0, 0.0, 0.0]}  # "x" is no number
    assert batch.reward.tolist() == [20.0, 2.0, 0.0]


@pytest.mark.parametrize(("names", "expected"), [
    (["a:one", "b:two"], ("one", "two")),
    (["a:one", "b:one", "gsm8k"], ("a:one", "b:one", "gsm8k")),
    (["x", "x"], ("x_1", "x_2"))])
def test_names_of_rewards_are_short_and_differ(names, expected):
    assert labels(names) == expected


def test_a_quick_function_is_called_on_the_spot():
    threads = []

    def quick(completion, problem):
        threads.append(threading.current_thread())
        return 1.0

    quick.quick = True
    score(quick, completions=["a"] * 3)
    assert threads == [threading.current_thread()] * 3


# -- Functions that cannot run side by side -------------------------------------------------------


def seeded() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)


def from_python(completion, problem):
    return random.random()


def from_numpy(completion, problem):
    return float(np.random.rand())


def from_torch(completion, problem):
    return torch.rand(()).item()


async def drawn_later(completion, problem):
    await asyncio.sleep(0)
    return random.random()


@pytest.mark.parametrize("fn", [from_python, from_numpy, from_torch, drawn_later])
def test_a_function_that_draws_from_shared_generators_is_repeatable(fn, caplog):
    seeded()
    expected = [fn("", None) if fn is not drawn_later else random.random() for _ in range(6)]
    with caplog.at_level(logging.WARNING, logger="grpo"):
        seeded()
        scorer = RewardScorer([(fn, 1.0)])
        waits = [scorer.start(["a"] * 3, problems(3)) for _ in range(2)]
        unchanged = GlobalGenerators()
        seeded()
        assert not unchanged.drawn()  # nothing has been drawn before it is waited for
        drawn = torch.cat([wait().reward for wait in waits])
    assert drawn.tolist() == torch.tensor(expected).tolist()
    (record,) = caplog.records
    assert "draws from the random generators of the process" in record.message


def test_a_function_that_sets_signals_gets_the_main_thread(caplog):
    def with_alarm(completion, problem):
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))
        return 1.0

    with caplog.at_level(logging.WARNING, logger="grpo"):
        batch = score(with_alarm, completions=["a", "b"])
    assert batch.reward.tolist() == [1.0, 1.0]
    assert "only works in the main thread" in caplog.text


def test_nothing_is_tried_beside_an_engine_that_draws_itself(caplog):
    assert not score(from_python, completions=["a"] * 3, try_first=False).error.any()
    assert not caplog.records  # it would say that the function is called in order


# -- Too many failures ----------------------------------------------------------------------------


def broken(completion, problem):
    table = {}
    return table[completion[:1]]


def half_broken(completion, problem):
    if completion < "m":
        raise ValueError("too early in the alphabet")
    return 1.0


def test_the_message_has_the_first_failures_that_differ_with_their_places():
    batch = score(half_broken, broken, completions=["a", "b", "z", "y"])
    assert len(batch.failures) == 2
    with pytest.raises(RewardsFailed) as raised:
        check_failures(batch.fault, batch.failures, limit=0.5, when="iteration 1")
    text = str(raised.value)
    assert text.startswith("iteration 1: not one of 4 completions got a reward; reward functions "
                           "failed, or were late, for 4 (env.max_reward_errors")
    assert "ValueError: too early in the alphabet" in text and "KeyError: 'z'" in text
    assert f"{__file__}:" in text and "in broken: return table[completion[:1]]" in text
    assert "pool.py" not in text and "Traceback" not in text
    assert text.count("\n") == 4


def test_skipped_samples_are_no_failures_and_the_limit_is_a_share():
    batch = score(lambda c, p: None if c == "none" else half_broken(c, p),
                  completions=["none", "none", "a", "z"])
    check_failures(batch.fault, batch.failures, limit=0.25, when="x")
    with pytest.raises(RewardsFailed, match="x: 1 of 4 completions got a reward; .*, for 1 "):
        check_failures(batch.fault, batch.failures, limit=0.2, when="x")


def test_batches_are_joined_in_order_and_keep_three_failures():
    def by_kind(completion, problem):
        raise {"a": KeyError, "b": ValueError, "c": OSError, "d": TypeError}[completion](completion)

    whole = RewardBatch.joined([score(by_kind, completions=text) for text in ("ab", "cd", "a")])
    assert whole.fault.tolist() == [data.FAULT_FAILED] * 5 and len(whole.messages) == 5
    assert len(whole.failures) == 3
