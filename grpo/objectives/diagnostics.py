"""What the loss reports about a batch: masked, exact over micro-batches, never in the gradient."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from grpo.objectives.kl import kl_estimate
from grpo.objectives.mismatch import mismatch_diagnostics

RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99,
                   "ratio_max": 1.0}


def quantile(sorted_N: Tensor, q: float) -> Tensor:
    """Linear-interpolated quantile; unlike ``torch.quantile`` without a limit on the size."""
    position = q * (len(sorted_N) - 1)
    low = int(position)
    if low == position:  # nothing to interpolate, and no infinite neighbour to multiply by 0
        return sorted_N[low]
    below, above = sorted_N[low], sorted_N[low + 1]
    # Between two infinities the difference would be NaN.
    return torch.where(below == above, below, torch.lerp(below, above, position - low))


def summarize(
    stats_N: TensorDictBase, *, clip_epsilon: tuple[float, float] | None
) -> dict[str, Tensor]:
    r"""Diagnostics over all loss tokens of one or several micro-batches.

    Concatenate the ``"token_stats"`` of the micro-batches first: means, quantiles and ESS are
    then those of the whole optimizer batch.

    * ``ratio_*``: quantiles and mean of the raw ratio, before any clipping;
    * ``clip_fraction_low`` / ``_high``: share of tokens whose ratio (or that of their sequence,
      where the objective clips it) is below the range with ``A < 0`` or above it with ``A > 0``;
      ``clip_fraction`` is their sum;
    * ``log_prob_*``, ``sampled_log_prob_*``: mean and standard deviation over the tokens of what
      the trainer gives them and of what the engine sampled them with, and ``log_prob_diff_*`` of
      the first minus the second;
    * ``kl_to_inference``, ``kl_to_ref``: k3 estimates in nats;
    * ``ess``: effective sample size :math:`(\sum w)^2 / (N \sum w^2)` of the token ratios, in
      (0, 1]; 1 means all ratios are equal;
    * ``entropy``: nats;
    * ``mismatch_*``: see :func:`~grpo.objectives.mismatch.mismatch_diagnostics`;
    * ``off_policy_fraction``: share of tokens whose sequence the off-policy mask drops.

    ``clip_epsilon`` are the bounds of the objective, None where it has none.
    """
    if not stats_N.batch_size[0]:
        return {}
    log_ratio, advantage = stats_N["log_ratio"].float(), stats_N["advantage"]
    ordered = log_ratio.sort().values.exp()
    out = {name: quantile(ordered, q) for name, q in RATIO_QUANTILES.items()}
    out["ratio_mean"] = ordered.mean()
    if clip_epsilon is not None:
        low, high = clip_epsilon
        ratio = stats_N.get("clipped_log_ratio", stats_N["log_ratio"]).float().exp()
        out["clip_fraction_low"] = ((ratio < 1 - low) & (advantage < 0)).float().mean()
        out["clip_fraction_high"] = ((ratio > 1 + high) & (advantage > 0)).float().mean()
        out["clip_fraction"] = out["clip_fraction_low"] + out["clip_fraction_high"]
    if "log_prob" in stats_N.keys():
        out |= _alignment(stats_N["log_prob"].float(), stats_N["to_inference"].float())
    for name, key in (("kl_to_inference", "to_inference"), ("kl_to_ref", "to_ref")):
        if key in stats_N.keys():
            # Bounded, so that a single token does not hide how far the others are.
            gap = stats_N[key].float()
            out[name] = kl_estimate(gap, torch.zeros_like(gap), estimator="k3").mean()
    if "entropy" in stats_N.keys():
        out["entropy"] = stats_N["entropy"].float().mean()
    log_ess = 2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)
    out["ess"] = log_ess.exp() / len(log_ratio)
    if "gap" in stats_N.keys():
        out |= mismatch_diagnostics(stats_N["gap"], stats_N["gap_weight"],
                                    raw_log_weight_N=stats_N["gap_raw_weight"])
    if "off_policy_mask" in stats_N.keys():
        out["off_policy_fraction"] = 1 - stats_N["off_policy_mask"].float().mean()
    return out


def _alignment(log_probs_N: Tensor, difference_N: Tensor) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from those that the engine sampled with."""
    sampled_N = log_probs_N - difference_N
    return {
        "log_prob_mean": log_probs_N.mean(), "log_prob_std": log_probs_N.std(correction=0),
        "sampled_log_prob_mean": sampled_N.mean(),
        "sampled_log_prob_std": sampled_N.std(correction=0),
        "log_prob_diff_mean": difference_N.mean(),
        "log_prob_diff_abs_mean": difference_N.abs().mean(),
        "log_prob_diff_abs_max": difference_N.abs().max()}
