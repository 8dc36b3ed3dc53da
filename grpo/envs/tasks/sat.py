"""3-SAT: an assignment of truth values under which every clause holds.

Each problem is made from a seed of its own and has a solution, because a hidden assignment is drawn
first and clauses that it breaks are left out. The harder ones have more variables, and more clauses
for each, up to the 4.27 at which random 3-SAT turns from mostly solvable to mostly not (Crawford &
Auton, *Experimental results on the crossover point in random 3-SAT*, 1996).
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Hashable, Sequence

from grpo.envs.tasks.base import Problem, check_count, register_task
from grpo.envs.tasks.seeded import SeededTask, messages, said

#: Variables and clauses for each of them, by difficulty.
LEVELS = ((3, 2.0), (5, 2.5), (8, 3.0), (12, 3.5), (20, 4.0), (30, 4.27))
SYSTEM_PROMPT = (
    "Find truth values that make every clause true. Write your reasoning between <think> and "
    "</think>, then the values of all variables between <answer> and </answer>, such as "
    "<answer>x1=1, x2=0, x3=1</answer>."
)
_VALUE = re.compile(r"x([0-9]{1,3})\s*=\s*(1|0|true|false)\b", re.IGNORECASE)
_PARTING = re.compile(r"[\s,;]*")
Clause = tuple[int, int, int]


@register_task("sat")
class SatTask(SeededTask):
    """Seeded 3-SAT. A seed decides the problem and, with ``difficulty`` null, how hard it is:
    seeds go through the levels in turn. The reward is 1 if the answer satisfies every clause and
    0 otherwise; any such assignment is right.

    Args:
        train_seed_start: first seed of the training problems.
        num_train_seeds: how many there are.
        test_seed_start: first seed of the held-out problems.
        num_test_seeds: how many there are.
        difficulty: of all problems, from 0 to 5, in place of the seed's own: 3 variables and 6
            clauses to 30 variables and 128 clauses.
        system_prompt: first message; None: the question stands alone.

    Raises:
        ValueError: if the seeds of the splits meet, or an option is out of range.

    Examples:
        >>> task = SatTask(num_train_seeds=1, num_test_seeds=0, difficulty=0)
        >>> print(task.train[0].prompt[-1]["content"])
        Variables: x1, x2, x3. Clauses:
        (x3 or not x2 or not x1)
        (x1 or not x3 or x2)
        (x1 or x2 or x3)
        (x3 or x1 or not x2)
        (x1 or x2 or x3)
        (not x3 or x2 or not x1)
    """

    def __init__(
        self, *, train_seed_start: int = 1000, num_train_seeds: int = 1000,
        test_seed_start: int = 1_000_000, num_test_seeds: int = 100, difficulty: int | None = None,
        system_prompt: str | None = SYSTEM_PROMPT,
    ) -> None:
        if difficulty is not None:
            check_count("env.task.difficulty", difficulty)
            if difficulty >= len(LEVELS):
                raise ValueError(f"env.task.difficulty={difficulty} must be at most "
                                 f"{len(LEVELS) - 1}; null takes that of the seed")

        def problem(seed: int) -> tuple[Problem, Hashable]:
            variables, clauses, hidden = formula(seed, difficulty)
            names = ", ".join(f"x{number}" for number in range(1, variables + 1))
            question = "\n".join([f"Variables: {names}. Clauses:", *map(_text, clauses)])
            return Problem(
                prompt=messages(system_prompt, question), answer=_assignment_text(hidden),
                id=f"sat/{seed}", verifier=functools.partial(verify, variables, clauses),
            ), (variables, frozenset(map(frozenset, clauses)))

        super().__init__(problem, train_seed_start=train_seed_start,
                         num_train_seeds=num_train_seeds, test_seed_start=test_seed_start,
                         num_test_seeds=num_test_seeds)


def formula(
    seed: int, difficulty: int | None = None
) -> tuple[int, tuple[Clause, ...], tuple[bool, ...]]:
    """Number of variables, clauses, and an assignment that satisfies them.

    A clause holds three numbers of variables, negative where they are negated.
    """
    rng = random.Random(f"sat/{seed}")
    variables, ratio = LEVELS[seed % len(LEVELS) if difficulty is None else difficulty]
    hidden = tuple(rng.random() < 0.5 for _ in range(variables))
    clauses: list[Clause] = []
    while len(clauses) < round(ratio * variables):
        chosen = rng.sample(range(1, variables + 1), 3)
        clause = tuple(number if rng.random() < 0.5 else -number for number in chosen)
        if satisfies(hidden, [clause]):
            clauses.append(clause)
    return variables, tuple(clauses), hidden


def satisfies(values: Sequence[bool], clauses: Sequence[Clause]) -> bool:
    """Whether each clause has a literal that is true."""
    return all(any(values[abs(literal) - 1] == (literal > 0) for literal in clause)
               for clause in clauses)


def verify(variables: int, clauses: Sequence[Clause], completion: str) -> float:
    """1.0 if the answer gives every variable one value, and they satisfy every clause."""
    values = _parsed(said(completion) or "")
    if values.keys() != set(range(1, variables + 1)):
        return 0.0
    return float(satisfies([values[number] for number in sorted(values)], clauses))


def _parsed(answer: str) -> dict[int, bool]:
    """Values by the number of the variable; none if a variable has two, or anything else is said.
    """
    values: dict[int, bool] = {}
    position = _PARTING.match(answer).end()
    while position < len(answer):
        match = _VALUE.match(answer, position)
        if match is None:
            return {}
        value = match[2].lower() in ("1", "true")
        if values.setdefault(int(match[1]), value) != value:
            return {}
        position = _PARTING.match(answer, match.end()).end()
    return values


def _assignment_text(values: Sequence[bool]) -> str:
    return ", ".join(f"x{number}={value:d}" for number, value in enumerate(values, start=1))


def _text(clause: Clause) -> str:
    literals = (f"x{literal}" if literal > 0 else f"not x{-literal}" for literal in clause)
    return f"({' or '.join(literals)})"
