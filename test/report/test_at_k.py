"""pass@k and its relatives against what they mean: drawing subsets, counting, binomial tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.report.at_k import MEASURES, Samples, all_at_k, estimates, mcnemar


@st.composite
def small_samples(draw, most: int = 7):
    problems, n = draw(st.integers(1, 4)), draw(st.integers(1, most))
    answers = draw(st.lists(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=n,
                                     max_size=n), min_size=problems, max_size=problems))
    correct = np.array([[answer == "1" for answer in row] for row in answers])
    rewards = np.array(draw(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 2.0]), min_size=n,
                                              max_size=n), min_size=problems, max_size=problems)))
    return Samples(correct, rewards, answers)


def over_subsets(samples: Samples, k: int, value) -> list[float]:
    """The mean of a function of (correct, rewards, answers) over all subsets of each problem."""
    return [float(np.mean([value(samples.correct[p, list(some)], samples.rewards[p, list(some)],
                                 [samples.answers[p][i] for i in some])
                           for some in itertools.combinations(range(samples.n), k)]))
            for p in range(samples.problems)]


@given(samples=small_samples(), data=st.data())
def test_expectations_are_means_over_all_subsets(samples, data):
    k = data.draw(st.integers(1, samples.n))
    for name, value in {
            "pass": lambda correct, rewards, answers: correct.any(),
            "best": lambda correct, rewards, answers: rewards.max(),
            "distinct": lambda correct, rewards, answers: len({*answers} - {None})}.items():
        np.testing.assert_allclose(samples.per_problem(name, k), over_subsets(samples, k, value),
                                   atol=1e-12, err_msg=name)


def test_a_sample_without_a_reward_is_no_reward_of_zero():
    """It is left out of means, and is the lowest of all where the best is looked for."""
    none = math.nan
    rewards = np.array([[-1.0, none, -3.0], [none, -2.0, -2.0], [none, none, none]])
    samples = Samples(np.zeros((3, 3), bool), rewards)
    assert samples.per_problem("mean", 3).tolist() == [-2.0, -2.0, -3.0]
    assert samples.per_problem("mean", 1).tolist() == [-1.0, -2.0, -3.0]
    assert samples.per_problem("best", 3).tolist() == [-1.0, -2.0, -3.0]
    assert samples.per_problem("best", 1) == pytest.approx([-7 / 3, -7 / 3, -3.0])
    nothing = Samples(np.zeros((1, 2), bool), np.full((1, 2), none))
    assert nothing.per_problem("mean", 2) == nothing.per_problem("best", 2) == [0.0]


def by_votes(correct, rewards, answers) -> float:
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return first.count("1") / len(first) if first else 0.0


@given(samples=small_samples())
def test_the_majority_of_all_samples_is_that_of_the_votes(samples):
    np.testing.assert_allclose(samples.per_problem("majority", samples.n),
                               over_subsets(samples, samples.n, by_votes))


def test_the_majority_of_some_samples_is_near_the_mean_over_all_subsets():
    answers = [["1", "2", "1", None, "2", "3", "1", "1", "2", "2"]]
    samples = Samples(np.array([[a == "1" for a in answers[0]]]), np.zeros((1, 10)), answers)
    exact = over_subsets(samples, 5, by_votes)
    assert samples.per_problem("majority", 5) == pytest.approx(exact, abs=0.08)


def test_pass_at_k_is_what_drawing_finds():
    rng = np.random.default_rng(1)
    correct = rng.random((6, 64)) < np.array([0.0, 0.02, 0.1, 0.3, 0.8, 1.0])[:, None]
    for k in (1, 8, 32):
        drawn = np.stack([correct[:, rng.permutation(64)[:k]].any(1) for _ in range(4000)])
        spread = 4 * np.sqrt(0.25 / 4000)
        assert np.abs(Samples(correct).per_problem("pass", k) - drawn.mean(0)).max() < spread


@pytest.mark.slow
def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.zeros((1, 5000), bool)
    correct[0, 7] = True
    assert Samples(correct).per_problem("pass", 2500)[0] == pytest.approx(0.5)
    with np.errstate(all="raise"):
        assert Samples(correct).per_problem("best", 2500)[0] == pytest.approx(0.5)


@given(samples=small_samples())
def test_measures_agree_where_they_must(samples):
    n = samples.n
    of_all = [samples.per_problem(name, n) for name in ("pass", "pass_ordered", "coverage")]
    for other in of_all[1:]:
        np.testing.assert_allclose(other, of_all[0])
    np.testing.assert_allclose(samples.per_problem("pass", 1), samples.correct.mean(1))
    np.testing.assert_allclose(samples.per_problem("coverage", 1), samples.correct.mean(1))
    np.testing.assert_allclose(samples.per_problem("best", n), samples.rewards.max(1), atol=1e-12)
    for name in ("pass", "best", "distinct", "pass_ordered"):
        by_k = np.stack([samples.per_problem(name, k) for k in range(1, n + 1)])
        assert (np.diff(by_k, axis=0) >= -1e-12).all(), name


def test_blocks_of_samples_are_counted_each_by_itself():
    samples = Samples(np.array([[1, 0, 0, 0, 0], [0, 0, 0, 1, 1]], bool))
    assert samples.per_problem("coverage", 2).tolist() == [0.5, 0.5]
    assert samples.per_problem("pass_ordered", 2).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("k", [0, 5])
def test_more_samples_than_there_are_are_refused(name, k):
    samples = Samples(np.ones((2, 4), bool), answers=[["1"] * 4] * 2)
    with pytest.raises(ValueError, match=rf"{name}@{k} needs at least k=.* and there are n=4"):
        samples.per_problem(name, k)


@pytest.mark.parametrize(("options", "message"), [
    ({"correct": np.zeros((0, 3), bool)}, "shape"),
    ({"correct": np.ones((2, 3), bool), "rewards": np.ones((3, 2))}, "one of each sample"),
    ({"correct": np.ones((2, 3), bool), "answers": [["1"] * 3]}, "one of each sample"),
])
def test_arrays_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Samples(**options)


def test_without_answers_only_what_needs_them_is_left_out():
    names = all_at_k(Samples(np.ones((2, 4), bool)), [1, 4])
    assert {name.partition("@")[0] for name in names} == set(MEASURES) - {"majority", "distinct"}


def test_intervals_cover_the_truth_about_as_often_as_they_say_and_repeat():
    rng, inside = np.random.default_rng(3), 0
    for _ in range(200):
        found = estimates({"x": (rng.random(100) < 0.3).astype(float)}, resamples=400)["x"]
        inside += found.low <= 0.3 <= found.high
    assert 0.88 <= inside / 200 <= 0.99
    values = {"x": rng.random(50)}
    assert estimates(values, seed=4) == estimates(values, seed=4) != estimates(values, seed=5)


@given(first=st.integers(0, 40), second=st.integers(0, 40))
def test_mcnemar_is_the_two_sided_binomial_test(first, second):
    total = first + second
    chance = [math.comb(total, i) / 2**total for i in range(total + 1)]
    as_rare = sum(p for i, p in enumerate(chance) if abs(i - total / 2) >= abs(first - total / 2))
    assert mcnemar(first, second) == pytest.approx(min(1.0, as_rare))
    assert mcnemar(first, second) == mcnemar(second, first)
