"""Tests of the arithmetic task: layout, splits, and the slips of its wrong solutions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.envs.rewards import exact_match
from grpo.envs.tasks import ArithmeticTask, Problem

OPERATORS = ("+", "-", "*")


def operands(problem):
    """``(a, operator, b)`` read back from the prompt."""
    a, operator, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", problem.prompt).groups()
    return int(a), operator, int(b)


@st.composite
def tasks(draw):
    """Small tasks that use up all, or nearly all, problems there are."""
    max_operand = draw(st.integers(1, 14))
    operators = draw(st.lists(st.sampled_from(OPERATORS), min_size=1, unique=True))
    total = (max_operand + 1) ** 2 * len(operators)
    num_test = draw(st.integers(0, total - 1))
    return {"max_operand": max_operand, "operators": operators, "num_test": num_test,
            "seed": draw(st.integers(0, 2**32)),
            "num_train": draw(st.integers(0, total - num_test - 1))}


class TestProblems:
    def test_defaults_give_two_digit_sums(self):
        task = ArithmeticTask()
        assert (len(task.train), len(task.test)) == (2200, 256)
        assert {(len(p.prompt), len(p.answer)) for p in task.train + task.test} == {(6, 2)}

    @pytest.mark.parametrize(("max_operand", "operators", "triple", "prompt", "answer"), [
        (49, "+", (7, "+", 5), "07+05=", "12"),
        (49, "+", (0, "+", 0), "00+00=", "00"),
        (99, "+", (7, "+", 5), "07+05=", "012"),
        (99, "+", (99, "+", 99), "99+99=", "198"),
        (9, "-", (3, "-", 9), "3-9=", "-6"),
        (99, "-", (3, "-", 9), "03-09=", "-06"),
        (99, "+-", (3, "-", 9), "03-09=", "-006"),
        (49, "*", (49, "*", 49), "49*49=", "2401"),
        (49, "+-*", (7, "+", 5), "07+05=", "0012")])
    def test_numbers_have_fixed_widths(self, max_operand, operators, triple, prompt, answer):
        task = ArithmeticTask(
            max_operand=max_operand, operators=operators, num_train=10, num_test=10)
        problem = task.problem(*triple)
        assert (problem.prompt, problem.answer) == (prompt, answer)

    @given(tasks())
    def test_answers_are_right(self, options):
        task = ArithmeticTask(**options)
        for problem in task.train + task.test:
            a, operator, b = operands(problem)
            assert int(problem.answer) == {"+": a + b, "-": a - b, "*": a * b}[operator]
            assert max(a, b) <= options["max_operand"]
            assert len(problem.answer.removeprefix("-")) == task.answer_width


class TestSplits:
    @given(tasks())
    def test_sizes_are_as_asked_and_no_problem_occurs_twice(self, options):
        task = ArithmeticTask(**options)
        assert (len(task.train), len(task.test)) == (options["num_train"], options["num_test"])
        ids = [problem.id for problem in task.train + task.test]
        assert len(ids) == len(set(ids))

    @given(tasks())
    def test_train_and_test_share_no_problem_even_mirrored(self, options):
        task = ArithmeticTask(**options)
        train, test = (
            {(op, *sorted((a, b))) for a, op, b in map(operands, split)}
            for split in (task.train, task.test))
        assert not train & test

    @given(tasks())
    def test_same_seed_gives_the_same_problems(self, options):
        one, other = ArithmeticTask(**options), ArithmeticTask(**options)
        assert (one.train, one.test) == (other.train, other.test)

    def test_another_seed_gives_another_split(self):
        one, other = ArithmeticTask(seed=1), ArithmeticTask(seed=2)
        assert set(one.test) != set(other.test)

    def test_test_split_does_not_depend_on_the_number_of_training_problems(self):
        assert ArithmeticTask(num_train=5).test == ArithmeticTask(num_train=2000).test

    def test_all_problems_can_be_used(self):
        task = ArithmeticTask(max_operand=4, num_train=25, num_test=0)
        assert {operands(p)[::2] for p in task.train} == {
            (a, b) for a in range(5) for b in range(5)}


class TestErrors:
    @pytest.mark.parametrize(("options", "message"), [
        ({"num_train": 2400}, "num_train=2400 and num_test=256.* 2500 problems"),
        ({"max_operand": 9, "num_train": 0, "num_test": 101}, "num_test=101.* 100 problems")])
    def test_too_many_problems_names_how_many_there_are(self, options, message):
        with pytest.raises(ValueError, match=message):
            ArithmeticTask(**options)

    @pytest.mark.parametrize("options", [
        {"max_operand": 0}, {"max_operand": 1000}, {"max_operand": 4.5}, {"operators": ()},
        {"operators": ("/",)}, {"operators": ("+", "+")}, {"seed": None}, {"num_train": -1},
        {"num_test": True}])
    def test_bad_option_is_named(self, options):
        with pytest.raises(ValueError, match=next(iter(options))):
            ArithmeticTask(**options)


class TestSlip:
    @pytest.mark.parametrize(("triple", "expected"), [
        ((17, "+", 25), "0032"),  # 7+5 -> 2, 1+2 -> 3
        ((49, "+", 49), "0088"),
        ((42, "-", 17), "0035"),  # 2-7 -> 5, 4-1 -> 3
        ((17, "-", 42), "-0035"),
        ((12, "*", 15), "0170"),  # 10 -> 0, 5+2 -> 7, 1
        ((49, "*", 49), "0621"),  # 81 -> 1, 36+36 -> 2, 16 -> 6
    ])
    def test_what_should_be_carried_is_dropped(self, triple, expected):
        task = ArithmeticTask(operators=OPERATORS)
        assert task.slip(task.problem(*triple)) == expected

    @given(tasks())
    def test_has_the_form_of_the_answer(self, options):
        task = ArithmeticTask(**options)
        for problem in task.train[:50]:
            slip = task.slip(problem)
            assert len(slip) == len(problem.answer)
            assert slip.startswith("-") == problem.answer.startswith("-")
            assert slip.removeprefix("-").isdecimal()

    @given(st.integers(0, 49), st.integers(0, 49))
    def test_a_sum_is_wrong_exactly_where_something_is_carried(self, a, b):
        task = ArithmeticTask()
        problem = task.problem(a, "+", b)
        carries = a % 10 + b % 10 >= 10
        assert exact_match(task.slip(problem), problem).success != carries

    def test_refuses_a_problem_of_another_kind(self):
        chat = Problem(prompt=({"role": "user", "content": "1+1=?"},), answer="2", id="p7")
        with pytest.raises(ValueError, match="'p7' is no arithmetic problem"):
            ArithmeticTask().slip(chat)
