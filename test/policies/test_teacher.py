"""TeacherScorer: the teacher's log-probs of sampled tokens, and its own most likely ones."""

from __future__ import annotations

import pytest
import torch

from grpo import GRPOLoss, data
from grpo.objectives import GroupAdvantage, total_loss
from grpo.policies.scoring import TeacherScorer

ROWS = {"prompts": (2, 4, 1, 3, 2), "responses": (5, 1, 6, 3, 0)}
TOPK = (data.DISTILL_IDS, data.DISTILL_LOG_PROBS)


@pytest.fixture(scope="module")
def student(make_model):
    return make_model()


@pytest.fixture(scope="module")
def teacher(make_model):
    return make_model(seed=1)


@pytest.fixture
def rollout(student, make_batch):
    return make_batch(student, **ROWS)


def log_softmax(model, row, *, temperature: float) -> torch.Tensor:
    """What the model predicts at each token of one row, ``[T, V]``; the first has no prediction."""
    length = int(row[data.ATTENTION_MASK].sum())
    with torch.no_grad():
        logits = model(input_ids=row[data.TOKENS][None, :length]).logits[0] / temperature
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[:-1].log_softmax(-1)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 15, 100])
def test_the_sampled_tokens_are_scored_under_the_teacher(teacher, rollout, temperature, max_tokens):
    scorer = TeacherScorer(teacher, temperature=temperature, max_tokens=max_tokens)
    keys = set(rollout.keys(True, True))
    assert scorer(rollout) is rollout
    assert set(rollout.keys(True, True)) - keys == {data.TEACHER_LOG_PROBS}
    assert rollout[data.TEACHER_LOG_PROBS].dtype == torch.float32
    for row in rollout:
        mask, scores = row[data.ASSISTANT_MASK], row[data.TEACHER_LOG_PROBS]
        predicted = log_softmax(teacher, row, temperature=temperature)
        expected = predicted.gather(-1, row[data.TOKENS][: len(predicted), None])[:, 0]
        torch.testing.assert_close(scores[mask], expected[mask[: len(predicted)]].float())
        assert not scores[~mask].any()


@pytest.mark.parametrize("topk", [1, 4, 23])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 100])
def test_the_most_likely_tokens_are_those_of_each_position_at_temperature_one(
        teacher, rollout, topk, temperature, max_tokens):
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


def test_both_at_once_are_what_each_is_alone(teacher, rollout):
    both, one, other = rollout.clone(), rollout.clone(), rollout.clone()
    options = {"temperature": 1.0, "max_tokens": 20}
    TeacherScorer(teacher, topk=3, **options)(both)
    TeacherScorer(teacher, **options)(one)
    TeacherScorer(teacher, topk=3, sampled_tokens=False, **options)(other)
    assert torch.equal(both[data.TEACHER_LOG_PROBS], one[data.TEACHER_LOG_PROBS])
    for key in TOPK:
        assert torch.equal(both[key], other[key])
    assert not any(key in one.keys(True) for key in TOPK)


def test_a_teacher_is_frozen_and_out_of_training_mode(make_model):
    model = make_model().train()
    TeacherScorer(model, temperature=1.0, max_tokens=20)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("topk", [0, -1, 24])
def test_more_tokens_than_the_vocabulary_has_are_refused(teacher, topk):
    with pytest.raises(ValueError, match=f"topk={topk} must be between 1 and the 23 tokens"):
        TeacherScorer(teacher, temperature=1.0, max_tokens=20, topk=topk)


@pytest.mark.parametrize(("temperature", "distill_temperature"), [
    (1.0, None), (0.7, None), (0.7, 2.0), (1.0, 0.5)])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(
        make_model, make_batch, temperature, distill_temperature):
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


def test_rows_of_the_teacher_reach_loss_and_advantage(student, teacher, rollout):
    TeacherScorer(teacher, temperature=1.0, max_tokens=20, topk=5)(rollout)
    GroupAdvantage(reverse_kl_coeff=0.5)(rollout)
    assert rollout[data.ADVANTAGE].shape == rollout[data.TOKENS].shape
    out = GRPOLoss(student, distill_coeff=1.0)(rollout)
    # Cross-entropy of the sum of K probabilities that were made to add up to one.
    mask = rollout[data.ASSISTANT_MASK]
    expected = []
    for row in rollout:
        predicted = log_softmax(student, row, temperature=1.0)
        for t in row[data.ASSISTANT_MASK].nonzero()[:, 0].tolist():
            target = row[data.DISTILL_LOG_PROBS][t].double().softmax(-1)
            expected.append(-(target * predicted[t][row[data.DISTILL_IDS][t]]).sum())
    assert len(expected) == mask.sum()
    torch.testing.assert_close(out["loss_distill"], torch.stack(expected).mean(),
                               check_dtype=False, rtol=1e-5, atol=1e-6)
