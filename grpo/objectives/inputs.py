"""What the loss reads of a batch: the standard names, checked, and only the tokens that count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from grpo import data
from grpo.data.torchrl import from_torchrl, is_dense
from grpo.objectives.tokens import LossTokens


def standard_batch(
    tensordict: TensorDictBase, *, names: Mapping[NestedKey, NestedKey],
    required: Mapping[NestedKey, str], pad_token_id: int = 0,
) -> TensorDictBase:
    """The batch under the names of :mod:`grpo.data`, checked; one of ``ChatEnv`` becomes dense.

    ``names`` tells where the batch has the entry of each standard name, ``required`` which of them
    must be there and what to do if one is not.

    Raises:
        KeyError: for an entry that is missing; the message says what to do.
        ValueError: for an entry whose shape is not that of the tokens, and for rows that are not
            padded on the right.
    """
    moved = {standard: tensordict.get(key, None)
             for standard, key in names.items() if standard != key}
    if moved:
        # An entry under the standard name is not what the caller asked to be read.
        tensordict = tensordict.exclude(*moved)
        for standard, value in moved.items():
            if value is not None:
                tensordict[standard] = value
    if not is_dense(tensordict):
        tensordict = from_torchrl(tensordict, pad_token_id=pad_token_id)
    present = tensordict.keys(True)
    for key, fix in required.items():
        if key not in present:
            raise KeyError(f"the batch has no {names.get(key, key)}: {fix}")
    shape = tensordict[data.TOKENS].shape
    for key in data.TOKEN_KEYS:
        if key in present and tensordict[key].shape[:2] != shape:
            raise ValueError(f"{names.get(key, key)} has shape {tuple(tensordict[key].shape)} but "
                             f"{data.TOKENS} has {tuple(shape)}")
    if data.ATTENTION_MASK in present:
        data.check_right_padded(tensordict[data.ATTENTION_MASK],
                                names.get(data.ATTENTION_MASK, data.ATTENTION_MASK))
    return tensordict


def loss_mask(batch: TensorDictBase) -> Tensor:
    """Bool ``[B, T]``: the sampled tokens of rows that have a reward and have not been filtered."""
    mask_BT = batch[data.ASSISTANT_MASK] & batch[data.ATTENTION_MASK]
    error = batch.get(data.REWARD_ERROR, None)
    if error is not None:
        mask_BT = mask_BT & ~error.reshape(-1, 1)
    keep = batch.get(data.ROW_MASK, None)
    if keep is not None:
        mask_BT = mask_BT & keep.reshape(-1, 1)
    # The first token of a row has no context to be predicted from.
    first = torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0
    return mask_BT & ~first


@dataclass(frozen=True)
class Rows:
    """Which tokens of a flat list belong to which row, known without asking the GPU."""

    starts: list[int]  # first token of each row, and the number of tokens

    @classmethod
    def of_mask(cls, mask_BT: Tensor) -> Rows:
        return cls([0, *mask_BT.sum(1).cumsum(0).tolist()])

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """First row with tokens in the range, and the one after the last."""
        return bisect_right(self.starts, start) - 1, bisect_right(self.starts, stop - 1)

    def borders(self, chunk_size: int, *, whole_rows: bool) -> list[int] | None:
        """First token of each part of at most ``chunk_size``, and the number of tokens.

        None if a row is longer than a part but may not be cut.

        Examples:
            >>> Rows([0, 3, 5, 9]).borders(5, whole_rows=True)
            [0, 5, 9]
            >>> Rows([0, 3, 5, 9]).borders(4, whole_rows=False)
            [0, 4, 8, 9]
        """
        total = self.starts[-1]
        if not whole_rows:
            return [*range(0, total, chunk_size), total]
        borders = [0]
        for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True):
            if stop - start > chunk_size:
                return None
            if stop - borders[-1] > chunk_size:
                borders.append(start)
        return [*borders, total]


@dataclass(frozen=True)
class BatchTokens:
    """The loss tokens of consecutive rows of a batch, laid end to end."""

    flat: TensorDict  # [N]: "row" (its index in the batch) and what the loss reads of each token
    rows: Rows
    group_B: Tensor | None  # prompt of each row of the batch
    first_row: int  # row of the batch that the first token may belong to
    num_rows: int  # rows from there on, some perhaps without tokens

    def part(self, start: int, stop: int) -> BatchTokens:
        """The tokens ``start`` to ``stop`` of a whole batch."""
        first, after = self.rows.within(start, stop)
        return BatchTokens(self.flat[start:stop], self.rows, self.group_B, first, after - first)

    def loss_tokens(self, log_probs_N: Tensor, old_log_probs_N: Tensor) -> LossTokens:
        """What the objectives compute on."""
        row_N = self.flat["row"] - self.first_row
        rows = slice(self.first_row, self.first_row + self.num_rows)
        weight_N = self.flat.get("listwise_weight", None)
        if weight_N is not None:  # the same for all tokens of a row; others take no part
            weight_N = weight_N.new_zeros(self.num_rows).index_copy(0, row_N, weight_N)
        return LossTokens(
            log_probs_N, old_log_probs_N, self.flat["advantage"], row_N, self.num_rows,
            group_R=None if self.group_B is None else self.group_B[rows],
            listwise_weight_R=weight_N)


def batch_tokens(
    mask_BT: Tensor, values: Mapping[str, Tensor], *, group_B: Tensor | None, dtype: torch.dtype
) -> BatchTokens:
    """The entries of the tokens under the mask, in ``dtype`` if they are floating-point.

    Values are ``[B, T, ...]``, or ``[B]`` and ``[B, 1]`` for one a row.
    """
    row_N, column_N = mask_BT.nonzero(as_tuple=True)
    flat = {"row": row_N}
    for name, value in values.items():
        by_row = value.ndim == 1 or value.ndim == 2 and value.shape[1] == 1
        value = value.reshape(len(mask_BT))[row_N] if by_row else value[row_N, column_N]
        flat[name] = value.to(dtype) if value.is_floating_point() else value
    return BatchTokens(TensorDict(flat, batch_size=[len(row_N)]), Rows.of_mask(mask_BT),
                       None if group_B is None else group_B.flatten(), 0, len(mask_BT))
