"""IFEval: prompts with instructions whose following a program can check.

Zhou et al., *Instruction-Following Evaluation for Large Language Models*, 2023 (arXiv:2311.07911).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from grpo.envs.tasks.answer_text import answer_tag
from grpo.envs.tasks.base import Problem, Task, check_count, register_task
from grpo.envs.tasks.ifeval_checks import check
from grpo.envs.tasks.language import warm_up
from grpo.envs.tasks.sources import PlacedRow, file_rows, hub_rows

DATASET = "google/IFEval"
SYSTEM_PROMPT = (
    "Think about the request between <think> and </think>, then write your whole response to it, "
    "and nothing else, between <answer> and </answer>."
)
#: Of prompt-strict, instruction-strict, prompt-loose and instruction-loose in the reward.
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
#: Of exactly one answer block, and of exactly one think block.
ANSWER_BONUS, THINK_BONUS = 0.1, 0.05


@register_task("ifeval")
class IFEvalTask(Task):
    """Prompts of the data as chat messages. The data has no splits: the rows are shuffled by
    ``seed``, and the first ``num_test`` of them are held out, whatever ``num_train`` is.

    A row holds ``key``, ``prompt``, ``instruction_id_list`` and ``kwargs``. Ids are
    ``ifeval/KEY``. Success is that all instructions are strictly followed, for which alone
    :func:`reward` gives 1 or more.

    Args:
        data_path: local ``input_data.jsonl``, or a folder that it is in; None: load ``dataset``.
        dataset: data set on the Hugging Face hub, read with the ``datasets`` package.
        num_train: training problems; None: all that are not held out.
        num_test: held-out problems.
        seed: of the shuffle.
        system_prompt: first message; None: the prompt stands alone.

    Raises:
        FileNotFoundError: if the file or the data set is not there.
        ImportError: if ``datasets``, nltk or langdetect is needed but not installed.
        ValueError: if a row is malformed, more rows are asked for than exist, or ``dataset`` is
            given beside ``data_path``, which would ignore it.
    """

    default_reward = "verifier"

    def __init__(
        self, *, data_path: str | Path | None = None, dataset: str = DATASET,
        num_train: int | None = None, num_test: int = 100, seed: int = 0,
        system_prompt: str | None = SYSTEM_PROMPT,
    ) -> None:
        for key, value in (("num_train", num_train), ("num_test", num_test), ("seed", seed)):
            if value is not None:
                check_count(f"env.task.{key}", value)
        if data_path is not None and dataset != DATASET:
            raise ValueError(f"dataset={dataset!r} would be ignored because env.data_path="
                             f"{str(data_path)!r} is set; give either a file or a data set")
        try:
            warm_up()
        except ImportError as error:
            raise ImportError("env.dataset=ifeval needs nltk and langdetect: pip install nltk "
                              f"langdetect ({error})") from error
        system = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
        problems = [_problem(row, where, system) for where, row in _rows(data_path, dataset)]
        random.Random(seed).shuffle(problems)
        test, train = problems[:num_test], problems[num_test:][:num_train]
        if len(test) < num_test or len(train) < (num_train or 0):
            raise ValueError(f"env.task.num_test={num_test} and env.task.num_train={num_train}, "
                             f"but there are only {len(problems)} rows; lower one of them")
        super().__init__(train=train, test=test, source=str(data_path or dataset))


class Score(TypedDict):
    """What of a row's instructions a response follows, each and all of them; strictly, and with
    the framing left out that models put around a response."""

    prompt_strict: bool
    inst_strict: list[bool]
    prompt_loose: bool
    inst_loose: list[bool]


def score(row: Mapping[str, Any], response: str) -> Score:
    """What a response follows, by the rules of the paper.

    Loose: if it does so without its first line, its last line, or its asterisks, or with any of
    them. An empty response follows nothing.

    Args:
        row: with ``instruction_id_list`` and ``kwargs``, one table for each; arguments that are
            null are none.
        response: text that is judged as it is; blocks in it are part of it.

    Raises:
        ValueError: if the row asks for something that is not IFEval's.

    Examples:
        >>> row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        ...        "kwargs": [{}, {}]}
        >>> score(row, 'Sure:\\n"Hello there"')  # doctest: +NORMALIZE_WHITESPACE
        {'prompt_strict': False, 'inst_strict': [True, False],
         'prompt_loose': True, 'inst_loose': [True, True]}
    """
    strict, loose = [], []
    others = _without_framing(response)
    for follows in _checks(row):
        strict.append(bool(response.strip()) and follows(response))
        loose.append(strict[-1] or any(map(follows, others)))
    return {"prompt_strict": all(strict), "inst_strict": strict,
            "prompt_loose": all(loose), "inst_loose": loose}


def reward(row: Mapping[str, Any], response: str) -> float:
    """What training gives: a mean of the four scores of the first ``<answer>`` block, of which an
    absent one has none, and something for the format; 1.15 at most.

    0.4 if all instructions are strictly followed, 0.3 times the share that is, 0.2 if all are
    loosely followed, and 0.1 times that share; 0.1 more for exactly one ``<answer>`` block, and
    0.05 for exactly one ``<think>`` block. These are the weights of TorchRL's ``IfEvalScorer``.

    Raises:
        ValueError: see :func:`score`.

    Examples:
        >>> row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        >>> reward(row, "<think>no commas</think><answer>Fine</answer>")
        1.15
        >>> reward(row, "<answer>No, sorry</answer>"), reward(row, "Fine")
        (0.1, 0.0)
    """
    found = score(row, answer_tag(response) or "")
    parts = (found["prompt_strict"], _share(found["inst_strict"]),
             found["prompt_loose"], _share(found["inst_loose"]))
    total = sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))
    total += ANSWER_BONUS * (_blocks(response, "answer") == 1)
    return round(total + THINK_BONUS * (_blocks(response, "think") == 1), 6)


def _share(followed: list[bool]) -> float:
    return sum(followed) / len(followed)


def _blocks(text: str, tag: str) -> int:
    """Complete blocks, as a search from left to right finds them."""
    count, end, closing = 0, 0, f"</{tag}>"
    while (start := text.find(f"<{tag}>", end)) >= 0 and (end := text.find(closing, start)) >= 0:
        count, end = count + 1, end + len(closing)
    return count


def _without_framing(response: str) -> list[str]:
    """The other texts of the loose rule, none of them empty or twice."""
    lines = response.split("\n")
    shorter = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [*shorter, *(text.replace("*", "") for text in (response, *shorter))]
    return [text for text in dict.fromkeys(texts) if text.strip() and text != response]


def _checks(row: Mapping[str, Any]) -> list[Callable[[str], bool]]:
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not names or len(names) != len(arguments):
        raise ValueError(f"instruction_id_list has {len(names)} entries and kwargs "
                         f"{len(arguments)}; a row needs at least one instruction, and one table "
                         "of arguments for each")
    return [check(name, given or {}) for name, given in zip(names, arguments, strict=True)]


# -- problems -------------------------------------------------------------------------------------


def _rows(data_path: str | Path | None, dataset: str) -> Iterator[PlacedRow]:
    if data_path is None:
        return hub_rows(dataset, None, "train", key="env.dataset",
                        instead="env.data_path to input_data.jsonl")
    path = Path(data_path).expanduser()
    path = path / "input_data.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"env.data_path={str(data_path)!r}: there is no {path}; point it "
                                "to IFEval's input_data.jsonl or its folder, or leave it out to "
                                f"load {DATASET} from the hub")
    return file_rows(path)


def _problem(row: Any, where: str, system: tuple[dict[str, str], ...]) -> Problem:
    needed = {"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list}
    for key, kind in needed.items():
        if not isinstance(row, dict) or not isinstance(row.get(key), kind):
            raise ValueError(f"{where}: {key!r} must be {kind.__name__}, got {row!r:.80}")
    try:
        _checks(row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    request = {"role": "user", "content": row["prompt"]}
    return Problem(prompt=(*system, request), answer=", ".join(row["instruction_id_list"]),
                   id=f"ifeval/{row['key']}", verifier=partial(reward, row), row=row)
