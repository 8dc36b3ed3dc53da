"""Sums and maxima over the completions of each prompt."""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """The rows that take part, by group.

    Everything is computed on them alone, so nothing that a left-out row holds (NaN included)
    reaches a value or a gradient.

    Args:
        group_id_B: int64 ``[B]``; rows need not be sorted, groups may differ in size.
        valid_B: bool ``[B]``, the rows that take part; None: all.

    Attributes:
        rows: int64 ``[n]``, numbers of the rows that take part, in order.
        group: int64 ``[n]``, index of each one's group; groups ascend by their id.
        size: int64 ``[G]``, rows of each group.

    Examples:
        >>> groups = Groups(torch.tensor([7, 3, 7]), None)
        >>> groups.sum(torch.tensor([1.0, 2.0, 4.0])).tolist(), groups.size.tolist()
        ([5.0, 2.0, 5.0], [1, 2])
    """

    def __init__(self, group_id_B: Tensor, valid_B: Tensor | None) -> None:
        valid_B = torch.ones_like(group_id_B, dtype=torch.bool) if valid_B is None else valid_B
        self.num_rows = len(group_id_B)
        self.rows = valid_B.nonzero()[:, 0]
        _, self.group, self.size = group_id_B[self.rows].unique(
            return_inverse=True, return_counts=True)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of each group, given back to each of its rows."""
        return values.new_zeros(len(self.size)).index_add(0, self.group, values)[self.group]

    def max(self, values: Tensor) -> Tensor:
        """Greatest value of each group, given back to each of its rows."""
        start = values.new_full(self.size.shape, -torch.inf)
        return start.scatter_reduce(0, self.group, values, "amax")[self.group]

    def log_softmax(self, scores: Tensor) -> Tensor:
        shifted = scores - self.max(scores.detach())
        return shifted - self.sum(shifted.exp()).log()

    def scatter(self, values: Tensor) -> Tensor:
        """Back to all rows, with 0 for those left out."""
        return values.new_zeros(self.num_rows).index_put((self.rows,), values)
