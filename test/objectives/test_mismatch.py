"""Corrections of the mismatch between the policy that samples and the one that learns."""

from __future__ import annotations

import math
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives.mismatch import make_mismatch, mismatch_diagnostics, off_policy_sequence_mask
from grpo.objectives.tokens import LossTokens

from .reference import mismatch_weight

# Sequences 0 and 2 have tokens, sequence 1 has none.
RATIOS = [[4.0, 0.5, 1.0], [], [0.25, 2.0]]
SPECS = [
    {"tis": 1.5},
    {"mis": 2.0},
    {"mis": (0.4, 2.5)},
    {"sequence_tis": 1.2},
    {"sequence_mis": (0.2, 1.5)},
    {"sequence_reject": (0.4, 3.0)},
    {"geometric_reject": (0.8, 1.2)},
    {"tis": 1.5, "sequence_reject": (0.2, 3.0), "geometric_reject": (0.8, 1.3)},
    {"geometric_reject": (0.6, 1.2), "sequence_mis": (0.6, 3.0)},
]


def make_tokens(lengths, *, log_probs_N=None, advantage_N=None, dtype=torch.float64):
    zeros = torch.zeros(sum(lengths), dtype=dtype)
    return LossTokens(
        log_probs_N=zeros if log_probs_N is None else log_probs_N,
        old_log_probs_N=zeros,
        advantage_N=zeros if advantage_N is None else advantage_N,
        row_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_rows=len(lengths))


def flat(rows):
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64).log()


def weights(spec, rows):
    return make_mismatch(spec).weights(flat(rows), make_tokens([len(row) for row in rows]))


@pytest.mark.parametrize(("spec", "expected"), [
    ({"tis": 2.0}, [2.0, 0.5, 1.0, 0.25, 2.0]),
    ({"mis": 2.5}, [0.0, 0.5, 1.0, 0.25, 2.0]),
    ({"mis": (0.3, 2.5)}, [0.0, 0.5, 1.0, 0.0, 2.0]),
    ({"sequence_tis": 1.5}, [1.5, 1.5, 1.5, 0.5, 0.5]),  # the products are 2 and 0.5
    ({"sequence_mis": 1.5}, [0.0, 0.0, 0.0, 0.5, 0.5]),
    ({"sequence_mis": (0.6, 3.0)}, [2.0, 2.0, 2.0, 0.0, 0.0]),
    ({"sequence_reject": (0.6, 3.0)}, [1.0, 1.0, 1.0, 0.0, 0.0]),
    ({"geometric_reject": (0.8, 1.2)}, [0.0] * 5),  # 2^(1/3) = 1.26 and 0.5^(1/2) = 0.71
    ({"geometric_reject": (0.7, 1.2)}, [0.0, 0.0, 0.0, 1.0, 1.0]),
    ({"tis": 2.0, "sequence_reject": (0.6, 3.0)}, [2.0, 0.5, 1.0, 0.0, 0.0]),
    ({"mis": 2.5, "geometric_reject": (0.8, 1.3)}, [0.0, 0.5, 1.0, 0.0, 0.0]),
])
def test_weights_by_hand(spec, expected):
    torch.testing.assert_close(weights(spec, RATIOS), torch.tensor(expected).double())


