"""Problems of any data set: of the Hugging Face hub, or of local files, by names of columns."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from grpo.envs.tasks.base import NUM_TEST, Problem, Task, check_count, register_task
from grpo.envs.tasks.sources import SUFFIXES, PlacedRow, file_rows, hub_rows

SYSTEM_PROMPT = (
    "Think about the problem between <think> and </think>, then write the answer alone between "
    "<answer> and </answer>."
)
_ENTRY = ("id", "config", "split", "columns", "weight", "prompt_column", "answer_column")
_MIXTURE = ("datasets", "seed", "test_split_size")


@register_task("dataset")
class DatasetTask(Task):
    """Problems from the columns of a data set, or of a mixture of several.

    A prompt is a text, which becomes the user's message, or a list of chat messages, as they are;
    if the assistant has the last one, it is left out of the prompt. The reward is ``env.reward``, a
    name or an import path; functions find all columns in ``problem.row``. The default compares the
    first ``<answer>`` block with the answer. A prompt that is held out is not trained on, however
    often the data have it.

    Args:
        path: id of a data set on the hub, a local file (jsonl, json, csv, parquet), or a folder
            with files named after the splits.
        dataset_mixture: in place of ``path``: ``{datasets: [{id, config, split, columns, weight}],
            seed, test_split_size}``. ``id`` is like ``path``, ``weight`` the fraction of that
            split which is used (1 at most), chosen by ``seed``. ``columns`` are those to keep.
            ``prompt_column`` and ``answer_column`` of an entry win over those of all.
            ``test_split_size``, a number of problems or a share below 1, is held out.
        prompt_column: with a text or a chat.
        answer_column: with a text or a number; None: the assistant's last message of a chat, or
            no answer, for rewards that need none.
        config: of the hub's data set.
        train_split: what is trained on.
        test_split: what is held out; None: ``num_test`` problems of ``train_split``, the first of
            a shuffle by ``seed``.
        num_train: training problems; None: all.
        num_test: held-out problems; None: 100, or all of ``test_split``.
        seed: of the shuffle.
        system_prompt: first message, where a chat does not bring one; None: there is none.
        chat: whether a prompt that is a text becomes the user's message; False: prompts are as they
            stand, the model continues a text, and chats get no system prompt of the default.

    Raises:
        FileNotFoundError: if a file, a folder or a data set is not there.
        ImportError: if a package that reads it is not installed.
        ValueError: if a column does not exist or holds something else, more rows are asked for than
            there are, every training prompt is held out, or an option would be ignored.

    Examples:
        >>> import json, tempfile
        >>> rows = [{"q": f"{n} + 1?", "a": n + 1} for n in range(3)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "sums.jsonl")
        ...     _ = path.write_text("\\n".join(map(json.dumps, rows)))
        ...     task = DatasetTask(path=path, prompt_column="q", answer_column="a", num_test=1,
        ...                        system_prompt=None)
        >>> sorted((p.prompt[0]["content"], p.answer) for p in task.train + task.test)
        [('0 + 1?', '1'), ('1 + 1?', '2'), ('2 + 1?', '3')]
    """

    default_reward = "gsm8k"

    def __init__(
        self, *, path: str | Path | None = None,
        dataset_mixture: Mapping[str, Any] | None = None, prompt_column: str | None = None,
        answer_column: str | None = None, config: str | None = None, train_split: str = "train",
        test_split: str | None = None, num_train: int | None = None, num_test: int | None = None,
        seed: int = 0, system_prompt: str | None = SYSTEM_PROMPT, chat: bool = True,
    ) -> None:
        for key, value in (("num_train", num_train), ("num_test", num_test), ("seed", seed)):
            if value is not None:
                check_count(f"env.task.{key}", value)
        if not chat and system_prompt == SYSTEM_PROMPT:
            system_prompt = None
        if (path is None) == (dataset_mixture is None):
            raise ValueError(f"env.path={_shown(path)}, env.dataset_mixture={dataset_mixture}: "
                             "give one of them, a data set or several")

        self._unanswered: list[Problem] = []  # whose answer is in no column that was named

        def problems(source: Mapping[str, Any]) -> list[Problem]:
            entry = {"prompt_column": prompt_column, "answer_column": answer_column} | {
                key: value for key, value in source.items() if value is not None}
            name = "/".join(str(entry[key]) for key in ("id", "split") if key in entry)
            found = [_problem(row, where, entry, system_prompt, f"{name}/{number}", chat=chat)
                     for number, (where, row) in enumerate(rows_of(entry))]
            if entry["answer_column"] is None:
                self._unanswered += [problem for problem in found if not problem.answer]
            return found

        if dataset_mixture is not None:
            given = {"config": config, "num_test": num_test, "test_split": test_split}
            if unread := [key for key, value in given.items() if value is not None]:
                raise ValueError(f"env.task.{unread[0]}={given[unread[0]]!r} would be ignored with "
                                 "env.dataset_mixture, which says so itself; remove it")
            entries, seed, held_out = _mixture(dataset_mixture, seed)
            train = [*chain(*(_share(problems(entry), entry.get("weight", 1.0), seed, number)
                              for number, entry in enumerate(entries)))]
            num_test = round(held_out * len(train)) if isinstance(held_out, float) else held_out
            source = ", ".join(str(entry["id"]) for entry in entries)
        else:
            where = {"id": str(path), "config": config}
            _check_read(str(path), {"env.task.config": config}, {
                "env.task.test_split": test_split,
                "env.task.train_split": None if train_split == "train" else train_split})
            train, source = problems(where | {"split": train_split}), str(path)
        if test_split is None:
            num_test = NUM_TEST if num_test is None else num_test
            random.Random(seed).shuffle(train)
            test, train = train[:num_test], train[num_test:]
        else:
            test = problems(where | {"split": test_split})[:num_test]
        asked = {_said(problem) for problem in test}
        given, train = len(train), [problem for problem in train if _said(problem) not in asked]
        if given and not train and num_train != 0:
            raise ValueError(f"all {given} training prompts of {source} are held out as well; "
                             "give another env.task.train_split or test_split, or other rows")
        train = train[:num_train]
        if len(test) < (num_test or 0) or len(train) < (num_train or 0):
            raise ValueError(
                f"env.task.num_train={num_train} and {num_test} held-out problems are more than "
                f"the {len(train) + len(test)} rows of {source} that may be used; lower "
                "env.task.num_test (of a mixture test_split_size) or env.task.num_train")
        super().__init__(train=train, test=test, source=source)

    def check_answers(self, reward: str) -> None:
        """Refuse problems without answers, where a reward of this name compares with them.

        Raises:
            ValueError: if one has none because no column for it was named, or none has one.
        """
        for problem in self._unanswered[:1]:
            raise ValueError(
                f"env.answer_column=null: problem {problem.id!r} has no answer, which env.reward="
                f"{reward} compares completions with; set it to the column that has the answer, of "
                f"{', '.join(map(str, problem.row))}, or choose another env.reward")
        super().check_answers(reward)


def rows_of(entry: Mapping[str, Any]) -> Iterator[PlacedRow]:
    """The rows of one data set, by ``id``, ``config`` and ``split``."""
    name, split = str(entry["id"]), entry.get("split", "train")
    path = Path(name).expanduser()
    if _is_file(path):
        return file_rows(path)
    if path.is_dir():
        found = [path / f"{split}{suffix}" for suffix in SUFFIXES
                 if (path / f"{split}{suffix}").is_file()]
        if not found:
            raise FileNotFoundError(
                f"the folder {name} has no split {split!r}, a file {split}"
                f"{f', {split}'.join(SUFFIXES)}; it has "
                f"{', '.join(sorted(one.name for one in path.iterdir())) or 'no files'}")
        return file_rows(found[0])
    return hub_rows(name, entry.get("config"), split, key="env.path",
                    instead="it to a local file")


def _is_file(path: Path) -> bool:
    return path.suffix in SUFFIXES or path.is_file()


def _check_read(name: str, of_hub: Mapping[str, Any], of_splits: Mapping[str, Any]) -> None:
    """Refuse, by their keys, a configuration of what is local and a split of a single file."""
    path = Path(name).expanduser()
    if _is_file(path):
        kind, unread = "file", {**of_hub, **of_splits}
    else:
        kind, unread = "folder", of_hub if path.is_dir() else {}
    for key, value in unread.items():
        if value is not None:
            instead = ", or give a folder with a file for each split" if key in of_splits else ""
            raise ValueError(f"{key}={value!r} would be ignored: {name} is a {kind}; remove it"
                             f"{instead}")


# -- a mixture ------------------------------------------------------------------------------------


def _mixture(
    given: Mapping[str, Any], seed: int
) -> tuple[list[Mapping[str, Any]], int, int | float]:
    """Data sets, the seed and what is held out."""
    _known("env.dataset_mixture", given, _MIXTURE)
    entries = given.get("datasets")
    if not isinstance(entries, Sequence) or not entries:
        raise ValueError("env.dataset_mixture.datasets must be a list with at least one {id: ...}")
    for number, entry in enumerate(entries):
        where = f"env.dataset_mixture.datasets[{number}]"
        if not isinstance(entry, Mapping) or not entry.get("id"):
            raise ValueError(f"{where}={entry!r} names no data set; give it an id")
        _known(where, entry, _ENTRY)
        split = entry.get("split")
        _check_read(str(entry["id"]), {f"{where}.config": entry.get("config")},
                    {f"{where}.split": None if split == "train" else split})
        weight = entry.get("weight")
        if weight is not None and not (isinstance(weight, int | float) and 0 < weight <= 1):
            raise ValueError(f"{where}.weight={weight!r} must be a fraction of the split, above 0 "
                             "and at most 1")
    held_out = given.get("test_split_size")
    if held_out is None:
        held_out = NUM_TEST
    elif isinstance(held_out, float) and not 0 < held_out < 1:
        raise ValueError(f"env.dataset_mixture.test_split_size={held_out} must be a share between "
                         "0 and 1, or a whole number of problems")
    elif not isinstance(held_out, float):
        check_count("env.dataset_mixture.test_split_size", held_out)
    own = given.get("seed")
    present = [{key: value for key, value in entry.items() if value is not None}
               for entry in entries]
    return present, seed if own is None else own, held_out


def _known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{where}.{key}={value!r}: there is no such key; use some of "
                             f"{', '.join(known)}")


def _share(problems: list[Problem], weight: float, seed: int, number: int) -> list[Problem]:
    """So much of the problems of one data set, at least one, as its number and the seed have it."""
    count = max(1, round(weight * len(problems)))
    if count >= len(problems):
        return problems
    chosen = random.Random(f"{seed}/{number}").sample(range(len(problems)), count)
    return [problems[index] for index in sorted(chosen)]


# -- a row ----------------------------------------------------------------------------------------


def _problem(
    row: Any, where: str, entry: Mapping[str, Any], system_prompt: str | None, id: str, *,
    chat: bool,
) -> Problem:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: expected a table of columns, got {row!r:.80}")
    row = _kept(row, where, entry.get("columns"))
    prompt = _column(row, where, "prompt_column", entry["prompt_column"])
    messages = _messages(prompt, f"{where}: env.prompt_column={entry['prompt_column']!r}")
    answer = ""
    if messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
        if not messages:
            raise ValueError(f"{where}: the chat in column {entry['prompt_column']!r} has nothing "
                             "before the assistant's message")
    if entry["answer_column"] is not None:
        value = _column(row, where, "answer_column", entry["answer_column"])
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{where}: env.answer_column={entry['answer_column']!r} must hold a "
                             f"text or a number, got {value!r:.80}")
        answer = str(value).strip()
    if isinstance(prompt, str) and not chat:
        return Problem(prompt=prompt, answer=answer, id=id, row=row)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return Problem(prompt=tuple(messages), answer=answer, id=id, row=row)


def _said(problem: Problem) -> str | tuple[tuple[str, str], ...]:
    """The prompt, to be looked up."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return tuple((message["role"], message["content"]) for message in problem.prompt)


def _kept(row: Mapping[str, Any], where: str, columns: Sequence[str] | None) -> dict[str, Any]:
    for column in columns or ():
        _column(row, where, "dataset_mixture.datasets.columns", column)
    return {key: row[key] for key in columns} if columns else dict(row)


def _column(row: Mapping[str, Any], where: str, key: str, column: str | None) -> Any:
    if column is None or column not in row:
        asked = "is not set" if column is None else f"={column!r} is no column"
        raise ValueError(f"{where}: env.{key}{asked if column else ' ' + asked}; the columns are "
                         f"{', '.join(map(str, row)) or 'none'}")
    return row[column]


def _messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """A text as the user's message, or a chat."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and prompt and all(
            isinstance(one, Mapping) and all(isinstance(one.get(key), str)
                                             for key in ("role", "content")) for one in prompt):
        return [{"role": one["role"], "content": one["content"]} for one in prompt]
    raise ValueError(f"{where} must hold a text, or a list of messages such as {{'role': 'user', "
                     f"'content': ...}}, got {prompt!r:.80}")


def _shown(path: str | Path | None) -> str:
    return "null" if path is None else str(path)
