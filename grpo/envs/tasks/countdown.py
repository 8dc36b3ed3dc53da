"""Countdown: reach a target with some numbers and the four operations.

The game of Gandhi et al., *Stream of Search*, 2024 (arXiv:2404.03683), as it is used to train
reasoning.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

from grpo.envs.tasks.base import Problem, check_count, register_task
from grpo.envs.tasks.seeded import SeededTask, messages, said

SYSTEM_PROMPT = (
    "Write your reasoning between <think> and </think>, then one expression between <answer> and "
    "</answer>, such as <answer>(7 + 3) * 2</answer>."
)
#: Characters of an answer; no expression with twenty numbers needs more.
LONGEST = 500
#: Expressions that are made until the value of one may be a target; the defaults need a few.
_TRIES = 10_000
_TOKEN = re.compile(r"\s*(?:([0-9]{1,9})|(.))", re.DOTALL)
_OTHER_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


@register_task("countdown")
class CountdownTask(SeededTask):
    """Seeded countdown. The target of a problem is the value of a hidden expression with all of
    its numbers, so that there is a solution. The reward is 1 for an expression with the target's
    value that uses each number once, 0.1 for another one that can be read, and 0 for none.

    Args:
        train_seed_start: first seed of the training problems.
        num_train_seeds: how many there are.
        test_seed_start: first seed of the held-out problems.
        num_test_seeds: how many there are.
        num_numbers: numbers of a problem, 2 to 8, or a list of which the seed chooses one.
        max_number: largest number; the smallest is 1.
        max_target: largest target.
        system_prompt: first message; None: the question stands alone.

    Raises:
        ValueError: if the seeds of the splits meet, or an option is out of range or hardly allows a
            problem.

    Examples:
        >>> task = CountdownTask(num_train_seeds=3, num_test_seeds=1)
        >>> print(task.train[0].prompt[-1]["content"])  # doctest: +ELLIPSIS
        Reach ... with the numbers ..., each of which is used exactly once, and +, -, *, / and \
