"""GSM8K: grade-school word problems whose solutions end in ``#### number``.

Cobbe et al., *Training Verifiers to Solve Math Word Problems*, 2021 (arXiv:2110.14168).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from grpo.envs.tasks.base import Problem, Task, check_count, register_task

DATASET, CONFIG = "openai/gsm8k", "main"
ANSWER_MARK = "####"
SYSTEM_PROMPT = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, then only "
    "the final number between <answer> and </answer>."
)


@register_task("gsm8k")
class Gsm8kTask(Task):
    """Word problems as chat messages: the system prompt, then the question.

    A row holds ``question`` and ``answer``; the text after ``####`` in ``answer`` is the gold
    answer. Rows keep their order, ids are ``gsm8k/train/0`` and so on.

    Args:
        data_path: local folder with ``train.jsonl`` and ``test.jsonl``; None: load ``dataset``.
        dataset: data set on the Hugging Face hub, read with the ``datasets`` package.
        config: configuration of ``dataset``.
        num_train: use only the first rows of the train split; None: all of them.
        num_test: the same for the test split. A split of 0 rows is not read at all.
        system_prompt: first message; None: the question stands alone.

    Raises:
        FileNotFoundError: if the folder, a file in it or the data set is not there.
        ImportError: if ``datasets`` is needed but not installed.
        ValueError: if a row is malformed, more rows are asked for than exist, or ``dataset`` or
            ``config`` is given beside ``data_path``, which would ignore it.

    Examples:
        >>> import tempfile
        >>> row = {"question": "How many legs have two cats?", "answer": "2 * 4 = 8\\n#### 8"}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "train.jsonl").write_text(json.dumps(row))
        ...     task = Gsm8kTask(data_path=folder, num_test=0, system_prompt=None)
        >>> task.split("train")[0].answer
        '8'
        >>> task.split("train")[0].prompt
        ({'role': 'user', 'content': 'How many legs have two cats?'},)
    """

    default_reward = "gsm8k"

    def __init__(
        self, *, data_path: str | Path | None = None, dataset: str = DATASET, config: str = CONFIG,
        num_train: int | None = None, num_test: int | None = None,
        system_prompt: str | None = SYSTEM_PROMPT,
    ) -> None:
        if data_path is not None and (dataset, config) != (DATASET, CONFIG):
            raise ValueError(
                f"dataset={dataset!r}, config={config!r} would be ignored because env.data_path="
                f"{str(data_path)!r} is set; give either a folder or a data set")
        system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)

        def load(split: str, limit: int | None) -> list[Problem]:
            if limit is not None:
                check_count(f"num_{split}", limit)
            if data_path is not None:
                rows = read_jsonl(Path(data_path).expanduser(), split)
            else:
                rows = _read_hub(dataset, config, split)
            # Rows are read one by one, so a limit of 0 does not even open the source.
            problems = [_problem(row, where, system, id=f"gsm8k/{split}/{i}")
                        for i, (where, row) in enumerate(islice(rows, limit))]
            if limit is not None and len(problems) < limit:
                raise ValueError(
                    f"env.task.num_{split}={limit}, but the {split} split has only "
                    f"{len(problems)} rows; lower it, or set it to null for all of them")
            return problems

        super().__init__(train=load("train", num_train), test=load("test", num_test),
                         source=f"{dataset} ({config})" if data_path is None else str(data_path))


def read_jsonl(folder: Path, split: str) -> Iterator[tuple[str, object]]:
    """Yield ``(place, parsed row)`` of each non-blank line."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        missing = "has no such file" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"env.data_path={str(folder)!r} {missing} (looked for {path}); point it to a folder "
            "with train.jsonl and test.jsonl, or leave it out to load env.dataset from the hub")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{where}: not valid JSON ({error})") from error


def _read_hub(dataset: str, config: str, split: str) -> Iterator[tuple[str, object]]:
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f"reading {dataset!r} from the hub needs the datasets package: pip install datasets "
            "(or set env.data_path to a folder with train.jsonl and test.jsonl)")
    import datasets

    try:
        rows = datasets.load_dataset(dataset, config, split=split)
    except OSError as error:  # not found, no access, no network
        raise FileNotFoundError(
            f"cannot load data set {dataset!r}, config {config!r}, split {split!r}: {error}; check "
            "env.dataset and the network, or set env.data_path to a folder with train.jsonl and "
            "test.jsonl") from error
    for number, row in enumerate(rows):
        yield f"{dataset}, split {split}, row {number}", row


def _problem(row: object, where: str, system: tuple[dict[str, str], ...], *, id: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with question and answer, got {row!r:.80}")
    for key in ("question", "answer"):
        if key not in row:
            raise ValueError(f"{where}: key {key!r} is missing; the row has {sorted(row)}")
        if not isinstance(row[key], str):
            raise ValueError(f"{where}: {key!r} must be text, got {row[key]!r:.80}")
    _, mark, gold = row["answer"].rpartition(ANSWER_MARK)
    if not mark or not gold.strip():
        raise ValueError(f"{where}: 'answer' must end in '{ANSWER_MARK} <gold answer>', "
                         f"got ...{row['answer'][-60:]!r}")
    question = {"role": "user", "content": row["question"]}
    return Problem(prompt=(*system, question), answer=gold.strip(), id=id)
