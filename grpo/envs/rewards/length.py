"""Rewards for the length of a completion, in tokens, alone or with whether it is right.

Whether it is right is what another reward says, the option ``verdict``; its failures are failures
here, and samples that it leaves out are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from grpo.envs.rewards.completion import token_count
from grpo.envs.rewards.registry import (
    RewardFn,
    batch_reward,
    check_finite,
    name_of,
    options_of,
    register_reward,
    with_options,
)
from grpo.envs.tasks.base import Problem

#: Rewards that compare a completion with the problem's answer, or run its tests.
_COMPARING = ("exact_match", "answer_tag", "gsm8k", "accuracy", "verifier", "code")


def judged_by(fn: RewardFn, rewards: Iterable[str], own: str) -> RewardFn:
    """A reward that asks whether a completion is right, with a verdict where it has none: what else
    the run takes for right.

    Args:
        fn: any reward; those that do not ask, or say whom, are as they were.
        rewards: names of the run's; the first that compares with the problem's answer is asked.
        own: the task's reward, which is asked if it is the run's and none of those is. One that the
            run does not have may be another kind of answer's, and never say yes.

    Raises:
        ValueError: if none of the run's rewards is known to say what is right.

    Examples:
        >>> options_of(judged_by(length, ["format", "accuracy", "length"], "gsm8k"))
        {'verdict': 'accuracy'}
        >>> options_of(judged_by(length, ["my:score", "length"], "my:score"))
        {'verdict': 'my:score'}
    """
    if not getattr(fn, "judged", False) or options_of(fn)["verdict"] is not None:
        return fn
    rewards = list(rewards)
    known = [one for one in rewards if one in _COMPARING] or [one for one in rewards if one == own]
    if not known:
        name = name_of(fn).strip("'")
        raise ValueError(
            f"reward {name!r} needs to know which completions are right, and none of the run's "
            f"rewards ({', '.join(rewards)}) is known to say so; name one that does, such as the "
            f"task's own: env.reward_options={{{name}: {{verdict: {own}}}}}")
    return with_options(fn, {"verdict": known[0]})


@register_reward("length", quick=True, judged=True)
@batch_reward
def length(
    completions: Sequence[str], problems: Sequence[Problem], correct: Sequence[bool], *,
    verdict: str | None = None,
) -> list[float]:
    r"""Short completions of a prompt before long ones, and wrong ones never above 0.

    With ``x = 0.5 - (len - min_len) / (max_len - min_len)`` among the completions of the same
    problem: ``x`` for a right one, ``min(0, x)`` for a wrong one; 0 where all are of one length.
    Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.3, in tokens like there; ``len_reward`` of
    open-r1 counts characters, and takes answers that it cannot read for right.

    Args:
        completions: with their tokens.
        problems: of each.
        correct: what the verdict says of each.
        verdict: name or import path of the reward that says whether a completion is right; None:
            see :func:`judged_by`.

    Examples:
        >>> from grpo.envs.rewards import Completion
        >>> texts = [Completion("", token_ids=range(count)) for count in (10, 20, 30)]
        >>> length(texts, [Problem(prompt="", answer="", id="p")] * 3, [False, True, True])
        [0.0, 0.0, -0.5]
    """
    counts = [token_count(completion) for completion in completions]
    by_problem: dict[str, list[int]] = {}
    for problem, count in zip(problems, counts, strict=True):
        by_problem.setdefault(problem.id, []).append(count)
    rewards = []
    for problem, count, right in zip(problems, counts, correct, strict=True):
        least, most = min(by_problem[problem.id]), max(by_problem[problem.id])
        x = 0.5 - (count - least) / (most - least) if most > least else 0.0
        rewards.append(x if right else min(0.0, x))
    return rewards


def check_cosine(*, max_len: int, **values: float | str | None) -> None:
    """Raises ValueError for what cannot work."""
    check_finite("cosine", **{key: value for key, value in values.items() if key != "verdict"})
    if max_len < 1:
        raise ValueError(f"max_len={max_len} of the reward 'cosine' must be at least 1")


@register_reward("cosine", quick=True, judged=True, check=check_cosine)
def cosine(
    completion: str, problem: Problem, correct: bool, *, min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5, min_value_correct: float = 0.5, max_value_correct: float = 1.0,
    max_len: int = 1000, verdict: str | None = None,
) -> float:
    r"""Right answers are worth more when short, wrong ones cost less when long.

    ``b + (a - b) / 2 * (1 + cos(pi * len / max_len))``, which is ``a`` for no tokens and ``b`` for
    ``max_len``. Of a right answer ``a, b = max_value_correct, min_value_correct``, of a wrong one
    ``a, b = min_value_wrong, max_value_wrong``. Source: Yeo et al. (arXiv:2502.03373), appendix
    C.1, which counts tokens, with the names of TRL's and open-r1's ``get_cosine_scaled_reward``.
    ``max_len`` is open-r1's, where it counts characters; TRL has no default. Beyond ``max_len``
    the value at ``max_len`` stays, where both libraries let the cosine rise again.

    Args:
        completion: with its tokens.
        problem: of it.
        correct: what the verdict says.
        min_value_wrong: of no tokens.
        max_value_wrong: of ``max_len`` tokens.
        min_value_correct: of ``max_len`` tokens.
        max_value_correct: of no tokens.
        max_len: in tokens.
        verdict: name or import path of the reward that says whether a completion is right; None:
            see :func:`judged_by`.

    Examples:
        >>> from grpo.envs.rewards import Completion
        >>> half = Completion("", token_ids=range(50))
        >>> [round(cosine(half, Problem(prompt="", answer="", id="p"), right, max_len=100), 6)
        ...  for right in (True, False)]
        [0.75, -0.75]
    """
    short, long = ((max_value_correct, min_value_correct) if correct else
                   (min_value_wrong, max_value_wrong))
    progress = min(token_count(completion) / max_len, 1.0)
    return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress))


def check_overlong(*, max_completion_len: int, soft_punish_cache: int) -> None:
    """Raises ValueError for what cannot work."""
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(f"soft_punish_cache={soft_punish_cache} of the reward "
                         "'soft_overlong_punishment' must be at least 1 and at most its "
                         f"max_completion_len={max_completion_len}")


@register_reward("soft_overlong_punishment", quick=True, check=check_overlong)
def soft_overlong_punishment(
    completion: str, problem: Problem, *, max_completion_len: int = 16384,
    soft_punish_cache: int = 4096,
) -> float:
    """0 up to ``max_completion_len - soft_punish_cache`` tokens, then falling linearly to -1 at
    ``max_completion_len`` and beyond.

    Source: DAPO (arXiv:2503.14476), eq. 13; names as in TRL's and open-r1's
    ``get_soft_overlong_punishment``, defaults those of open-r1. ``train.overlong_buffer`` is the
    same with the run's own limit, and keeps the punishment out of the metrics of the reward.

    Examples:
        >>> from grpo.envs.rewards import Completion
        >>> soft_overlong_punishment(Completion("", token_ids=range(90)), None,
        ...                          max_completion_len=100, soft_punish_cache=20)
        -0.5
    """
    beyond = token_count(completion) - (max_completion_len - soft_punish_cache)
    return -min(max(beyond / soft_punish_cache, 0.0), 1.0)
