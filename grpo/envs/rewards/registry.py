"""Reward functions by name or import path, and the three forms that they have."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from grpo.envs.tasks.base import Problem


class RewardResult(NamedTuple):
    """A reward together with the verifier's yes or no."""

    reward: float  # what the policy is trained on
    success: bool  # whether the problem counts as solved, in evaluation and logs


#: What a completion gets. None leaves the sample out of training.
Reward: TypeAlias = RewardResult | float | None
#: Scores one completion, or with :func:`batch_reward` the completions of a call; both may be
#: declared ``async def``.
RewardFn: TypeAlias = (Callable[[str, Problem], Reward | Awaitable[Reward]] |
                       Callable[[Sequence[str], Sequence[Problem]],
                                Sequence[Reward] | Awaitable[Sequence[Reward]]])
AnyRewardFn = TypeVar("AnyRewardFn", bound=RewardFn)

_REWARDS: dict[str, RewardFn] = {}


def batch_reward(fn: AnyRewardFn) -> AnyRewardFn:
    """Decorator for a reward function that takes lists.

    It is called with the completions of a group, and in evaluations with those of a batch, and
    their problems, and returns as many rewards. All it does is to set ``fn.takes_lists = True``,
    which marks an object with a ``__call__`` as well.

    Examples:
        >>> @batch_reward
        ... def rank(completions, problems):
        ...     order = sorted(completions, key=len)
        ...     return [float(order.index(completion)) for completion in completions]
        >>> rank.takes_lists
        True
    """
    fn.takes_lists = True
    return fn


def register_reward(
    name: str, *, quick: bool = False
) -> Callable[[AnyRewardFn], AnyRewardFn]:
    """Decorator that makes a reward function available by name.

    Args:
        name: what it is chosen by.
        quick: it takes microseconds, always ends, and so is called on the spot: a thread and a
            deadline would cost more than the function.

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
            raise ValueError(f"reward {name!r} is already registered by {name_of(_REWARDS[name])}; "
                             "choose another name")
        _REWARDS[name] = fn
        if quick:
            fn.quick = True
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
        >>> get_reward("exact_match") is get_reward("grpo.envs.rewards.answers:exact_match")
        True
    """
    if ":" not in name:
        if name not in _REWARDS:
            raise ValueError(
                f"unknown reward {name!r}; known rewards: {', '.join(reward_names())}; "
                "your own function is named by import path, 'package.module:function'")
        return _REWARDS[name]
    return imported(name, "reward")


def imported(path: str, what: str) -> Callable:
    """The function at ``"package.module:function"``.

    Args:
        path: where it is.
        what: it is to be, for messages.

    Raises:
        ValueError: if there is none. An error inside the imported module itself surfaces unchanged.
    """
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{what} {path!r} is no import path of the form 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # found, but it imports something that is missing
        raise ValueError(f"{what} {path!r}: there is no module {error.name!r}; install it, or put "
                         "its folder on PYTHONPATH") from error
    fn = getattr(module, attribute, None)
    if not callable(fn):
        raise ValueError(f"{what} {path!r}: module {module_name!r} has no function {attribute!r}")
    return fn


def name_of(fn: RewardFn) -> str:
    """The name that a function is registered by, or its import path, in quotes."""
    registered = [name for name, known in _REWARDS.items() if known is fn]
    if registered:
        return repr(registered[0])
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return repr(f"{named.__module__}:{named.__qualname__}")
