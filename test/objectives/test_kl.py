"""KL estimators on distributions whose divergence is known."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives.kl import check_kl_estimator, kl_estimate

LOG_PROBS = st.floats(-8, 0)


def three_policies(seed: int):
    """Log-probs of a current (differentiable), an old and a reference policy over 11 actions."""
    logits, old, ref = torch.randn(3, 11, generator=torch.Generator().manual_seed(seed)).double()
    logits.requires_grad_()
    return logits, logits.log_softmax(-1), old.log_softmax(-1), ref.log_softmax(-1)


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


@given(log_p=LOG_PROBS, log_q=LOG_PROBS, log_old=LOG_PROBS)
def test_values_and_gradients(log_p, log_q, log_old):
    p, q, old = torch.tensor([log_p, log_q, log_old], dtype=torch.float64)
    p.requires_grad_()
    d, e, r = log_p - log_q, math.exp(log_q - log_p), math.exp(log_p - log_old)
    k3 = e - 1 + d
    expected = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (k3, 1 - e),
                "unbiased_k3": (r * k3, r * k3 + r * (1 - e))}
    for name, (value, slope) in expected.items():
        estimate = kl_estimate(p, q, estimator=name, log_ratio_N=p - old)
        assert estimate.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert gradient(estimate, p).item() == pytest.approx(slope, rel=1e-9, abs=1e-9)


@given(log_p=LOG_PROBS, log_q=LOG_PROBS)
def test_all_but_k1_are_never_negative_and_zero_only_where_equal(log_p, log_q):
    p, q = torch.tensor(log_p), torch.tensor(log_q)
    for name in ("k2", "k3", "unbiased_k3"):
        options = {"estimator": name, "log_ratio_N": torch.tensor(0.5)}
        assert kl_estimate(p, q, **options) >= -2e-7
        assert kl_estimate(p, p, **options) == 0
        if abs(log_p - log_q) > 1e-2:
            assert kl_estimate(p, q, **options) > 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_on_policy_is_the_divergence(estimator):
    _, log_p, _, log_q = three_policies(0)
    mean = (log_p.exp() * kl_estimate(log_p, log_q, estimator=estimator)).sum()
    torch.testing.assert_close(mean, divergence(log_p, log_q))
    assert abs(mean - divergence(log_q, log_p)) > 0.01  # the direction matters


@pytest.mark.parametrize("seed", range(3))
def test_unbiased_k3_has_the_value_and_gradient_of_the_divergence_under_the_old_policy(seed):
    logits, log_p, log_old, log_ref = three_policies(seed)
    estimate = kl_estimate(
        log_p, log_ref, estimator="unbiased_k3", log_ratio_N=log_p - log_old)
    mean = (log_old.exp() * estimate).sum()
    exact = divergence(log_p, log_ref)
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(gradient(mean, logits), gradient(exact, logits))

    plain = (log_old.exp() * kl_estimate(log_p, log_ref, estimator="k3")).sum()
    assert abs(plain - exact) > 0.01
    assert (gradient(plain, logits) - gradient(exact, logits)).abs().max() > 0.01


def test_on_policy_unbiased_k3_still_needs_the_gradient_of_its_ratio():
    logits, log_p, _, log_ref = three_policies(0)
    old = log_p.detach()
    exact = gradient(divergence(log_p, log_ref), logits)
    for log_ratio, right in ((log_p - old, True), (torch.zeros_like(old), False)):
        estimate = kl_estimate(log_p, log_ref, estimator="unbiased_k3", log_ratio_N=log_ratio)
        got = gradient((old.exp() * estimate).sum(), logits)
        assert torch.allclose(got, exact) is right


def test_expected_gradient_on_policy_of_k2_is_that_of_the_divergence_and_of_k3_its_opposite():
    logits, log_p, _, log_q = three_policies(0)
    weights = log_p.exp().detach()  # samples come from p, but are not differentiated
    k2, k3 = (gradient((weights * kl_estimate(log_p, log_q, estimator=name)).sum(), logits)
              for name in ("k2", "k3"))
    torch.testing.assert_close(k2, gradient(divergence(log_p, log_q), logits))
    torch.testing.assert_close(k3, gradient(divergence(log_q, log_p), logits))


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor(1e-3)
    torch.testing.assert_close(
        kl_estimate(d, torch.tensor(0.0), estimator="k3"), d**2 / 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_any_shape_is_kept(shape):
    p, q, log_ratio = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    for name in ("k1", "k2", "k3", "unbiased_k3"):
        assert kl_estimate(p, q, estimator=name, log_ratio_N=log_ratio).shape == shape


def test_unbiased_k3_without_a_ratio_is_an_error():
    with pytest.raises(ValueError, match="unbiased_k3.*log_ratio_N=None.*pass"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="unbiased_k3")


def test_an_unknown_estimator_is_an_error():
    for call in (check_kl_estimator,
                 lambda name: kl_estimate(torch.zeros(1), torch.zeros(1), estimator=name)):
        with pytest.raises(ValueError, match="kl_estimator='k4'.*k3"):
            call("k4")
    assert check_kl_estimator("unbiased_k3") == "unbiased_k3"


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "unbiased_k3"])
@pytest.mark.parametrize("gap, old_gap", [(95.0, 0.0), (-95.0, 0.0), (0.1, 95.0), (-95.0, 95.0)])
def test_gaps_that_exp_cannot_hold_stay_finite(name, gap, old_gap):
    p = torch.tensor([-1.0], requires_grad=True)
    log_ratio = p - (p.detach() - old_gap)
    estimate = kl_estimate(p, p.detach() - gap, estimator=name, log_ratio_N=log_ratio)
    assert estimate.isfinite() and gradient(estimate, p).isfinite()
    if gap > 90 and name == "k3":  # and still pulls back where it is far above the other policy
        assert gradient(estimate, p).item() == pytest.approx(1.0)
