"""Reward functions by name or import path, and how a batch of completions is scored safely."""

from __future__ import annotations

import importlib
import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from grpo.rewards.deadline import call_with_deadline
from grpo.tasks.base import Problem

#: Seconds a reward function may take on one completion.
DEFAULT_TIMEOUT = 30.0


class RewardResult(NamedTuple):
    """A reward together with the verifier's yes or no.

    Attributes:
        reward: what the policy is trained on.
        success: whether the problem counts as solved, in evaluation and logs.
    """

    reward: float
    success: bool


#: Scores one completion. None leaves the sample out of training.
RewardFn: TypeAlias = Callable[[str, Problem], "RewardResult | float | None"]
AnyRewardFn = TypeVar("AnyRewardFn", bound=RewardFn)

_REWARDS: dict[str, RewardFn] = {}
_FLOAT32_MAX = torch.finfo(torch.float32).max


def register_reward(name: str) -> Callable[[AnyRewardFn], AnyRewardFn]:
    """Decorator that makes a reward function available by name.

    Raises:
        ValueError: if the name is taken, or holds a ``:`` and so reads as an import path.

    Examples:
        >>> @register_reward("contains_answer")
        ... def contains_answer(completion, problem):
        ...     return float(problem.answer in completion)
        >>> get_reward("contains_answer") is contains_answer
        True
    """
    if ":" in name:
        raise ValueError(f"reward name {name!r} must not hold ':', which marks an import path")

    def register(fn: AnyRewardFn) -> AnyRewardFn:
        if name in _REWARDS:
            raise ValueError(
                f"reward {name!r} is already registered by {_name_of(_REWARDS[name])}; "
                "choose another name"
            )
        _REWARDS[name] = fn
        return fn

    return register


def reward_names() -> tuple[str, ...]:
    """Names that :func:`get_reward` knows, sorted."""
    return tuple(sorted(_REWARDS))


def get_reward(name: str) -> RewardFn:
    """Look up a reward function.

    Args:
        name: a registered name, or ``"package.module:function"`` for one of your own.

    Raises:
        ValueError: if there is no such function. An error inside the imported module itself
            surfaces unchanged.

    Examples:
        >>> get_reward("exact_match") is get_reward("grpo.rewards.answers:exact_match")
        True
    """
    if ":" not in name:
        if name not in _REWARDS:
            raise ValueError(
                f"unknown reward {name!r}; known rewards: {', '.join(reward_names())}; "
                "your own function is named by import path, 'package.module:function'"
            )
        return _REWARDS[name]
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"reward {name!r} is no import path of the form 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # found, but it imports something that is missing
        raise ValueError(
            f"reward {name!r}: there is no module {error.name!r}; "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    fn = getattr(module, attribute, None)
    if not callable(fn):
        raise ValueError(f"reward {name!r}: module {module_name!r} has no function {attribute!r}")
    return fn


@dataclass(frozen=True)
class RewardBatch:
    """Scores of ``B`` completions.

    Attributes:
        reward: float32 ``[B]``, weighted sum over the functions; 0 where ``error``.
        success: bool ``[B]``; False where ``error``.
        error: bool ``[B]``, True where there is no reward. Such a row has to be masked.
        messages: one sentence a failed row: which function, which problem, why.
    """

    reward: Tensor
    success: Tensor
    error: Tensor
    messages: list[str]


def compute_rewards(
    fns_with_weights: Sequence[tuple[RewardFn, float]],
    completions: Sequence[str],
    problems: Sequence[Problem],
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> RewardBatch:
    """Score completions with one or several reward functions.

    A failure is never a silent 0: where a function raises, takes longer than ``timeout``, returns
    None (skip this sample), a value that is not finite in float32, or no number, the row is marked
    in ``error``.

    The success of a row is that of the first function which returns a :class:`RewardResult`; if
    none does, a row succeeds when the first function gives at least 1.

    Args:
        fns_with_weights: functions and their finite weights in the sum.
        completions: what the model wrote, ``B`` texts without the prompts.
        problems: the problem of each completion.
        timeout: seconds one function may take on one completion.

    Raises:
        ValueError: if there is no function, a weight is not finite, the timeout is not positive,
            or the lengths differ.

    Examples:
        >>> problem = Problem(prompt="6*7=", answer="42", id="p0")
        >>> fns = [(get_reward("exact_match"), 1.0), (lambda completion, problem: 1.0, 0.5)]
        >>> batch = compute_rewards(fns, ["42", "41"], [problem, problem])
        >>> batch.reward.tolist(), batch.success.tolist()
        ([1.5, 0.5], [True, False])
    """
    if not fns_with_weights:
        raise ValueError("fns_with_weights is empty; give at least one (function, weight)")
    for fn, weight in fns_with_weights:
        if not math.isfinite(weight):
            raise ValueError(f"weight={weight} of reward {_name_of(fn)} must be finite")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if len(completions) != len(problems):
        raise ValueError(
            f"{len(completions)} completions but {len(problems)} problems; give one for each"
        )
    results, messages = [], []
    for completion, problem in zip(completions, problems, strict=True):
        result = _score(fns_with_weights, completion, problem, timeout)
        if isinstance(result, str):
            messages.append(result)
        results.append(result)
    failed = [isinstance(result, str) for result in results]
    kept = [RewardResult(0.0, False) if isinstance(r, str) else r for r in results]
    return RewardBatch(
        reward=torch.tensor([result.reward for result in kept], dtype=torch.float32),
        success=torch.tensor([result.success for result in kept], dtype=torch.bool),
        error=torch.tensor(failed, dtype=torch.bool),
        messages=messages,
    )


def _score(
    fns_with_weights: Sequence[tuple[RewardFn, float]],
    completion: str,
    problem: Problem,
    timeout: float,
) -> RewardResult | str:
    """Weighted sum of one row, or the sentence that says why it has none."""
    total, verdict, first_success = 0.0, None, None
    for fn, weight in fns_with_weights:
        who = f"reward {_name_of(fn)}, problem {problem.id!r}"
        # The function is the user's code and may raise anything. One bad completion must cost its
        # own row, not the run; the row is masked and the message reported, so nothing is hidden.
        try:
            value = call_with_deadline(fn, completion, problem, seconds=timeout)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{who}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        if value is None:
            return f"{who}: returned None, the sample is skipped"
        reward = value.reward if isinstance(value, RewardResult) else value
        if not isinstance(reward, numbers.Real):
            return f"{who}: returned {value!r:.80}; return a float, a RewardResult or None"
        if not abs(reward) <= _FLOAT32_MAX:  # also true of NaN
            return f"{who}: returned {reward!r:.80}, which is not finite in float32"
        total += weight * float(reward)
        if isinstance(value, RewardResult) and verdict is None:
            verdict = bool(value.success)
        if first_success is None:
            first_success = bool(reward >= 1.0)
    if not abs(total) <= _FLOAT32_MAX:
        return f"problem {problem.id!r}: the weighted sum {total} is not finite in float32"
    return RewardResult(total, first_success if verdict is None else verdict)


def _name_of(fn: RewardFn) -> str:
    registered = [name for name, known in _REWARDS.items() if known is fn]
    if registered:
        return repr(registered[0])
    module = getattr(fn, "__module__", type(fn).__module__)
    return repr(f"{module}:{getattr(fn, '__qualname__', type(fn).__qualname__)}")
