"""Rollouts scored without gradient: by reference, teacher, and the policy before its update."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from grpo import GRPOLoss, data
from grpo.objectives import GroupAdvantage, TokenScorer, total_loss
from grpo.objectives.inputs import loss_mask
from grpo.policies.scoring import (
    ProximalScorer,
    ReferenceScorer,
    TeacherScorer,
    highest,
    score_rollout,
)

TOPK = (data.DISTILL_IDS, data.DISTILL_LOG_PROBS)
ROWS = {"prompts": (2, 4, 1, 3, 2), "responses": (5, 1, 6, 3, 0)}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def teacher(make_model):
    return make_model(seed=1)


@pytest.fixture
def rollout(model, make_batch):
    return make_batch(model, **ROWS)


def log_softmax(model, row, *, temperature: float) -> torch.Tensor:
    """What the model predicts at each token of one row, ``[T, V]``; the first has no prediction."""
    length = int(row[data.ATTENTION_MASK].sum())
    with torch.no_grad():
        logits = model(input_ids=row[data.TOKENS][None, :length]).logits[0] / temperature
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[:-1].log_softmax(-1)])


def alone(model, row, *, temperature):
    """Log-prob and entropy of the assistant tokens of one row, from its own full logits."""
    predicted = log_softmax(model, row, temperature=temperature)
    tokens, mask = (row[key][1 : len(predicted)] for key in (data.TOKENS, data.ASSISTANT_MASK))
    choice = torch.distributions.Categorical(logits=predicted[1:])
    return choice.log_prob(tokens)[mask], choice.entropy()[mask]


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


class TestTeacherScorer:
    """The teacher's log-probs of sampled tokens, and its own most likely ones."""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("max_tokens", [1, 15, 100])
    def test_the_sampled_tokens_are_scored_under_the_teacher(
            self, teacher, rollout, temperature, max_tokens):
        scorer = TeacherScorer(teacher, temperature=temperature, max_tokens=max_tokens)
        keys = set(rollout.keys(True, True))
        assert scorer(rollout) is rollout
        assert set(rollout.keys(True, True)) - keys == {data.TEACHER_LOG_PROBS}
        assert rollout[data.TEACHER_LOG_PROBS].dtype == torch.float32
        for row in rollout:
            mask, scores = row[data.ASSISTANT_MASK], row[data.TEACHER_LOG_PROBS]
            expected, _ = alone(teacher, row, temperature=temperature)
            torch.testing.assert_close(scores[mask], expected.float())
            assert not scores[~mask].any()

    @pytest.mark.parametrize("topk", [1, 4, 23])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("max_tokens", [1, 100])
    def test_the_most_likely_tokens_are_those_of_each_position_at_temperature_one(
            self, teacher, rollout, topk, temperature, max_tokens):
        before = rollout.clone()
        TeacherScorer(teacher, temperature=temperature, max_tokens=max_tokens, sampled_tokens=False,
                      topk=topk)(rollout)
        assert set(rollout.keys(True, True)) - set(before.keys(True, True)) == set(TOPK)
        ids, log_probs = (rollout[key] for key in TOPK)
        assert ids.dtype == torch.int64 and log_probs.dtype == torch.float32
        for b, row in enumerate(rollout):
            mask = row[data.ASSISTANT_MASK]
            predicted = log_softmax(teacher, row, temperature=1.0)[mask[: int(
                row[data.ATTENTION_MASK].sum())]]
            expected = predicted.topk(topk)
            assert torch.equal(ids[b][mask], expected.indices)
            torch.testing.assert_close(log_probs[b][mask], expected.values.float())
            assert (log_probs[b][~mask] == -torch.inf).all()

    def test_both_at_once_are_what_each_is_alone(self, teacher, rollout):
        both, one, other = rollout.clone(), rollout.clone(), rollout.clone()
        options = {"temperature": 1.0, "max_tokens": 20}
        TeacherScorer(teacher, topk=3, **options)(both)
        TeacherScorer(teacher, **options)(one)
        TeacherScorer(teacher, topk=3, sampled_tokens=False, **options)(other)
        assert torch.equal(both[data.TEACHER_LOG_PROBS], one[data.TEACHER_LOG_PROBS])
        for key in TOPK:
            assert torch.equal(both[key], other[key])
        assert not any(key in one.keys(True) for key in TOPK)

    def test_a_teacher_is_frozen_and_out_of_training_mode(self, make_model):
        model = make_model().train()
        TeacherScorer(model, temperature=1.0, max_tokens=20)
        assert not model.training and not any(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize("topk", [0, -1, 24])
    def test_more_tokens_than_the_vocabulary_has_are_refused(self, teacher, topk):
        with pytest.raises(ValueError, match=f"topk={topk} must be between 1 and the 23 tokens"):
            TeacherScorer(teacher, temperature=1.0, max_tokens=20, topk=topk)

    @pytest.mark.parametrize(("temperature", "distill_temperature"), [
        (1.0, None), (0.7, None), (0.7, 2.0), (1.0, 0.5)])
    def test_a_student_equal_to_its_teacher_has_nothing_to_learn(
            self, make_model, make_batch, temperature, distill_temperature):
        student = make_model()
        # On-policy: the log-probs of the batch are the student's own.
        rollout = make_batch(student, **ROWS, noise=0.0, temperature=temperature)
        TeacherScorer(make_model(), temperature=temperature, max_tokens=20, topk=23)(rollout)
        rollout[data.REWARD] = torch.ones_like(rollout[data.REWARD])
        GroupAdvantage(reverse_kl_coeff=1.0)(rollout)
        assert rollout[data.ADVANTAGE].abs().max() < 1e-5
        loss = GRPOLoss(student, distill_coeff=1.0, distill_temperature=distill_temperature,
                        temperature=temperature)
        total_loss(loss(rollout)).backward()
        gradient = torch.cat([p.grad.flatten() for p in student.parameters()])
        assert gradient.abs().max() < 1e-5

    def test_rows_of_the_teacher_reach_loss_and_advantage(self, model, teacher, rollout):
        TeacherScorer(teacher, temperature=1.0, max_tokens=20, topk=5)(rollout)
        GroupAdvantage(reverse_kl_coeff=0.5)(rollout)
        assert rollout[data.ADVANTAGE].shape == rollout[data.TOKENS].shape
        out = GRPOLoss(model, distill_coeff=1.0)(rollout)
        # Cross-entropy of the sum of K probabilities that were made to add up to one.
        mask = rollout[data.ASSISTANT_MASK]
        expected = []
        for row in rollout:
            predicted = log_softmax(model, row, temperature=1.0)
            for t in row[data.ASSISTANT_MASK].nonzero()[:, 0].tolist():
                target = row[data.DISTILL_LOG_PROBS][t].double().softmax(-1)
                expected.append(-(target * predicted[t][row[data.DISTILL_IDS][t]]).sum())
        assert len(expected) == mask.sum()
        torch.testing.assert_close(out["loss_distill"], torch.stack(expected).mean(),
                                   check_dtype=False, rtol=1e-5, atol=1e-6)


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
