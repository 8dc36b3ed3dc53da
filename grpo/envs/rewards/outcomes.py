"""What a call of a reward function came to: a number, a verdict, or why it is neither."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch

from grpo.envs.rewards.batch import Unusable
from grpo.envs.rewards.registry import RewardResult

#: The largest reward.
FLOAT32_MAX = torch.finfo(torch.float32).max

#: What a call returned, or the exception that it raised.
Outcome: TypeAlias = Any


def called(fn: Callable[..., Any], *args: Any, **options: Any) -> Outcome:
    """Call a function here."""
    # It is the user's code and may raise anything. One bad completion must cost its own row, not
    # the run; the row is masked and the message reported, so nothing is hidden.
    try:
        return fn(*args, **options)
    except Exception as error:
        return error


def outcome_of(future: Future) -> Outcome:
    """The outcome of a call in the pool; interrupts are raised here."""
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else error


def spread(outcome: Outcome, count: int) -> list[Outcome]:
    """The outcomes of the rows of a function that takes lists."""
    if isinstance(outcome, Exception):
        return [outcome] * count
    values = outcome.tolist() if hasattr(outcome, "tolist") else outcome
    listed = isinstance(values, list | tuple) and not isinstance(values, RewardResult)
    if listed and len(values) == count:
        return list(values)
    got = f"{len(values)} rewards" if listed else f"{outcome!r:.80}"
    return [Unusable(f"returned {got} for {count} completions; a function that takes lists "
                     "returns a list with one reward for each")] * count


def number_of(value: Any) -> float | Unusable:
    """The reward that a function returned, or why it is none."""
    reward = value.reward if isinstance(value, RewardResult) else value
    if isinstance(reward, torch.Tensor) and reward.numel() == 1:
        reward = reward.item()
    if not isinstance(reward, numbers.Real):
        return Unusable(f"returned {value!r:.80}; return a float, a RewardResult or None")
    if not abs(reward) <= FLOAT32_MAX:  # also true of NaN
        return Unusable(f"returned {reward!r:.80}, which is not finite in float32")
    return float(reward)


def verdict_of(outcome: Outcome) -> bool | Exception | None:
    """Whether a completion is right, or why that is not known."""
    if outcome is None or isinstance(outcome, Exception):
        return outcome
    if isinstance(outcome, RewardResult):
        return bool(outcome.success)
    reward = number_of(outcome)
    return reward if isinstance(reward, Unusable) else reward >= 1.0
