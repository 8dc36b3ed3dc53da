"""Two operations on a tile of logits ``[n, v]``: fold it into running statistics, and turn it into
its own gradient in place. In PyTorch here, in Triton in :mod:`grpo.objectives.head_triton`.

With :math:`z` the logits over the temperature, :math:`p` their softmax and :math:`H` its entropy,
the gradient of :math:`g \\log p_y + e H` by the logits of one token is

.. math:: \\big(g (1_y - p) - e\\, p (\\log p + H)\\big) / temperature
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

#: A logit below all others. It is finite: its product with a probability of 0 is 0 and not NaN.
LOWEST = -1e30
# The same for a log-probability: its exp is 0 in float32 and float64.
LOWEST_LOG_PROB = -1e4
_SLICE_ELEMENTS = 2**20


@dataclass(frozen=True)
class Statistics:
    """What is known of each token's distribution after some columns of its logits ``z``."""

    max_N: Tensor
    sum_N: Tensor  # of exp(z - max)
    weighted_N: Tensor  # sum of exp(z - max) * (z - max), for the entropy
    target_N: Tensor  # logit of the target; 0 until its column has been seen

    @classmethod
    def empty(cls, size: int, *, dtype: torch.dtype, device: torch.device) -> Statistics:
        zeros = torch.zeros(3, size, dtype=dtype, device=device)
        return cls(torch.full_like(zeros[0], LOWEST), *zeros)

    def rows(self, start: int, stop: int) -> Statistics:
        """The same for a range of tokens, as views."""
        return Statistics(self.max_N[start:stop], self.sum_N[start:stop],
                          self.weighted_N[start:stop], self.target_N[start:stop])

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(log_prob_N, entropy_N, log_normaliser_N)`` once all columns have been seen."""
        log_sum_N = self.sum_N.log()
        log_normaliser_N = self.max_N + log_sum_N
        return (self.target_N - log_normaliser_N, log_sum_N - self.weighted_N / self.sum_N,
                log_normaliser_N)


def fold(
    tile_nv: Tensor, targets_n: Tensor, statistics: Statistics, *, column: int,
    inverse_temperature: float,
) -> None:
    """Add the columns ``column`` to ``column + v`` of the logits to ``statistics``, in place."""
    if _use_triton(tile_nv):
        from grpo.objectives.head_triton import fold as fold_triton

        fold_triton(tile_nv, targets_n, statistics, column=column,
                    inverse_temperature=inverse_temperature)
        return
    for rows in _slices(tile_nv):
        _fold_rows(tile_nv[rows], targets_n[rows], statistics.rows(rows.start, rows.stop),
                   column, inverse_temperature)


def _fold_rows(
    tile_nv: Tensor, targets_n: Tensor, statistics: Statistics, column: int,
    inverse_temperature: float,
) -> None:
    logits_nv = tile_nv.to(statistics.sum_N.dtype) * inverse_temperature
    local_n = targets_n - column
    inside_n = (local_n >= 0) & (local_n < logits_nv.shape[1])
    at_target_n = logits_nv.gather(1, local_n.clamp(0, logits_nv.shape[1] - 1)[:, None])[:, 0]
    statistics.target_N.copy_(torch.where(inside_n, at_target_n, statistics.target_N))
    new_max_n = torch.maximum(statistics.max_N, logits_nv.amax(1))
    shift_n = statistics.max_N - new_max_n
    rescale_n = shift_n.exp()
    shifted_nv = logits_nv.sub_(new_max_n[:, None]).clamp_(min=LOWEST_LOG_PROB)
    weights_nv = shifted_nv.exp()
    statistics.weighted_N.add_(statistics.sum_N * shift_n).mul_(rescale_n).add_(
        shifted_nv.mul_(weights_nv).sum(1))
    statistics.sum_N.mul_(rescale_n).add_(weights_nv.sum(1))
    statistics.max_N.copy_(new_max_n)


def grad_(
    tile_nv: Tensor, targets_n: Tensor, *, log_normaliser_n: Tensor, entropy_n: Tensor,
    grad_log_prob_n: Tensor, grad_entropy_n: Tensor | None, column: int,
    inverse_temperature: float,
) -> None:
    """Overwrite a tile of logits with the gradient by them (see the module's formula).

    Normaliser and entropy are those of whole rows, from :meth:`Statistics.finish`; ``column`` is
    the first vocabulary entry of the tile. Without ``grad_entropy_n`` only log-probs have one.
    """
    if _use_triton(tile_nv):
        from grpo.objectives.head_triton import grad_ as grad_triton_

        grad_triton_(tile_nv, targets_n, log_normaliser_n=log_normaliser_n, entropy_n=entropy_n,
                     grad_log_prob_n=grad_log_prob_n, grad_entropy_n=grad_entropy_n,
                     column=column, inverse_temperature=inverse_temperature)
        return
    for rows in _slices(tile_nv):
        _grad_rows_(tile_nv[rows], targets_n[rows], log_normaliser_n[rows], entropy_n[rows],
                    grad_log_prob_n[rows], None if grad_entropy_n is None else grad_entropy_n[rows],
                    column, inverse_temperature)


def _grad_rows_(
    tile_nv: Tensor, targets_n: Tensor, log_normaliser_n: Tensor, entropy_n: Tensor,
    grad_log_prob_n: Tensor, grad_entropy_n: Tensor | None, column: int,
    inverse_temperature: float,
) -> None:
    dtype = log_normaliser_n.dtype
    same = tile_nv.dtype == dtype  # then no second tile is needed
    log_p_nv = (tile_nv if same else tile_nv.to(dtype)).mul_(inverse_temperature)
    log_p_nv.sub_(log_normaliser_n[:, None])
    scale_n = -inverse_temperature * grad_log_prob_n
    if grad_entropy_n is None:
        grad_nv = log_p_nv.exp_().mul_(scale_n[:, None])
    else:
        p_nv = log_p_nv.clamp_(min=LOWEST_LOG_PROB).exp()
        slope_n = -inverse_temperature * grad_entropy_n
        grad_nv = log_p_nv.mul_(slope_n[:, None]).add_((slope_n * entropy_n + scale_n)[:, None])
        grad_nv.mul_(p_nv)
    local_n = targets_n - column
    inside_n = (local_n >= 0) & (local_n < tile_nv.shape[1])
    grad_nv.scatter_add_(1, local_n.clamp(0, tile_nv.shape[1] - 1)[:, None],
                         torch.where(inside_n, -scale_n, 0.0)[:, None])
    if not same:
        tile_nv.copy_(grad_nv)


def _slices(tile_nv: Tensor) -> list[slice]:
    """Rows that are worked on at a time, so that intermediate results stay small."""
    if tile_nv.is_cuda:
        return [slice(0, len(tile_nv))]
    size = max(1, _SLICE_ELEMENTS // max(1, tile_nv.shape[1]))
    return [slice(start, min(start + size, len(tile_nv)))
            for start in range(0, len(tile_nv), size)]


def _use_triton(tile: Tensor) -> bool:
    return tile.is_cuda and tile.dtype != torch.float64 and _HAS_TRITON


_HAS_TRITON = importlib.util.find_spec("triton") is not None
