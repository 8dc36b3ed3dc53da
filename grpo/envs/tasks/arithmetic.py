"""Integer arithmetic as text: small enough to learn on a CPU, exact to verify."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence

from grpo.envs.tasks.base import Problem, Task, check_count, register_task

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
#: All pairs of operands are enumerated, so their number has to stay within memory.
MAX_OPERAND = 999


@register_task("arithmetic")
class ArithmeticTask(Task):
    """Sums, differences and products of two numbers, such as ``"07+35="`` with answer ``"42"``.

    All pairs of operands are enumerated, shuffled by ``seed`` and split. A problem and its mirror
    image (``07+35`` and ``35+07``) never fall on different sides, so the test split measures more
    than memory. The test split does not depend on ``num_train``.

    Every number has a fixed width, zero-padded: operands have the digits of ``max_operand``
    (``operand_width``), answers those of the largest result over all ``operators``
    (``answer_width``). A negative answer has a ``-`` before its digits.

    Args:
        max_operand: largest operand, 1 to 999; the smallest is 0.
        operators: any of ``"+"``, ``"-"``, ``"*"``.
        seed: of the shuffle.
        num_train: size of the training split.
        num_test: size of the test split.

    Raises:
        ValueError: if an option is out of range, or more problems are asked for than exist.

    Examples:
        >>> task = ArithmeticTask(max_operand=99, num_train=9000, num_test=500)
        >>> task.operand_width, task.answer_width
        (2, 3)
        >>> task.problem(7, "+", 35)
        Problem(prompt='07+35=', answer='042', id='arithmetic/07+35')
    """

    default_reward = "exact_match"

    def __init__(
        self, *, max_operand: int = 49, operators: Sequence[str] = ("+",), seed: int = 0,
        num_train: int = 2200, num_test: int = 256,
    ) -> None:
        check_count("max_operand", max_operand, minimum=1)
        if max_operand > MAX_OPERAND:
            raise ValueError(f"max_operand={max_operand} must be at most {MAX_OPERAND}")
        operators = tuple(operators)
        if not operators or set(operators) - set(OPERATORS) or len(set(operators)) < len(operators):
            raise ValueError(
                f"{operators=} must be one or more distinct entries of {tuple(OPERATORS)}")
        check_count("seed", seed)
        check_count("num_train", num_train)
        check_count("num_test", num_test)

        largest = max(abs(OPERATORS[sign](a, max_operand))
                      for sign in operators for a in (0, max_operand))
        self.operand_width, self.answer_width = len(str(max_operand)), len(str(largest))
        rng = random.Random(seed)
        numbers = range(max_operand + 1)
        families = [(sign, a, b) for sign in operators for a in numbers for b in numbers[a:]]
        rng.shuffle(families)
        triples = [t for sign, a, b in families for t in sorted({(a, sign, b), (b, sign, a)})]
        test, rest = triples[:num_test], triples[num_test:]
        if test and rest and rest[0] == test[-1][::-1]:
            del rest[0]  # the cut went between mirror images: the second one belongs to no split
        if len(test) < num_test or len(rest) < num_train:
            raise ValueError(
                f"{num_train=} and {num_test=}, but {max_operand=} with {operators=} gives "
                f"{len(triples)} problems, of which {len(rest)} are left for training; "
                "lower num_train or num_test, or raise max_operand")
        rng.shuffle(test)  # mirror images are neighbours until here
        rng.shuffle(rest)
        super().__init__(
            train=[self.problem(*triple) for triple in rest[:num_train]],
            test=[self.problem(*triple) for triple in test],
            source=f"all a {' '.join(operators)} b with 0 <= a, b <= {max_operand}")

    def problem(self, a: int, sign: str, b: int) -> Problem:
        """The problem ``a sign b``, laid out as everywhere in this task."""
        text = f"{a:0{self.operand_width}d}{sign}{b:0{self.operand_width}d}"
        answer = self._format(OPERATORS[sign](a, b))
        return Problem(prompt=f"{text}=", answer=answer, id=f"arithmetic/{text}")

    def slip(self, problem: Problem) -> str:
        """The answer of someone who forgets to carry; the right one where nothing is carried.

        Warm-starting a fresh model on a mix of slips and right answers gives it the format, a
        systematic mistake, and something left to learn from rewards. A slip is as wide as the
        answer and has its sign. Each column is computed modulo 10: sums without the carry
        (``17+25 -> 32``), larger minus smaller without the borrow (``42-17 -> 35``), and partial
        products without the carry (``12*15 -> 170``).

        Raises:
            ValueError: if the prompt is no arithmetic problem.

        Examples:
            >>> task = ArithmeticTask()
            >>> task.slip(task.problem(17, "+", 25)), task.slip(task.problem(12, "+", 25))
            ('32', '37')
        """
        match = re.fullmatch(r"([0-9]+)([-+*])([0-9]+)=", str(problem.prompt))
        if match is None:
            raise ValueError(f"problem {problem.id!r} is no arithmetic problem: {problem.prompt!r}")
        (a, b), sign = sorted((match[1], match[3]), reverse=True), match[2]
        high, low = ([int(digit) for digit in reversed(number)] for number in (a, b))
        columns = [0] * (len(high) + len(low))
        for i, x in enumerate(high):
            if sign == "*":
                for j, y in enumerate(low):
                    columns[i + j] += x * y
            else:
                columns[i] = OPERATORS[sign](x, low[i])
        magnitude = sum(column % 10 * 10**place for place, column in enumerate(columns))
        return self._format(-magnitude if problem.answer.startswith("-") else magnitude)

    def _format(self, number: int) -> str:
        return f"{'-' * (number < 0)}{abs(number):0{self.answer_width}d}"
