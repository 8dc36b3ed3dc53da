"""Environments of the verifiers package: its problems, its side of the conversation, its rubric.

Brown, *Verifiers: Environments for LLM Reinforcement Learning*, 2025.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

from grpo.envs.tasks.base import Problem, Task, check_count, held_out_count, register_task
from grpo.envs.tasks.verifiers_talk import Talk, raising

_LOADING = threading.Lock()


@register_task("verifiers")
class VerifiersTask(Task):
    """Problems of an environment that was written for verifiers, which is used as it is.

    Args:
        id: the module that has ``load_environment``, as verifiers names it: "my-env" is the module
            ``my_env``, and "package.my_env" one inside a package.
        args: of ``load_environment``.
        num_train: training problems, the first ones; None: all.
        num_test: held-out problems: the first of the environment's evaluation set, or where it has
            none, the first of its only one, which are not trained on. None: 100 of the evaluation
            set, or of the only one a tenth; no more than 100, and no more than there are.

    Raises:
        ImportError: if verifiers is not installed, or in a version without ``load_environment``.
        ValueError: if the environment cannot be loaded or is one that needs something else than
            a conversation in text, or if it has fewer problems than asked for.
    """

    default_reward = "verifier"

    def __init__(
        self, *, id: str | None = None, args: Mapping[str, Any] | None = None,
        num_train: int | None = None, num_test: int | None = None,
    ) -> None:
        for key, value in (("num_train", num_train), ("num_test", num_test)):
            if value is not None:
                check_count(f"env.task.{key}", value)
        if not id:
            raise ValueError("env.id names no environment; give the module that has its "
                             "load_environment, such as env.id=my_env")
        made_of = json.dumps([id, dict(args or {})])
        environment = _environment(made_of)
        rows = list(environment.get_dataset())
        environment.build_eval_dataset()
        if environment.eval_dataset is None:
            count = held_out_count(num_test, len(rows))
            test, rows = rows[:count], rows[count:]
        else:
            count = held_out_count(num_test, None)
            test = list(islice(environment.get_eval_dataset(), count))
        train = rows[:num_train]
        for key, wanted, found in (("num_train", num_train, train), ("num_test", num_test, test)):
            if wanted is not None and len(found) < wanted:
                raise ValueError(f"env.task.{key}={wanted}: env.id={id} has only {len(found)} such "
                                 "problems; ask for fewer, or give it env.task.args for more")
        super().__init__(
            train=[_problem(environment, made_of, row, f"train/{i}")
                   for i, row in enumerate(train)],
            test=[_problem(environment, made_of, row, f"test/{i}") for i, row in enumerate(test)],
            source=f"the verifiers environment {id}")


def _problem(environment: Any, made_of: str, row: Mapping[str, Any], name: str) -> Problem:
    if isinstance(row["prompt"], str):
        raise ValueError(f"the environment's problem {name} is a text to continue; only chat "
                         "environments can be trained on here")
    info = row.get("info") or {}
    info = json.loads(info) if isinstance(info, str) else info
    tools = environment._normalize_tool_defs(info.get("tool_defs", environment.tool_defs))
    begin = functools.partial(_begin, made_of, row)
    return Problem(
        prompt=tuple(_given(message) for message in row["prompt"]),
        answer=str(row.get("answer") or ""), id=name, partner=begin, row=dict(row),
        verifier=functools.partial(_score_of_one_turn, begin),
        tools=tuple({"type": "function", "function": {
            "name": tool.name, "description": tool.description, "parameters": tool.parameters}}
            for tool in tools or ()))


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without the columns that a data set adds to messages of other kinds."""
    return {key: value for key, value in dict(message).items() if value is not None}


def _begin(made_of: str, row: Mapping[str, Any]) -> Talk:
    """A conversation about a row. An environment is loaded once a process, where it is needed."""
    return Talk(_environment(made_of), row)


def _score_of_one_turn(begin: functools.partial, completion: str) -> float:
    """What a conversation is worth that ends after its first turn."""
    talk = begin()
    talk.reply(completion, truncated=False, seconds=_SECONDS)
    talk.stop(seconds=_SECONDS)
    return talk.score()


_SECONDS = 3600.0  # the reward's own deadline comes first


def _environment(made_of: str) -> Any:
    with _LOADING:
        return _load(made_of)


@functools.cache
def _load(made_of: str) -> Any:
    """The environment of an id and arguments, whose reward functions may fail."""
    name, args = json.loads(made_of)
    needs = ("env.dataset=verifiers needs the verifiers package in a version with "
             "load_environment: pip install 'verifiers>=0.1.14,<0.2', or the extra verifiers")
    try:
        import verifiers
    except ImportError as error:
        raise ImportError(needs) from error
    if not hasattr(verifiers, "load_environment"):
        raise ImportError(f"{needs}; installed is {getattr(verifiers, '__version__', 'another')}")
    try:
        with _signals_kept():
            environment = verifiers.load_environment(name, **args)
    except (ValueError, RuntimeError) as error:  # as which it gives what a module raises
        raise ValueError(f"env.id={name}, env.task.args={args}: {error} "
                         f"({type(error.__cause__).__name__}: {error.__cause__})") from error
    if environment.rubric.has_group_rewards:
        raise ValueError(f"env.id={name}: its rubric compares the completions of a group, which is "
                         "not known here; give it reward functions of one completion")
    for rubric in _rubrics(environment.rubric):
        rubric.funcs[:] = [raising(fn) for fn in rubric.funcs]
    return environment


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Environments set signal handlers as they are made: a run has its own, and in a thread nobody
    may."""
    from verifiers.envs import environment

    kept = environment.signal
    environment.signal = SimpleNamespace(**{**vars(kept), "signal": lambda *handler: None})
    try:
        yield
    finally:
        environment.signal = kept


def _rubrics(rubric: Any) -> Sequence[Any]:
    """A rubric, and those inside it."""
    return [rubric, *(inner for one in getattr(rubric, "rubrics", ()) for inner in _rubrics(one))]
