"""Rewards for the form of a completion, whatever its answer.

Plain searches take the place of regular expressions that backtrack, so each is linear in the text.
"""

from __future__ import annotations

import re

from grpo.envs.rewards.completion import tokens_of
from grpo.envs.rewards.registry import check_finite, register_reward
from grpo.envs.tasks.base import Problem

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_STEPS = re.compile(r"Step \d+:|\A\d+\.|\n[-*]|(?:First|Second|Next|Finally),")
_ENOUGH_STEPS = 3


@register_reward("format", quick=True)
def think_answer_format(completion: str, problem: Problem) -> float:
    r"""1.0 if the completion is a block of thoughts and then one with the answer, else 0.0.

    It has to begin with ``<think>``, and what follows ``</think>`` is ``<answer>``, each tag on a
    line of its own; what stands behind the line of ``</answer>`` is free. Source: ``format_reward``
    of open-r1, whose regular expression has the same matches.

    Examples:
        >>> problem = Problem(prompt="", answer="", id="p0")
        >>> think_answer_format("<think>\n2+2\n</think>\n<answer>\n4\n</answer>", problem)
        1.0
        >>> think_answer_format("<answer>\n4\n</answer>", problem)
        0.0
    """
    if not completion.startswith("<think>\n"):
        return 0.0
    _, between, answer = completion[len("<think>\n"):].partition("\n</think>\n<answer>\n")
    closed = "\n</answer>\n" in answer or answer.endswith("\n</answer>")
    return float(bool(between) and closed)


@register_reward("tag_count", quick=True)
def tag_count(completion: str, problem: Problem) -> float:
    r"""A quarter for each of the four tags of ``format`` that is there exactly once.

    Counted are ``"<think>\n"``, ``"\n</think>\n"``, ``"\n<answer>\n"`` and ``"\n</answer>"``.
    Source: ``tag_count_reward`` of open-r1.

    Examples:
        >>> tag_count("<think>\n2+2\n</think>\n4", Problem(prompt="", answer="", id="p0"))
        0.5
    """
    return sum(completion.count(tag) == 1 for tag in _TAGS) / len(_TAGS)


@register_reward("reasoning_steps", quick=True)
def reasoning_steps(completion: str, problem: Problem) -> float:
    r"""``min(1, n / 3)`` for ``n`` signs of a step.

    Signs are ``Step 1:``, a number with a point at the very beginning, ``-`` or ``*`` at the
    beginning of a later line, and ``First,`` ``Second,`` ``Next,`` ``Finally,``. Source:
    ``reasoning_steps_reward`` of open-r1.

    Examples:
        >>> reasoning_steps("1. Add.\n- Carry.\nFinally, 12", Problem(prompt="", answer="", id="p"))
        1.0
    """
    found = sum(1 for _ in _STEPS.finditer(completion))
    return min(1.0, found / _ENOUGH_STEPS)


def check_repetition(*, ngram_size: int, max_penalty: float) -> None:
    """Raises ValueError for what cannot work."""
    check_finite("repetition_penalty", max_penalty=max_penalty)
    if ngram_size < 1 or max_penalty > 0:
        raise ValueError(f"ngram_size={ngram_size} of the reward 'repetition_penalty' must be at "
                         f"least 1, and its max_penalty={max_penalty} at most 0")


@register_reward("repetition_penalty", quick=True, check=check_repetition)
def repetition_penalty(
    completion: str, problem: Problem, *, ngram_size: int = 3, max_penalty: float = -1.0
) -> float:
    r"""``max_penalty * (1 - different n-grams / n-grams)``; 0 for fewer tokens than an n-gram has.

    N-grams are those of sampled tokens, as in Yeo et al. (arXiv:2502.03373), appendix C.2, and in
    TRL's ``get_repetition_penalty_reward``, whose defaults these are; open-r1 counts words.

    Args:
        completion: with its tokens.
        problem: plays no part.
        ngram_size: tokens of an n-gram, at least 1.
        max_penalty: at most 0.

    Raises:
        TypeError: for a text without tokens.

    Examples:
        >>> from grpo.envs.rewards import Completion
        >>> text = Completion("aaaaa", token_ids=[5, 5, 5, 5, 5])
        >>> repetition_penalty(text, Problem(prompt="", answer="", id="p0"), ngram_size=2)
        -0.75
    """
    tokens = tokens_of(completion)
    count = len(tokens) - ngram_size + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(tokens[i:] for i in range(ngram_size)), strict=False)))
    return (1 - different / count) * max_penalty if different < count else 0.0
