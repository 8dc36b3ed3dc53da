"""Rewards for answers that are mathematics, by math-verify."""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import TYPE_CHECKING

from grpo.envs.rewards.registry import RewardResult, register_reward
from grpo.envs.tasks.base import Problem

if TYPE_CHECKING:
    from math_verify import LatexExtractionConfig

#: Seconds of computing that an answer is worth. What cannot be read and compared in that time is
#: not right, as math-verify has it with its own limits.
_SECONDS = 0.75
#: Characters from the end that are searched for the answer: searches of math-verify take seconds
#: in what is much longer.
_CHARACTERS = 20_000
#: What math-verify finds LaTeX by.
_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\[(\[]|\\boxed", re.DOTALL)
_PERCENT = re.compile(r"\s*-?[\d.,]+\s*\\?%\s*")
#: A word of a sentence, or a unit; LaTeX has its names behind a backslash.
_WORD = re.compile(r"(?:^|\s)[A-Za-z]{2,}[.!?]?(?=\s|$)")


def require_math_verify() -> None:
    """Raises ValueError where the package is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("the reward 'accuracy' needs math-verify: pip install math-verify, or the "
                         "extra 'math' of this package")


def warm_up() -> None:
    """Let the package load what it needs for a first answer, which takes it most of a second."""
    for answer in ("0.5", r"\boxed{\frac{1}{2}}", r"\boxed{x^2 + 2x + 1}", r"\boxed{\{1, 2\}}"):
        accuracy(answer, Problem(prompt="", answer="$(x+1)^2$", id="none"))


@register_reward("accuracy", apart=True, check=require_math_verify, computing=_SECONDS,
                 imports=(f"{__name__}:warm_up",), late=RewardResult(0.0, False), compares=True)
def accuracy(completion: str, problem: Problem) -> RewardResult | None:
    r"""1.0 if the answer in the completion is mathematically the problem's, else 0.0.

    Answers are read in LaTeX, a ``\boxed{}`` before others, and compared by math-verify, so
    ``\boxed{\frac{1}{2}}`` is ``0.5``. A problem whose own answer cannot be read leaves its samples
    out. The same as TRL's ``accuracy_reward``, but for the time it may take and for the problem's
    own answer: LaTeX without ``$`` around it, as data sets have it, is read whole, where TRL takes
    a number out of it; what is no mathematics then is compared as text. open-r1's gives
    1 where the problem's answer cannot be read, and asks for stricter LaTeX.

    It is called in a process that is ended after 0.75 s of computing, because what a model writes
    may take for ever to evaluate; the reward is then 0.0. The answer is looked for in the last
    20,000 characters.

    Examples:
        >>> half = Problem(prompt="...", answer="0.5", id="p0")
        >>> accuracy(r"So it is \boxed{\frac{1}{2}}.", half)                    # doctest: +SKIP
        RewardResult(reward=1.0, success=True)
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("parser", "grader"):  # they warn that they have no limit of their own
        logging.getLogger(f"math_verify.{name}").setLevel(logging.CRITICAL)
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0,
        try_extract_without_anchor=False)
    gold = _read_bare(problem.answer, latex) or parse(problem.answer, parsing_timeout=None)
    if not gold:
        return None
    answer = parse(completion[-_CHARACTERS:], extraction_config=[latex],
                   extraction_mode="first_match", parsing_timeout=None)
    right = bool(verify(gold, answer, timeout_seconds=None))
    return RewardResult(float(right), right)


def _read_bare(answer: str, latex: LatexExtractionConfig) -> list:
    """What a problem's answer says that is LaTeX with nothing around it; empty if it is not."""
    from math_verify import parse

    if _DELIMITED.search(answer) or "\\" not in answer and _WORD.search(answer):
        return []
    boxed = f"\\boxed{{{answer}}}"
    read = parse(boxed, parsing_timeout=None)
    read += parse(boxed, extraction_config=[latex], parsing_timeout=None)  # as completions are
    if _PERCENT.fullmatch(answer):  # which is text in a box
        read += parse(f"${answer}$", parsing_timeout=None)
    return read
