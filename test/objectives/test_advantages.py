"""Group-relative advantages against loops in NumPy."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from grpo import GroupAdvantage
from grpo.objectives import group_advantages

ESTIMATORS = ("group_norm", "group_norm_population", "group_mean", "rloo")
# Reward, group and validity of each row; group ids are neither sorted nor consecutive.
ROWS = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.sampled_from([-3, 0, 1, 10**12]), st.booleans()),
    min_size=1, max_size=16)


def columns(rows):
    rewards, groups, valid = zip(*rows, strict=True)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid)


def loops(rows, estimator, eps):
    out = []
    for i, (reward, group, valid) in enumerate(rows):
        rewards = np.array([r for r, g, v in rows if g == group and v])
        others = np.array([r for j, (r, g, v) in enumerate(rows) if g == group and v and j != i])
        if not valid or len(rewards) < 2:
            out.append(0.0)
        elif estimator == "rloo":
            out.append(reward - others.mean())
        else:
            scale = {"group_norm": rewards.std(ddof=1) + eps,
                     "group_norm_population": rewards.std() + eps, "group_mean": 1.0}[estimator]
            out.append((reward - rewards.mean()) / scale)
    return torch.tensor(out, dtype=torch.float32)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=ROWS, eps=st.sampled_from([1e-4, 1e-6, 0.5]))
def test_equals_loops_over_groups(estimator, rows, eps):
    rewards, groups, valid = columns(rows)
    actual = group_advantages(rewards, groups, estimator=estimator, eps=eps, valid_B=valid)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, loops(rows, estimator, eps), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=ROWS, order=st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_rows(estimator, rows, order):
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    rewards, groups, valid = columns(rows)
    expected = group_advantages(rewards, groups, estimator=estimator, valid_B=valid)[permutation]
    actual = group_advantages(rewards[permutation], groups[permutation], estimator=estimator,
                              valid_B=valid[permutation])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=ROWS, shift=st.integers(-4, 4))
def test_does_not_depend_on_a_common_reward(estimator, rows, shift):
    rewards, groups, valid = columns(rows)
    rewards = rewards.double()
    one, other = (group_advantages(r, groups, estimator=estimator, valid_B=valid)
                  for r in (rewards, rewards + shift))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_zero(estimator):
    rewards, groups = torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 2])
    advantage = group_advantages(rewards, groups, estimator=estimator)
    assert advantage.abs().max() < 1e-6


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e9])
def test_invalid_rows_get_zero_and_are_left_out_of_their_group(estimator, junk):
    rewards, groups = torch.tensor([1.0, junk, 0.0, 0.5]), torch.tensor([0, 0, 0, 0])
    valid = torch.tensor([True, False, True, True])
    advantage = group_advantages(rewards, groups, estimator=estimator, valid_B=valid)
    alone = group_advantages(rewards[valid], groups[valid], estimator=estimator)
    assert advantage[1] == 0
    assert torch.equal(advantage[valid], alone) and alone[0] > 0


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_a_valid_reward_that_is_not_finite_is_an_error_naming_the_row(junk):
    with pytest.raises(ValueError, match=r"rows \[2\].*reward_error"):
        group_advantages(torch.tensor([1.0, 0.0, junk]), torch.zeros(3, dtype=torch.int64))


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="'gae'.*rloo"):
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), estimator="gae")
    with pytest.raises(ValueError, match="'gae'.*rloo"):
        GroupAdvantage(estimator="gae")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_module_reads_errors_and_passes_its_options_on(estimator):
    td = TensorDict({
        "next": {"reward": torch.tensor([[1.0], [0.0], [torch.nan], [3.0]]),
                 "reward_error": torch.tensor([[False], [False], [True], [False]])},
        "group_id": torch.tensor([5, 5, 5, 5])}, [4])
    expected = group_advantages(torch.tensor([1.0, 0.0, 3.0]), torch.zeros(3, dtype=torch.int64),
                                estimator=estimator, eps=0.5)
    out = GroupAdvantage(estimator=estimator, eps=0.5)(td)
    assert out["advantage"].shape == (4, 1)
    assert torch.equal(out["advantage"][[0, 1, 3], 0], expected) and out["advantage"][2] == 0
    bare = GroupAdvantage(estimator=estimator, eps=0.5)(td[[0, 1, 3]].exclude(
        ("next", "reward_error")))
    assert torch.equal(bare["advantage"][:, 0], expected)
