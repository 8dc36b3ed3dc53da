"""Maximum-entropy weights against loops in plain Python."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from grpo import data
from grpo.objectives.maxent import MaxEntWeights, listwise_weights, weight_entropy

from .test_controllers import tau as controller

# Utility, reference score, group and validity of each row.
ROWS = st.lists(
    st.tuples(st.floats(-4, 4, width=32), st.floats(-9, 0, width=32), st.sampled_from([-3, 0, 7]),
              st.booleans()),
    min_size=1, max_size=12)
OPTIONS = st.fixed_dictionaries({
    "tau": st.sampled_from([0.05, 0.5, 1.0, 20.0]), "beta": st.sampled_from([0.0, 0.3]),
    "q_temperature": st.sampled_from([0.5, 1.0, 3.0]), "q_epsilon": st.sampled_from([0.0, 0.1])})


def softmax(values):
    top = max(values)
    exps = [math.exp(v - top) for v in values]
    return [e / sum(exps) for e in exps]


def members(groups, valid):
    """Row numbers of each group's valid rows."""
    return [[i for i, g in enumerate(groups) if g == group and valid[i]]
            for group in sorted(set(groups))]


def weights_by_loops(utility, ref, groups, valid, *, tau, beta, q_temperature, q_epsilon):
    out = [0.0] * len(utility)
    for rows in filter(None, members(groups, valid)):
        q = softmax([utility[i] / q_temperature for i in rows])
        q = [(1 - q_epsilon) * x + q_epsilon / len(rows) for x in q]
        logits = [math.log(x) + beta * ref[i] for x, i in zip(q, rows, strict=True)]
        for i, weight in zip(rows, softmax([x / (tau + beta) for x in logits]), strict=True):
            out[i] = weight
    return torch.tensor(out, dtype=torch.float64)


def columns(rows):
    utility, ref, groups, valid = zip(*rows, strict=True)
    return (torch.tensor(utility, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64),
            torch.tensor(groups), torch.tensor(valid))


# --- weights -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(rows=ROWS, options=OPTIONS)
def test_weights_equal_loops_over_groups(rows, options):
    utility, ref, groups, valid = columns(rows)
    weights = listwise_weights(utility, ref, groups, valid_B=valid, **options)
    expected = weights_by_loops(*zip(*rows, strict=True), **options)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-7)


def test_weights_maximise_what_they_are_defined_to_maximise():
    utility, ref = torch.tensor([1.0, 0.0, 0.5]).double(), torch.tensor([-2.0, -1.0, -3.0]).double()
    tau, beta = 0.4, 0.3

    def value(w):
        gain = (w * (utility.log_softmax(0) + beta * ref)).sum()
        return (gain + (tau + beta) * torch.special.entr(w).sum()).item()

    best = listwise_weights(utility, ref, torch.zeros(3, dtype=torch.int64), tau=tau,
                            beta=beta).double()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        other = torch.rand(3, generator=generator, dtype=torch.float64)
        assert value(0.7 * best + 0.3 * other / other.sum()) < value(best)


def test_tau_goes_from_the_best_completion_over_q_to_uniform():
    utility, groups = torch.tensor([1.0, 0.0, 0.9, 1.0]), torch.zeros(4, dtype=torch.int64)

    def at(tau):
        return listwise_weights(utility, None, groups, tau=tau)

    torch.testing.assert_close(at(1e-3), torch.tensor([0.5, 0.0, 0.0, 0.5]))
    torch.testing.assert_close(at(1.0), utility.softmax(0))
    torch.testing.assert_close(at(1e9), torch.full((4,), 0.25))
    assert torch.equal(at(math.inf), torch.full((4,), 0.25))


def test_weights_keep_their_precision_where_probabilities_underflow():
    utility, groups = torch.tensor([0.0, -2000.0, -2001.0]), torch.zeros(3, dtype=torch.int64)
    tau = 1000.0  # q of the last two is 0 in float64, but their ratio in w is exp(1 / tau)
    weights = listwise_weights(utility, None, groups, tau=tau)
    torch.testing.assert_close(weights, (utility / tau).softmax(0))


