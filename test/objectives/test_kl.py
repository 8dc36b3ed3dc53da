"""KL estimators on distributions whose divergence is known."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives import kl_estimate

LOG_PROBS = st.floats(-8, 0)


@given(log_p=LOG_PROBS, log_q=LOG_PROBS)
def test_values(log_p, log_q):
    p, q = torch.tensor([[log_p], [log_q]], dtype=torch.float64)
    d = p - q
    expected = {"k1": d, "k2": d * d / 2, "k3": torch.exp(q - p) - 1 - (q - p)}
    for name, value in expected.items():
        torch.testing.assert_close(kl_estimate(p, q, estimator=name), value, rtol=1e-9, atol=1e-12)


@given(log_p=LOG_PROBS, log_q=LOG_PROBS)
def test_k2_and_k3_are_never_negative_and_zero_only_where_equal(log_p, log_q):
    p, q = torch.tensor(log_p), torch.tensor(log_q)
    for name in ("k2", "k3"):
        assert kl_estimate(p, q, estimator=name) >= -1e-7
        assert kl_estimate(p, p, estimator=name) == 0
        if abs(log_p - log_q) > 1e-3:
            assert kl_estimate(p, q, estimator=name) > 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_divergence(estimator):
    p, q = torch.randn(2, 11, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    mean = (p * kl_estimate(p.log(), q.log(), estimator=estimator)).sum()
    torch.testing.assert_close(mean, (p * (p / q).log()).sum())
    assert abs(mean - (q * (q / p).log()).sum()) > 0.01  # the direction matters


def test_expected_gradient_of_k2_is_that_of_the_divergence():
    logits, other = torch.randn(2, 11, generator=torch.Generator().manual_seed(0)).double()
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    weights = log_p.exp().detach()  # samples come from p, but are not differentiated
    k2, = torch.autograd.grad(
        (weights * kl_estimate(log_p, log_q, estimator="k2")).sum(), logits, retain_graph=True)
    exact, = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    torch.testing.assert_close(k2, exact)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor(1e-3)
    torch.testing.assert_close(kl_estimate(d, torch.tensor(0.0)), d**2 / 2, rtol=1e-3, atol=0)


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="kl_estimator='k4'.*k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="k4")
