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
``dr_grpo``    sum over tokens / (number of        Dr.GRPO (arXiv:2503.20783), sec. 3.1
               sequences x a constant length)
=============  ==================================  ============================================
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "dr_grpo"]


def check_aggregation(aggregation: str, constant_length: int | None) -> None:
    """Validate the pair once, when the loss is built.

    Raises:
        ValueError: for an unknown name, or a ``constant_length`` that is missing or unused.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation={aggregation!r} is unknown; use one of "
                         f"{get_args(Aggregation)}")
    if aggregation == "dr_grpo" and (constant_length is None or constant_length < 1):
        raise ValueError("aggregation='dr_grpo' needs constant_length, the greatest number of "
                         f"response tokens (got {constant_length})")
    if aggregation != "dr_grpo" and constant_length is not None:
        raise ValueError(f"constant_length={constant_length} is only read by "
                         f"aggregation='dr_grpo', not by {aggregation!r}; remove it")


def normalizer(
    mask_BT: Tensor, *, aggregation: Aggregation, constant_length: int | None = None
) -> Tensor:
    """What the sums of an optimizer batch are divided by.

    Args:
        mask_BT: bool ``[B, T]``, True on tokens that enter the loss.
        aggregation: see the module's table.
        constant_length: tokens; for ``dr_grpo``.

    Returns:
        float64 scalar. Counts of several batches or ranks add up; that of an empty one is 0.

    Examples:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> [normalizer(mask, aggregation=a).item() for a in ("token", "sequence")]
        [3.0, 2.0]
    """
    if aggregation == "token":
        count = mask_BT.sum()
    else:
        count = mask_BT.any(-1).sum()
    return count.double() * (constant_length if aggregation == "dr_grpo" else 1)


def aggregate(
    values_BT: Tensor, mask_BT: Tensor, *, aggregation: Aggregation, normalizer: Tensor | float
) -> Tensor:
    """Reduce token values to this micro-batch's share of the loss.

    Args:
        values_BT: one value a token; anything (NaN included) is allowed outside the mask.
        mask_BT: bool ``[B, T]``.
        aggregation: see the module's table.
        normalizer: from :func:`normalizer` over the whole optimizer batch; 0, of a batch without
            any token, gives a zero loss.

    Examples:
        >>> values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregate(values, mask, aggregation="token", normalizer=3.0).item()
        3.0
        >>> aggregate(values, mask, aggregation="sequence", normalizer=2.0).item()
        3.5
    """
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if aggregation == "sequence":
        values_BT = values_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    total = values_BT.sum()
    normalizer = torch.as_tensor(normalizer, dtype=total.dtype, device=total.device)
    return total / torch.where(normalizer == 0, 1.0, normalizer)
