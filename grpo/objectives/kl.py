"""Estimators of the KL divergence between two policies from sampled tokens.

Source of all three: J. Schulman, "Approximating KL Divergence" (2020). With samples from
:math:`\\pi` and :math:`d = \\log\\pi - \\log\\pi_{other}`, each estimates
:math:`KL(\\pi \\| \\pi_{other})`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    log_probs_BT: Tensor, other_log_probs_BT: Tensor, *, estimator: KLEstimator = "k3"
) -> Tensor:
    r"""KL estimate of each token, in nats.

    =====  ==============================  =======================================================
    name   value                           property
    =====  ==============================  =======================================================
    k1     :math:`d`                       unbiased, high variance; its own gradient is zero on
                                           average, so use it for logging or in the reward
    k2     :math:`d^2 / 2`                 biased, low variance; its gradient is that of the true
                                           KL on-policy
    k3     :math:`e^{-d} - 1 + d`          unbiased, never negative
    =====  ==============================  =======================================================

    Args:
        log_probs_BT: log-probs of the sampled tokens under the current policy.
        other_log_probs_BT: the same under the reference or the inference policy.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.

    Raises:
        ValueError: for an unknown estimator.

    Examples:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator="k1").item()
        0.5
    """
    diff_BT = log_probs_BT - other_log_probs_BT
    if estimator == "k1":
        return diff_BT
    if estimator == "k2":
        return diff_BT.square() / 2
    if estimator == "k3":
        # expm1 keeps the value exact near zero, where exp(-d) - 1 would cancel.
        return torch.expm1(-diff_BT) + diff_BT
    raise ValueError(f"kl_estimator={estimator!r} is unknown; use one of {get_args(KLEstimator)}")
