"""Policy objectives: from log-probs and advantages to one loss term a token.

In all formulas :math:`r = \\exp(\\log p - \\log p_{old})` is the ratio of a token (bounded, see
:func:`~grpo.objectives.tokens.bounded_ratio`), :math:`A` its advantage and :math:`sg` stops the
gradient; the option ``clip_epsilon`` is ``(low, high)`` and :math:`\\mathrm{clip}(x)` keeps ``x``
between ``1 - low`` and ``1 + high``. On-policy (:math:`r = 1`) the gradient of every objective is
:math:`-A \\nabla \\log p`.

Add your own with :func:`~grpo.objectives.registry.register_surrogate`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo.objectives.registry import is_number, register_surrogate, require
from grpo.objectives.tokens import LossTokens, bounded_ratio

Divergence = Literal["tv", "kl"]


def _clip(ratio: Tensor, clip_epsilon: tuple[float, float]) -> Tensor:
    return ratio.clamp(1.0 - clip_epsilon[0], 1.0 + clip_epsilon[1])


def _lower_bound(ratio: Tensor, advantage: Tensor, clip_epsilon: tuple[float, float]) -> Tensor:
    # The minimum, for both signs of the advantage, is what makes the clip pessimistic.
    return torch.minimum(ratio * advantage, _clip(ratio, clip_epsilon) * advantage)


def _check_ppo_clip(*, clip_epsilon: tuple[float, float], delta: float | None) -> None:
    require(delta is None or (is_number(delta) and delta > 1 + clip_epsilon[1]), "delta", delta,
            f"None or a number above 1 + clip_epsilon[1] = {1 + clip_epsilon[1]:g}")


@register_surrogate("ppo_clip", check=_check_ppo_clip)
def ppo_clip(
    tokens: LossTokens, *, clip_epsilon: tuple[float, float] = (0.2, 0.2),
    delta: float | None = None,
) -> Tensor:
    r"""Clipped surrogate of PPO, with separate lower and upper bounds and optional dual clip.

    .. math:: L = -\min\big(r A,\ \mathrm{clip}(r)\, A\big)

    The gradient vanishes where the ratio is above the range and :math:`A > 0`, or below it and
    :math:`A < 0`: where a step would lead further away. With ``delta`` the term of a token with
    :math:`A < 0` is at most :math:`-\delta A`, and its gradient vanishes above it.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; separate bounds: DAPO
    (arXiv:2503.14476), eq. 10; dual clip: Ye et al. 2019 (arXiv:1912.09729).

    Args:
        delta: greatest ratio that counts for a negative advantage, above ``1 + high``.

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.2, 0.8]).log(), torch.tensor([0.4, 0.4]).log(),
        ...     advantage_N=torch.tensor([-1.0, -1.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> [round(term, 4) for term in ppo_clip(tokens).tolist()]
        [0.8, 2.0]
        >>> [round(term, 4) for term in ppo_clip(tokens, delta=1.5).tolist()]
        [0.8, 1.5]
    """
    advantage_N = tokens.advantage_N
    bound_N = _lower_bound(tokens.ratio_N, advantage_N, clip_epsilon)
    if delta is not None:
        dual_N = torch.maximum(bound_N, delta * advantage_N)
        bound_N = torch.where(advantage_N < 0, dual_N, bound_N)
    return -bound_N


@register_surrogate("cispo")
def cispo(tokens: LossTokens, *, clip_epsilon: tuple[float, float] = (1.0, 0.2)) -> Tensor:
    r"""Log-likelihood weighted with a clipped ratio that carries no gradient.

    .. math:: L = -sg\big(\mathrm{clip}(r)\big)\, A \log p

    The gradient never vanishes: clipping limits the weight of a token and does not drop it. By
    default only the upper side clips, since no ratio is below :math:`1 - 1 = 0`.

    Source: MiniMax-M1 (arXiv:2506.13585).

    Examples:
        >>> log_prob = torch.tensor([0.8]).log().requires_grad_()
        >>> tokens = LossTokens(log_prob, torch.tensor([0.4]).log(),
        ...     advantage_N=torch.tensor([1.0]), row_N=torch.tensor([0]), num_rows=1)
        >>> cispo(tokens, clip_epsilon=(1.0, 0.5)).sum().backward()
        >>> log_prob.grad.item()  # the ratio of 2 is clipped, and still the token learns
        -1.5
    """
    weight_N = _clip(tokens.ratio_N.detach(), clip_epsilon)
    return -weight_N * tokens.advantage_N * tokens.log_probs_N


@register_surrogate("gspo", scope="sequence", token_advantages=False)
def gspo(tokens: LossTokens, *, clip_epsilon: tuple[float, float] = (3e-4, 4e-4)) -> Tensor:
    r"""Clipped surrogate of the length-normalised ratio of the whole sequence.

    .. math::
        L = -\min\big(s A,\ \mathrm{clip}(s)\, A\big),\quad
        s = \exp\Big(\tfrac{1}{|y|} \sum_t \log p_t - \log p_{old,t}\Big)

    All tokens of a sequence have the same term and gradient, which vanishes where that of
    :func:`ppo_clip` would at ratio :math:`s`. Its bounds are narrow: a mean of gaps moves little.

    Source: Zheng et al. 2025 (arXiv:2507.18071); the bounds: sec. 5.1.

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.8, 0.4]).log(), torch.tensor([0.4, 0.2]).log(),
        ...     advantage_N=torch.tensor([-1.0, -1.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> [round(term, 4) for term in gspo(tokens).tolist()]
        [2.0, 2.0]
    """
    ratio_R = bounded_ratio(tokens.row_mean(tokens.log_ratio_N))
    return -_lower_bound(tokens.of_row(ratio_R), tokens.advantage_N, clip_epsilon)


@register_surrogate("gspo_token", scope="sequence")
def gspo_token(tokens: LossTokens, *, clip_epsilon: tuple[float, float] = (3e-4, 4e-4)) -> Tensor:
    r""":func:`gspo` with an advantage for each token.

    .. math::
        L_t = -\min\big(s_t A_t,\ \mathrm{clip}(s_t)\, A_t\big),\quad
        s_t = sg(s)\, \exp\big(\log p_t - sg(\log p_t)\big)

    The value of :math:`s_t` is the ratio :math:`s` of the sequence, its gradient that of the
    token. Where advantages are equal in a sequence, the summed terms and their gradient are those
    of :func:`gspo`; where not, each token stops by the sign of its own advantage.

    Source: Zheng et al. 2025 (arXiv:2507.18071).

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.8, 0.4]).log(), torch.tensor([0.4, 0.2]).log(),
        ...     advantage_N=torch.tensor([-1.0, 1.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> [round(term, 4) for term in gspo_token(tokens, clip_epsilon=(0.2, 0.2)).tolist()]
        [2.0, -1.2]
    """
    log_probs_N = tokens.log_probs_N
    ratio_R = bounded_ratio(tokens.row_mean(tokens.log_ratio_N.detach()))
    ratio_N = tokens.of_row(ratio_R) * (log_probs_N - log_probs_N.detach()).exp()
    return -_lower_bound(ratio_N, tokens.advantage_N, clip_epsilon)


_DPPO_THRESHOLDS = {"tv": 0.15, "kl": 0.05}


def _check_dppo(*, divergence: Divergence, threshold: float | None) -> None:
    require(divergence in get_args(Divergence), "divergence", divergence,
            f"one of {get_args(Divergence)}")
    limit = 1.0 if divergence == "tv" else math.inf  # no total variation is above 1
    in_range = threshold is None or (is_number(threshold) and 0 < threshold <= limit)
    require(in_range, "threshold", threshold, "None, or a number above 0 and at most "
            f"{limit:g} for divergence={divergence!r}")


@register_surrogate("dppo", check=_check_dppo)
def dppo(
    tokens: LossTokens, *, divergence: Divergence = "tv", threshold: float | None = None
) -> Tensor:
    r"""Importance-weighted gradient inside a trust region on probabilities instead of ratios.

    .. math:: L = -sg(m)\, r A

    :math:`m = 0`, and with it the gradient, where the sampled token's divergence :math:`D` exceeds
    ``threshold`` and a step would lead further away (:math:`r > 1` with :math:`A > 0`, or
    :math:`r < 1` with :math:`A < 0`). With :math:`p` and :math:`q` the current and the old
    probability, "this token or another one" is a binary choice, and

    * ``"tv"``: :math:`D = |p - q|`;
    * ``"kl"``: :math:`D = q \log\frac{q}{p} + (1-q) \log\frac{1-q}{1-p}`, in nats, with both
      clamped to between the machine epsilon of their dtype and one minus it, so that it is finite.

    So a rare token may change its ratio a lot, and one that is nearly certain only a little.

    Source: Qi et al. 2026 (arXiv:2602.04879).

    Args:
        divergence: ``"tv"`` (total variation) or ``"kl"``.
        threshold: greatest divergence, above 0; at most 1 for ``"tv"``. None: 0.15 for ``"tv"``
            and 0.05 for ``"kl"``.

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.004, 0.8]).log(), torch.tensor([0.001, 0.4]).log(),
        ...     advantage_N=torch.tensor([1.0, 1.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> [round(term, 4) + 0 for term in dppo(tokens).tolist()]  # ratios of 4 and 2
        [-4.0, 0.0]
    """
    p_N, q_N = tokens.log_probs_N.detach().exp(), tokens.old_log_probs_N.exp()
    if divergence == "tv":
        divergence_N = (p_N - q_N).abs()
    else:
        epsilon = torch.finfo(p_N.dtype).eps
        p_N, q_N = p_N.clamp(epsilon, 1 - epsilon), q_N.clamp(epsilon, 1 - epsilon)
        divergence_N = q_N * (q_N / p_N).log() + (1 - q_N) * ((1 - q_N) / (1 - p_N)).log()
    leads_away_N = tokens.log_ratio_N.detach() * tokens.advantage_N > 0
    threshold = _DPPO_THRESHOLDS[divergence] if threshold is None else threshold
    outside_N = (divergence_N > threshold) & leads_away_N
    return -(tokens.ratio_N * tokens.advantage_N).masked_fill(outside_N, 0.0)


def _check_sapo(**temperatures: float) -> None:
    for name, value in temperatures.items():
        require(is_number(value) and value > 0, name, value, "a number above 0")


@register_surrogate("sapo", check=_check_sapo)
def sapo(
    tokens: LossTokens, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    r"""A soft gate on the ratio in place of a clip.

    .. math:: L = -f(r) A,\quad f(r) = \frac{4}{\tau}\, \sigma\big(\tau (r - 1)\big)

    :math:`f'(1) = 1` for every temperature. Away from :math:`r = 1` the gradient fades on both
    sides, faster for a higher :math:`\tau`, and is never cut to zero.

    Source: "Soft Adaptive Policy Optimization", 2025 (arXiv:2511.20347).

    Args:
        temperature_positive: :math:`\tau` of tokens with :math:`A > 0`.
        temperature_negative: :math:`\tau` of the others.

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.4, 0.4]).log(), torch.tensor([0.4, 0.4]).log(),
        ...     advantage_N=torch.tensor([1.0, -1.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> sapo(tokens, temperature_positive=1.0, temperature_negative=2.0).tolist()
        [-2.0, 1.0]
    """
    advantage_N = tokens.advantage_N
    temperature_N = torch.full_like(advantage_N, temperature_negative)
    temperature_N = temperature_N.masked_fill(advantage_N > 0, temperature_positive)
    gate_N = torch.sigmoid(temperature_N * (tokens.ratio_N - 1.0))
    return -4.0 / temperature_N * gate_N * advantage_N


@register_surrogate("reinforce")
def reinforce(tokens: LossTokens) -> Tensor:
    r"""Importance-weighted policy gradient without any clipping, :math:`L = -r A`.

    Its gradient :math:`-r A \nabla \log p` never vanishes.

    Source: Williams 1992; the importance weight as in Degris et al. 2012 (arXiv:1205.4839).

    Examples:
        >>> tokens = LossTokens(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log(),
        ...     advantage_N=torch.tensor([1.0, -2.0]), row_N=torch.tensor([0, 0]), num_rows=1)
        >>> reinforce(tokens).tolist()
        [-1.0, 4.0]
    """
    return -tokens.ratio_N * tokens.advantage_N
