r"""Corrections for tokens that another policy sampled than the one the ratio is taken to.

An inference engine computes slightly other probabilities than the trainer, and an asynchronous one
may hold older weights. With :math:`gap = \log\pi_{proximal} - \log\pi_{behaviour}` of each token
and :math:`\rho = e^{gap}`, a correction weighs (truncated or masked importance sampling) or drops
tokens or whole sequences. Weights are constants: no gradient goes through them.

================  ===========================  ====================================================
name              bounds                       weight of a token
================  ===========================  ====================================================
tis               C                            :math:`\min(\rho, C)`
mis               high, or (low, high)         :math:`\rho` if low <= :math:`\rho` <= high, else 0
sequence_tis      C                            tis with the sequence's
                                               :math:`\rho = e^{\sum gap}`
sequence_mis      high, or (low, high)         mis with the sequence's
                                               :math:`\rho = e^{\sum gap}`
sequence_reject   (low, high)                  1 if low <= :math:`e^{\sum gap}` <= high, else 0
geometric_reject  (low, high)                  1 if low <= :math:`e^{mean\ gap}` <= high, else 0
================  ===========================  ====================================================

Sources: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
(2025) for truncation, IcePop (Ling team, 2025) for masks; the off-policy sequence mask is that of
DeepSeek-V3.2 (arXiv:2512.02556).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo.objectives.tokens import LossTokens

# name: (what the ratio is taken over, what happens to a ratio outside the bounds)
_METHODS = {
    "tis": ("token", "truncate"),
    "mis": ("token", "mask"),
    "sequence_tis": ("sum", "truncate"),
    "sequence_mis": ("sum", "mask"),
    "sequence_reject": ("sum", "reject"),
    "geometric_reject": ("mean", "reject"),
}


@dataclass(frozen=True)
class Mismatch:
    """A validated combination of corrections; build it with :func:`make_mismatch`.

    Attributes:
        bounds: ``(low, high)`` of the ratio under each name; low is 0 for a truncation.
    """

    bounds: Mapping[str, tuple[float, float]]

    @property
    def scope(self) -> Literal["token", "sequence"]:
        """``"sequence"`` where a weight needs all tokens of its sequence at once."""
        return "token" if all(_METHODS[name][0] == "token" for name in self.bounds) else "sequence"

    def raw_log_weight(self, gap_N: Tensor, tokens: LossTokens) -> Tensor:
        """Log of the importance weight before truncation and masks, ``[N]``, detached."""
        for name in self.bounds:
            over, action = _METHODS[name]
            if action != "reject":
                return _log_rho(gap_N.detach(), tokens, over=over)
        return torch.zeros_like(gap_N)

    def weights(self, gap_N: Tensor, tokens: LossTokens) -> Tensor:
        """Product of the configured weights, ``[N]``, detached.

        ``gap_N`` is the proximal minus the behaviour log-prob of each token; sequences must be
        whole unless :attr:`scope` is ``"token"``.
        """
        gap_N = gap_N.detach()
        weight_N = self.raw_log_weight(gap_N, tokens).exp()
        keep_N = torch.ones_like(gap_N, dtype=torch.bool)
        for name, (low, high) in self.bounds.items():
            over, action = _METHODS[name]
            if action == "truncate":
                weight_N = weight_N.clamp(max=high)
            else:
                # In log space a bound keeps its meaning where exp would overflow or underflow.
                log_rho_N = _log_rho(gap_N, tokens, over=over)
                keep_N &= (log_rho_N >= _log(low)) & (log_rho_N <= _log(high))
        # Selected, not multiplied: a weight that overflowed times 0 would be NaN.
        return torch.where(keep_N, weight_N, torch.zeros_like(weight_N))


def make_mismatch(spec: Mapping[str, float | tuple[float, float]] | None) -> Mismatch | None:
    """Validate a combination of corrections; their weights multiply.

    Args:
        spec: bounds by the names of the module's table. For ``mis`` and ``sequence_mis`` one number
            means ``(0, number)``. None or empty: no correction.

    Raises:
        ValueError: for an unknown name, bounds that are malformed, negative, not finite or in the
            wrong order, or more than one importance weight (all but the rejections).

    Examples:
        >>> make_mismatch({"mis": 5.0, "geometric_reject": (0.99, 1.01)}).bounds
        {'mis': (0.0, 5.0), 'geometric_reject': (0.99, 1.01)}
    """
    if not spec:
        return None
    for name in spec:
        if name not in _METHODS:
            raise ValueError(f"mismatch[{name!r}] is unknown; use some of {', '.join(_METHODS)}")
    importance = [name for name in spec if _METHODS[name][1] != "reject"]
    if len(importance) > 1:
        raise ValueError(f"mismatch combines {' and '.join(importance)}, which would weigh each "
                         "token by its ratio twice; keep one of them (rejections may be added)")
    return Mismatch({name: _check_bounds(name, bounds) for name, bounds in spec.items()})


def off_policy_sequence_mask(sampled_N: Tensor, tokens: LossTokens, *, delta: float) -> Tensor:
    """0 for the tokens of bad sequences that the current policy would hardly sample, else 1.

    A sequence (they must be whole) is dropped where its advantages sum to less than 0 and the mean
    over its tokens of behaviour minus current log-prob exceeds ``delta`` nats (DeepSeek-V3.2,
    arXiv:2512.02556). Good sequences are kept however far they are.

    Returns:
        ``[N]``, detached, of the dtype of ``sampled_N``, the behaviour log-probs.

    Raises:
        ValueError: if ``delta`` is negative or not finite.
    """
    check_off_policy_delta(delta)
    far_R = tokens.row_mean((sampled_N - tokens.log_probs_N).detach()) > delta
    bad_R = tokens.row_sum(tokens.advantage_N.detach()) < 0
    return tokens.of_row(~(far_R & bad_R)).to(sampled_N.dtype)


def check_off_policy_delta(delta: float | None) -> float | None:
    """The threshold of :func:`off_policy_sequence_mask`, validated; None: no such mask."""
    if delta is not None and not (math.isfinite(delta) and delta >= 0):
        raise ValueError(f"off_policy_delta={delta!r} must be a finite number of nats a token, at "
                         "least 0; use None to switch the mask off")
    return delta


def mismatch_diagnostics(
    gap_N: Tensor, weight_N: Tensor, *, raw_log_weight_N: Tensor
) -> dict[str, Tensor]:
    r"""How far the behaviour policy is, before any correction, and what the correction did.

    From the results of :meth:`Mismatch.weights` and :meth:`Mismatch.raw_log_weight`; empty without
    tokens. A gap too large for exp makes a ratio ``inf``, not NaN.

    * ``mismatch_kl_k1``, ``mismatch_kl_k3``: estimates of
      :math:`KL(\pi_{behaviour} \| \pi_{proximal})` in nats a token;
    * ``mismatch_ratio_min`` / ``_mean`` / ``_max``: of the raw :math:`\rho` of the tokens;
    * ``mismatch_weight_mean``;
    * ``mismatch_masked_fraction``: share of tokens with weight 0;
    * ``mismatch_truncated_fraction``: share of tokens whose weight is cut, but not to 0.
    """
    if not len(gap_N):
        return {}
    ratio_N = gap_N.exp()
    # The margin is for the last digit of exp, which may depend on how the tokens were batched.
    truncated_N = (weight_N > 0) & (weight_N < raw_log_weight_N.exp() * (1 - 1e-6))
    return {
        "mismatch_kl_k1": -gap_N.mean(),
        "mismatch_kl_k3": (torch.expm1(gap_N) - gap_N).mean(),
        "mismatch_ratio_min": ratio_N.min(),
        "mismatch_ratio_mean": ratio_N.mean(),
        "mismatch_ratio_max": ratio_N.max(),
        "mismatch_weight_mean": weight_N.mean(),
        "mismatch_masked_fraction": (weight_N == 0).to(gap_N.dtype).mean(),
        "mismatch_truncated_fraction": truncated_N.to(gap_N.dtype).mean(),
    }


def _log_rho(gap_N: Tensor, tokens: LossTokens, *, over: str) -> Tensor:
    """Log-ratio of each token, or of its sequence, ``[N]``."""
    if over == "token":
        return gap_N
    reduce = tokens.row_sum if over == "sum" else tokens.row_mean
    return tokens.of_row(reduce(gap_N))


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf


def _check_bounds(
    name: str, bounds: float | tuple[float, float] | list[float]
) -> tuple[float, float]:
    """The ``(low, high)`` of one correction."""
    action = _METHODS[name][1]
    pair = isinstance(bounds, (tuple, list))
    values = list(bounds) if pair else [bounds]
    wanted = {"truncate": "one number", "mask": "one number or (low, high)",
              "reject": "(low, high)"}[action]
    right_count = {"truncate": not pair, "mask": True, "reject": pair}[action]
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    if not right_count or not numbers or len(values) != (2 if pair else 1):
        raise ValueError(f"mismatch[{name!r}]={bounds!r} must be {wanted}")
    low, high = values if pair else (0.0, *values)
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low <= high and high > 0):
        rule = "0 <= low <= high and high > 0" if pair else "a bound above 0"
        raise ValueError(f"mismatch[{name!r}]={bounds!r} must be finite, with {rule}; "
                         "it bounds a ratio, where 1 means no mismatch")
    return float(low), float(high)
