"""Reward functions as TRL calls them: ``fn(prompts=..., completions=..., **columns)``.

They are told by their signature, and called so in any run that names them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo.envs.rewards.completion import Completion
from grpo.envs.rewards.registry import RewardFn, check_options, options_of, path_of
from grpo.envs.tasks.base import Problem

#: What TRL's trainer hands over of itself.
_OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
#: What every function is handed beside the columns, which options cannot replace.
_HANDED_OVER = ("prompts", "completions", "completion_ids")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_trl_reward(fn: Callable[..., Any]) -> bool:
    """Whether a function has TRL's signature: a parameter ``completions``, and ``**kwargs``, which
    TRL's trainer requires in effect, because it hands over every column.

    Examples:
        >>> def of_trl(completions, solution, **kwargs): ...
        >>> def of_this_library(completions, problems): ...
        >>> is_trl_reward(of_trl), is_trl_reward(of_this_library)
        (True, False)
    """
    if getattr(fn, "takes_lists", False):
        return False
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    kinds = {one.kind for one in parameters.values()}
    return "completions" in parameters and parameters["completions"].kind in _NAMED and (
        inspect.Parameter.VAR_KEYWORD in kinds)


def as_trl_reward(
    fn: Callable[..., Any], name: str | None = None, options: Mapping[str, Any] | None = None
) -> RewardFn:
    """A function with TRL's signature as one that takes the lists of this library.

    A row's columns are those of ``problem.row``, and ``answer`` where there is no such column. Of
    several functions that return None for a row, the others count; where all do, it is left out.

    Args:
        fn: the function; it may be ``async def``.
        name: import path that it was asked for by.
        options: values of keyword-only parameters, also in the place of a column; parameters that
            have none and no default get the column of their name.

    Raises:
        ValueError: if it needs what only TRL's trainer has, has no such option, or refuses its
            value.

    Examples:
        >>> def brevity(prompts, completions, limit, **kwargs):
        ...     return [float(len(text) < most) for text, most in zip(completions, limit)]
        >>> problem = Problem(prompt="Say it.", answer="", id="0", row={"limit": 5})
        >>> as_trl_reward(brevity)(["four", "eleven"], [problem, problem])
        [1.0, 0.0]
    """
    for need in _OF_THE_TRAINER:
        parameter = inspect.signature(fn).parameters.get(need)
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ValueError(f"reward {fn.__name__!r} asks for {need}, which TRL's trainer has and "
                             "this library does not; give the parameter a default")
    known = {one: default for one, default in options_of(fn).items()
             if one not in (*_HANDED_OVER, *_OF_THE_TRAINER)}
    check_options(fn, options or {}, known, needed=())
    path = path_of(fn, name)
    async_too = inspect.iscoroutinefunction(fn)
    call = functools.partial(call_async_like_trl if async_too else call_like_trl,
                             function=path or fn, options=dict(options or {}))
    call.takes_lists, call.none_is_absent = True, True
    call.shown = path or f"{fn.__module__}:{getattr(fn, '__qualname__', type(fn).__name__)}"
    call.apart = None if path else False  # nobody else finds it
    call.imports = (path.partition(":")[0],) if path else ()
    return call


def call_like_trl(
    completions: Sequence[str], problems: Sequence[Problem], *,
    function: str | Callable[..., Any], options: Mapping[str, Any],
) -> list[float | None]:
    """Call a function, or what is at an import path, as TRL does."""
    return _listed(_found(function)(**arguments(completions, problems) | options))


async def call_async_like_trl(
    completions: Sequence[str], problems: Sequence[Problem], *,
    function: str | Callable[..., Any], options: Mapping[str, Any],
) -> list[float | None]:
    """The same of a coroutine function."""
    return _listed(await _found(function)(**arguments(completions, problems) | options))


def arguments(completions: Sequence[str], problems: Sequence[Problem]) -> dict[str, list[Any]]:
    """What TRL hands over: prompts and completions as texts or as messages, as the prompt is,
    tokens, and every column of the data set.

    Examples:
        >>> chat = Problem(prompt=({"role": "user", "content": "6*7?"},), answer="42", id="0")
        >>> arguments(["42"], [chat])["completions"]
        [[{'role': 'assistant', 'content': '42'}]]
    """
    texts = [isinstance(problem.prompt, str) for problem in problems]
    rows = [_columns(problem) for problem in problems]
    columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(
        key for row in rows for key in row)}
    return columns | {
        "prompts": [problem.prompt if text else list(problem.prompt)
                    for problem, text in zip(problems, texts, strict=True)],
        "completions": [str(one) if text else [{"role": "assistant", "content": str(one)}]
                        for one, text in zip(completions, texts, strict=True)],
        "completion_ids": [list(one.token_ids) if isinstance(one, Completion) else []
                           for one in completions]}


def _listed(values: Any) -> list[float | None]:
    """What a function returned: a list, a tensor or an array."""
    return values.tolist() if hasattr(values, "tolist") else [*values]


def _columns(problem: Problem) -> Mapping[str, Any]:
    own = {key: value for key, value in problem.row.items()
           if key not in ("prompt", "completion", *_HANDED_OVER)}
    return {"answer": problem.answer} | own


def _found(function: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
