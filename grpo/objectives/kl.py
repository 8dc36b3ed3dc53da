"""Estimators of the KL divergence between two policies from sampled tokens.

Source of k1, k2 and k3: J. Schulman, "Approximating KL Divergence" (2020). With samples from
:math:`\\pi` and :math:`d = \\log\\pi - \\log\\pi_{other}`, each estimates
:math:`KL(\\pi \\| \\pi_{other})`. Samples of a reused batch come from an older policy instead:
``unbiased_k3`` weighs them by :math:`r = \\pi / \\pi_{old}` (DeepSeek-V3.2, arXiv:2512.02556).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from grpo.objectives.tokens import MAX_LOG_RATIO, bounded_ratio

KLEstimator = Literal["k1", "k2", "k3", "unbiased_k3"]


def check_kl_estimator(name: str) -> KLEstimator:
    """Give the name back; ValueError if :func:`kl_estimate` does not know it."""
    if name not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator={name!r} is unknown; use one of {get_args(KLEstimator)}")
    return name


def kl_estimate(
    log_probs_N: Tensor, other_log_probs_N: Tensor, *, estimator: KLEstimator,
    log_ratio_N: Tensor | None = None,
) -> Tensor:
    r"""KL estimate of each token, in nats, of the shape and dtype of ``log_probs_N``.

    ===========  ===========================  =====================================================
    name         value                        property
    ===========  ===========================  =====================================================
    k1           :math:`d`                    unbiased, high variance; its own gradient is zero on
                                              average, so use it for logging or in the reward
    k2           :math:`d^2 / 2`              biased, low variance; its gradient is that of the true
                                              KL on-policy
    k3           :math:`e^{-d} - 1 + d`       unbiased, never negative; its gradient is that of the
                                              opposite direction, :math:`KL(\pi_{other} \| \pi)`,
                                              on-policy
    unbiased_k3  :math:`r (e^{-d} - 1 + d)`   never negative; value and gradient are those of the
                                              true KL also with samples from the old policy
    ===========  ===========================  =====================================================

    Below :math:`d = -20` k3 is constant and has no gradient (as in verl), and :math:`r` is bounded
    (:func:`~grpo.objectives.tokens.bounded_ratio`), so that neither overflows.

    Args:
        log_probs_N: log-probs of the sampled tokens under the current policy; any shape.
        other_log_probs_N: the same under the reference or the inference policy.
        estimator: a name of the table.
        log_ratio_N: current minus old log-prob, :math:`\log r`, **with** its gradient (also where
            its value is 0, on-policy); only ``unbiased_k3`` reads it.

    Raises:
        ValueError: for an unknown estimator, or ``unbiased_k3`` without ``log_ratio_N``.

    Examples:
        >>> current, other = torch.tensor([-1.0]), torch.tensor([-1.5])
        >>> kl_estimate(current, other, estimator="k1").item()
        0.5
        >>> half = torch.tensor([0.5]).log()  # the old policy drew this token twice as often
        >>> kl_estimate(current, other, estimator="unbiased_k3", log_ratio_N=half) * 2 == (
        ...     kl_estimate(current, other, estimator="k3"))
        tensor([True])
    """
    check_kl_estimator(estimator)
    diff_N = log_probs_N - other_log_probs_N
    if estimator == "k1":
        return diff_N
    if estimator == "k2":
        return diff_N.square() / 2
    # Above, where the value grows like d and pulls the policy back, there is nothing to bound.
    diff_N = diff_N.clamp(min=-MAX_LOG_RATIO)
    # expm1 keeps the value exact near zero, where exp(-d) - 1 would cancel.
    k3_N = torch.expm1(-diff_N) + diff_N
    if estimator == "k3":
        return k3_N
    if log_ratio_N is None:
        raise ValueError("kl_estimator='unbiased_k3' weighs each token by its ratio, but "
                         "log_ratio_N=None; pass current minus old log-prob, or use 'k3'")
    return bounded_ratio(log_ratio_N) * k3_N
