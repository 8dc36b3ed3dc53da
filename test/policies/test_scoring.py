"""Rollouts scored without gradient: by the reference, and by the policy before its update."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from grpo import GRPOLoss, data
from grpo.objectives import TokenScorer
from grpo.objectives.inputs import loss_mask
from grpo.policies.scoring import ProximalScorer, ReferenceScorer, highest, score_rollout

ROWS = {"prompts": (2, 4, 1, 3, 2), "responses": (5, 1, 6, 3, 0)}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture
def rollout(model, make_batch):
    return make_batch(model, **ROWS)


def alone(model, row, *, temperature):
    """Log-prob and entropy of the assistant tokens of one row, from its own full logits."""
    length = int(row[data.ATTENTION_MASK].sum())
    tokens, mask = row[data.TOKENS][:length], row[data.ASSISTANT_MASK][:length]
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0] / temperature
    choice = torch.distributions.Categorical(logits=logits[:-1])
    return choice.log_prob(tokens[1:])[mask[1:]], choice.entropy()[mask[1:]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@settings(max_examples=8)
@given(max_tokens=st.integers(1, 60))
def test_scores_are_those_of_each_row_whatever_the_micro_batches(
        model, make_batch, temperature, max_tokens):
    rollout = make_batch(model, **ROWS)
    before = rollout.clone()
    scores = score_rollout(TokenScorer(model, temperature=temperature), rollout,
                           max_tokens=max_tokens)
    for b, row in enumerate(rollout):
        mask = row[data.ASSISTANT_MASK]
        for scored, expected in zip(scores, alone(model, row, temperature=temperature),
                                    strict=True):
            torch.testing.assert_close(scored[b][mask], expected.float(), rtol=1e-6, atol=1e-6)
            assert not scored[b][~mask].any()
    assert all(s.dtype == torch.float32 and not s.requires_grad for s in scores)
    assert (rollout == before).all() and set(rollout.keys(True)) == set(before.keys(True))


def test_a_first_token_that_counts_as_sampled_is_not_scored(model, rollout):
    mask = rollout[data.ASSISTANT_MASK]
    mask[0] = True
    log_probs, _ = score_rollout(TokenScorer(model), rollout, max_tokens=64)
    assert log_probs[0, 0] == 0 and (log_probs[0, 1:7] != 0).all()


class TestReferenceScorer:
    def test_writes_the_log_probs_of_a_frozen_model(self, make_model, rollout):
        reference = make_model(seed=1).train()
        scorer = ReferenceScorer(reference, temperature=0.7, max_tokens=20)
        assert not reference.training
        assert not any(p.requires_grad for p in reference.parameters())
        old = rollout.pop(data.REF_LOG_PROBS[:2])
        assert old is not None and scorer(rollout) is rollout
        for row in rollout:
            expected, _ = alone(reference, row, temperature=0.7)
            torch.testing.assert_close(row[data.REF_LOG_PROBS][row[data.ASSISTANT_MASK]],
                                       expected.float(), rtol=1e-6, atol=1e-6)
        GRPOLoss(reference, kl_to_ref_coeff=0.1)(rollout)  # found where the loss reads it

    def test_a_reference_equal_to_the_policy_has_no_kl(self, model, make_model, rollout):
        rollout = ReferenceScorer(make_model(), temperature=1.0, max_tokens=20)(rollout)
        out = GRPOLoss(model, kl_to_ref_coeff=1.0)(rollout)
        assert abs(out["loss_kl_to_ref"].item()) < 1e-9


class TestProximalScorer:
    @pytest.mark.parametrize("head", ["auto", "chunked", "logits"])
    def test_before_the_first_step_every_ratio_is_exactly_one(self, model, make_batch, head):
        rollout = make_batch(model, prompts=(2, 2, 2), responses=(5, 5, 5))
        # In float64 nothing is rounded between the scorer and the loss.
        rollout[data.LOG_PROBS] = rollout[data.LOG_PROBS].double()
        loss = GRPOLoss(model, proximal="scored", head=head, temperature=0.7)
        ProximalScorer(loss.scorer, max_tokens=100)(rollout)
        with torch.no_grad():
            out = loss(rollout)
        assert out["ratio_min"] == out["ratio_max"] == 1
        assert not out["token_stats", "log_ratio"].any()
        # Which the log-probs they were sampled with are not.
        assert GRPOLoss(model, temperature=0.7)(rollout)["ratio_max"] > 1.01

    @pytest.mark.parametrize(("dtype", "tolerance"),
                             [(torch.float64, 1e-12), (torch.float32, 2e-6)])
    def test_and_nearly_one_whatever_the_micro_batches(
            self, make_model, make_batch, dtype, tolerance):
        model = make_model(dtype=dtype)
        rollout = make_batch(model, **ROWS)
        rollout[data.LOG_PROBS] = rollout[data.LOG_PROBS].to(dtype)
        loss = GRPOLoss(model, proximal="scored")
        rollout = ProximalScorer(loss.scorer, max_tokens=9)(rollout)
        assert loss(rollout)["token_stats", "log_ratio"].abs().max() <= tolerance

    def test_only_entropy_fraction_asks_for_the_mask(self, model, rollout):
        scorer = TokenScorer(model)
        ProximalScorer(scorer, max_tokens=20)(rollout)
        assert data.HIGH_ENTROPY_MASK not in rollout.keys(True)
        ProximalScorer(scorer, max_tokens=20, entropy_fraction=0.4)(rollout)
        GRPOLoss(model, high_entropy_only=True)(rollout)

    @pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.9])
    def test_the_mask_marks_the_share_with_the_highest_entropies(self, model, make_batch, fraction):
        rollout = make_batch(model, **ROWS, error_rows=(2,))
        entropies = torch.cat([alone(model, row, temperature=0.7)[1]
                               for b, row in enumerate(rollout) if b != 2])
        ProximalScorer(TokenScorer(model, temperature=0.7), max_tokens=20,
                       entropy_fraction=fraction)(rollout)
        marked = rollout[data.HIGH_ENTROPY_MASK]
        mask = loss_mask(rollout)
        assert marked.dtype == torch.bool and not (marked & ~mask).any() and not marked[2].any()
        kept = int(marked.sum())
        assert kept - 1 < fraction * len(entropies) <= kept
        threshold = entropies.sort(descending=True).values[kept - 1]
        assert torch.equal(marked[mask], entropies >= threshold - 1e-6)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 1.5, float("nan")])
    def test_a_wrong_fraction_is_an_error_that_names_it(self, model, fraction):
        with pytest.raises(ValueError, match=f"entropy_fraction={fraction}"):
            ProximalScorer(TokenScorer(model), max_tokens=20, entropy_fraction=fraction)


class TestHighest:
    @given(values=st.lists(st.integers(0, 5), min_size=1, max_size=24),
           masked=st.integers(0, 2**24), fraction=st.floats(0.01, 0.99))
    def test_marks_the_greatest_under_the_mask_and_all_ties(self, values, masked, fraction):
        mask = [bool(masked >> i & 1) for i in range(len(values))]
        marked = highest(torch.tensor([values]).float(), torch.tensor([mask]),
                         fraction=fraction)[0].tolist()
        chosen = sorted((v for v, m in zip(values, mask, strict=True) if m), reverse=True)
        wanted = fraction * len(chosen)
        kept = [v for v, m in zip(values, marked, strict=True) if m]
        assert not any(m and not inside for m, inside in zip(marked, mask, strict=True))
        if not chosen:
            assert not kept
            return
        # The greatest ones, at least the wanted number, and none that is not needed or a tie.
        assert sorted(kept, reverse=True) == chosen[: len(kept)] and len(kept) >= wanted - 1e-9
        assert sum(v > min(kept) for v in kept) < wanted + 1e-9
        assert all(v < min(kept) for v in chosen[len(kept) :])
