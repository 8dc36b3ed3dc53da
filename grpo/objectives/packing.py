"""Rows laid end to end in one sequence, without padding; tokens that rows begin with are kept once.

The completions of a group share their prompt. What a causal model computes for a token depends on
the tokens before it alone, so the prompt's hidden states, keys and values are the same in every row
and are computed once: of ``G`` completions with ``R`` tokens to a prompt of ``P``, ``P + G * R``
tokens pass through the model in place of ``G * (P + R)``. The gradient is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo.data import first_scored


class Segments(NamedTuple):
    """Which keys the tokens of a packed sequence attend to, one segment a row.

    The queries of a segment are the row's tokens that no other row has computed, its keys all
    tokens of the row. A query attends to the keys up to its own place, counted from the end. The
    names are those that Transformers hands to attention functions for packed sequences.
    """

    cu_seq_lens_q: Tensor  # int32 [B + 1], where the queries of each segment start
    cu_seq_lens_k: Tensor  # int32 [B + 1], where its keys start
    max_length_q: int  # the most queries of a segment
    max_length_k: int  # the most keys of a segment
    key_slots: Tensor | None  # int64 [M], places of the keys; None: each once, nothing is shared


class PackedRows(NamedTuple):
    """A batch as one sequence of ``N`` tokens.

    Attributes:
        tokens: int64 ``[1, N]``, row by row.
        position_ids: int64 ``[1, N]``, of the tokens in their rows.
        slots: int64 ``[B * T]``, place in the sequence of each token of the flattened batch (of the
            one that it shares, where it does); 0 for padding.
        segments: what attends to what.
    """

    tokens: Tensor
    position_ids: Tensor
    slots: Tensor
    segments: Segments


def pack(
    tokens_BT: Tensor, attention_mask_BT: Tensor, scored_BT: Tensor | None = None
) -> PackedRows:
    """Lay the real tokens of right-padded rows end to end.

    Rows that are equal up to their first token under ``scored_BT`` share what is before it; without
    this mask nothing is shared.

    Examples:
        >>> tokens = torch.tensor([[5, 6, 0], [5, 6, 9]])
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])
        >>> p = pack(tokens, mask)
        >>> p.tokens.tolist(), p.position_ids.tolist(), p.segments.cu_seq_lens_q.tolist()
        ([[5, 6, 5, 6, 9]], [[0, 1, 0, 1, 2]], [0, 2, 5])
        >>> p = pack(tokens, mask, scored_BT=torch.tensor([[False, True, False]] * 2))
        >>> p.tokens.tolist(), p.position_ids.tolist()      # the first token is kept once
        ([[5, 6, 6, 9]], [[0, 1, 1, 2]])
        >>> p.segments.key_slots.tolist(), p.segments.cu_seq_lens_k.tolist()
        ([0, 1, 0, 2, 3], [0, 2, 5])
    """
    B, T = tokens_BT.shape
    positions_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
    kept_BT, owner_BT = attention_mask_BT, None
    if scored_BT is not None:
        kept_BT, owner_BT = _share(tokens_BT, attention_mask_BT, scored_BT, positions_BT)
    index_N = kept_BT.flatten().nonzero()[:, 0]
    slots_BT = torch.zeros_like(tokens_BT)
    slots_BT.view(-1)[index_N] = torch.arange(len(index_N), device=tokens_BT.device)
    if owner_BT is not None:
        slots_BT = slots_BT.gather(0, owner_BT)
    queries_B = kept_BT.sum(-1)
    # Keys of a row without queries would be looked at by nobody.
    keys_BT = attention_mask_BT & (queries_B > 0)[:, None]
    keys_B = keys_BT.sum(-1)
    max_queries, max_keys, keys = torch.stack(
        [queries_B.max(), keys_B.max(), keys_B.sum()]).tolist()
    segments = Segments(_starts(queries_B), _starts(keys_B), max_queries, max_keys,
                        slots_BT[keys_BT] if keys > len(index_N) else None)
    return PackedRows(tokens_BT.flatten()[index_N][None], positions_BT.flatten()[index_N][None],
                      slots_BT.flatten(), segments)


def _share(
    tokens_BT: Tensor, attention_mask_BT: Tensor, scored_BT: Tensor, positions_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens to be computed, bool ``[B, T]``, and the row that each token is computed in."""
    B = len(tokens_BT)
    rows_B = torch.arange(B, device=tokens_BT.device)
    before_BT = positions_BT < first_scored(scored_BT, attention_mask_BT)[:, None]
    _, kind_B = torch.unique(tokens_BT.masked_fill(~before_BT, -1), dim=0, return_inverse=True)
    owner_B = torch.full_like(rows_B, B).scatter_reduce(0, kind_B, rows_B, "amin")[kind_B]
    owner_BT = torch.where(before_BT, owner_B[:, None], rows_B[:, None])
    return attention_mask_BT & (owner_BT == rows_B[:, None]), owner_BT


def _starts(lengths_B: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
