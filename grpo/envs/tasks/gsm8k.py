"""GSM8K: grade-school word problems whose solutions end in ``#### number``.

Cobbe et al., *Training Verifiers to Solve Math Word Problems*, 2021 (arXiv:2110.14168).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from grpo.envs.tasks.answer_text import answer_tag, last_number, normalize_number, one_number
from grpo.envs.tasks.base import Problem, Task, check_count, register_task
from grpo.envs.tasks.sources import hub_rows, read_jsonl

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
        train_start, test_start: row of the split that is the first, counted on from its first row
            again behind its last: so each number, such as a seed, stands for a problem.
        system_prompt: first message; None: the question stands alone.

    Raises:
        FileNotFoundError: if the folder, a file in it or the data set is not there.
        ImportError: if ``datasets`` is needed but not installed.
        ValueError: if a row is malformed, more rows are asked for than exist, or ``dataset`` or
            ``config`` is given beside ``data_path``, which would ignore it.

    Examples:
        >>> import json, tempfile
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
        train_start: int = 0, test_start: int = 0, system_prompt: str | None = SYSTEM_PROMPT,
    ) -> None:
        if data_path is not None and (dataset, config) != (DATASET, CONFIG):
            raise ValueError(
                f"dataset={dataset!r}, config={config!r} would be ignored because env.data_path="
                f"{str(data_path)!r} is set; give either a folder or a data set")
        system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)

        def load(split: str, limit: int | None, start: int) -> list[Problem]:
            check_count(f"{split}_start", start)
            if limit is not None:
                check_count(f"num_{split}", limit)
            if data_path is not None:
                rows = read_jsonl(Path(data_path).expanduser(), split)
            else:
                rows = hub_rows(dataset, config, split, key="env.dataset",
                                instead="env.data_path to a folder with train.jsonl and test.jsonl")
            # Rows are read one by one, so a limit of 0 does not even open the source.
            problems = [_problem(row, where, system, id=f"gsm8k/{split}/{i}")
                        for i, (where, row) in enumerate(rows if start else islice(rows, limit))]
            if start:
                start %= max(1, len(problems))
                problems = (problems[start:] + problems[:start])[:limit]
            if limit is not None and len(problems) < limit:
                raise ValueError(
                    f"env.task.num_{split}={limit}, but the {split} split has only "
                    f"{len(problems)} rows; lower it, or set it to null for all of them")
            return problems

        super().__init__(train=load("train", num_train, train_start),
                         test=load("test", num_test, test_start),
                         source=f"{dataset} ({config})" if data_path is None else str(data_path))


def is_correct(row: Mapping[str, str], response: str) -> bool:
    """Whether a response gives the answer of a row of the data.

    The answer of a response is its first ``<answer>`` block, else the line that follows its last
    ``####``, else its last number. A block and a line may say a number in any notation, with units
    or in an equation; where they name several numbers, as ``9,5`` does, they answer nothing. Time
    is linear in the response.

    Args:
        row: with ``answer``, whose text after the last ``####`` is the gold answer.
        response: all that the model said.

    Raises:
        ValueError: if the row has no gold answer.

    Examples:
        >>> row = {"question": "...", "answer": "2 * 540\\n#### 1,080"}
        >>> [is_correct(row, text) for text in (
        ...     "<answer>$1080.00</answer>", "#### 1080 eggs", "So it is 1,080.", "1080 or 1081")]
        [True, True, True, False]
    """
    return _grade(_gold(row), response)[0]


def reward(row: Mapping[str, str], response: str) -> float:
    """1.0 for the right answer, 0.1 for another one, 0.0 for none.

    Of a response with an ``<answer>`` block this is what training gives by the reward ``gsm8k``,
    :func:`grpo.envs.rewards.answers.gsm8k`: the block must be the number and nothing else, but for
    ``,`` ``$`` ``%``, a final ``.`` and zeros behind the decimal point, so that "18 eggs" is worth
    0.1 there though :func:`is_correct` takes it, and "1,8" is 18 there though it does not read it.
    Without a block training gives 0.0; here the answer is then that of :func:`is_correct`, so that
    base models and solutions of the data, which do not write blocks, can be scored.

    Raises:
        ValueError: if the row has no gold answer.

    Examples:
        >>> row = {"question": "...", "answer": "2 * 9\\n#### 18"}
        >>> [reward(row, text) for text in ("<answer>18.0</answer>", "<answer>18 eggs</answer>",
        ...                                 "#### 18", "19", "no idea", "<answer></answer>18")]
        [1.0, 0.1, 1.0, 0.1, 0.0, 0.0]
    """
    gold, block = _gold(row), answer_tag(response)
    if block is None:
        correct, answered = _grade(gold, response)
    else:
        answer = normalize_number(block)
        correct, answered = answer == normalize_number(gold), bool(answer)
    return 1.0 if correct else 0.1 if answered else 0.0


def _grade(gold: str, response: str) -> tuple[bool, bool]:
    """Whether a response is right, and whether it answers at all."""
    said = answer_tag(response)
    if said is None:
        _, mark, after = response.rpartition(ANSWER_MARK)
        said = after.strip().partition("\n")[0] if mark else None
    if said is None:
        number = last_number(response)
        return number is not None and number == one_number(gold), number is not None
    number = one_number(said)
    return number is not None and number == one_number(gold), bool(normalize_number(said))


def _gold(row: Mapping[str, str]) -> str:
    _, mark, gold = row["answer"].rpartition(ANSWER_MARK)
    if not mark or not gold.strip():
        raise ValueError(f"'answer' must end in '{ANSWER_MARK} <gold answer>', "
                         f"got ...{row['answer'][-60:]!r}")
    return gold.strip()


def _problem(row: object, where: str, system: tuple[dict[str, str], ...], *, id: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with question and answer, got {row!r:.80}")
    for key in ("question", "answer"):
        if key not in row:
            raise ValueError(f"{where}: key {key!r} is missing; the row has {sorted(row)}")
        if not isinstance(row[key], str):
            raise ValueError(f"{where}: {key!r} must be text, got {row[key]!r:.80}")
    try:
        gold = _gold(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    question = {"role": "user", "content": row["question"]}
    return Problem(prompt=(*system, question), answer=gold, id=id, row=row)
