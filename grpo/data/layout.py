"""Rows in the batch layout: padded, joined, measured."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from grpo.data import keys


def pad_rows(rows: list[list[int]] | list[list[float]], width: int, value: float, *,
             dtype: torch.dtype = torch.int64) -> Tensor:
    """Right-pad lists of token ids, or of their log-probs, into one ``[len(rows), width]`` tensor.

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
    prompt_BP: Tensor, prompt_mask_BP: Tensor, response_BR: Tensor, response_mask_BR: Tensor,
    log_probs_BR: Tensor, *, pad_token_id: int,
) -> TensorDict:
    """Lay prompt and response next to each other in dense rows of ``T = P + R`` tokens.

    Token ids are int64, masks bool (True on tokens of the prompt, or sampled), log-probs float32,
    and all of them right-padded.

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
    return TensorDict({keys.TOKENS: tokens, keys.ATTENTION_MASK: attention,
                       keys.ASSISTANT_MASK: assistant, keys.LOG_PROBS: log_probs},
                      batch_size=[B], device=device)


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
    mask_BT = batch[keys.ASSISTANT_MASK]
    versions_BR = versions_BR.to(mask_BT.device)
    column_R = torch.arange(versions_BR.shape[1], device=mask_BT.device)
    sampled_BR = column_R < mask_BT.sum(-1, keepdim=True)
    nothing_BT = torch.full_like(mask_BT, keys.NO_VERSION, dtype=torch.int64)
    batch[keys.POLICY_VERSIONS] = nothing_BT.masked_scatter(mask_BT, versions_BR[sampled_BR])
    # A row without sampled tokens is as old as the policy that sampled none.
    sampled_BR[:, 0] = True
    newest = torch.iinfo(torch.int64).max
    batch[keys.POLICY_VERSION] = versions_BR.masked_fill(~sampled_BR, newest).amin(-1)
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
    mask_BT = batch[keys.ASSISTANT_MASK]
    if keys.POLICY_VERSIONS in batch.keys(True):
        versions_BT = batch[keys.POLICY_VERSIONS]
    elif keys.POLICY_VERSION in batch.keys():
        versions_BT = batch[keys.POLICY_VERSION][:, None].expand_as(mask_BT)
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
                         "the right; lay them out with grpo.data.torchrl.from_torchrl(batch, "
                         "pad_token_id=...)")


def lengths(batch: TensorDictBase) -> Tensor:
    """Number of real tokens of each row, int64 ``[B]``."""
    return batch[keys.ATTENTION_MASK].sum(-1)


def token_keys(batch: TensorDictBase) -> list:
    """The keys of ``batch`` that hold one value a token (``[B, T]``), advantages included."""
    out = [key for key in keys.TOKEN_KEYS if key in batch.keys(True)]
    width = batch[keys.TOKENS].shape[-1]
    advantage = batch.get(keys.ADVANTAGE, None)
    if advantage is not None and advantage.ndim == 2 and advantage.shape[-1] == width > 1:
        out.append(keys.ADVANTAGE)
    return out


def first_scored(scored_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """Column of each row's first token in ``scored_BT``; its length if there is none."""
    return torch.where(scored_BT.any(-1), scored_BT.int().argmax(-1), attention_mask_BT.sum(-1))


def scatter_tokens(values_N: Tensor, index_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Lay the values of some tokens out as ``[B, T]``, zeros elsewhere (differentiable).

    ``index_N`` holds their positions in the flattened ``[B * T]`` batch.

    Examples:
        >>> scatter_tokens(torch.tensor([5.0, 7.0]), torch.tensor([1, 2]), (2, 2)).tolist()
        [[0.0, 5.0], [7.0, 0.0]]
    """
    flat = values_N.new_zeros(shape[0] * shape[1])
    return flat.index_put((index_N,), values_N).view(shape)
