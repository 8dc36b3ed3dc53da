"""Reward shaping, clipping and group filters against plain Python in float64."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from grpo.objectives.shaping import (
    clip_to_percentiles,
    distillation_advantages,
    informative_groups,
    kl_in_reward,
    overlong_penalty,
)

from .test_advantages import columns

# Reward, group and validity of each row; few distinct rewards, so that groups of equals occur.
REWARDS = st.sampled_from([0.0, 0.1, 1.0, -3.0, 1e-30]) | st.floats(-5, 5, width=32)
ROWS = st.lists(st.tuples(REWARDS, st.sampled_from([-3, 0, 10**12]), st.booleans()),
                min_size=1, max_size=12)


class TestOverlongPenalty:
    @given(length=st.integers(0, 60), limit=st.integers(2, 50), data=st.data())
    def test_equals_equation_13_of_dapo(self, length, limit, data):
        buffer = data.draw(st.integers(1, limit - 1))
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - buffer) - length) / buffer
        else:
            expected = -1.0
        actual = overlong_penalty(torch.tensor([length]), max_response_tokens=limit, buffer=buffer)
        assert actual.dtype == torch.float64 and actual.tolist() == [pytest.approx(expected)]


class TestKLInReward:
    @pytest.mark.parametrize("estimator, formula", [
        ("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)])
    def test_is_the_estimate_of_sampled_tokens(self, estimator, formula):
        log_probs = [[-1.0, -2.0, -0.5, -7.0], [-0.25, -1.5, -3.0, -1.0]]
        reference = [[-1.5, -1.0, -0.75, -7.0], [-2.0, -0.5, -3.5, -1.0]]
        mask = [[False, True, True, False], [True, True, True, True]]
        expected = [[formula(p - q) if m else 0.0 for p, q, m in zip(*row, strict=True)]
                    for row in zip(log_probs, reference, mask, strict=True)]
        actual = kl_in_reward(torch.tensor(log_probs), torch.tensor(reference),
                              torch.tensor(mask), estimator=estimator)
        assert actual.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]

    @pytest.mark.parametrize("junk", [math.nan, -math.inf])
    def test_ignores_what_the_reference_leaves_on_prompt_and_padding(self, junk):
        actual = kl_in_reward(torch.tensor([[0.0, -1.0], [0.0, 0.0]]),
                              torch.tensor([[junk, -3.0], [junk, junk]]),
                              torch.tensor([[False, True], [False, False]]), estimator="k3")
        assert actual.tolist() == [[0.0, pytest.approx(math.exp(-2) + 1)], [0.0, 0.0]]


class TestInformativeGroups:
    @given(rows=ROWS)
    def test_is_where_the_standard_deviation_is_not_zero(self, rows):
        expected = []
        for _, group, _ in rows:
            rewards = [float(np.float32(r)) for r, g, v in rows if g == group and v]
            # statistics computes in exact fractions: no rounding error of its own.
            expected.append(len(rewards) > 1 and statistics.pvariance(map(Fraction, rewards)) > 0)
        assert informative_groups(*columns(rows)).tolist() == expected

    def test_rewards_equal_up_to_rounding_teach_nothing(self):
        nearly = torch.tensor([0.1 + 0.2, 0.3, -1e6, -1e6 * (1 + 1e-9)], dtype=torch.float64)
        assert nearly[0] != nearly[1] and nearly[2] != nearly[3]
        groups, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
        assert informative_groups(nearly, groups, valid).tolist() == [False] * 4

    def test_small_rewards_that_differ_are_informative(self):
        groups, valid = torch.zeros(2).long(), torch.ones(2, dtype=torch.bool)
        assert informative_groups(torch.tensor([1e-12, 2e-12]), groups, valid).all()

    def test_a_row_without_reward_does_not_make_its_group_informative(self):
        rewards = torch.tensor([1.0, math.nan, 1.0, 0.0, 2.0])
        groups = torch.tensor([0, 0, 0, 1, 1])
        valid = torch.tensor([True, False, True, False, True])
        assert informative_groups(rewards, groups, valid).tolist() == [False] * 5
        rewards[2] = 3.0
        assert informative_groups(rewards, groups, valid).tolist() == [True] * 3 + [False] * 2

    def test_a_valid_reward_that_is_not_finite_is_an_error(self):
        with pytest.raises(ValueError, match=r"rows \[1\]"):
            informative_groups(torch.tensor([1.0, math.nan]), torch.zeros(2).long(),
                               torch.ones(2, dtype=torch.bool))


class TestClipToPercentiles:
    @given(rows=ROWS, percentile=st.floats(0.1, 49.9))
    def test_equals_clipping_in_numpy(self, rows, percentile):
        values, _, valid = columns(rows)
        expected = values.double().numpy().copy()
        if valid.any():
            known = expected[valid.numpy()]
            low, high = np.percentile(known, [percentile, 100 - percentile])
            expected[valid.numpy()] = known.clip(low, high)
        actual = clip_to_percentiles(values, percentile, valid=valid)
        assert actual.dtype == values.dtype
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-12)


class TestDistillationAdvantages:
    def test_equals_the_formula_on_each_token(self):
        log_probs = torch.tensor([[-9.0, -1.0, -2.0], [-0.5, -0.25, -9.0]])
        teacher = torch.tensor([[math.nan, -0.5, -4.0], [-1.5, -0.25, -math.inf]])
        mask = torch.tensor([[False, True, True], [True, True, False]])
        actual = distillation_advantages(torch.tensor([[1.0], [-2.0]]), log_probs, teacher, mask,
                                         coeff=0.5)
        assert actual.dtype == torch.float32
        assert actual.tolist() == [[0.0, 1.25, 0.0], [-2.5, -2.0, 0.0]]

    def test_a_token_that_the_teacher_did_not_score_is_an_error_naming_the_row(self):
        teacher = torch.tensor([[-1.0, -1.0], [-1.0, -math.inf]])
        with pytest.raises(ValueError, match=r"rows \[1\].*teacher"):
            distillation_advantages(torch.zeros(2, 1), -torch.ones(2, 2), teacher,
                                    torch.ones(2, 2, dtype=torch.bool), coeff=1.0)
