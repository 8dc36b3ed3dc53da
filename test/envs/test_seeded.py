"""Tasks whose problems are made from seeds: 3-SAT and countdown."""

from __future__ import annotations

import itertools
import re
import time
from fractions import Fraction

import pytest

from grpo.envs.tasks import countdown, make_task, sat

NAMES = ("sat", "countdown")


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_a_problem_wherever_the_range_begins(name):
    first = make_task(name, train_seed_start=5, num_train_seeds=30, num_test_seeds=3)
    later = make_task(name, train_seed_start=15, num_train_seeds=10, num_test_seeds=3)
    by_id = {problem.id: problem for problem in first.train}
    assert later.train and all(by_id[problem.id] == problem for problem in later.train)
    assert first.test == later.test and len(first.test) == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_problem_has_the_solution_that_was_planted(name):
    task = make_task(name, num_train_seeds=120, num_test_seeds=30)
    for problem in task.train + task.test:
        assert problem.verifier(f"<think>?</think><answer>{problem.answer}</answer>") == 1.0
        assert problem.verifier(problem.answer) == 0.0  # which is no answer block


@pytest.mark.parametrize("name", NAMES)
def test_no_training_problem_asks_what_a_held_out_one_does(name):
    small = {"sat": {"difficulty": 0}, "countdown": {"num_numbers": 2, "max_number": 3}}[name]
    task = make_task(name, num_train_seeds=500, num_test_seeds=50, **small)
    asked = [{p.prompt[-1]["content"] for p in split} for split in (task.train, task.test)]
    assert not asked[0] & asked[1]
    assert 0 < len(task.train) <= 500 and len(task.test) == 50


@pytest.mark.parametrize("name, options", [
    ("sat", {"difficulty": 0}), ("countdown", {"num_numbers": 2, "max_number": 20})])
def test_a_held_out_problem_in_another_order_is_no_training_problem(name, options):
    task = make_task(name, num_train_seeds=500, **options)

    def content(problem):  # in an order of its own, read from the question
        question = problem.prompt[-1]["content"]
        if name == "sat":
            return frozenset(frozenset(re.findall(r"(?:not )?x[0-9]", clause))
                             for clause in question.splitlines()[1:])
        target, *numbers = map(int, re.findall("[0-9]+", question))
        return target, *sorted(numbers)

    train, test = ({content(problem) for problem in split} for split in (task.train, task.test))
    assert train and len(task.test) == 100 and not train & test


@pytest.mark.parametrize("name, options, message", [
    *((name, {"train_seed_start": 10, "num_train_seeds": 5, "test_seed_start": 14},
       "seeds 10 to 14 for training and 14 to 113 held out have problems in common")
      for name in NAMES),
    *((name, {"num_train_seeds": -1}, "env.task.num_train_seeds=-1 must be an integer")
      for name in NAMES),
    ("sat", {"difficulty": 6}, "env.task.difficulty=6 must be at most 5"),
    ("countdown", {"num_numbers": 9}, "env.task.num_numbers=9 must be 2 to 8"),
    ("countdown", {"num_numbers": 1}, "env.task.num_numbers=1 must be an integer of at least 2"),
    ("countdown", {"max_target": 3}, "env.task.max_target=3 must be an integer of at least 10")])
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


# -- 3-SAT ----------------------------------------------------------------------------------------


def test_difficulty_goes_with_the_seed_or_is_the_same_for_all():
    for seed, (variables, ratio) in enumerate(sat.LEVELS):
        count, clauses, _ = sat.formula(seed + 6)
        assert (count, len(clauses)) == (variables, round(ratio * variables))
    assert {sat.formula(seed, 2)[0] for seed in range(9)} == {8}
    assert all(len({abs(literal) for literal in clause}) == 3 for clause in sat.formula(5)[1])


def test_exactly_the_assignments_that_satisfy_every_clause_are_right():
    variables, clauses, _ = sat.formula(0)
    for values in itertools.product((False, True), repeat=variables):
        answer = ", ".join(f"x{i}={value:d}" for i, value in enumerate(values, 1))
        by_hand = all(any(values[abs(x) - 1] == (x > 0) for x in clause) for clause in clauses)
        assert sat.verify(variables, clauses, f"<answer>{answer}</answer>") == by_hand


@pytest.mark.parametrize("answer, right", [
    ("x1=1, x2=0, x3=1", True), ("X1 = True; x2=FALSE\nx3=1", True), ("x3=1 x2=0 x1=1 x1=1", True),
    ("x1=1, x2=0", False), ("x1=1, x2=0, x3=1, x1=0", False), ("x1=1, x2=0, x3=1, x4=1", False),
    ("x1=1, x2=0, x3=10", False), ("x1=1, x2=0, x3=1 or not", False), ("", False),
    ("x1=1, x2=0, x3=1" + " " * 3000, True), ("x1=1," * 1000, False)])
def test_answers_are_assignments_and_nothing_else(answer, right):
    assert sat.verify(3, [(1, -2, 3)], f"<answer>{answer}</answer>") == right


# -- countdown ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, reward", [
    ("(7 + 3) * 2", 1.0), ("2*(3+7) = 20", 1.0), ("(7 + 3) × 2", 1.0), ("((7+3)*(2))", 1.0),
    ("7 + 3 * 2", 0.1), ("20", 0.1), ("7 + 3 + 2 * 5", 0.1), ("(7 + 3) * 2 * 1", 0.1),
    ("7 / (3 - 3)", 0.1), ("(7 + 3) * 2)", 0.0), ("((7 + 3) * 2", 0.0), ("7 3 2", 0.0),
    ("2 ** 3 ** 7", 0.0), ("__import__('os')", 0.0), ("7 + 3 twice", 0.0), ("", 0.0),
    ("-7", 0.0), ("٧", 0.0)])
def test_an_expression_is_worth_its_value_and_its_numbers(answer, reward):
    assert countdown.verify([3, 2, 7], 20, f"<answer>{answer}</answer>") == reward


def test_expressions_have_the_values_that_python_gives_them():
    signs = "+-*/"
    for a, b, c in itertools.product(signs, repeat=3):
        for text in (f"8{a}3{b}5{c}2", f"(8{a}3){b}(5{c}2)", f"8{a}(3{b}(5{c}2))"):
            wrapped = text
            for number in "8352":
                wrapped = wrapped.replace(number, f"Fraction({number})")
            try:
                expected = eval(wrapped, {"Fraction": Fraction})
            except ZeroDivisionError:
                expected = None
            assert countdown.evaluate(text)[0] == expected


@pytest.mark.parametrize("options", [
    {"max_number": 10**9}, {"max_number": 10**6, "num_numbers": 2}])
def test_numbers_that_hardly_ever_reach_a_target_are_refused(options):
    start = time.process_time()
    with pytest.raises(ValueError, match=f"env.task.max_number={options['max_number']}.*"
                                         "env.task.max_target=10 .*lower the one or raise"):
        make_task("countdown", max_target=10, **options)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("piece", ["1", "(", ")", "1+", "(1+", "9*9*", " ", "x1=1,", "\x00"])
@pytest.mark.parametrize("name", NAMES)
def test_no_answer_takes_a_second(name, piece):
    problem = make_task(name, num_train_seeds=1, num_test_seeds=0).train[0]
    text, start = piece * (10**6 // len(piece)), time.process_time()
    for response in (text, f"<answer>{text}</answer>", f"<answer>{text[:480]}</answer>"):
        assert problem.verifier(response) <= 0.1
    assert time.process_time() - start < 1
