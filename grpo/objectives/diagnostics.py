"""What the loss reports about a batch: masked, exact over micro-batches, never in the gradient."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

RATIO_QUANTILES = {"ratio_min": 0.0, "ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99,
                   "ratio_max": 1.0}


def token_stats(mask_BT: Tensor, **values_BT: Tensor) -> TensorDict:
    """Keep the masked tokens of each named ``[B, T]`` tensor, detached, as ``[N]`` entries."""
    kept = {name: value.detach().expand_as(mask_BT)[mask_BT] for name, value in values_BT.items()}
    return TensorDict(kept, batch_size=[int(mask_BT.sum())])


def quantile(sorted_N: Tensor, q: float) -> Tensor:
    """Linear-interpolated quantile; unlike ``torch.quantile`` without a limit on the size."""
    position = q * (len(sorted_N) - 1)
    low = int(position)
    high = min(low + 1, len(sorted_N) - 1)
    return torch.lerp(sorted_N[low], sorted_N[high], position - low)


def summarize(
    stats_N: TensorDictBase, *, clip_epsilon: tuple[float, float] | None
) -> dict[str, Tensor]:
    r"""Diagnostics over all masked tokens of one or several micro-batches.

    Concatenate the ``"token_stats"`` of the micro-batches first: means, quantiles and ESS are
    then those of the whole optimizer batch.

    * ``ratio_*``: quantiles of the raw ratio, before any clipping;
    * ``clip_fraction_low`` / ``_high``: share of tokens whose gradient the clip removes, below
      the range with ``A < 0`` and above it with ``A > 0``;
    * ``kl_to_inference``, ``kl_to_ref``: k3 estimates in nats;
    * ``ess``: effective sample size :math:`(\sum w)^2 / (N \sum w^2)` of the token ratios, in
      (0, 1]; 1 means all ratios are equal;
    * ``entropy``: nats.

    Args:
        stats_N: from :func:`token_stats`, with ``log_ratio``, ``advantage`` and optionally
            ``entropy`` and ``ref_log_ratio`` (current minus reference log-prob).
        clip_epsilon: the bounds of the objective, or None where it has none.

    Examples:
        >>> mask = torch.tensor([[True, True]])
        >>> stats = token_stats(mask, log_ratio=torch.zeros(1, 2), advantage=torch.ones(1, 2))
        >>> summarize(stats, clip_epsilon=(0.2, 0.2))["ess"].item()
        1.0
    """
    if not stats_N.batch_size[0]:
        return {}
    log_ratio, advantage = stats_N["log_ratio"].float(), stats_N["advantage"]
    ratio = log_ratio.exp()
    ordered = ratio.sort().values
    out = {name: quantile(ordered, q) for name, q in RATIO_QUANTILES.items()}
    if clip_epsilon is not None:
        low, high = clip_epsilon
        out["clip_fraction_low"] = ((ratio < 1 - low) & (advantage < 0)).float().mean()
        out["clip_fraction_high"] = ((ratio > 1 + high) & (advantage > 0)).float().mean()
    # k3 from the current policy's side: exp(other - current) - 1 - (other - current).
    out["kl_to_inference"] = (torch.expm1(-log_ratio) + log_ratio).mean()
    if "ref_log_ratio" in stats_N.keys():
        ref = stats_N["ref_log_ratio"].float()
        out["kl_to_ref"] = (torch.expm1(-ref) + ref).mean()
    if "entropy" in stats_N.keys():
        out["entropy"] = stats_N["entropy"].float().mean()
    log_ess = 2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)
    out["ess"] = log_ess.exp() / len(log_ratio)
    return out
