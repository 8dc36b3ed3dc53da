"""Top-k distillation against loops in plain Python and the full cross-entropy."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from grpo.objectives import distillation
from grpo.objectives.distillation import topk_cross_entropy, topk_log_probs

from .batches import Largest

ENTRY = st.tuples(st.floats(-8, -0.01), st.one_of(st.floats(-8, -0.01), st.just(-math.inf)))


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cross_entropy_by_loops(row, temperature):
    kept = [(s, math.exp(t / temperature)) for s, t in row if t > -math.inf]
    total = sum(p for _, p in kept)
    return -sum(p / total * s for s, p in kept)


@settings(deadline=None)
@given(rows=st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(ENTRY, min_size=k, max_size=k), min_size=1, max_size=4)),
    temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_cross_entropy_equals_loops_with_entries_left_out(rows, temperature):
    student, teacher = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    terms = topk_cross_entropy(student, teacher, temperature=temperature)
    expected = torch.tensor([cross_entropy_by_loops(row, temperature) for row in rows]).double()
    torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_with_the_whole_vocabulary_it_is_the_full_cross_entropy(temperature):
    logits, teacher_logits = randn(5, 7).requires_grad_(), randn(5, 7, seed=1)
    terms = topk_cross_entropy(logits.log_softmax(-1), teacher_logits.log_softmax(-1),
                               temperature=temperature)
    probs = (teacher_logits / temperature).softmax(-1)
    torch.testing.assert_close(
        terms, torch.nn.functional.cross_entropy(logits, probs, reduction="none"))
    grad = torch.autograd.grad(terms.sum(), logits)[0]
    torch.testing.assert_close(grad, logits.detach().softmax(-1) - probs)


def test_a_token_without_entries_has_term_zero_and_no_gradient():
    student = torch.tensor([[-torch.inf, -torch.inf], [-1.0, -2.0]], requires_grad=True)
    terms = topk_cross_entropy(student, torch.tensor([[-torch.inf, -torch.inf], [-1.0, -1.0]]))
    terms.sum().backward()
    assert terms.tolist() == [0.0, 1.5]
    assert student.grad.tolist() == [[0.0, 0.0], [-0.5, -0.5]]


@pytest.mark.parametrize("junk", [torch.nan, -torch.inf])
def test_what_the_student_has_in_an_entry_left_out_does_not_matter(junk):
    student = torch.tensor([[-1.0, junk]], requires_grad=True)
    terms = topk_cross_entropy(student, torch.tensor([[-2.0, -torch.inf]]))
    terms.sum().backward()
    assert terms.tolist() == [1.0] and student.grad.tolist() == [[-1.0, 0.0]]


def test_a_broken_teacher_is_not_hidden():
    assert topk_cross_entropy(torch.zeros(1, 2), torch.tensor([[torch.nan, -1.0]])).isnan().all()


def test_the_teacher_gets_no_gradient():
    student, teacher = randn(2, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    topk_cross_entropy(student, teacher).sum().backward()
    assert teacher.grad is None and student.grad.abs().sum() > 0


def test_half_precision_is_raised_to_float32():
    student, teacher = randn(4, 3).bfloat16(), randn(4, 3, seed=1).bfloat16()
    terms = topk_cross_entropy(student, teacher, temperature=0.7)
    assert terms.dtype == torch.float32
    assert torch.equal(terms, topk_cross_entropy(student.float(), teacher.float(), temperature=0.7))


# --- the student's log-probs ----------------------------------------------------------------------

N, K, D, V = 6, 3, 4, 9
IDS = torch.tensor([[0, 8, 3], [1, 1, 2], [8, 0, 5], [3, 4, 3], [7, 6, 5], [2, 0, 8]])


def normaliser(hidden, weight, temperature):
    return (hidden @ weight.t() / temperature).logsumexp(-1)


@pytest.fixture(params=["one chunk", "several chunks"])
def chunks(request, monkeypatch):
    if request.param == "several chunks":
        monkeypatch.setattr(distillation, "GATHERED_BYTES", 4 * K * D * 8 + 5)  # 4 + 2 positions


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_gradients_are_those_of_the_full_log_softmax(chunks, temperature):
    hidden, weight = randn(N, D).requires_grad_(), randn(V, D, seed=1).requires_grad_()
    actual = topk_log_probs(hidden, weight, IDS, normaliser(hidden, weight, temperature),
                            temperature=temperature)
    expected = (hidden @ weight.t() / temperature).log_softmax(-1).gather(-1, IDS)
    torch.testing.assert_close(actual, expected)
    upstream = randn(N, K, seed=2)
    for one, other in zip(torch.autograd.grad(actual, (hidden, weight), upstream),
                          torch.autograd.grad(expected, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_to_all_three_inputs_match_finite_differences(chunks):
    inputs = randn(N, D), randn(V, D, seed=1), randn(N, seed=2)
    assert torch.autograd.gradcheck(
        lambda h, w, z: topk_log_probs(h, w, IDS, z, temperature=0.8),
        [x.requires_grad_() for x in inputs])


def gathered(tensor):
    """Bytes of a tensor of three dimensions."""
    return tensor.nbytes if tensor.ndim == 3 else 0


def test_few_rows_are_gathered_at_a_time_and_none_are_kept(monkeypatch):
    n, k, d, limit = 64, 8, 16, 4 * 8 * 16 * 4
    monkeypatch.setattr(distillation, "GATHERED_BYTES", limit)
    hidden = randn(n, d, dtype=torch.float32).requires_grad_()
    weight = randn(50, d, seed=1, dtype=torch.float32).requires_grad_()
    ids = torch.randint(50, (n, k), generator=torch.Generator().manual_seed(0))
    log_z = normaliser(hidden, weight, 1.0).detach()
    kept = []
    with Largest(gathered) as forward, torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        out = topk_log_probs(hidden, weight, ids, log_z)
    with Largest(gathered) as backward:
        out.sum().backward()
    assert forward.size == backward.size == limit
    assert max(kept, default=0) < n * k * d


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_multiplied_in_float32(half):
    hidden, weight = randn(N, D, dtype=half), randn(V, D, seed=1, dtype=half)
    log_z = normaliser(hidden.float(), weight.float(), 1.0)
    actual = topk_log_probs(hidden, weight, IDS, log_z)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual, topk_log_probs(hidden.double(), weight.double(), IDS, log_z).float())


def test_no_positions_give_an_empty_result_that_still_has_a_gradient():
    hidden, weight = randn(0, D).requires_grad_(), randn(V, D).requires_grad_()
    out = topk_log_probs(hidden, weight, IDS[:0], randn(0))
    out.sum().backward()
    assert out.shape == (0, K) and weight.grad.eq(0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_out_of_range_is_an_error(temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature} must be positive"):
        topk_cross_entropy(randn(1, 2), randn(1, 2), temperature=temperature)
    with pytest.raises(ValueError, match=f"temperature={temperature} must be positive"):
        topk_log_probs(randn(N, D), randn(V, D), IDS, randn(N), temperature=temperature)
