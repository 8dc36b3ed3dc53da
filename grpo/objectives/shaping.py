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
    """Refuse rewards that would poison the statistics of other rows.

    Args:
        rewards_B: float ``[B]``.
        valid_B: bool ``[B]``; the other rows may hold anything.

    Raises:
        ValueError: naming the rows, if a valid reward is NaN or infinite.
    """
    bad_B = valid_B & ~rewards_B.isfinite()
    if bad_B.any():
        raise ValueError(
            f"reward of rows {bad_B.nonzero()[:, 0].tolist()} is not finite "
            f"({rewards_B[bad_B].tolist()}); mark such rows in 'reward_error' or repair the reward"
        )


def overlong_penalty(length_B: Tensor, *, max_response_tokens: int, buffer: int) -> Tensor:
    r"""Soft punishment of long responses, to be added to the reward.

    0 up to :math:`L_{max} - buffer` tokens, then falling linearly to -1 at :math:`L_{max}`, and -1
    beyond it. Source: DAPO (arXiv:2503.14476), eq. 13.

    Args:
        length_B: int64 ``[B]``, sampled tokens of each row.
        max_response_tokens: :math:`L_{max}`, at most the sampler's limit.
        buffer: tokens over which the penalty grows.

    Returns:
        float64 ``[B]``, from -1 to 0.

    Examples:
        >>> overlong_penalty(torch.tensor([5, 8, 9, 10, 11]), max_response_tokens=10,
        ...                  buffer=4).tolist()
        [0.0, -0.5, -0.75, -1.0, -1.0]
    """
    return ((max_response_tokens - buffer - length_B).double() / buffer).clamp(-1.0, 0.0)


def kl_in_reward(
    log_probs_BT: Tensor,
    ref_log_probs_BT: Tensor,
    assistant_mask_BT: Tensor,
    *,
    estimator: RewardKLEstimator = "k1",
) -> Tensor:
    """KL to the reference of each sampled token, in nats, to be subtracted from the reward.

    Source: Ziegler et al. (arXiv:1909.08593), eq. 2, there with ``k1`` and summed over the row.

    Args:
        log_probs_BT: float ``[B, T]``, of the sampled tokens when they were sampled.
        ref_log_probs_BT: float ``[B, T]``, the same under the reference.
        assistant_mask_BT: bool ``[B, T]``; only these tokens count.
        estimator: see :func:`~grpo.objectives.kl.kl_estimate`.

    Returns:
        float64 ``[B, T]``, 0 for the other tokens.

    Examples:
        >>> kl_in_reward(torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[9.0, -1.5, -2.25]]),
        ...              torch.tensor([[False, True, True]])).tolist()
        [[0.0, 0.5, 0.25]]
    """
    kl_BT = kl_estimate(log_probs_BT.double(), ref_log_probs_BT.double(), estimator=estimator)
    # where, not a product: the reference may leave anything on prompts and padding.
    return torch.where(assistant_mask_BT, kl_BT, 0.0)


def normalised(values: Tensor, weights: Tensor, *, eps: float) -> Tensor:
    """``(values - mean) / (std + eps)``, where the weights say how many tokens have a value.

    Args:
        values: float64, any shape; may hold anything where the weight is 0.
        weights: float64, numbers of tokens, of the same shape.
        eps: added to the (unbiased) standard deviation.

    Returns:
        float64, 0 where the weight is 0, and everywhere if all values are equal.

    Examples:
        >>> normalised(torch.tensor([1.0, 0.0]).double(), torch.tensor([1.0, 3.0]).double(), eps=0)
        tensor([ 1.5000, -0.5000], dtype=torch.float64)
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
    """Rows whose group has unequal rewards, hence a gradient.

    Rewards count as equal within 1e-8 of their magnitude, which for float32 means exactly equal.

    Args:
        rewards_B: float ``[B]``.
        group_id_B: int64 ``[B]``; rows need not be sorted, groups may differ in size.
        valid_B: bool ``[B]``; rows without a reward do not count, but get their group's answer.

    Returns:
        bool ``[B]``, the same for all rows of a group; False where fewer than two are valid.

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

    Keep it small: where fewer than ``percentile`` % of the values lie on one side of zero, clipping
    moves them to the other side.

    Args:
        values: float, one a row or one a token.
        percentile: between 0 and 50, both excluded; interpolated linearly between values.
        valid: bool, of the same shape; other values neither count nor change.

    Returns:
        Shape and dtype of ``values``.

    Examples:
        >>> values = torch.tensor([-9.0, 0.0, 1.0, 2.0, 9.0])
        >>> clip_to_percentiles(values, 25.0, valid=values > -torch.inf).tolist()
        [0.0, 0.0, 1.0, 2.0, 2.0]
    """
    if not valid.any():
        return values
    ordered = values[valid].double().sort().values
    low, high = (quantile(ordered, share) for share in (percentile / 100, 1 - percentile / 100))
    return torch.where(valid, values.double().clamp(low, high), values).to(values.dtype)


def distillation_advantages(
    advantage: Tensor,
    log_probs_BT: Tensor,
    teacher_log_probs_BT: Tensor,
    mask_BT: Tensor,
    *,
    coeff: float,
) -> Tensor:
    r"""Token-level advantages that also pull the policy towards a teacher.

    :math:`A_t = A - coeff (\log\pi(y_t) - \log\pi_{teacher}(y_t))`: the reverse KL, estimated on
    the sampled token, is a cost that each token bears itself.

    Source: Agarwal et al. (arXiv:2306.13649); as a reward of each token: Lu and Thinking Machines
    Lab, "On-Policy Distillation" (2025).

    Args:
        advantage: float ``[B, 1]``, of the whole response, or ``[B, T]``.
        log_probs_BT: float ``[B, T]``, of the sampled tokens when they were sampled.
        teacher_log_probs_BT: float ``[B, T]``, the same under the teacher.
        mask_BT: bool ``[B, T]``, sampled tokens of rows that have an advantage.
        coeff: weight of the reverse KL.

    Returns:
        float32 ``[B, T]``, 0 outside ``mask_BT``.

    Raises:
        ValueError: naming the rows, if a log-prob under the mask is NaN or infinite.

    Examples:
        >>> distillation_advantages(
        ...     torch.tensor([[1.0]]), torch.tensor([[0.0, -1.0, -2.0]]),
        ...     torch.tensor([[0.0, -1.5, -1.0]]), torch.tensor([[False, True, True]]),
        ...     coeff=0.5).tolist()
        [[0.0, 0.75, 1.5]]
    """
    gap_BT = log_probs_BT.double() - teacher_log_probs_BT.double()
    bad_B = (mask_BT & ~gap_BT.isfinite()).any(-1)
    if bad_B.any():
        raise ValueError(
            f"log-probs of rows {bad_B.nonzero()[:, 0].tolist()} under policy or teacher are not "
            f"finite; score sampled tokens under the teacher's full distribution, without top-k")
    return torch.where(mask_BT, advantage.double() - coeff * gap_BT, 0.0).float()
