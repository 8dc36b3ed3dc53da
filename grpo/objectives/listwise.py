r"""Losses over the completions of a prompt: the policy learns the weights of
:mod:`grpo.objectives.maxent`.

It learns ``w`` through its own scores :math:`s_i` of the completions (log-prob, summed or
averaged over tokens): :func:`maxent_listwise` is the cross-entropy of ListNet (Cao et al. 2007,
"Learning to rank: from pairwise approach to listwise approach"). Both objectives need the groups
whole and ``aggregation="prompt"``: the mean of their terms over a prompt's tokens is its loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo.objectives.groups import Groups
from grpo.objectives.registry import register_surrogate
from grpo.objectives.tokens import LossTokens, bounded_ratio

_DEFAULT_CLIP_EPSILON = (0.2, 0.2)


def _check_clip(
    *, length_normalize: bool, clip_coeff: float, clip_epsilon: tuple[float, float]
) -> None:
    if not 0 <= clip_coeff < math.inf:
        raise ValueError(f"clip_coeff={clip_coeff} must be at least 0 and finite")
    if not clip_coeff and clip_epsilon != _DEFAULT_CLIP_EPSILON:
        raise ValueError(f"clip_epsilon={clip_epsilon} would be ignored at clip_coeff=0; remove it "
                         "or set clip_coeff > 0")


@register_surrogate("maxent_listwise", scope="group", check=_check_clip, reads_listwise_weight=True)
def maxent_listwise(
    tokens: LossTokens, *, length_normalize: bool = True, clip_coeff: float = 0.0,
    clip_epsilon: tuple[float, float] = _DEFAULT_CLIP_EPSILON,
) -> Tensor:
    r"""Cross-entropy of a group's weights with the softmax of its sequence scores.

    .. math:: L_{group} = -\sum_i w_i \log \mathrm{softmax}_i(s)
              - c \sum_i \min\big(\rho_i A_i, \mathrm{clip}(\rho_i) A_i\big)

    with :math:`A = w - 1/K` and :math:`\rho_i` the exponential of the mean log-ratio of sequence
    *i*. The gradient of the first part is :math:`\mathrm{softmax}_i(s) - w_i` for each score: a
    sequence whose share exceeds its weight is pushed **down**.

    A row without tokens takes no part: it is in no softmax and does not count in ``K``, and the
    weights of the others are divided by their sum.

    Args:
        tokens: ``group_R`` and ``listwise_weight_R`` are needed; advantages are not read.
        length_normalize: score by the mean log-prob of the tokens instead of their sum.
        clip_coeff: weight ``c`` of the clipped part; at 0 a ``clip_epsilon`` is refused.

    Raises:
        ValueError: without ``group_R``.

    Examples:
        >>> log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> tokens = LossTokens(
        ...     log_probs_N=log_probs, old_log_probs_N=log_probs.detach(),
        ...     advantage_N=torch.zeros(2), row_N=torch.tensor([0, 1]), num_rows=2,
        ...     group_R=torch.zeros(2, dtype=torch.int64),
        ...     listwise_weight_R=torch.tensor([0.9, 0.1]))
        >>> maxent_listwise(tokens).mean().backward()
        >>> [round(g, 4) for g in log_probs.grad.tolist()]
        [-0.4, 0.4]
    """
    groups, weight, score = _participants(tokens, length_normalize)
    term = -weight * groups.log_softmax(score)
    return _by_token(tokens, groups, term + _clipped(
        tokens, groups, weight, clip_coeff, clip_epsilon))


@register_surrogate("maxent_weighted", scope="group", check=_check_clip, reads_listwise_weight=True)
def maxent_weighted(
    tokens: LossTokens, *, length_normalize: bool = True, clip_coeff: float = 0.0,
    clip_epsilon: tuple[float, float] = _DEFAULT_CLIP_EPSILON,
) -> Tensor:
    r"""Weighted maximum likelihood, :math:`-\sum_i w_i s_i` a group.

    Every sequence is pushed up, in proportion to its weight; only the clipped part can push one
    down. Arguments, result and errors are those of :func:`maxent_listwise`.

    Examples:
        >>> tokens = LossTokens(
        ...     log_probs_N=torch.tensor([-1.0, -3.0]), old_log_probs_N=torch.zeros(2),
        ...     advantage_N=torch.zeros(2), row_N=torch.tensor([0, 1]), num_rows=2,
        ...     group_R=torch.zeros(2, dtype=torch.int64),
        ...     listwise_weight_R=torch.tensor([0.75, 0.25]))
        >>> maxent_weighted(tokens).mean().item()
        1.5
    """
    groups, weight, score = _participants(tokens, length_normalize)
    return _by_token(tokens, groups, -weight * score + _clipped(
        tokens, groups, weight, clip_coeff, clip_epsilon))


def _participants(tokens: LossTokens, length_normalize: bool) -> tuple[Groups, Tensor, Tensor]:
    """The rows in the loss, their weights (summing to 1 in each group) and their scores."""
    if tokens.group_R is None:
        raise ValueError("group_R=None: a listwise objective compares the completions of a prompt; "
                         "pass LossTokens with group_R and keep every group in one micro-batch")
    # A score of 0, that of an empty sequence, would beat every real log-prob in the softmax.
    groups = Groups(tokens.group_R, tokens.length_R > 0)
    weight = tokens.listwise_weight_R.detach()[groups.rows].double()
    total = groups.sum(weight)
    # float64: in a sum over thousands of tokens float32 rounds by enough to move the softmax.
    score_R = (tokens.row_mean if length_normalize else tokens.row_sum)(tokens.log_probs_N.double())
    # All the weight of a group may have been on rows that are left out: nothing to learn then.
    return groups, weight / total.where(total > 0, 1.0), score_R[groups.rows]


def _clipped(
    tokens: LossTokens, groups: Groups, weight: Tensor, clip_coeff: float,
    clip_epsilon: tuple[float, float],
) -> Tensor | float:
    if not clip_coeff:
        return 0.0
    # The group's mean is 1/K, or 0 where all weight was left out and nothing is to be learnt.
    advantage = weight - groups.sum(weight) / groups.size[groups.group]
    ratio = bounded_ratio(tokens.row_mean(tokens.log_ratio_N.double())[groups.rows])
    clipped = ratio.clamp(1.0 - clip_epsilon[0], 1.0 + clip_epsilon[1])
    return -clip_coeff * torch.minimum(ratio * advantage, clipped * advantage)


def _by_token(tokens: LossTokens, groups: Groups, term: Tensor) -> Tensor:
    """Spread sequence terms so that the mean over a prompt's tokens is their sum, ``[N]``."""
    term_R = groups.scatter(term).to(tokens.log_probs_N.dtype)
    length_R = tokens.length_R
    group_length_R = Groups(tokens.group_R, None).sum(length_R)
    return tokens.of_row(term_R * group_length_R / length_R.clamp(min=1))
