"""What happens around an advantage: shaped rewards, clipped values, groups that teach nothing.

Pure functions of tensors; :class:`~grpo.objectives.advantages.GroupAdvantage` calls them in order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo.objectives.diagnostics import quantile
from grpo.objectives.groups import Groups
from grpo.objectives.kl import kl_estimate

#: Estimators that need no gradient, so that they may stand in a reward.
RewardKLEstimator = Literal["k1", "k2", "k3"]


def check_rewards(rewards_B: Tensor, valid_B: Tensor) -> None:
    """ValueError if a valid reward is NaN or infinite: it would poison the statistics of others."""
    bad_B = valid_B & ~rewards_B.isfinite()
    if bad_B.any():
        raise ValueError(
            f"reward of rows {bad_B.nonzero()[:, 0].tolist()} is not finite "
            f"({rewards_B[bad_B].tolist()}); mark such rows in 'reward_error' or repair the reward"
        )


def overlong_penalty(length_B: Tensor, *, max_response_tokens: int, buffer: int) -> Tensor:
    """Soft punishment of long responses, to be added to the reward; float64 ``[B]``.

    0 while at least ``buffer`` tokens are left to the maximum, then falling linearly to -1 at the
    maximum and beyond. Source: DAPO (arXiv:2503.14476), eq. 13.
    """
    return ((max_response_tokens - buffer - length_B).double() / buffer).clamp(-1.0, 0.0)


def kl_in_reward(
    log_probs_BT: Tensor, ref_log_probs_BT: Tensor, assistant_mask_BT: Tensor, *,
    estimator: RewardKLEstimator,
) -> Tensor:
    """KL to the reference of each sampled token, in nats, 0 for other tokens; float64 ``[B, T]``.

    Source: Ziegler et al. (arXiv:1909.08593), eq. 2, there with ``k1`` and summed over the row.
    """
    kl_BT = kl_estimate(log_probs_BT.double(), ref_log_probs_BT.double(), estimator=estimator)
    # where, not a product: the reference may leave anything on prompts and padding.
    return torch.where(assistant_mask_BT, kl_BT, 0.0)


def normalised(values: Tensor, weights: Tensor, *, eps: float) -> Tensor:
    """``(values - mean) / (unbiased std + eps)``; a weight counts the tokens that have the value.

    Both are float64 of one shape. The result is 0 where the weight is, whatever the value, and
    everywhere if all values are equal.
    """
    known = weights > 0
    if not known.any() or values[known].max() == values[known].min():
        return torch.zeros_like(values)
    total = weights.sum()
    values = torch.where(known, values, 0.0)
    centred = torch.where(known, values - (weights * values).sum() / total, 0.0)
    variance = (weights * centred.square()).sum() / (total - 1)
    return centred / (variance.sqrt() + eps)


def informative_groups(rewards_B: Tensor, group_id_B: Tensor, valid_B: Tensor) -> Tensor:
    """Rows whose group has unequal rewards, hence a gradient; bool ``[B]``.

    Rewards count as equal within 1e-8 of their magnitude, which for float32 means exactly equal.
    Rows that are not valid get their group's answer, which is False with fewer than two valid ones.

    Raises:
        ValueError: if a valid reward is NaN or infinite.

    Examples:
        >>> informative_groups(torch.tensor([1.0, 0.0, 1.0, 1.0, 3.0]),
        ...                    torch.tensor([4, 4, 7, 7, 9]), torch.ones(5).bool()).tolist()
        [True, True, False, False, False]
    """
    check_rewards(rewards_B, valid_B)
    rewards, groups = rewards_B.double(), Groups(group_id_B, None)
    # The range vanishes where the standard deviation does, and has no rounding error of its own.
    # Rows that do not count, and groups without any that does, are -inf.
    highest = groups.max(torch.where(valid_B, rewards, -torch.inf))
    lowest = -groups.max(torch.where(valid_B, -rewards, -torch.inf))
    return highest - lowest > 1e-8 * torch.maximum(highest.abs(), lowest.abs())


def clip_to_percentiles(values: Tensor, percentile: float, *, valid: Tensor) -> Tensor:
    """Clip values to their own ``[percentile, 100 - percentile]`` percentiles.

    Values that are not valid neither count nor change.
    """
    if not valid.any():
        return values
    ordered = values[valid].double().sort().values
    low, high = (quantile(ordered, share) for share in (percentile / 100, 1 - percentile / 100))
    return torch.where(valid, values.double().clamp(low, high), values).to(values.dtype)


def distillation_advantages(
    advantage: Tensor, log_probs_BT: Tensor, teacher_log_probs_BT: Tensor, mask_BT: Tensor, *,
    coeff: float,
) -> Tensor:
    r"""Advantages that also pull the policy towards a teacher; float32 ``[B, T]``, 0 off the mask.

    :math:`A_t = A - coeff (\log\pi(y_t) - \log\pi_{teacher}(y_t))`: the reverse KL, estimated on
    the sampled token, is a cost that each token bears itself. Source: Agarwal et al.
    (arXiv:2306.13649); as a reward of each token: Lu and Thinking Machines Lab, "On-Policy
    Distillation" (2025).

    Raises:
        ValueError: naming the rows, if a log-prob under the mask is NaN or infinite.
    """
    gap_BT = log_probs_BT.double() - teacher_log_probs_BT.double()
    bad_B = (mask_BT & ~gap_BT.isfinite()).any(-1)
    if bad_B.any():
        raise ValueError(
            f"log-probs of rows {bad_B.nonzero()[:, 0].tolist()} under policy or teacher are not "
            f"finite; score sampled tokens under the teacher's full distribution, without top-k")
    return torch.where(mask_BT, advantage.double() - coeff * gap_BT, 0.0).float()
