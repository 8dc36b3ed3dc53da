"""The operations of :mod:`grpo.objectives.head_tiles` as Triton kernels, one pass over a tile each.

Half-precision logits are read once, raised to float32 in registers, and their gradient is written
over them, so neither operation needs memory of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from grpo.objectives.head_tiles import Statistics

# Measured on an H200; larger blocks or more warps are up to a third slower.
_FOLD_BLOCK, _GRAD_BLOCK, _WARPS = 4096, 2048, 4


@triton.jit
def _fold_kernel(tile, row_stride, targets, max_ptr, sum_ptr, weighted_ptr, target_ptr, column,
                 num_columns, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits = tile + row * row_stride
    running_max = tl.load(max_ptr + row)
    running_sum = tl.load(sum_ptr + row)
    weighted = tl.load(weighted_ptr + row)
    for start in range(0, num_columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < num_columns
        z = tl.load(logits + offsets, mask=inside, other=-float("inf")).to(tl.float32)
        z = z * inverse_temperature
        new_max = tl.maximum(running_max, tl.max(z, axis=0))
        shift = running_max - new_max
        rescale = tl.exp(shift)
        z = z - new_max
        e = tl.exp(z)
        weighted = (weighted + running_sum * shift) * rescale
        # Neither columns outside nor logits of -inf, whose product would be NaN.
        weighted += tl.sum(tl.where(e > 0, e * z, 0.0), axis=0)
        running_sum = running_sum * rescale + tl.sum(e, axis=0)
        running_max = new_max
    tl.store(max_ptr + row, running_max)
    tl.store(sum_ptr + row, running_sum)
    tl.store(weighted_ptr + row, weighted)
    local = tl.load(targets + row) - column
    if (local >= 0) & (local < num_columns):
        at_target = tl.load(logits + local).to(tl.float32) * inverse_temperature
        tl.store(target_ptr + row, at_target)


@triton.jit
def _grad_kernel(tile, row_stride, targets, log_normaliser_ptr, entropy_ptr, grad_log_prob_ptr,
                 grad_entropy_ptr, column, num_columns, inverse_temperature,
                 WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_columns
    pointers = tile + row * row_stride + offsets
    g = tl.load(grad_log_prob_ptr + row)
    local = tl.load(targets + row) - column
    z = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    log_p = z * inverse_temperature - tl.load(log_normaliser_ptr + row)
    slope = g
    if WITH_ENTROPY:
        # LOWEST_LOG_PROB of head_tiles: a logit of -inf has p = 0, and its slope must be finite.
        log_p = tl.where(log_p < -10000.0, -10000.0, log_p)
        slope = g + tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    grad = tl.where(offsets == local, g, 0.0) - tl.exp(log_p) * slope
    grad = grad * inverse_temperature
    tl.store(pointers, grad.to(tile.dtype.element_ty), mask=inside)


def fold(
    tile_nv: Tensor, targets_n: Tensor, statistics: Statistics, *, column: int,
    inverse_temperature: float,
) -> None:
    """See :func:`grpo.objectives.head_tiles.fold`."""
    rows, columns = tile_nv.shape
    block = min(_FOLD_BLOCK, triton.next_power_of_2(columns))
    _fold_kernel[(rows,)](
        tile_nv, tile_nv.stride(0), targets_n, statistics.max_N, statistics.sum_N,
        statistics.weighted_N, statistics.target_N, column, columns, inverse_temperature,
        BLOCK=block, num_warps=_WARPS)


def grad_(
    tile_nv: Tensor, targets_n: Tensor, *, log_normaliser_n: Tensor, entropy_n: Tensor,
    grad_log_prob_n: Tensor, grad_entropy_n: Tensor | None, column: int,
    inverse_temperature: float,
) -> None:
    """See :func:`grpo.objectives.head_tiles.grad_`."""
    rows, columns = tile_nv.shape
    block = min(_GRAD_BLOCK, triton.next_power_of_2(columns))
    _grad_kernel[(rows, triton.cdiv(columns, block))](
        tile_nv, tile_nv.stride(0), targets_n, log_normaliser_n, entropy_n, grad_log_prob_n,
        grad_log_prob_n if grad_entropy_n is None else grad_entropy_n, column, columns,
        inverse_temperature, WITH_ENTROPY=grad_entropy_n is not None, BLOCK=block, num_warps=_WARPS)
