"""What is given to a run from Python, rows and reward functions: checked before anything is loaded,
then put where every process of the run finds it."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config.keys import ConfigError
from grpo.envs.rewards import RewardFn, get_reward, register_reward, reward_names
from grpo.envs.rewards.registry import path_of
from grpo.envs.rewards.trl import is_trl_reward

#: A function, or the name or import path of a reward.
Reward = str | Callable[..., Any]
Rows = list[dict[str, Any]]
#: Problems that are held out of a data set that brings none of its own.
_HELD_OUT, _SHARE = 100, 10
#: What reward functions of TRL's kind get beside the columns.
_HANDED_OVER = {"prompts", "completions", "completion_ids", "answer"}
_FUNCTION = "give a function, or the name of a reward"

# -- rows ------------------------------------------------------------------------------------------


def as_rows(given: Any, what: str, column: str = "prompt") -> Rows:
    """Rows of a data set, each with a prompt.

    Args:
        given: a list, a ``datasets.Dataset``, or anything else that has rows one after another.
        what: it is called where it was given.
        column: with the prompts.

    Raises:
        ConfigError: for anything else, for rows that cannot be kept as JSON, and where there are
            none.

    Examples:
        >>> as_rows(iter([{"prompt": "1+1="}]), "dataset")
        [{'prompt': '1+1='}]
        >>> as_rows({"prompt": ["1+1="]}, "dataset")
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: dataset: it has columns (prompt), where rows are read; give \
datasets.Dataset.from_dict(...) of it, or a list of rows
    """
    if problem := _no_rows(given, what):
        raise ConfigError(f"{what}{problem}")
    rows = []
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{what}: row {number} is {row!r:.80}; a row has columns, such as "
                              f"{{{column!r}: ...}}")
        _check_row(row, number, what, column)
        rows.append(dict(row))
    if not rows:
        raise ConfigError(f"{what}: it has no rows; give some with a {column}")
    return rows


def _no_rows(given: Any, what: str) -> str | None:
    """What is wrong with something that has no rows, and what to give in its place."""
    if isinstance(given, str | Path):
        return (f"={str(given)!r}: rows are read, not a name; give "
                f"datasets.load_dataset({str(given)!r}, split='train'), or a list of rows")
    if isinstance(given, Mapping):
        names = ", ".join(map(str, given))
        if given and all(isinstance(one, list | tuple) for one in given.values()) and not any(
                isinstance(one, Mapping) for column in given.values() for one in column[:1]):
            return (f": it has columns ({names}), where rows are read; give "
                    "datasets.Dataset.from_dict(...) of it, or a list of rows")
        if any(isinstance(one, str | int | float | bool | None) for one in given.values()):
            return f": it is one row ({names}); give a list of rows"
        if not given:
            return ": it has no rows; give some"
        first = "train" if "train" in given else next(iter(given))
        return f": it has the data sets {names}; give one, such as {what}[{first!r}]"
    if hasattr(given, "iterrows"):
        return ": a DataFrame is read by its columns; give its to_dict('records')"
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        return f"={given!r:.80}: give rows, such as a datasets.Dataset or a list of dictionaries"
    return None


def _check_row(row: Mapping[str, Any], number: int, what: str, column: str) -> None:
    if column not in row:
        raise ConfigError(f"{what}: row {number} has no column {column!r}, but "
                          f"{', '.join(map(str, row)) or 'none'}; rename the one with the prompt, "
                          "or name it with env.prompt_column")
    prompt = row[column]
    chat = isinstance(prompt, Sequence) and prompt and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str) for one in prompt)
    if not (isinstance(prompt, str) or chat):
        raise ConfigError(f"{what}: row {number} has {column}={prompt!r:.80}; give a text, or a "
                          "list of messages such as {'role': 'user', 'content': 'a text'}")
    try:
        json.dumps(dict(row))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: row {number}: rows are texts, numbers, lists and tables, which "
                          f"go into a file for all processes of the run ({error}); leave out the "
                          "column, or make it a text") from error


def of_rows(
    rows: Rows, held_out: Rows | None, folder: Path, *, what: str = "dataset",
    column: str = "prompt",
) -> dict[str, Any]:
    """Keys of ``env`` by which a run reads rows from a folder; :func:`write_rows` writes them."""
    if held_out is None and len(rows) < 2:
        raise ConfigError(f"{what}: it has one row, which cannot be trained on and held out; give "
                          f"more, or an eval_dataset")
    keys = {"env": "dataset", "env.path": str(folder.absolute()), "env.prompt_column": column,
            "env.task.chat": False}
    if all(_is_answer(row.get("answer")) for row in rows):
        keys["env.answer_column"] = "answer"
    if held_out is None:
        keys["env.task.num_test"] = max(1, min(_HELD_OUT, len(rows) // _SHARE))
    else:
        keys["env.task.test_split"] = "test"
    return keys


def _is_answer(value: Any) -> bool:
    """Whether a value can be compared with a completion; functions get any column."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def check_answers(rows: Rows, what: str, *, column: str = "prompt") -> None:
    """Refuse rows without answers, which nothing scores where there is no reward function."""
    chats = (row[column] for row in rows)
    if not all(_is_answer(row.get("answer")) for row in rows) and not any(
            not isinstance(chat, str) and chat[-1]["role"] == "assistant" for chat in chats):
        raise ConfigError(f"{what}=None: a completion is compared with the column 'answer', which "
                          "not all rows have with a text or a number; give a function, or that "
                          "column")


