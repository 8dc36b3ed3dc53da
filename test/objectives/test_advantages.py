"""Advantages and the module around them against loops in plain Python and NumPy."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from grpo import GRPOLoss, data, total_loss
from grpo.objectives.advantages import DEFAULT_EPS, GroupAdvantage, group_advantages
from grpo.objectives.estimators import AdvantageEstimator

ESTIMATORS = get_args(AdvantageEstimator)
# Reward, group and validity of each row; group ids are neither sorted nor consecutive.
ROWS = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.sampled_from([-3, 0, 1, 10**12]), st.booleans()),
    min_size=1, max_size=16)


def suit(rows, estimator):
    """Rewards that the estimator accepts: MaxRL divides by their mean."""
    return [(abs(r), g, v) for r, g, v in rows] if estimator == "maxrl" else rows


def columns(rows):
    rewards, groups, valid = zip(*rows, strict=True)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(valid)


def batch_norm(rows, eps):
    """By the standard library."""
    def centre(reward, group):
        return reward - statistics.fmean(r for r, g, v in rows if v and group == g)

    centred = [centre(r, g) if v else None for r, g, v in rows]
    known = [c for c in centred if c is not None]
    if len(known) < 2:
        return torch.zeros(len(rows))
    scale = statistics.stdev(known) + eps
    return torch.tensor([0.0 if c is None else c / scale for c in centred])


def reinforce_pp(returns, valid, eps):
    """REINFORCE++ (arXiv:2501.03262): ``returns`` of each token of each row."""
    tokens = [value for row, v in zip(returns, valid, strict=True) if v for value in row]
    if sum(valid) < 2 or len(tokens) < 2 or max(tokens) == min(tokens):
        return [[0.0] * len(row) for row in returns]
    mean, scale = statistics.fmean(tokens), statistics.stdev(tokens) + eps
    return [[(value - mean) / scale if v else 0.0 for value in row]
            for row, v in zip(returns, valid, strict=True)]


def loops(rows, estimator, eps, lengths=None):
    if estimator == "global_norm":
        lengths = [1] * len(rows) if lengths is None else lengths
        returns = [[reward] * length for (reward, _, _), length in zip(rows, lengths, strict=True)]
        by_token = reinforce_pp(returns, [v for _, _, v in rows], eps)
        return torch.tensor([row[0] if row else 0.0 for row in by_token])
    if estimator == "batch_norm":
        return batch_norm(rows, eps)
    out = []
    for i, (reward, group, valid) in enumerate(rows):
        rewards = np.array([r for r, g, v in rows if g == group and v])
        others = np.array([r for j, (r, g, v) in enumerate(rows) if g == group and v and j != i])
        if not valid or len(rewards) < 2:
            out.append(0.0)
        elif estimator == "rloo":
            out.append(reward - others.mean())
        else:
            added = 0.0 if eps is None else eps
            scale = {"group_norm": rewards.std(ddof=1) + added,
                     "group_norm_population": rewards.std() + added, "group_mean": 1.0,
                     "maxrl": rewards.mean() + added}[estimator]
            out.append((reward - rewards.mean()) / scale if scale else 0.0)
    return torch.tensor(out, dtype=torch.float32)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=ROWS, eps=st.sampled_from([1e-4, 1e-6, 0.5]), seed=st.integers(0, 99))
def test_equals_loops_over_groups(estimator, rows, eps, seed):
    rows = suit(rows, estimator)
    rewards, groups, valid = columns(rows)
    eps = eps if estimator in DEFAULT_EPS else None
    lengths = torch.randint(5, (len(rows),), generator=torch.Generator().manual_seed(seed))
    for length_B in (None, lengths):
        actual = group_advantages(rewards, groups, estimator=estimator, eps=eps, valid_B=valid,
                                  length_B=length_B)
        assert actual.dtype == torch.float32
        expected = loops(rows, estimator, eps, None if length_B is None else length_B.tolist())
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=ROWS, order=st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_rows(estimator, rows, order):
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    rewards, groups, valid = columns(suit(rows, estimator))
    expected = group_advantages(rewards, groups, estimator=estimator, valid_B=valid)[permutation]
    actual = group_advantages(rewards[permutation], groups[permutation], estimator=estimator,
                              valid_B=valid[permutation])
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", sorted({*ESTIMATORS} - {"maxrl"}))
@given(rows=ROWS, shift=st.integers(-4, 4))
def test_does_not_depend_on_a_common_reward(estimator, rows, shift):
    rewards, groups, valid = columns(rows)
    rewards = rewards.double()
    one, other = (group_advantages(r, groups, estimator=estimator, valid_B=valid)
                  for r in (rewards, rewards + shift))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_zero_also_where_nothing_is_added_to_the_denominator(estimator, reward):
    rewards, groups = torch.full((6,), reward), torch.tensor([0, 0, 0, 1, 1, 2])
    for eps in (None, 0.0) if estimator in DEFAULT_EPS else (None,):
        advantage = group_advantages(rewards, groups, estimator=estimator, eps=eps)
        assert torch.equal(advantage, torch.zeros(6))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e9])
def test_invalid_rows_get_zero_and_are_left_out_of_their_group(estimator, junk):
    rewards, groups = torch.tensor([1.0, junk, 0.0, 0.5]), torch.tensor([0, 0, 0, 0])
    valid = torch.tensor([True, False, True, True])
    advantage = group_advantages(rewards, groups, estimator=estimator, valid_B=valid)
    alone = group_advantages(rewards[valid], groups[valid], estimator=estimator)
    assert advantage[1] == 0
    assert torch.equal(advantage[valid], alone) and alone[0] > 0


def test_a_prompt_sampled_once_teaches_only_against_the_whole_batch():
    rewards, groups = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([7, 8, 8])
    for estimator in ESTIMATORS:
        alone = group_advantages(rewards, groups, estimator=estimator)[0]
        assert (alone > 1) if estimator == "global_norm" else (alone == 0)
    # Its zero still counts in the spread of the batch: [0, 1/2, -1/2] has deviation 1/2.
    batch_norm = group_advantages(rewards, groups, estimator="batch_norm", eps=1e-12)
    assert batch_norm.tolist() == pytest.approx([0.0, 1.0, -1.0])


@pytest.mark.parametrize("size", [4, 1024])
def test_maxrl_weighs_the_rare_success_by_one_over_the_success_rate(size):
    """Exactly: an eps of 1e-4 would take 9 % off the one success of 1,024."""
    rewards = torch.zeros(size + 2)
    rewards[0] = 1.0
    groups = torch.tensor([0] * size + [1, 1])
    advantage = group_advantages(rewards, groups, estimator="maxrl")
    assert advantage.tolist() == [size - 1.0] + [-1.0] * (size - 1) + [0.0, 0.0]
    damped = group_advantages(rewards, groups, estimator="maxrl", eps=1e-4)[0]
    assert damped == pytest.approx((size - 1) / (1 + size * 1e-4), rel=1e-6)


def test_maxrl_refuses_negative_rewards_of_valid_rows():
    rewards, groups = torch.tensor([-1.0, 0.5, -0.25]), torch.zeros(3, dtype=torch.int64)
    valid = torch.tensor([False, True, True])
    with pytest.raises(ValueError, match=r"rows \[2\] is negative \(\[-0.25\]\).*'maxrl'"):
        group_advantages(rewards, groups, estimator="maxrl", valid_B=valid)
    rewards[2] = 0.25
    assert group_advantages(rewards, groups, estimator="maxrl", valid_B=valid)[0] == 0


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_a_valid_reward_that_is_not_finite_is_an_error_naming_the_row(junk):
    with pytest.raises(ValueError, match=r"rows \[2\].*reward_error"):
        group_advantages(torch.tensor([1.0, junk, junk]), torch.zeros(3, dtype=torch.int64),
                         valid_B=torch.tensor([True, False, True]))


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
    td[data.ASSISTANT_MASK] = torch.arange(4) < torch.tensor([[1], [3], [4], [2]])
    eps = 0.5 if estimator in DEFAULT_EPS else None
    expected = group_advantages(torch.tensor([1.0, 0.0, 3.0]), torch.zeros(3, dtype=torch.int64),
                                estimator=estimator, eps=eps, length_B=torch.tensor([1, 3, 2]))
    out = GroupAdvantage(estimator=estimator, eps=eps)(td)
    assert out["advantage"].shape == (4, 1)
    assert torch.equal(out["advantage"][[0, 1, 3], 0], expected) and out["advantage"][2] == 0
    bare = GroupAdvantage(estimator=estimator, eps=eps)(td[[0, 1, 3]].exclude(
        ("next", "reward_error")))
    assert torch.equal(bare["advantage"][:, 0], expected)


T, PROMPT = 7, 2
#: Every option at once; test_each_option_matters shows that none of them is idle.
ALL = {"clip_percentile": 15.0, "zero_variance_filter": True, "mask_truncated": True,
       "overlong_buffer": 3, "max_response_tokens": 4, "overlong_factor": 0.5,
       "kl_in_reward_coeff": 0.25, "kl_in_reward_estimator": "k3", "reverse_kl_coeff": 0.75}
NEEDS = {"overlong_factor": ("overlong_buffer", "max_response_tokens"),
         "max_response_tokens": ("overlong_buffer",), "overlong_buffer": ("max_response_tokens",),
         "kl_in_reward_estimator": ("kl_in_reward_coeff",)}
LOG_PROB = st.floats(-4, 0, width=16)
TOKEN = st.tuples(LOG_PROB, LOG_PROB, LOG_PROB)  # under policy, reference and teacher
ROLLOUT_ROW = st.fixed_dictionaries({
    "reward": st.sampled_from([400.0, 401.0]),  # above what any penalty takes, for MaxRL
    "group": st.sampled_from([2, 5]), "error": st.sampled_from([False, False, True]),
    "truncated": st.booleans(), "tokens": st.lists(TOKEN, max_size=T - PROMPT)})


def rollout(rows):
    """Dense batch of dictionaries; junk everywhere that must not be read."""
    B = len(rows)
    values = torch.full((3, B, T), torch.nan)
    mask = torch.zeros(B, T, dtype=torch.bool)
    for i, row in enumerate(rows):
        end = PROMPT + len(row["tokens"])
        mask[i, PROMPT:end] = True
        if not row["error"]:
            values[:, i, PROMPT:end] = torch.tensor(row["tokens"]).reshape(-1, 3).T
    out = TensorDict({}, [B])
    out[data.LOG_PROBS], out[data.REF_LOG_PROBS], out[data.TEACHER_LOG_PROBS] = values
    out[data.ASSISTANT_MASK] = mask
    out[data.ATTENTION_MASK] = torch.arange(T) < PROMPT + mask.sum(-1, keepdim=True)
    out[data.REWARD] = torch.tensor([[math.nan if r["error"] else r["reward"]] for r in rows])
    out[data.REWARD_ERROR] = torch.tensor([[r["error"]] for r in rows])
    out[data.TRUNCATED] = torch.tensor([[r["truncated"]] for r in rows])
    out[data.GROUP_ID] = torch.tensor([r["group"] for r in rows])
    return out


def earned_reward(row):
    """With the options of ALL, but for the KL."""
    length = len(row["tokens"])
    penalty = 0.0 if length <= 1 else (1 - length) / 3 if length <= 4 else -1.0
    return math.nan if row["error"] else row["reward"] + 0.5 * penalty


def shaped_reward(row):
    """With the options of ALL."""
    kl = sum(math.exp(q - p) - 1 + (p - q) for p, q, _ in row["tokens"])
    return earned_reward(row) - 0.25 * kl


def token_advantages(rows, shaped, estimator):
    """With the options of ALL, [B][T]."""
    valid = np.array([not row["error"] for row in rows])
    triples = [(s, row["group"], not row["error"]) for s, row in zip(shaped, rows, strict=True)]
    if estimator == "global_norm":
        advantage = reinforce_pp(returns_to_go(rows, shaped), valid.tolist(), 1e-4)
        known = [a for row, v in zip(advantage, valid, strict=True) if v for a in row]
    else:
        of_row = loops(triples, estimator, 0.0 if estimator == "maxrl" else 1e-4).double().tolist()
        advantage = [[a] * len(row["tokens"]) for a, row in zip(of_row, rows, strict=True)]
        known = [a for a, v in zip(of_row, valid, strict=True) if v]
    low, high = np.percentile(known, [15, 85]) if known else (0, 0)
    tokens = np.zeros((len(rows), T))
    for i, row in enumerate(rows):
        for t, (p, _, teacher) in enumerate(row["tokens"] if valid[i] else []):
            tokens[i, PROMPT + t] = np.clip(advantage[i][t], low, high) - 0.75 * (p - teacher)
    return torch.tensor(tokens)


def returns_to_go(rows, shaped):
    """What each token has before it: the reward minus the KL from this token on."""
    out = []
    for row, total in zip(rows, shaped, strict=True):
        kl = [math.exp(q - p) - 1 + (p - q) for p, q, _ in row["tokens"]]
        reward = total + 0.25 * sum(kl)
        out.append([reward - 0.25 * sum(kl[t:]) for t in range(len(kl))])
    return out


def rows_that_stay(rows):
    """With the options of ALL."""
    distinct = {row["group"]: set() for row in rows}
    for row in rows:
        if not row["error"]:
            distinct[row["group"]].add(earned_reward(row))
    return [not row["error"] and not row["truncated"] and len(distinct[row["group"]]) > 1
            for row in rows]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=st.lists(ROLLOUT_ROW, min_size=1, max_size=8))
def test_all_options_together_equal_the_formulas(estimator, rows):
    batch = rollout(rows)
    before = batch.clone()
    module = GroupAdvantage(estimator=estimator, **ALL)
    out = module(batch)
    shaped, advantage, keep = (out[key] for key in module.out_keys)
    assert (shaped.dtype, advantage.dtype, keep.dtype) == (torch.float32,) * 2 + (torch.bool,)
    assert shaped.shape == keep.shape == (len(rows), 1)
    expected = torch.tensor([[shaped_reward(row)] for row in rows])
    torch.testing.assert_close(shaped, expected, rtol=2e-7, atol=0.0, equal_nan=True)
    # What follows starts from the rewards as written: their last bit decides what is equal.
    rewards = shaped[:, 0].tolist()
    torch.testing.assert_close(advantage.double(), token_advantages(rows, rewards, estimator),
                               rtol=1e-5, atol=1e-5)
    assert keep[:, 0].tolist() == rows_that_stay(rows)
    for key in before.keys(True, True):
        torch.testing.assert_close(out[key], before[key], rtol=0, atol=0, equal_nan=True)


@given(rows=st.lists(ROLLOUT_ROW, min_size=1, max_size=8),
       order=st.randoms(use_true_random=False), estimator=st.sampled_from(ESTIMATORS))
def test_all_options_together_follow_a_permutation_of_the_rows(rows, order, estimator):
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    module = GroupAdvantage(estimator=estimator, **ALL)
    expected = module(rollout(rows))[torch.tensor(permutation)]
    actual = module(rollout([rows[i] for i in permutation]))
    for key in module.out_keys:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-6,
                                   equal_nan=True)


def some_rows():
    """Two groups that teach, one of equals; each row with its own length and log-probs."""
    generator = np.random.default_rng(0)
    return [{"reward": float(i % 3) if i < 6 else 1.0, "group": i // 3, "error": i == 4,
             "truncated": i % 4 == 1, "tokens": (-generator.random((n, 3))).tolist()}
            for i, n in enumerate([2, 5, 3, 4, 2, 5, 1, 1, 1])]


@pytest.mark.parametrize("option", ALL)
def test_each_option_matters(option):
    idle = {"overlong_buffer": 1, "max_response_tokens": 9, "overlong_factor": None,
            "kl_in_reward_estimator": None}
    others = {name: ALL[name] for name in NEEDS.get(option, ())}
    without = others | {option: idle[option]} if option in idle else {}
    before = GroupAdvantage(**without)(rollout(some_rows()))
    after = GroupAdvantage(**others, **{option: ALL[option]})(rollout(some_rows()))
    if option in ("zero_variance_filter", "mask_truncated"):
        assert data.ROW_MASK not in before.keys() and not after[data.ROW_MASK].all()
        assert torch.equal(after[data.ADVANTAGE], before[data.ADVANTAGE])
    else:
        assert data.ROW_MASK not in after.keys()
        assert after[data.ADVANTAGE].isfinite().all()
        assert (after[data.ADVANTAGE] - before[data.ADVANTAGE]).abs().max() > 1e-3


def test_filters_name_the_rows_that_stay():
    rows = some_rows()
    filtered = GroupAdvantage(zero_variance_filter=True)(rollout(rows))[data.ROW_MASK]
    assert filtered[:, 0].tolist() == [True] * 4 + [False, True] + [False] * 3
    cut = GroupAdvantage(mask_truncated=True)(rollout(rows))[data.ROW_MASK]
    assert cut[:, 0].tolist() == [i not in (1, 4, 5) for i in range(9)]


@pytest.mark.parametrize("option", ["zero_variance_filter", "mask_truncated"])
def test_rows_that_were_out_of_the_loss_stay_out(option):
    module, batch = GroupAdvantage(**{option: True}), rollout(some_rows())
    filtered = module(batch.copy())[data.ROW_MASK]
    batch[data.ROW_MASK] = torch.arange(9)[:, None] != 0
    assert filtered[0]
    assert torch.equal(module(batch)[data.ROW_MASK], filtered & (torch.arange(9)[:, None] != 0))


def test_the_kl_in_the_reward_keeps_no_group_of_equal_rewards_in_the_loss():
    rows = some_rows()
    filtered = GroupAdvantage(zero_variance_filter=True)(rollout(rows))[data.ROW_MASK]
    module = GroupAdvantage(zero_variance_filter=True, kl_in_reward_coeff=0.1)
    assert torch.equal(module(rollout(rows))[data.ROW_MASK], filtered)


def test_the_filter_looks_at_punished_rewards():
    rows = [{"reward": 1.0, "group": 0, "error": False, "truncated": False,
             "tokens": [(-1.0, -1.0, -1.0)] * n} for n in (1, 5)]
    alone = GroupAdvantage(zero_variance_filter=True)(rollout(rows))
    shaped = GroupAdvantage(zero_variance_filter=True, overlong_buffer=2,
                            max_response_tokens=4)(rollout(rows))
    assert not alone[data.ROW_MASK].any() and shaped[data.ROW_MASK].all()


@pytest.mark.parametrize("sampled, size, penalty", [
    ([(10, 110)], 110, -1.0), ([(10, 95)], 95, -0.25), ([(10, 90)], 90, 0.0),
    ([(10, 30), (90, 110)], 110, -1.0), ([(10, 30), (85, 95)], 95, -0.25), ([], 110, 0.0),
    ([(10, 30)], 100, -0.5)])  # behind the last turn of some stands a message
def test_overlong_conversations_are_as_long_as_all_that_shares_the_limit(sampled, size, penalty):
    batch = rollout([{"reward": 1.0, "group": 0, "error": False, "truncated": False,
                      "tokens": []}] * 2)
    at = torch.arange(120)
    scored = torch.zeros(120, dtype=torch.bool)
    for start, end in sampled:
        scored |= (at >= start) & (at < end)
    batch[data.ASSISTANT_MASK] = torch.stack([scored, (at >= 10) & (at < 11)])
    batch[data.ATTENTION_MASK] = torch.stack([at < size, at < 11])
    shaped = GroupAdvantage(overlong_buffer=20, max_response_tokens=100)(batch)
    assert shaped[data.SHAPED_REWARD].flatten().tolist() == [1.0 + penalty, 1.0]


def test_a_batch_without_the_mask_that_lengths_need_is_told_so():
    batch = rollout(some_rows()).exclude(data.ATTENTION_MASK)
    with pytest.raises(KeyError, match="all_attention_mask.*overlong_buffer needs it"):
        GroupAdvantage(overlong_buffer=2, max_response_tokens=4)(batch)


def test_without_options_nothing_but_the_advantage_is_written():
    batch = rollout(some_rows())
    keys = {*batch.keys(True, True)}
    module = GroupAdvantage()
    assert {*module(batch).keys(True, True)} - keys == {data.ADVANTAGE}
    assert module.in_keys == [data.REWARD, data.GROUP_ID] and module.out_keys == [data.ADVANTAGE]


def test_keys_follow_the_options():
    module = GroupAdvantage(kl_in_reward_coeff=0.1, mask_truncated=True)
    read = rollout(some_rows()).select(*module.in_keys, data.REWARD_ERROR)
    assert {*module(read).keys(True, True)} >= {*module.out_keys}
    assert module.out_keys == [data.SHAPED_REWARD, data.ADVANTAGE, data.ROW_MASK]


class TestReinforcePlusPlus:
    """arXiv:2501.03262: statistics over tokens, and each token pays for the KL from it on."""

    def test_a_token_does_not_pay_for_the_kl_before_it(self):
        rows = [{"reward": r, "group": g, "error": False, "truncated": False,
                 "tokens": [(-1.0, -1.0 - kl, 0.0) for kl in kls]}
                for r, g, kls in ((1.0, 0, [0.5, 0.0, 0.2]), (0.0, 1, [0.0, 1.0]))]
        module = GroupAdvantage(estimator="global_norm", kl_in_reward_coeff=0.1)
        out = module(rollout(rows))
        returns = [1.0 - 0.07, 1.0 - 0.02, 1.0 - 0.02, -0.1, -0.1]
        mean, scale = statistics.fmean(returns), statistics.stdev(returns) + 1e-4
        expected = [(value - mean) / scale for value in returns]
        actual = out[data.ADVANTAGE][out[data.ASSISTANT_MASK]].tolist()
        assert actual == pytest.approx(expected, rel=1e-5)
        assert not out[data.ADVANTAGE][~out[data.ASSISTANT_MASK]].any()
        assert out[data.SHAPED_REWARD][:, 0].tolist() == pytest.approx([0.93, -0.1])

    def test_a_long_row_counts_with_all_of_its_tokens(self):
        rows = [{"reward": r, "group": 0, "error": False, "truncated": False,
                 "tokens": [(-1.0, -1.0, 0.0)] * n} for r, n in ((1.0, 1), (0.0, 4))]
        advantage = GroupAdvantage(estimator="global_norm")(rollout(rows))[data.ADVANTAGE]
        scale = statistics.stdev([1.0, 0.0, 0.0, 0.0, 0.0]) + 1e-4
        assert advantage[:, 0].tolist() == pytest.approx([0.8 / scale, -0.2 / scale])

    def test_the_loss_takes_them_from_rewards_alike(self, make_model, make_batch):
        model = make_model()
        batch = make_batch(model)
        batch[data.REWARD] = torch.tensor([[1.0], [0.0], [0.5], [0.25]])
        del batch[data.ADVANTAGE]
        loss = GRPOLoss(model, advantage_estimator="global_norm")
        expected = total_loss(loss(GroupAdvantage(estimator="global_norm")(batch.copy())))
        assert total_loss(loss(batch)) == expected


class TestTeacherAlone:
    def batch(self):
        rows = [row | {"error": False} for row in some_rows()]
        return rollout(rows).exclude(data.REWARD, data.REWARD_ERROR, data.GROUP_ID)

    def test_distils_without_rewards(self):
        out = GroupAdvantage(reverse_kl_coeff=0.5, mask_truncated=True)(self.batch())
        mask, gap = out[data.ASSISTANT_MASK], out[data.LOG_PROBS] - out[data.TEACHER_LOG_PROBS]
        torch.testing.assert_close(out[data.ADVANTAGE][mask], -0.5 * gap[mask])
        assert not out[data.ADVANTAGE][~mask].any()
        assert torch.equal(out[data.ROW_MASK], ~out[data.TRUNCATED])

    @pytest.mark.parametrize("options", [
        {"zero_variance_filter": True}, {"clip_percentile": 5.0}, {"kl_in_reward_coeff": 0.1},
        {"overlong_buffer": 2, "max_response_tokens": 4}])
    def test_options_of_the_reward_are_refused(self, options):
        with pytest.raises(ValueError, match=f"{next(iter(options))} would be ignored.*reward"):
            GroupAdvantage(reverse_kl_coeff=0.5, **options)(self.batch())

    def test_without_a_teacher_rewards_are_required(self):
        with pytest.raises(KeyError, match="reward"):
            GroupAdvantage()(self.batch())


@pytest.mark.parametrize("options, key, hint", [
    ({"kl_in_reward_coeff": 0.1}, data.REF_LOG_PROBS, "reference first"),
    ({"reverse_kl_coeff": 0.1}, data.TEACHER_LOG_PROBS, "teacher first"),
    ({"mask_truncated": True}, data.TRUNCATED, "length limit")])
def test_a_missing_entry_is_an_error_with_the_fix(options, key, hint):
    with pytest.raises(KeyError, match=hint) as error:
        GroupAdvantage(**options)(rollout(some_rows()).exclude(key))
    assert key[1] in str(error.value)


@pytest.mark.parametrize("options, message", [
    ({"eps": -1e-6}, "eps=-1e-06 must be"),
    ({"eps": 1e-6, "estimator": "rloo"}, "eps=1e-06 would be ignored.*'rloo'"),
    ({"eps": math.nan}, "eps=nan must be"),
    ({"clip_percentile": 0}, "clip_percentile=0 must lie between 0 and 50"),
    ({"clip_percentile": 50.0}, "clip_percentile=50.0 must lie"),
    ({"clip_percentile": math.nan}, "clip_percentile=nan must lie"),
    ({"overlong_buffer": 4}, "overlong_buffer=4 needs max_response_tokens"),
    ({"max_response_tokens": 4}, "max_response_tokens=4 would be ignored.*overlong_buffer"),
    ({"overlong_factor": 1.0}, "overlong_factor=1.0 would be ignored.*overlong_buffer"),
    ({"overlong_buffer": 4, "max_response_tokens": 4}, "below max_response_tokens=4"),
    ({"overlong_buffer": 0, "max_response_tokens": 4}, "overlong_buffer=0 must be above 0"),
    ({"overlong_buffer": 1, "max_response_tokens": 4, "overlong_factor": -1.0},
     "overlong_factor=-1.0 must be"),
    ({"kl_in_reward_coeff": 0.0}, "kl_in_reward_coeff=0.0 must be"),
    ({"kl_in_reward_coeff": math.inf}, "kl_in_reward_coeff=inf must be"),
    ({"kl_in_reward_estimator": "k1"}, "kl_in_reward_estimator='k1' would be ignored.*_coeff"),
    ({"kl_in_reward_estimator": "k4", "kl_in_reward_coeff": 0.1}, "'k4' is unknown.*'k3'"),
    ({"reverse_kl_coeff": -0.5}, "reverse_kl_coeff=-0.5 must be")])
def test_options_out_of_range_or_without_effect_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        GroupAdvantage(**options)