parentheses.
        >>> task.train[0].verifier(f"<answer>{task.train[0].answer}</answer>")
        1.0
    """

    def __init__(
        self, *, train_seed_start: int = 1000, num_train_seeds: int = 1000,
        test_seed_start: int = 1_000_000, num_test_seeds: int = 100,
        num_numbers: int | Sequence[int] = (3, 4), max_number: int = 50, max_target: int = 100,
        system_prompt: str | None = SYSTEM_PROMPT,
    ) -> None:
        counts = (num_numbers,) if isinstance(num_numbers, int) else tuple(num_numbers)
        for count in counts:
            check_count("env.task.num_numbers", count, minimum=2)
        if not counts or max(counts) > 8:
            raise ValueError(f"env.task.num_numbers={num_numbers} must be 2 to 8, or some of these")
        check_count("env.task.max_number", max_number, minimum=1)
        check_count("env.task.max_target", max_target, minimum=10)

        def problem(seed: int) -> tuple[Problem, Hashable]:
            numbers, target, solution = puzzle(seed, counts, max_number, max_target)
            question = (f"Reach {target} with the numbers {', '.join(map(str, numbers))}, each of "
                        "which is used exactly once, and +, -, *, / and parentheses.")
            return Problem(prompt=messages(system_prompt, question), answer=solution,
                           id=f"countdown/{seed}",
                           verifier=functools.partial(verify, numbers, target),
                           ), (target, *sorted(numbers))

        super().__init__(problem, train_seed_start=train_seed_start,
                         num_train_seeds=num_train_seeds, test_seed_start=test_seed_start,
                         num_test_seeds=num_test_seeds)


def puzzle(
    seed: int, counts: Sequence[int], max_number: int, max_target: int
) -> tuple[tuple[int, ...], int, str]:
    """Numbers, the target, and an expression that reaches it.

    Raises:
        ValueError: if hardly any expression of such numbers has a value that may be a target.
    """
    rng = random.Random(f"countdown/{seed}")
    for _ in range(_TRIES):
        numbers = [rng.randint(1, max_number) for _ in range(rng.choice(counts))]
        parts = [(number, str(number)) for number in numbers]
        while len(parts) > 1:
            rng.shuffle(parts)
            (a, left), (b, right) = sorted((parts.pop(), parts.pop()), reverse=True)
            signs = ["+", "-", "*", *(["/"] if b and a % b == 0 else [])]
            sign = rng.choice(signs)
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // (b or 1)}[sign]
            parts.append((value, f"({left} {sign} {right})"))
        value, text = parts[0]
        if 1 <= value <= max_target:
            return tuple(numbers), value, text[1:-1]
    raise ValueError(f"env.task.max_number={max_number}: none of {_TRIES:,} expressions of such "
                     f"numbers has a value from 1 to env.task.max_target={max_target} (seed "
                     f"{seed}); lower the one or raise the other")


def verify(numbers: Sequence[int], target: int, completion: str) -> float:
    """1.0, 0.1 or 0.0, see :class:`CountdownTask`."""
    try:
        value, used = evaluate(said(completion, longest=LONGEST) or "")
    except ValueError:
        return 0.0
    return 1.0 if value == target and Counter(used) == Counter(numbers) else 0.1


def evaluate(text: str) -> tuple[Fraction | None, list[int]]:
    """The value of an expression of whole numbers, ``+ - * /`` and parentheses, and the numbers in
    it; the value is None where it divides by zero. An ``=`` and what follows are left out.

    It is read token by token, by the rule that a stack of operators waits for those that bind
    tighter: nothing is executed, and nesting costs no recursion.

    Raises:
        ValueError: if it cannot be read.

    Examples:
        >>> evaluate("(7 + 3) * 2 = 20")
        (Fraction(20, 1), [7, 3, 2])
        >>> evaluate("1 / (2 - 2)")[0] is None
        True
        >>> evaluate("2 ** 9")
        Traceback (most recent call last):
        ...
        ValueError: '*' where a number is expected
    """
    values: list[Fraction | None] = []
    signs: list[str] = []
    used: list[int] = []
    wants_number = True
    for token in _tokens(text.translate(_OTHER_SIGNS).partition("=")[0].strip()):
        if wants_number != (token.isdigit() or token == "("):
            raise ValueError(f"{token!r} where {'a number' if wants_number else 'a sign'} is "
                             "expected")
        if token.isdigit():
            values.append(Fraction(token))
            used.append(int(token))
        elif token == "(":
            signs.append(token)
        elif token == ")":
            _apply_while(values, signs, lambda sign: sign != "(")
            if not signs:
                raise ValueError("a parenthesis is closed that was not opened")
            signs.pop()
        else:
            _apply_while(values, signs, lambda sign, token=token: sign in "*/" or (
                sign in "+-" and token in "+-"))
            signs.append(token)
        wants_number = token in "(+-*/"
    if wants_number or "(" in signs:
        raise ValueError("the expression does not end")
    _apply_while(values, signs, lambda sign: True)
    return values[0], used


def _tokens(text: str) -> list[str]:
    tokens = [match[1] or match[2] for match in _TOKEN.finditer(text)]
    for token in tokens:
        if not (token.isascii() and token.isdigit()) and token not in "+-*/()":
            raise ValueError(f"{token!r} is neither a number nor one of + - * / ( )")
    return tokens


def _apply_while(values: list[Fraction | None], signs: list[str], applies) -> None:
    while signs and applies(signs[-1]):
        b, a, sign = values.pop(), values.pop(), signs.pop()
        if a is None or b is None or (sign == "/" and not b):
            values.append(None)
        else:
            values.append(a + b if sign == "+" else a - b if sign == "-" else
                          a * b if sign == "*" else a / b)