def test_smoothing_bounds_the_target_from_below():
    utility, groups = torch.tensor([0.0, -2000.0]), torch.zeros(2, dtype=torch.int64)
    weights = listwise_weights(utility, None, groups, tau=1.0, q_epsilon=0.2)
    torch.testing.assert_close(weights, torch.tensor([0.9, 0.1]))


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
def test_invalid_rows_get_zero_and_are_left_out_of_their_group(junk):
    utility, ref = torch.tensor([1.0, junk, 0.0]), torch.tensor([-1.0, junk, -2.0])
    groups, valid = torch.tensor([3, 3, 3]), torch.tensor([True, False, True])
    weights = listwise_weights(utility, ref, groups, tau=0.5, beta=0.1, valid_B=valid)
    alone = listwise_weights(utility[valid], ref[valid], groups[valid], tau=0.5, beta=0.1)
    assert weights[1] == 0 and torch.equal(weights[valid], alone)
    with pytest.raises(ValueError, match=r"utility of rows \[1\].*reward_error"):
        listwise_weights(utility, ref, groups, tau=0.5, beta=0.1)
    with pytest.raises(ValueError, match=r"ref_score of rows \[1\]"):
        listwise_weights(torch.zeros(3), ref, groups, tau=0.5, beta=0.1)


def test_a_batch_without_any_valid_row_is_all_zero():
    groups, none = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool)
    weights = listwise_weights(torch.ones(2), None, groups, tau=1.0, valid_B=none)
    assert weights.tolist() == [0, 0]
    assert weight_entropy(weights, groups, valid_B=none)[0].tolist() == []


@pytest.mark.parametrize(("options", "message"), [
    ({"tau": 0.0}, "tau=0.0 and beta=0.0.*raise tau"),
    ({"tau": -0.1, "beta": 1.0}, "tau=-0.1"),
    ({"tau": 1.0, "beta": -0.5}, "beta=-0.5"),
    ({"tau": math.nan}, "tau=nan"),
    ({"tau": 1.0, "q_temperature": 0.0}, "q_temperature=0.0 must be positive"),
    ({"tau": 1.0, "q_epsilon": 1.0}, r"q_epsilon=1.0 must be in \[0, 1\)"),
    ({"tau": 1.0, "q_epsilon": -0.1}, "q_epsilon=-0.1"),
])
def test_options_out_of_range_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        listwise_weights(torch.ones(2), torch.zeros(2), torch.tensor([0, 0]), **options)
    with pytest.raises(ValueError, match=message):
        MaxEntWeights(**options)


def test_beta_without_reference_scores_is_an_error():
    with pytest.raises(ValueError, match="beta=0.5 needs ref_score_B"):
        listwise_weights(torch.ones(2), None, torch.zeros(2, dtype=torch.int64), tau=1.0, beta=0.5)


