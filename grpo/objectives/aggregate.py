"""From one loss term a token to the scalar that is differentiated.

Every aggregation is ``sum of weighted terms / normalizer`` where the normalizer counts over the
**whole optimizer batch**. A micro-batch (or a data-parallel rank) contributes its own sum over
the same normalizer, so the gradient does not depend on how the batch was cut.

=============  ==================================  ============================================
name           value                               source
=============  ==================================  ============================================
``token``      sum over tokens / number of tokens  DAPO (arXiv:2503.14476), eq. 8
``sequence``   mean over each sequence's tokens,   GRPO (arXiv:2402.03300), eq. 3
               then mean over sequences
``prompt``     mean over all tokens of a prompt's  ScaleRL (arXiv:2510.13786), sec. 3.2
               sequences, then over prompts
``dr_grpo``    sum over tokens / (number of        Dr.GRPO (arXiv:2503.20783), sec. 3.1
               sequences x a constant length)
=============  ==================================  ============================================

In each of them all tokens of a sequence have the same weight, :func:`row_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "prompt", "dr_grpo"]


def check_aggregation(aggregation: str, constant_length: int | None) -> None:
    """ValueError for an unknown name, or a ``constant_length`` that is missing or unused."""
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation={aggregation!r} is unknown; use one of "
                         f"{get_args(Aggregation)}")
    if aggregation == "dr_grpo" and (constant_length is None or constant_length < 1):
        raise ValueError("aggregation='dr_grpo' needs constant_length, the greatest number of "
                         f"response tokens (got {constant_length})")
    if aggregation != "dr_grpo" and constant_length is not None:
        raise ValueError(f"constant_length={constant_length} is only read by "
                         f"aggregation='dr_grpo', not by {aggregation!r}; remove it")


@dataclass(frozen=True, eq=False)
class Normalizer:
    """What the sums of an optimizer batch are divided by.

    Normalizers of several batches or ranks add up with ``+`` and ``sum``.

    Attributes:
        count: float64 scalar: tokens, sequences, prompts, or sequences times a length. 0 for a
            batch without any token.
        group_G: int64 ``[G]``, ascending: the prompts; None except for ``prompt``.
        tokens_G: int64 ``[G]``: the loss tokens of each of them.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> (count(mask, aggregation="token") + count(mask, aggregation="token")).count.item()
        6.0
    """

    count: Tensor
    group_G: Tensor | None = None
    tokens_G: Tensor | None = None

    def __add__(self, other: Normalizer) -> Normalizer:
        if self.group_G is None:
            return Normalizer(self.count + other.count)
        return _of_groups(torch.cat([self.group_G, other.group_G]),
                          torch.cat([self.tokens_G, other.tokens_G]))

    def __radd__(self, zero: int) -> Normalizer:
        return self  # sum() starts with 0


def count(
    mask_BT: Tensor, *, aggregation: Aggregation, constant_length: int | None = None,
    group_id_B: Tensor | None = None,
) -> Normalizer:
    """Count the loss tokens (``mask_BT``) of a batch, or what the aggregation counts instead.

    ``constant_length`` is for ``dr_grpo``, and ``group_id_B``, the prompt of each row, for
    ``prompt``.
    """
    if aggregation == "prompt":
        return _of_groups(group_id_B, mask_BT.sum(-1))
    if aggregation == "token":
        return Normalizer(mask_BT.sum().double())
    rows = mask_BT.any(-1).sum().double()
    return Normalizer(rows * (constant_length if aggregation == "dr_grpo" else 1))


def _of_groups(group_N: Tensor, tokens_N: Tensor) -> Normalizer:
    group_G, index_N = group_N.unique(return_inverse=True)
    tokens_G = tokens_N.new_zeros(len(group_G)).index_add(0, index_N, tokens_N)
    group_G, tokens_G = group_G[tokens_G > 0], tokens_G[tokens_G > 0]
    return Normalizer(torch.tensor(len(group_G), dtype=torch.float64, device=group_G.device),
                      group_G, tokens_G)


def row_weights(
    mask_BT: Tensor, normalizer: Normalizer, *, aggregation: Aggregation,
    group_id_B: Tensor | None = None,
) -> Tensor:
    """Weight of every token of each row, float64 ``[B]``: the loss is the sum of weight times term.

    The normalizer is that of the whole optimizer batch; ``group_id_B`` is for ``prompt``.

    Raises:
        ValueError: for a prompt that the normalizer has not counted.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> norm = count(mask, aggregation="sequence")
        >>> row_weights(mask, norm, aggregation="sequence").tolist()
        [0.25, 0.5]
    """
    length_B = mask_BT.sum(-1)
    # Without any token there is nothing to weigh, and nothing may become NaN.
    total = torch.where(normalizer.count == 0, 1.0, normalizer.count).to(mask_BT.device)
    if aggregation == "sequence":
        return 1.0 / (length_B.clamp(min=1) * total)
    if aggregation != "prompt":
        return (1.0 / total).expand(len(mask_BT))
    group_G = normalizer.group_G.to(mask_BT.device)
    if not len(group_G):
        return torch.ones_like(length_B, dtype=torch.float64)
    index_B = torch.searchsorted(group_G, group_id_B.contiguous()).clamp(max=len(group_G) - 1)
    if bool(((group_G[index_B] != group_id_B) & (length_B > 0)).any()):
        raise ValueError("the normalizer was made from a batch without some of these prompts; "
                         "make it from the whole optimizer batch")
    return 1.0 / (normalizer.tokens_G.to(mask_BT.device)[index_B] * total)


def check_whole_groups(mask_BT: Tensor, normalizer: Normalizer, *, group_id_B: Tensor) -> None:
    """ValueError for a micro-batch that has some, but not all, sequences of a prompt."""
    here = count(mask_BT, aggregation="prompt", group_id_B=group_id_B)
    counted = dict(zip(normalizer.group_G.tolist(), normalizer.tokens_G.tolist(), strict=True))
    cut = [group for group, tokens in zip(here.group_G.tolist(), here.tokens_G.tolist(),
                                          strict=True) if counted.get(group, tokens) != tokens]
    if cut:
        raise ValueError(f"prompts {cut} are not whole in this micro-batch, but the objective "
                         "compares all sequences of a prompt; split with "
                         "split_rows(..., whole_groups=True)")
