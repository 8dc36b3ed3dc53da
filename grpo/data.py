"""The one batch layout: key names, shapes, and how rows are padded and split.

A rollout is a dense :class:`~tensordict.TensorDict` with ``batch_size [B]``. ``P`` is the padded
prompt length, ``R`` the padded response length, ``T = P + R``:

==============================================  ========  ==========  ==============================
key                                             dtype     shape       meaning
==============================================  ========  ==========  ==============================
``("tokens", "prompt")``                        int64     ``[B, P]``  prompt, right-padded
``("masks", "prompt_attention_mask")``          bool      ``[B, P]``  True on prompt tokens
``("tokens", "response")``                      int64     ``[B, R]``  sampled tokens, right-padded
``("tokens", "full")``                          int64     ``[B, T]``  prompt, response, padding
``("masks", "all_attention_mask")``             bool      ``[B, T]``  True on prompt and response
``("masks", "all_assistant_mask")``             bool      ``[B, T]``  True on sampled tokens
``("masks", "high_entropy")``                   bool      ``[B, T]``  tokens the objective is for
``("log_probs", "full")``                       float32   ``[B, T]``  of each sampled token, else 0
``("log_probs", "proximal")``                   float32   ``[B, T]``  the trainer's, before updates
``("next", "reward")``                          float32   ``[B, 1]``
``("next", "truncated")``                       bool      ``[B, 1]``  cut by the length limit
``("next", "reward_error")``                    bool      ``[B, 1]``  no reward: the row is masked
``("next", "reward_fault")``                    int64     ``[B, 1]``  why not (``FAULT_*``)
``("next", "reward_parts", NAME)``              float32   ``[B, 1]``  one of several, unweighted
``("next", "success")``                         bool      ``[B, 1]``  the verifier's yes or no
``("next", "shaped_reward")``                   float32   ``[B, 1]``  reward behind the advantage
``("next", "ref_log_probs", "full")``           float32   ``[B, T]``  the reference policy's
``("next", "teacher_log_probs", "full")``       float32   ``[B, T]``  a teacher's
``("distill", "token_ids")``                    int64     ``[B,T,K]`` a teacher's most likely tokens
``("distill", "log_probs")``                    float32   ``[B,T,K]`` and their log-probs
``("policy_versions", "full")``                 int64     ``[B, T]``  weights that sampled it, or -1
``"policy_version"``                            int64     ``[B]``     the oldest of them in a row
``"group_id"``                                  int64     ``[B]``
``"advantage"``                                 float32   ``[B, 1]``  or ``[B, T]`` for token-level
``"listwise_weight"``                           float32   ``[B, 1]``  share of the group (MaxEnt)
``"row_mask"``                                  bool      ``[B, 1]``  enters the loss; absent = all
==============================================  ========  ==========  ==============================

The names are TorchRL's, so replay buffers, collectors and losses of either side read the other's
data. :mod:`grpo.data_torchrl` converts TorchRL's ragged chat batches to and from this layout.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

PROMPT_TOKENS = ("tokens", "prompt")
RESPONSE_TOKENS = ("tokens", "response")
TOKENS = ("tokens", "full")
PROMPT_MASK = ("masks", "prompt_attention_mask")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
PROXIMAL_LOG_PROBS = ("log_probs", "proximal")
HIGH_ENTROPY_MASK = ("masks", "high_entropy")
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
TEACHER_LOG_PROBS = ("next", "teacher_log_probs", "full")
DISTILL_IDS = ("distill", "token_ids")
DISTILL_LOG_PROBS = ("distill", "log_probs")
REWARD = ("next", "reward")
SHAPED_REWARD = ("next", "shaped_reward")
REWARD_ERROR = ("next", "reward_error")
REWARD_FAULT = ("next", "reward_fault")
REWARD_PARTS = ("next", "reward_parts")
SUCCESS = ("next", "success")
TRUNCATED = ("next", "truncated")
GROUP_ID = "group_id"
POLICY_VERSION = "policy_version"
POLICY_VERSIONS = ("policy_versions", "full")
ADVANTAGE = "advantage"
LISTWISE_WEIGHT = "listwise_weight"
ROW_MASK = "row_mask"
FINISH_REASON = "finish_reason"

#: Codes of ``finish_reason``: the model ended its turn, or the length limit did.
FINISH_STOP, FINISH_LENGTH = 0, 1

#: Codes of ``reward_fault``: there is a reward; the function returned None to leave the sample out,
#: failed, or took too long.
FAULT_NONE, FAULT_SKIPPED, FAULT_FAILED, FAULT_LATE = range(4)

#: Entries whose second dimension runs over the ``T`` tokens of a row.
TOKEN_KEYS = (TOKENS, ATTENTION_MASK, ASSISTANT_MASK, HIGH_ENTROPY_MASK, LOG_PROBS,
              PROXIMAL_LOG_PROBS, REF_LOG_PROBS, TEACHER_LOG_PROBS, DISTILL_IDS, DISTILL_LOG_PROBS,
              POLICY_VERSIONS)

#: Version of a token that no policy sampled.
NO_VERSION = -1


def pad_rows(rows: list[list[int]] | list[list[float]], width: int, value: float, *,
             dtype: torch.dtype = torch.int64) -> Tensor:
    """Right-pad lists of token ids, or of their log-probs, into one ``[len(rows), width]`` tensor.

    Args:
        rows: the values of each row, at most ``width`` long.
        width: number of columns of the result.
        value: fill value.
        dtype: of the result.

    Raises:
        ValueError: if a row is longer than ``width``.

    Examples:
        >>> pad_rows([[5, 6], [7]], width=3, value=0).tolist()
        [[5, 6, 0], [7, 0, 0]]
    """
    longest = max(map(len, rows), default=0)
    if longest > width:
        raise ValueError(f"a row has {longest} tokens but the padded width is {width}")
    # All values through numpy at once: a tensor for each row would take ten times as long.
    sizes_B = np.fromiter(map(len, rows), np.int64, len(rows))
    out = torch.full((len(rows), width), value, dtype=dtype)
    out.numpy()[np.arange(width) < sizes_B[:, None]] = np.fromiter(
        chain.from_iterable(rows), out.numpy().dtype, sizes_B.sum())
    return out


def join_prompt_response(
    prompt_BP: Tensor,
    prompt_mask_BP: Tensor,
    response_BR: Tensor,
    response_mask_BR: Tensor,
    log_probs_BR: Tensor,
    *,
    pad_token_id: int,
) -> TensorDict:
    """Lay prompt and response next to each other in dense rows of ``T = P + R`` tokens.

    Args:
        prompt_BP: int64 ``[B, P]``, right-padded.
        prompt_mask_BP: bool ``[B, P]``.
        response_BR: int64 ``[B, R]``, right-padded.
        response_mask_BR: bool ``[B, R]``, True on sampled tokens.
        log_probs_BR: float32 ``[B, R]`` of the sampled tokens.
        pad_token_id: fill value of ``tokens``.

    Returns:
        TensorDict with ``tokens.full``, both masks and ``log_probs.full``.

    Examples:
        >>> ones = torch.ones(1, 2, dtype=torch.bool)
        >>> td = join_prompt_response(
        ...     torch.tensor([[7, 0]]), torch.tensor([[True, False]]),
        ...     torch.tensor([[8, 9]]), ones, torch.tensor([[-1.0, -2.0]]), pad_token_id=0)
        >>> td["tokens", "full"].tolist(), td["log_probs", "full"].tolist()
        ([[7, 8, 9, 0]], [[0.0, -1.0, -2.0, 0.0]])
    """
    check_right_padded(prompt_mask_BP, "the mask of the prompts")
    check_right_padded(response_mask_BR, "the mask of the responses")
    B, P = prompt_BP.shape
    R = response_BR.shape[1]
    device = prompt_BP.device
    tokens = torch.full((B, P + R), pad_token_id, dtype=torch.int64, device=device)
    assistant = torch.zeros(B, P + R, dtype=torch.bool, device=device)
    log_probs = torch.zeros(B, P + R, dtype=torch.float32, device=device)
    tokens[:, :P] = torch.where(prompt_mask_BP, prompt_BP, pad_token_id)
    prompt_lengths_B = prompt_mask_BP.sum(1)
    # Column of every response token: they start where the row's own prompt ends.
    columns_BR = prompt_lengths_B[:, None] + torch.arange(R, device=device)
    tokens.scatter_(1, columns_BR, torch.where(response_mask_BR, response_BR, pad_token_id))
    assistant.scatter_(1, columns_BR, response_mask_BR)
    log_probs.scatter_(1, columns_BR, log_probs_BR.float().masked_fill(~response_mask_BR, 0.0))
    lengths_B = prompt_lengths_B + response_mask_BR.sum(1)
    attention = torch.arange(P + R, device=device) < lengths_B[:, None]
    out = TensorDict({}, batch_size=[B], device=device)
    out[TOKENS], out[ATTENTION_MASK], out[ASSISTANT_MASK] = tokens, attention, assistant
    out[LOG_PROBS] = log_probs
    return out


def stamp_versions(batch: TensorDictBase, versions_BR: Tensor) -> TensorDictBase:
    """Write which weights sampled every token: an engine may get new ones in mid-response.

    Args:
        batch: with ``masks.all_assistant_mask``.
        versions_BR: int64 ``[B, R]``, ``R`` at least 1: number of weight updates before each token
            was sampled; a row's first entries are those of its tokens under the mask.

    Returns:
        ``batch`` with ``policy_versions.full`` and ``policy_version``.

    Examples:
        >>> batch = TensorDict({"masks": {"all_assistant_mask": torch.tensor(
        ...     [[False, True, True], [True, False, False]])}}, [2])
        >>> batch = stamp_versions(batch, torch.tensor([[4, 5], [5, 0]]))
        >>> batch["policy_versions", "full"].tolist(), batch["policy_version"].tolist()
        ([[-1, 4, 5], [5, -1, -1]], [4, 5])
    """
    mask_BT = batch[ASSISTANT_MASK]
    versions_BR = versions_BR.to(mask_BT.device)
    column_R = torch.arange(versions_BR.shape[1], device=mask_BT.device)
    sampled_BR = column_R < mask_BT.sum(-1, keepdim=True)
    batch[POLICY_VERSIONS] = torch.full_like(mask_BT, NO_VERSION, dtype=torch.int64).masked_scatter(
        mask_BT, versions_BR[sampled_BR])
    # A row without sampled tokens is as old as the policy that sampled none.
    sampled_BR[:, 0] = True
    newest = torch.iinfo(torch.int64).max
    batch[POLICY_VERSION] = versions_BR.masked_fill(~sampled_BR, newest).amin(-1)
    return batch


def staleness(batch: TensorDictBase, version: int) -> dict[str, float]:
    """How many weight updates ago the sampled tokens were sampled.

    Args:
        batch: with ``masks.all_assistant_mask`` and ``policy_versions.full``, or with one
            ``policy_version`` a row, which then counts for all of its tokens.
        version: number of weight updates so far.

    Returns:
        ``policy/age_mean`` over the sampled tokens and ``policy/age_max``; nothing for a batch
        without versions or without sampled tokens.

    Examples:
        >>> mask = torch.tensor([[False, True, True]])
        >>> batch = TensorDict({"masks": {"all_assistant_mask": mask},
        ...                     "policy_version": torch.tensor([3])}, [1])
        >>> staleness(batch, 5)
        {'policy/age_mean': 2.0, 'policy/age_max': 2.0}
        >>> staleness(stamp_versions(batch, torch.tensor([[3, 4]])), 5)
        {'policy/age_mean': 1.5, 'policy/age_max': 2.0}
    """
    mask_BT = batch[ASSISTANT_MASK]
    if POLICY_VERSIONS in batch.keys(True):
        versions_BT = batch[POLICY_VERSIONS]
    elif POLICY_VERSION in batch.keys():
        versions_BT = batch[POLICY_VERSION][:, None].expand_as(mask_BT)
    else:
        return {}
    age_N = (version - versions_BT[mask_BT]).float()
    if not len(age_N):
        return {}
    return {"policy/age_mean": age_N.mean().item(), "policy/age_max": age_N.max().item()}


def check_right_padded(mask_BT: Tensor, name: object) -> None:
    """Refuse rows whose tokens do not begin in the first column, or have padding between them.

    They would be cut where the padding of others is, and lose tokens without a word.

    Raises:
        ValueError: naming the rows.
    """
    mask_BT = mask_BT.bool()
    late_B = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).any(-1)
    if late_B.any():
        rows = late_B.nonzero()[:, 0].tolist()
        raise ValueError(f"{name} has padding before tokens in rows {rows}, but rows are padded on "
                         "the right; lay them out with grpo.data_torchrl.from_torchrl(batch, "
                         "pad_token_id=...)")


def lengths(batch: TensorDictBase) -> Tensor:
    """Number of real tokens of each row, int64 ``[B]``."""
    return batch[ATTENTION_MASK].sum(-1)


def token_keys(batch: TensorDictBase) -> list:
    """The keys of ``batch`` that hold one value a token (``[B, T]``), advantages included."""
    keys = [key for key in TOKEN_KEYS if key in batch.keys(True)]
    width = batch[TOKENS].shape[-1]
    advantage = batch.get(ADVANTAGE, None)
    if advantage is not None and advantage.ndim == 2 and advantage.shape[-1] == width > 1:
        keys.append(ADVANTAGE)
    return keys


def trim(batch: TensorDictBase, *, multiple_of: int = 1) -> TensorDict:
    """Drop the padding columns that no row of ``batch`` uses.

    Only what the trainer reads is kept at token width; ``tokens.prompt`` and ``tokens.response``
    keep their own widths.

    Args:
        batch: dense batch with ``batch_size [B]``.
        multiple_of: round the width up, so that compiled graphs meet few shapes.

    Raises:
        ValueError: for rows that are not padded on the right.
    """
    check_right_padded(batch[ATTENTION_MASK], ATTENTION_MASK)
    return _cut(batch, multiple_of)


def _cut(batch: TensorDictBase, multiple_of: int) -> TensorDict:
    width = int(lengths(batch).max()) if batch.batch_size[0] else 0
    width = min(batch[TOKENS].shape[-1], -(-width // multiple_of) * multiple_of)
    out = batch.copy()
    for key in token_keys(batch):
        out[key] = batch[key][:, :width]
    return out


def first_scored(scored_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """Column of each row's first token in ``scored_BT``, or its length if there is none; ``[B]``.

    Examples:
        >>> first_scored(torch.tensor([[False, True], [False, False]]),
        ...              torch.tensor([[True, True], [True, False]])).tolist()
        [1, 1]
    """
    return torch.where(scored_BT.any(-1), scored_BT.int().argmax(-1), attention_mask_BT.sum(-1))


def split_rows(
    batch: TensorDictBase,
    *,
    num_micro_batches: int | None = None,
    max_tokens: int | None = None,
    multiple_of: int = 1,
    whole_groups: bool = False,
    packed: bool = False,
) -> list[TensorDict]:
    """Split an optimizer batch into micro-batches, each trimmed to its own longest row.

    Exactly one of the first two options is given. With ``max_tokens`` rows are sorted by length
    first, so that little padding is computed on; the gradient does not depend on the order because
    the loss is normalised over the whole optimizer batch.

    Args:
        batch: dense batch, ``batch_size [B]``.
        num_micro_batches: split into this many pieces of (nearly) equal row count.
        max_tokens: greatest ``rows x width`` of a piece; a row longer than that gets its own.
        multiple_of: pad pieces to a multiple of this many tokens, so that compiled graphs meet few
            shapes; see :func:`trim`.
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


def scatter_tokens(values_N: Tensor, index_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Lay per-token values out as ``[B, T]``, zeros elsewhere (differentiable).

    Args:
        values_N: one value for each of some tokens.
        index_N: int64 ``[N]``, their positions in the flattened ``[B * T]`` batch.
        shape: ``(B, T)``.

    Examples:
        >>> scatter_tokens(torch.tensor([5.0, 7.0]), torch.tensor([1, 2]), (2, 2)).tolist()
        [[0.0, 5.0], [7.0, 0.0]]
    """
    flat = values_N.new_zeros(shape[0] * shape[1])
    return flat.index_put((index_N,), values_N).view(shape)