def test_entropy_is_counted_in_nats_over_the_valid_rows_of_each_group():
    groups = torch.tensor([5, 2, 5, 5, 2, 5, 8])
    weights = torch.tensor([0.25, 0.9, 0.5, 0.25, 0.1, 0.0, 0.0])
    valid = torch.tensor([True, True, True, True, True, True, False])
    entropy, size = weight_entropy(weights, groups, valid_B=valid)
    assert size.tolist() == [2, 4]
    expected = [-0.9 * math.log(0.9) - 0.1 * math.log(0.1), 1.5 * math.log(2)]
    torch.testing.assert_close(entropy, torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


# --- the module on a rollout ---------------------------------------------------------------------


def rollout():
    ref = torch.tensor([[9.0, -1.0, -2.0, -3.0], [9.0, -4.0, 9.0, 9.0], [9.0, 9.0, -0.5, -0.5],
                        [9.0, -7.0, 9.0, 9.0], [9.0, -1.0, -1.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
    batch = TensorDict({data.GROUP_ID: torch.tensor([1, 0, 1, 1, 0])}, [5])
    batch[data.REWARD] = torch.tensor([[1.0], [0.0], [0.5], [torch.nan], [2.0]])
    batch[data.REWARD_ERROR] = torch.tensor([[False], [False], [False], [True], [False]])
    batch[data.REF_LOG_PROBS], batch[data.ASSISTANT_MASK] = ref, mask.bool()
    return batch


@pytest.mark.parametrize(("normalize", "scores"), [
    (True, [-2.0, -4.0, -0.5, -7.0, -1.0]), (False, [-6.0, -4.0, -1.0, -7.0, -2.0])])
def test_the_module_scores_the_assistant_tokens_under_the_reference(normalize, scores):
    options = {"tau": 0.3, "beta": 0.2, "q_temperature": 2.0, "q_epsilon": 0.1}
    module = MaxEntWeights(length_normalize_ref=normalize, **options)
    out = module(rollout())
    expected = weights_by_loops([1.0, 0.0, 0.5, 0.0, 2.0], scores, [1, 0, 1, 1, 0],
                                [True, True, True, False, True], **options)
    weight, advantage = out[data.LISTWISE_WEIGHT], out[data.ADVANTAGE]
    assert weight.shape == (5, 1) and weight.dtype == torch.float32
    torch.testing.assert_close(weight[:, 0].double(), expected, rtol=1e-6, atol=0)
    uniform = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.5])  # K counts the rows with a reward
    torch.testing.assert_close(advantage, (expected.float() - uniform)[:, None])
    torch.testing.assert_close(
        module.entropy, torch.special.entr(expected).sum().item() / 2, rtol=1e-6, atol=0)


def test_without_beta_the_module_reads_neither_reference_nor_mask():
    module = MaxEntWeights(tau=1.0)
    batch = rollout().exclude(data.REF_LOG_PROBS, data.ASSISTANT_MASK, data.REWARD_ERROR)
    weights = module(batch[[0, 1, 2, 4]])[data.LISTWISE_WEIGHT][:, 0]
    torch.testing.assert_close(weights[[0, 2]], torch.tensor([1.0, 0.5]).softmax(0))
    assert module.in_keys == [data.REWARD, data.GROUP_ID]
    assert MaxEntWeights(tau=1.0, beta=0.1).in_keys[2:] == [data.REF_LOG_PROBS, data.ASSISTANT_MASK]


def test_a_new_tau_takes_effect_on_the_next_rollout():
    module = MaxEntWeights(tau=0.1)
    sharp = module(rollout())[data.LISTWISE_WEIGHT].max()
    entropy = module.entropy
    module.tau = 10.0
    assert module(rollout())[data.LISTWISE_WEIGHT].max() < sharp and module.entropy > entropy


def test_single_rows_do_not_count_in_the_mean_entropy():
    module = MaxEntWeights(tau=1.0)
    assert math.isnan(module.entropy)
    batch = rollout()
    batch[data.GROUP_ID] = torch.tensor([1, 2, 1, 3, 4])
    module(batch)
    shares = torch.tensor([1.0, 0.5]).double().softmax(0)
    assert module.entropy == pytest.approx(torch.special.entr(shares).sum().item(), rel=1e-6)
    batch[data.GROUP_ID] = torch.arange(5)
    assert module(batch)[data.ADVANTAGE].tolist() == [[0.0]] * 5
    assert math.isnan(module.entropy)


def test_an_option_that_beta_zero_would_ignore_is_an_error():
    with pytest.raises(ValueError, match="length_normalize_ref=False would be ignored at beta=0"):
        MaxEntWeights(tau=1.0, length_normalize_ref=False)


@pytest.mark.parametrize("init", [0.05, 50.0])
@pytest.mark.parametrize("target", [0.3, 1.2, 2.0])
def test_the_controller_of_tau_reaches_a_reachable_target(target, init):
    utility = torch.randn(32, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(32) % 4
    tau = controller(init=init, target=target)
    for _ in range(150):
        weights = listwise_weights(utility, None, groups, tau=tau.value, q_temperature=0.5)
        measured = weight_entropy(weights, groups)[0].mean().item()
        tau.update(measured)
    assert measured == pytest.approx(target, abs=1e-3)
    assert 0.05 < tau.value < 50.0
