"""Rewards that compare a completion with the known answer."""

from __future__ import annotations

from grpo.envs.rewards.registry import RewardResult, register_reward
from grpo.envs.tasks.answer_text import answer_tag, normalize_number
from grpo.envs.tasks.base import Problem
from grpo.envs.tasks.gsm8k import ANSWER_MARK


@register_reward("gsm8k", quick=True, compares=True)
def gsm8k(completion: str, problem: Problem) -> RewardResult:
    """Reward of GSM8K: 1.0 for the right number, 0.1 for another answer, 0.0 for none.

    The answer is the content of the first ``<answer>`` block; it and ``problem.answer`` are
    compared after :func:`normalize_number`. Of a whole solution, as the data of GSM8K have it in
    that column, what follows the last ``####`` is compared. Success is the right number alone.

    Examples:
        >>> problem = Problem(prompt="...", answer="1,080", id="p0")
        >>> gsm8k("<think>...</think><answer>$1080.00</answer>", problem)
        RewardResult(reward=1.0, success=True)
        >>> gsm8k("<answer>108</answer>", problem).reward, gsm8k("1080", problem).reward
        (0.1, 0.0)
    """
    answer = normalize_number(answer_tag(completion) or "")
    if not answer:
        return RewardResult(0.0, False)
    correct = answer == normalize_number(problem.answer.rpartition(ANSWER_MARK)[2])
    return RewardResult(1.0 if correct else 0.1, correct)


@register_reward("exact_match", quick=True, compares=True)
def exact_match(completion: str, problem: Problem) -> RewardResult:
    """1.0 if the completion, stripped of surrounding space, is the answer, else 0.0.

    Examples:
        >>> exact_match(" 42\\n", Problem(prompt="17+25=", answer="42", id="p0"))
        RewardResult(reward=1.0, success=True)
    """
    correct = completion.strip() == problem.answer
    return RewardResult(float(correct), correct)


@register_reward("answer_tag", quick=True, compares=True)
def answer_in_tag(completion: str, problem: Problem) -> RewardResult:
    """1.0 if the first ``<answer>`` block, stripped of surrounding space, is the answer, else 0.0.

    Examples:
        >>> answer_in_tag("so <answer> 42 </answer>", Problem(prompt="...", answer="42", id="p0"))
        RewardResult(reward=1.0, success=True)
    """
    correct = answer_tag(completion) == problem.answer.strip()
    return RewardResult(float(correct), correct)


@register_reward("verifier", apart=False)
def verifier(completion: str, problem: Problem) -> RewardResult:
    """What the problem's own rule gives, from 0 to 1; success is 1.

    Raises:
        ValueError: for a problem without a rule.

    Examples:
        >>> even = Problem(prompt="An even number: ", answer="", id="p0",
        ...                verifier=lambda text: float(int(text) % 2 == 0))
        >>> verifier("8", even), verifier("7", even).success
        (RewardResult(reward=1.0, success=True), False)
    """
    if problem.verifier is None:
        raise ValueError(f"problem {problem.id!r} has no verifier of its own; choose another "
                         "env.reward")
    reward = problem.verifier(completion)
    return RewardResult(reward, reward >= 1.0)


@register_reward("negative_length", quick=True)
def negative_length(completion: str, problem: Problem) -> RewardResult:
    """Minus the number of characters: a reward whose optimum is known, for sanity runs.

    Success is the optimum, an empty completion. The problem plays no part.

    Examples:
        >>> negative_length("four", Problem(prompt="", answer="", id="p0"))
        RewardResult(reward=-4.0, success=False)
    """
    return RewardResult(float(-len(completion)), completion == "")