ROWS = st.lists(st.lists(st.floats(0.05, 20), max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(rows=ROWS)
def test_weights_equal_the_plain_formula(spec, rows):
    expected = [flat([])]
    for gap in (flat([row]) for row in rows if row):
        sequence = SimpleNamespace(sampled=torch.zeros_like(gap),
                                   old=lambda proximal, gap=gap: gap)
        expected.append(mismatch_weight(sequence, "scored", spec))
    torch.testing.assert_close(weights(spec, rows), torch.cat(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scope_says_whether_a_token_can_be_weighed_without_its_sequence(spec):
    whole = weights(spec, RATIOS)
    alone = weights(spec, [[ratio] for row in RATIOS for ratio in row])
    assert torch.equal(whole, alone) is (make_mismatch(spec).scope == "token")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_are_constants(spec):
    gap_N = flat(RATIOS).requires_grad_()
    tokens = make_tokens([3, 0, 2], log_probs_N=gap_N)
    mismatch = make_mismatch(spec)
    assert not mismatch.weights(gap_N, tokens).requires_grad
    assert not mismatch.raw_log_weight(gap_N, tokens).requires_grad


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_on_policy_every_weight_is_1(spec):
    assert weights(spec, [[1.0, 1.0], [1.0]]).tolist() == [1.0] * 3


@pytest.mark.parametrize(("spec", "expected"), [
    ({"tis": 2.0}, [2.0, 2.0, 0.0]),
    ({"mis": 2.0}, [0.0, 0.0, 0.0]),
    ({"sequence_tis": 2.0}, [2.0, 2.0, 0.0]),
    ({"sequence_mis": (1e-3, 2.0)}, [0.0, 0.0, 0.0]),
    ({"tis": 2.0, "sequence_reject": (0.5, 2.0)}, [0.0, 0.0, 0.0]),
    ({"sequence_reject": (1e-320, 1e300)}, [0.0, 0.0, 0.0]),
    ({"sequence_reject": (0.0, 2.0)}, [0.0, 0.0, 1.0]),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaps_beyond_exp_are_cut_and_never_nan(spec, expected, dtype):
    gap_N = torch.tensor([750.0, 800.0, -900.0], dtype=dtype)
    tokens = make_tokens([2, 1], dtype=dtype)
    assert make_mismatch(spec).weights(gap_N, tokens).tolist() == expected


def test_a_bound_below_the_smallest_float_is_still_a_bound():
    gap_N = torch.tensor([-110.0, -120.0])  # exp of both is 0 in float32
    weight_N = make_mismatch({"sequence_reject": (1e-50, 2.0)}).weights(
        gap_N, make_tokens([1, 1], dtype=torch.float32))
    assert weight_N.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("spec", "message"), [
    ({"tiss": 2.0}, r"mismatch\['tiss'\] is unknown; use some of tis, mis"),
    ({"tis": 2.0, "mis": 3.0}, "tis and mis.*keep one"),
    ({"sequence_tis": 2.0, "tis": 3.0}, "sequence_tis and tis.*keep one"),
    ({"mis": (2.0, 1.0)}, "low <= high"),
    ({"mis": (-0.5, 1.0)}, "0 <= low"),
    ({"sequence_reject": (0.0, 0.0)}, "high > 0"),
    ({"tis": 0.0}, r"mismatch\['tis'\]=0.0 must be finite, with a bound above 0"),
    ({"tis": -1.0}, "a bound above 0"),
    ({"sequence_tis": math.inf}, "finite"),
    ({"mis": (0.5, math.nan)}, "finite"),
    ({"tis": (0.5, 2.0)}, r"mismatch\['tis'\]=\(0.5, 2.0\) must be one number"),
    ({"mis": (0.5, 1.0, 2.0)}, r"one number or \(low, high\)"),
    ({"mis": ()}, r"one number or \(low, high\)"),
    ({"sequence_reject": 2.0}, r"must be \(low, high\)"),
    ({"geometric_reject": [2.0]}, r"must be \(low, high\)"),
    ({"tis": "2"}, "must be one number"),
    ({"tis": True}, "must be one number"),
    ({"mis": None}, "one number or"),
], ids=str)
def test_a_malformed_specification_is_an_error(spec, message):
    with pytest.raises(ValueError, match=message):
        make_mismatch(spec)


def test_nothing_to_correct_is_none():
    assert make_mismatch(None) is None
    assert make_mismatch({}) is None


def test_the_list_of_a_yaml_file_is_a_pair():
    assert make_mismatch({"mis": [0.5, 2]}) == make_mismatch({"mis": (0.5, 2.0)})


@pytest.mark.parametrize(("advantage", "sampled", "kept"), [
    ([-1.0, -1.0], [-1.0, -1.5], False),  # mean gap 0.75
    ([-1.0, -1.0], [-1.0, -2.0], True),  # mean gap 0.5: not beyond delta
    ([-1.0, -1.0], [-3.0, -3.0], True),  # likelier now than when sampled
    ([1.0, 1.0], [-1.0, -1.0], True),  # good: kept however far
    ([0.0, 0.0], [-1.0, -1.0], True),
    ([-3.0, 1.0], [-1.0, -1.0], False),  # the sum decides
    ([3.0, -1.0], [-1.0, -1.0], True),
])
def test_only_bad_sequences_that_became_unlikely_are_masked(advantage, sampled, kept):
    # The neighbour is far and bad in every case: sequences are judged one by one.
    tokens = make_tokens(
        [2, 1], log_probs_N=torch.tensor([-2.0, -2.0, -9.0]).requires_grad_(),
        advantage_N=torch.tensor([*advantage, -1.0]))
    mask_N = off_policy_sequence_mask(torch.tensor([*sampled, -1.0]), tokens, delta=0.5)
    assert mask_N.tolist() == [float(kept), float(kept), 0.0]
    assert mask_N.dtype == torch.float32 and not mask_N.requires_grad


@given(rows=ROWS, random=st.randoms(use_true_random=False), delta=st.floats(0, 2))
def test_the_off_policy_mask_does_not_depend_on_the_order_of_sequences(rows, random, delta):
    order = list(range(len(rows)))
    random.shuffle(order)

    def masks(some_rows):
        sampled_N = flat(some_rows)
        tokens = make_tokens([len(row) for row in some_rows], advantage_N=-torch.cos(sampled_N))
        return off_policy_sequence_mask(sampled_N, tokens, delta=delta)

    parts = masks(rows).split([len(row) for row in rows])
    assert torch.equal(masks([rows[i] for i in order]), torch.cat([parts[i] for i in order]))


def verl_keeps(gap_N, mode, lower, upper):
    """``compute_rollout_rejection_mask`` of verl for one sequence: k1 is minus the log-ratio."""
    k1_N = -gap_N.clamp(-20.0, 20.0)
    statistic = {"seq_sum_k1": k1_N.sum(), "seq_mean_k1": k1_N.mean()}[mode]
    return math.log(lower) <= statistic <= math.log(upper)


@pytest.mark.parametrize("mode, name", [("seq_sum_k1", "sequence_reject"),
                                        ("seq_mean_k1", "geometric_reject")])
def test_the_guide_maps_the_bounds_of_verls_rejections_to_their_inverses(mode, name):
    lower, upper = 0.5, 1.1
    gaps = torch.linspace(-1.2, 1.2, 49)[:, None] * torch.tensor([0.5, 0.2, 0.8])
    kept = [verl_keeps(gap_N, mode, lower, upper) for gap_N in gaps]
    assert 5 < sum(kept) < 44

    def ours(*bounds):
        mismatch = make_mismatch({name: bounds})
        return [bool(mismatch.weights(gap_N, make_tokens([3])).all()) for gap_N in gaps]

    assert ours(1 / upper, 1 / lower) == kept
    assert ours(lower, upper) != kept


@pytest.mark.parametrize("delta", [-0.1, math.nan, math.inf])
def test_a_threshold_that_is_none_is_an_error(delta):
    with pytest.raises(ValueError, match=f"delta={delta}.*at least 0"):
        off_policy_sequence_mask(torch.zeros(1), make_tokens([1]), delta=delta)


def diagnostics(spec, gap_N, lengths=None):
    mismatch, tokens = make_mismatch(spec), make_tokens(lengths or [len(gap_N)])
    return mismatch_diagnostics(gap_N, mismatch.weights(gap_N, tokens),
                                raw_log_weight_N=mismatch.raw_log_weight(gap_N, tokens))


def test_diagnostics_describe_the_raw_ratios_and_what_the_correction_did():
    gap_N = flat([[4.0, 0.5, 1.0, 3.0]])
    out = {name: value.item() for name, value in diagnostics({"mis": 3.5}, gap_N).items()}
    assert out == pytest.approx({
        "mismatch_kl_k1": -math.log(6) / 4,
        "mismatch_kl_k3": (8.5 - 4 - math.log(6)) / 4,
        "mismatch_ratio_min": 0.5, "mismatch_ratio_mean": 8.5 / 4, "mismatch_ratio_max": 4.0,
        "mismatch_weight_mean": 4.5 / 4,
        "mismatch_masked_fraction": 0.25,  # the 4
        "mismatch_truncated_fraction": 0.0})

    out = diagnostics({"tis": 2.0}, gap_N)
    assert out["mismatch_truncated_fraction"] == 0.5  # the 4 and the 3
    assert out["mismatch_masked_fraction"] == 0


def test_mismatch_kl_is_the_divergence_of_the_behaviour_policy():
    behaviour, proximal = (
        torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1))
    exact = (behaviour.exp() * (behaviour - proximal)).sum()
    for name in ("mismatch_kl_k1", "mismatch_kl_k3"):
        each = torch.stack([diagnostics({"tis": 2.0}, gap[None])[name]
                            for gap in proximal - behaviour])
        torch.testing.assert_close((behaviour.exp() * each).sum(), exact)


@pytest.mark.parametrize(("spec", "truncated"), [
    ({"tis": 1.5}, 2 / 5),  # the 4 and the last 2
    ({"mis": 1.5}, 0.0),
    ({"sequence_tis": 1.5}, 3 / 5),  # the products are 2 and 0.5
    ({"sequence_mis": 1.5}, 0.0),
    ({"sequence_reject": (0.6, 3.0)}, 0.0),  # a weight of 1 is not a cut ratio of 4
    ({"tis": 1.5, "sequence_reject": (0.6, 3.0)}, 1 / 5),  # a rejected token counts as masked
])
def test_truncated_fraction_compares_with_the_uncut_weight(spec, truncated):
    out = diagnostics(spec, flat(RATIOS), [3, 0, 2])
    assert out["mismatch_truncated_fraction"].item() == pytest.approx(truncated)


def test_diagnostics_of_extreme_gaps_are_not_nan():
    out = diagnostics({"tis": 2.0}, torch.tensor([800.0, -900.0, 0.0]))
    assert not any(value.isnan() for value in out.values())
    assert out["mismatch_ratio_max"] == math.inf
    assert out["mismatch_truncated_fraction"].item() == pytest.approx(1 / 3)


def test_diagnostics_without_tokens_are_empty():
    assert diagnostics({"tis": 2.0}, torch.zeros(0)) == {}
