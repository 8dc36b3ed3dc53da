"""Reward functions by name or import path, their options, and the forms that they have."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from grpo.envs.tasks.base import Problem
from grpo.system.annotations import check_types


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
    name: str, *, quick: bool = False, apart: bool | None = None, judged: bool = False,
    check: Callable[..., None] | None = None, imports: Sequence[str] = (),
    computing: float | None = None, late: Reward = None, compares: bool = False,
    share: Callable[..., tuple[str, int]] | None = None,
) -> Callable[[AnyRewardFn], AnyRewardFn]:
    """Decorator that makes a reward function available by name.

    Args:
        name: what it is chosen by.
        quick: it takes microseconds, always ends, and so is called on the spot: a thread and a
            deadline would cost more than the function.
        apart: True: it is always called in another process, which can be ended; False: never; None:
            as the run says.
        judged: it takes a third argument, whether the completion is right, which the reward named
            by its option ``verdict`` says.
        check: called with all options before a run, once they are of the types that they are
            annotated with; raises ValueError for what cannot work.
        imports: that a process has before a first call counts, as
            :class:`~grpo.system.apart.CallsApart` takes them.
        computing: seconds of processor time that a call in another process may take.
        late: what such a call is worth that takes longer; None: it has no reward.
        compares: it compares the completion with ``problem.answer``, and is refused for problems
            that have none.
        share: called with all options; says whose calls these are, such as a server's, and how many
            of them are made at a time. The others wait, without a deadline; None: as many as the
            run makes.

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
        fn.quick, fn.apart, fn.judged, fn.check = quick, apart, judged, check
        fn.imports, fn.computing, fn.late, fn.share = imports, computing, late, share
        fn.compares = compares
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


def with_options(fn: RewardFn, options: Mapping[str, Any]) -> RewardFn:
    """A function with some of its keyword-only parameters set, once they have been checked.

    Raises:
        ValueError: if it has no such option, or refuses its value, or that is of another type than
            the annotation's.

    Examples:
        >>> def brevity(completion, problem, *, scale=1.0):
        ...     return -scale * len(completion)
        >>> with_options(brevity, {"scale": 0.5})("four", None)
        -2.0
        >>> with_options(brevity, {"size": 2})
        Traceback (most recent call last):
        ...
        ValueError: reward 'grpo.envs.rewards.registry:brevity' has no option 'size' (given 2); \
remove it, or use one of: scale
    """
    known = options_of(fn)
    check_options(fn, options, known, needed=[
        name for name, value in known.items() if value is inspect.Parameter.empty])
    if not options:
        return fn
    # With the marks of the function, which are its attributes, but values of its own.
    chosen = functools.update_wrapper(functools.partial(fn, **options), fn)
    del chosen.__wrapped__
    return chosen


def check_options(
    fn: RewardFn, options: Mapping[str, Any], known: Mapping[str, Any], *, needed: Sequence[str]
) -> None:
    """Refuse options that a function does not have, or whose values it does not take.

    Args:
        fn: the function.
        options: that are given.
        known: those that it has, and their defaults.
        needed: those that must be given.

    Raises:
        ValueError: as :func:`with_options` says.
    """
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"reward {name_of(fn)} has no option {option!r} (given {value!r}); "
                             f"remove it, or use one of: {', '.join(known) or '(none)'}")
    if missing := [name for name in needed if name not in options]:
        raise ValueError(f"reward {name_of(fn)} needs {', '.join(missing)}; set them in "
                         "env.reward_options")
    check_types(fn, options, f"reward {name_of(fn)}: ")
    if (check := getattr(fn, "check", None)) is not None:
        check(**{option: value for option, value in {**known, **options}.items()
                 if value is not inspect.Parameter.empty})


def check_finite(name: str, **options: float) -> None:
    """Raises ValueError for the first option of the reward ``name`` that is no finite number."""
    for option, value in options.items():
        if not math.isfinite(value):
            raise ValueError(f"{option}={value} of the reward {name!r} must be a finite number")


def options_of(fn: RewardFn) -> dict[str, Any]:
    """The options of a function, which are its keyword-only parameters, and their values.

    Examples:
        >>> options_of(get_reward("repetition_penalty"))
        {'ngram_size': 3, 'max_penalty': -1.0}
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return {}
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def path_of(fn: RewardFn, name: str | None = None) -> str | None:
    """The import path by which another process finds a function; None if there is none.

    Args:
        fn: the function, without options.
        name: that it was asked for by.

    Examples:
        >>> path_of(get_reward("gsm8k")), path_of(lambda completion, problem: 1.0)
        ('grpo.envs.rewards.answers:gsm8k', None)
    """
    paths = [name] if name and ":" in name else []
    if hasattr(fn, "__qualname__"):
        paths.append(f"{fn.__module__}:{fn.__qualname__}")
    for path in paths:
        module, _, attribute = path.partition(":")
        with suppress(ImportError, AttributeError):
            found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
            if found is fn and _found_by_others(sys.modules[module]):
                return path
    return None


def _found_by_others(module: ModuleType) -> bool:
    """Whether a process that has not imported a module finds it, and not another of its name."""
    spec, path, name = None, None, ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = next((found for finder in sys.meta_path
                     if (found := finder.find_spec(name, path)) is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec.origin == getattr(module.__spec__, "origin", None)


def name_of(fn: RewardFn) -> str:
    """The name that a function is registered by, or its import path, in quotes."""
    if (shown := getattr(fn, "shown", None)) is not None:
        return repr(shown)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    registered = [name for name, known in _REWARDS.items() if known is fn]
    if registered:
        return repr(registered[0])
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return repr(f"{named.__module__}:{named.__qualname__}")