def write_rows(rows: Rows, held_out: Rows | None, folder: Path) -> None:
    """Write rows where every process of the run can read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows), ("test", held_out)):
        path = folder / f"{name}.jsonl"
        if part is None:
            path.unlink(missing_ok=True)  # of a run that never began
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


# -- reward functions ------------------------------------------------------------------------------


def as_rewards(
    given: Any, what: str, rows: Rows | None = None,
    options: Any = None,
) -> list[Reward]:
    """A reward or several as a list; empty for None.

    Args:
        given: functions, or names of rewards.
        what: they are called where they were given.
        rows: whose columns they get; None: not known yet.
        options: the value of ``env.reward_options``, not checked yet; they stand for columns.

    Raises:
        ConfigError: for what is no reward, or cannot be called as one.
    """
    if given is None:
        return []
    several = isinstance(given, list | tuple)
    if several and not given:
        raise ConfigError(f"{what}=[]: {_FUNCTION}, or several")
    found = list(given) if several else [given]
    for number, one in enumerate(found):
        _check_reward(one, f"{what}[{number}]" if several else what, rows, options)
    return found


def _check_reward(one: Any, what: str, rows: Rows | None, options: Any) -> None:
    if isinstance(one, str):
        return _check_name(one, what)
    if not callable(one) or inspect.isclass(one):
        raise ConfigError(f"{what}={one!r:.80}: {_FUNCTION}")
    if hasattr(one, "save_pretrained"):
        raise ConfigError(f"{what} is a {type(one).__name__}: models that score are not loaded; "
                          "give a function that asks a server which has it")
    try:
        signature = inspect.signature(one)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    named = f"{what}: {getattr(one, '__name__', type(one).__name__)}{signature}"
    if is_trl_reward(one):
        own = options.get(reward_name(one)) if isinstance(options, Mapping) else None
        return _check_columns(signature, named, rows, own if isinstance(own, Mapping) else {})
    parameters = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    names = [p.name for p in parameters]
    if {"completions", "prompts"} & {*names} and not getattr(one, "takes_lists", False) and not (
            {"problem", "problems"} & {*names}):
        raise ConfigError(f"{named} is called as TRL does, with prompts, completions and every "
                          "column by name; add **kwargs for those that it does not use")
    try:
        signature.replace(parameters=parameters).bind("completion", "problem")
    except TypeError as error:
        raise ConfigError(f"{named} cannot be called ({error}); a reward function takes "
                          "(completion, problem), or, as in TRL, (completions, **kwargs)") from None


def _check_name(name: str, what: str) -> None:
    if ":" in name or name in reward_names():
        return
    if "/" in name:
        raise ConfigError(f"{what}={name!r}: models that score are not loaded; give a function "
                          "that asks a server which has it, or an import path, "
                          "'package.module:function'")
    near = difflib.get_close_matches(name, reward_names(), n=1)
    raise ConfigError(f"{what}={name!r}: there is no such reward; " + (
        f"did you mean {near[0]!r}? Known: " if near else "known: ") + ", ".join(reward_names())
        + "; a function of yours is given as it is, or as 'package.module:function'")


def _check_columns(
    signature: inspect.Signature, named: str, rows: Rows | None, options: Mapping[str, Any]
) -> None:
    """Of a function that is called with columns: whether they are there, or options for them."""
    if rows is None:
        return
    columns = _HANDED_OVER.union(*rows)
    for one in signature.parameters.values():
        optional = one.kind is one.KEYWORD_ONLY
        if one.default is one.empty and (optional or one.kind is one.POSITIONAL_OR_KEYWORD) and (
                one.name not in columns and not (optional and one.name in options)):
            raise ConfigError(f"{named} asks for {one.name}, which is no column of the rows "
                              f"({', '.join(dict.fromkeys(key for row in rows for key in row))}); "
                              f"add that, {'set it in env.reward_options, ' * optional}or give the "
                              "parameter a default")


#: Names under which this process alone knows functions.
_GIVEN: set[str] = set()


def known_here(names: Iterable[str]) -> list[str]:
    """Of some names those under which no other process finds a function."""
    return [name for name in names if name in _GIVEN]


def reward_name(reward: Reward) -> str:
    """What ``env.reward`` calls a function: its import path, or, where no other process would find
    it, a name under which this one knows it from now on.

    Examples:
        >>> reward_name("exact_match"), reward_name(get_reward("exact_match"))
        ('exact_match', 'grpo.envs.rewards.answers:exact_match')
        >>> reward_name(lambda completion, problem: 1.0)  # doctest: +ELLIPSIS
        'lambda...'
    """
    if isinstance(reward, str):
        return reward
    path = path_of(reward)
    if path is not None and path.partition(":")[2].isidentifier():
        return path
    base = "".join(char for char in getattr(reward, "__name__", type(reward).__name__)
                   if char.isidentifier() or char.isdigit())
    for number in range(1, len(reward_names()) + 2):
        name = base if number == 1 else f"{base}_{number}"
        if name not in reward_names():
            register_reward(name)(_markable(reward))
            _GIVEN.add(name)
            break
        if _original(get_reward(name)) is reward:
            break
    return name


def _markable(reward: RewardFn) -> RewardFn:
    """The function, or something around it that may have marks, which methods may not."""
    if inspect.isfunction(reward):
        return reward
    own = functools.partial(reward)
    own.takes_lists = getattr(reward, "takes_lists", False)
    return own


def _original(reward: RewardFn) -> Any:
    return reward.func if isinstance(reward, functools.partial) else reward
