"""A batch as micro-batches: padding dropped, rows shared out by a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from grpo.data.keys import ASSISTANT_MASK, ATTENTION_MASK, GROUP_ID, TOKENS
from grpo.data.layout import check_right_padded, first_scored, lengths, token_keys


def trim(batch: TensorDictBase) -> TensorDict:
    """Drop the padding columns that no row of ``batch`` uses, in the entries of :func:`token_keys`.

    Raises:
        ValueError: for rows that are not padded on the right.
    """
    check_right_padded(batch[ATTENTION_MASK], ATTENTION_MASK)
    return _cut(batch, multiple_of=1)


def _cut(batch: TensorDictBase, multiple_of: int) -> TensorDict:
    width = int(lengths(batch).max()) if batch.batch_size[0] else 0
    width = min(batch[TOKENS].shape[-1], -(-width // multiple_of) * multiple_of)
    out = batch.copy()
    for key in token_keys(batch):
        out[key] = batch[key][:, :width]
    return out


def split_rows(
    batch: TensorDictBase, *, num_micro_batches: int | None = None, max_tokens: int | None = None,
    multiple_of: int = 1, whole_groups: bool = False, packed: bool = False,
) -> list[TensorDict]:
    """Split an optimizer batch into micro-batches, each trimmed to its own longest row.

    Exactly one of the first two options is given. With ``max_tokens`` rows are sorted by length
    first, so that little padding is computed on; the gradient does not depend on their order.

    Args:
        batch: dense batch, ``batch_size [B]``.
        num_micro_batches: split into this many pieces of (nearly) equal row count.
        max_tokens: greatest ``rows x width`` of a piece; a row longer than that gets its own.
        multiple_of: pad pieces to a multiple of this many tokens, so that compiled graphs meet few
            shapes.
        whole_groups: keep the rows of a ``group_id`` together, for objectives that compare them.
        packed: ``max_tokens`` counts the tokens that packed rows have, those of a group's prompt
            once, and rows of a group follow each other; see :mod:`grpo.objectives.packing`.

    Raises:
        ValueError: if both or none of the options are given, or one is below 1; for rows that are
            not padded on the right.

    Examples:
        >>> batch = TensorDict({
        ...     "tokens": {"full": torch.ones(3, 4, dtype=torch.int64)},
        ...     "masks": {"all_attention_mask": torch.arange(4) < torch.tensor([[2], [4], [1]])},
        ... }, [3])
        >>> [tuple(p["tokens", "full"].shape) for p in split_rows(batch, max_tokens=4)]
        [(2, 2), (1, 4)]
    """
    if (num_micro_batches is None) == (max_tokens is None):
        raise ValueError("give exactly one of num_micro_batches and max_tokens")
    if (num_micro_batches if max_tokens is None else max_tokens) < 1:
        raise ValueError(f"{num_micro_batches=} or {max_tokens=} must be at least 1")
    units = row_units(batch, whole_groups=whole_groups)
    if num_micro_batches is not None:
        cuts = torch.arange(len(units)).tensor_split(min(num_micro_batches, len(units)))
        pieces = [[units[i] for i in cut.tolist()] for cut in cuts]
    else:
        fill = (_packed(batch, units) if packed else
                _padded(units, lengths(batch).tolist(), multiple_of))
        pieces = _within_budget(fill, max_tokens)
    check_right_padded(batch[ATTENTION_MASK], ATTENTION_MASK)  # once: on a GPU it is waited for
    return [_cut(batch[torch.cat(piece)], multiple_of) for piece in pieces]


def row_units(batch: TensorDictBase, *, whole_groups: bool) -> list[Tensor]:
    """Indices of the rows that must stay together: those of a group, or each one alone."""
    rows = torch.arange(batch.batch_size[0])
    if not whole_groups:
        return list(rows[:, None])
    group_B = batch[GROUP_ID].flatten().cpu()
    order = group_B.argsort(stable=True)
    return list(order.split(group_B.unique(return_counts=True)[1].tolist()))


def _within_budget(fill: Callable[[int], list[list[Tensor]]], budget: int) -> list[list[Tensor]]:
    """What ``fill`` makes of the least budget that needs no more pieces than this one.

    Filled to the brim one after the other, pieces would leave a last one of a few rows, which keeps
    a GPU waiting, and the others would take more memory than they need.
    """
    pieces, most = fill(budget), budget
    least = most // 2  # two neighbours exceed the budget together, so half of it takes more pieces
    while most - least > 1:
        tried = (least + most) // 2
        smaller = fill(tried)
        if len(smaller) > len(pieces):
            least = tried
        else:
            pieces, most = smaller, tried
    return pieces


def _padded(
    units: list[Tensor], lengths_B: list[int], multiple_of: int
) -> Callable[[int], list[list[Tensor]]]:
    """Fills pieces with neighbours in order of their width, up to ``rows x width``."""
    def width(unit: Tensor) -> int:
        longest = max(lengths_B[row] for row in unit.tolist())
        return -(-longest // multiple_of) * multiple_of

    by_width = sorted(((width(unit), unit) for unit in units), key=lambda pair: pair[0])

    def fill(max_tokens: int) -> list[list[Tensor]]:
        pieces: list[list[Tensor]] = []
        rows = 0
        for widest, unit in by_width:  # the newest unit is the widest of its piece
            if pieces and (rows + len(unit)) * widest <= max_tokens:
                pieces[-1].append(unit)
                rows += len(unit)
            else:
                pieces.append([unit])
                rows = len(unit)
        return pieces

    return fill


def _packed(batch: TensorDictBase, units: list[Tensor]) -> Callable[[int], list[list[Tensor]]]:
    """Fills pieces with neighbours in order of their groups, up to the tokens of packed rows."""
    first = first_scored(batch[ASSISTANT_MASK], batch[ATTENTION_MASK]).tolist()
    real, group = lengths(batch).tolist(), batch[GROUP_ID].flatten().tolist()
    by_group = []
    for unit in sorted(units, key=lambda unit: group[unit[0]]):
        rows = unit.tolist()
        by_group.append((unit, sum(real[row] - first[row] for row in rows),
                         {(group[row], first[row]) for row in rows}))

    def fill(max_tokens: int) -> list[list[Tensor]]:
        pieces: list[list[Tensor]] = []
        used, prompts = 0, set()
        for unit, tokens, new in by_group:
            added = tokens + sum(length for _, length in new - prompts)
            if pieces and used + added <= max_tokens:
                pieces[-1].append(unit)
                used, prompts = used + added, prompts | new
            else:
                pieces.append([unit])
                used, prompts = tokens + sum(length for _, length in new), new
        return pieces

    return fill
