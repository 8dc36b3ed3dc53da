"""Converters between the dense batch of :mod:`grpo.data` and TorchRL's chat TensorDicts.

TorchRL's ``ChatEnv`` with ``TransformersWrapper`` or ``vLLMWrapper`` writes ragged lazy stacks, or
rows padded on the left (prompts) and on the right (responses), with ``Tokens``, ``Masks`` and
``LogProbs`` containers. Which entries exist depends on the wrapper and its options:

* ``TransformersWrapper(generate=True)``: ``log_probs.response`` only, and no assistant mask.
* ``vLLMWrapper(generate=True)``: ``log_probs.full`` too, where the prompt part holds prompt scores
  or NaN; in text mode no prompt tokens at all.
* ``generate=False`` (scoring): ``tokens.full`` and ``log_probs.full``, no prompt and no response.

:func:`from_torchrl` reads all of them except vLLM's text mode; :func:`to_torchrl` writes what
TorchRL's own ``GRPOLoss``, ``MCAdvantage`` and ``ReplayBuffer`` (with a ``LazyStackStorage``) read.
Neither tokenises text: the token ids are those that were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor

from grpo import data

_PADDED = ("tokens", "padded")
_RESPONSE_LOG_PROBS = ("log_probs", "response")
_COLLECTOR_MASK = ("collector", "mask")

#: One value a row: key -> (dtype, trailing shape) in the dense layout.
_SCALARS = {
    data.REWARD: (torch.float32, (1,)),
    data.REWARD_ERROR: (torch.bool, (1,)),
    data.SUCCESS: (torch.bool, (1,)),
    data.GROUP_ID: (torch.int64, ()),
    data.POLICY_VERSION: (torch.int64, ()),
    data.FINISH_REASON: (torch.int64, ()),
    data.LISTWISE_WEIGHT: (torch.float32, (1,)),
    data.ROW_MASK: (torch.bool, (1,)),
}
_READ = {*_SCALARS, data.PROMPT_TOKENS, data.RESPONSE_TOKENS, *data.TOKEN_KEYS, data.ADVANTAGE,
         data.PROMPT_MASK, _PADDED, _RESPONSE_LOG_PROBS, _COLLECTOR_MASK}

ZeroFirstLogProb = Literal["mask", "keep"]


def is_dense(td: TensorDictBase) -> bool:
    """Whether ``td`` has the structure of :mod:`grpo.data` rather than one of TorchRL's.

    No value is looked at, hence no device waited for: one batch dimension, ``("tokens", "full")`` a
    plain ``[B, T]`` tensor, no lazy stack, no ``padded`` flag as in TorchRL's token containers.

    Examples:
        >>> is_dense(TensorDict({"tokens": {"full": torch.zeros(2, 3, dtype=torch.int64)}}, [2]))
        True
        >>> is_dense(lazy_stack([TensorDict({"tokens": {"full": torch.zeros(n)}}) for n in (2, 3)]))
        False
    """
    if td.ndim != 1 or isinstance(td, LazyStackedTensorDict):
        return False
    tokens = td.get(data.TOKENS[0], None)  # TorchRL's Tokens, a tensorclass, is no TensorDictBase
    if not isinstance(tokens, TensorDictBase) or isinstance(tokens, LazyStackedTensorDict):
        return False
    full = tokens.get(data.TOKENS[1], None)
    plain = isinstance(full, Tensor) and not full.is_nested and full.ndim == 2
    return plain and _PADDED[1] not in tokens.keys()


def from_torchrl(
    td: TensorDictBase, *, pad_token_id: int, zero_first_log_prob: ZeroFirstLogProb = "mask"
) -> TensorDict:
    """Lay a TorchRL chat batch out as dense, right-padded rows.

    All batch dimensions are flattened in order, so a rollout ``[B, turns]`` (or ``num_samples``
    batch ``[B, G]``) gives ``B * turns`` rows: each turn is one row, whose prompt is the
    conversation up to that turn. Rows that ``("collector", "mask")`` marks as padding are dropped.

    Sampled tokens without a finite log-prob stay in the tokens but leave the assistant mask: they
    cannot enter an importance ratio.

    ``("next", "truncated")`` is not read, because in TorchRL it says that an *episode* hit its
    step limit. It is set from ``finish_reason`` where a batch has one (:func:`to_torchrl` adds it).

    Args:
        td: what ``ChatEnv`` and a wrapper wrote, with at least one batch dimension, padded or
            ragged, with or without masks. Also converted where present: ``"advantage"`` (one
            number a row, or one a token), ``("next", "ref_log_probs", "full")`` and
            ``("policy_versions", "full")``; with one number a row reward, success and reward error
            (under ``"next"``), ``group_id``, ``policy_version``, ``listwise_weight`` and
            ``row_mask``. Text is not.
        pad_token_id: padding token of the tokenizer. It fills the dense rows, and without an
            attention mask it tells padding from tokens, so it must differ from the EOS token.
        zero_first_log_prob: ``TransformersWrapper`` reports 0.0 for the first sampled token of each
            response whatever the model gave it. ``"mask"`` leaves such a token out of the assistant
            mask; ``"keep"`` trusts the zero. Batches with an assistant mask are not affected:
            only that wrapper writes none.

    Returns:
        TensorDict ``[rows]`` in the layout of :mod:`grpo.data`, on the device of ``td``. ``P`` and
        ``R`` are the longest prompt and response. Advantages are ``[rows, 1]``, or ``[rows, T]``
        with zeros outside the sampled tokens if any row has one a token.

    Raises:
        KeyError: if tokens or log-probs are missing; the message names the key and the fix.
        ValueError: if there is no batch dimension, or values do not fit their tokens.

    Examples:
        >>> rows = [
        ...     TensorDict({"tokens": {"prompt": torch.tensor(p), "response": torch.tensor(r)},
        ...                 "log_probs": {"response": -torch.ones(len(r))}})
        ...     for p, r in [([5], [6, 7]), ([5, 6], [7])]]
        >>> dense = from_torchrl(lazy_stack(rows), pad_token_id=0)
        >>> dense["tokens", "full"].tolist()
        [[5, 6, 7, 0], [5, 6, 7, 0]]
        >>> dense["log_probs", "full"].tolist()
        [[0.0, -1.0, -1.0, 0.0], [0.0, 0.0, -1.0, 0.0]]
    """
    if zero_first_log_prob not in get_args(ZeroFirstLogProb):
        raise ValueError(f"{zero_first_log_prob=} must be one of {get_args(ZeroFirstLogProb)}")
    if td.ndim == 0:
        raise ValueError("td has batch_size [] but needs rows; set batch_size, or lazy_stack([td])")
    selected = td.select(*_READ, strict=False)
    # td.device is often None although the tokens are on an accelerator.
    device = td.device or (_full_tokens(selected[(0,) * td.ndim]).device if td.numel() else "cpu")
    # One transfer now instead of a synchronisation for each row below.
    sources = _collected_rows(selected.to("cpu"))
    rows = [_read_row(source, pad_token_id, zero_first_log_prob) for source in sources]
    out = _dense_rows(rows, pad_token_id)
    present = sources[0].keys(True) if sources else ()
    for key, (dtype, shape) in _SCALARS.items():
        if key in present:
            values = [_scalar(source, key) for source in sources]
            out[key] = torch.stack(values).to(dtype).view(-1, *shape)
    if data.FINISH_REASON in out.keys():
        out[data.TRUNCATED] = (out[data.FINISH_REASON] == data.FINISH_LENGTH)[:, None]
    for key in (data.REF_LOG_PROBS, data.ADVANTAGE, data.POLICY_VERSIONS):
        if key in present:
            out[key] = _token_values(sources, rows, key, out)
    return out.to(device)


def to_torchrl(td: TensorDictBase) -> TensorDictBase:
    """Turn a dense batch into the ragged rows that TorchRL's LLM components read.

    Each row gets unpadded ``Tokens`` (prompt, response, full), ``Masks`` and ``LogProbs``.
    Rewards and advantages get the extra dimension of TorchRL's LLM losses (``[B, 1, 1]``, ragged
    ``[B, tokens, 1]`` for token-level advantages). Every row is a finished one-step episode
    (``("next", "done")``), as ``MCAdvantage`` needs: use it with ``prompt_key="group_id"``.

    TorchRL's ``GRPOLoss`` reads them with an actor of ``input_mode="tokens"``, ``pad_output=False``
    (with ``pad_output=True`` it fails on ragged rows). It pads token-level advantages on the right
    and log-probs on the left, so those two only match where rows have equal length.

    Of what a loss may read, proximal log-probs, the entropy mask and a teacher's tokens and
    log-probs are left out. A loss that needs one of them says so.

    Returns:
        LazyStackedTensorDict ``[B]``. ``from_torchrl(to_torchrl(td))`` gives the same tokens, masks
        and log-probs, up to padding columns that no row uses.

    Raises:
        ValueError: if ``td`` is not dense, or not padded on the right.
        KeyError: if a mask or the log-probs are missing.
    """
    from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

    if not is_dense(td):
        raise ValueError("td is not a dense batch; a TorchRL batch needs no conversion")
    for key in (data.ATTENTION_MASK, data.ASSISTANT_MASK, data.LOG_PROBS):
        if key not in td.keys(True):
            raise KeyError(f"{key} is missing from the dense batch; see grpo.data for the layout")
    data.check_right_padded(td[data.ATTENTION_MASK], data.ATTENTION_MASK)
    rows = []
    for row in td.unbind(0):
        length = int(row[data.ATTENTION_MASK].sum())
        full, assistant = row[data.TOKENS][:length], row[data.ASSISTANT_MASK][:length]
        prompt_mask = row.get(data.PROMPT_MASK, None)
        start = _first_true(assistant) if prompt_mask is None else int(prompt_mask.sum())
        log_probs = row[data.LOG_PROBS][:length]
        everything = torch.ones_like(assistant)
        out = TensorDict(
            tokens=Tokens(prompt=full[:start], response=full[start:], full=full, padded=False),
            masks=Masks(all_attention_mask=everything, all_assistant_mask=assistant, padded=False),
            log_probs=LogProbs(response=log_probs[start:], full=log_probs, padded=False),
            device=td.device)
        if data.POLICY_VERSIONS in row.keys(True):
            out[data.POLICY_VERSIONS] = row[data.POLICY_VERSIONS][:length]
        out["next"] = _next_entries(row, length)
        if data.ADVANTAGE in row.keys():
            out[data.ADVANTAGE] = row[data.ADVANTAGE][:length, None]
        for key in (data.GROUP_ID, data.POLICY_VERSION, data.FINISH_REASON, data.LISTWISE_WEIGHT,
                    data.ROW_MASK):
            if key in row.keys():
                out[key] = row[key]
        if data.TRUNCATED in row.keys(True) and data.FINISH_REASON not in row.keys():
            cut = row[data.TRUNCATED][0]
            out[data.FINISH_REASON] = torch.where(cut, data.FINISH_LENGTH, data.FINISH_STOP)
        rows.append(out)
    return lazy_stack(rows)


@dataclass
class _Row:
    """One row without padding; ``L`` real tokens out of the ``width`` stored ones."""

    tokens: Tensor  # int64 [L]
    prompt_length: int
    assistant: Tensor  # bool [L]
    log_probs: Tensor  # float32 [L]
    real: Tensor  # bool [width], True on the L real tokens


def _read_row(source: TensorDictBase, pad_token_id: int, zero_first: ZeroFirstLogProb) -> _Row:
    full = _full_tokens(source)
    width = len(full)
    real = _real_tokens(source, full, pad_token_id)
    given_assistant = _mask(source, data.ASSISTANT_MASK, width)
    start = _prompt_length(source, real, given_assistant)
    log_probs = _log_probs(source, width)
    position = real.cumsum(0) - 1
    assistant = position >= start if given_assistant is None else given_assistant
    assistant = assistant & real & log_probs.isfinite()
    if given_assistant is None and zero_first == "mask":
        assistant &= ~((position == start) & (log_probs == 0.0))
    log_probs = torch.where(assistant, log_probs, 0.0)
    return _Row(full[real], start, assistant[real], log_probs[real], real)


def _full_tokens(source: TensorDictBase) -> Tensor:
    """Stored tokens of a row, ``[width]``: prompt then response, each with its padding."""
    full = source.get(data.TOKENS, None)
    prompt, response = source.get(data.PROMPT_TOKENS, None), source.get(data.RESPONSE_TOKENS, None)
    if full is None:
        return torch.cat([_require(source, k) for k in (data.PROMPT_TOKENS, data.RESPONSE_TOKENS)])
    if full.ndim != 1:
        raise ValueError(
            f"a row of {data.TOKENS} has shape {tuple(full.shape)}; give td one batch dimension "
            "for every dimension of its tokens but the last")
    if prompt is None or response is None or source.get(data.PROMPT_MASK, None) is not None:
        return full
    if len(prompt) + len(response) != len(full):
        raise ValueError(
            f"{data.TOKENS} has {len(full)} tokens but prompt and response have {len(prompt)} and "
            f"{len(response)}: TransformersWrapper drops every token that equals the padding "
            "token; give the tokenizer a pad_token that is not its eos_token")
    return full


def _log_probs(source: TensorDictBase, width: int) -> Tensor:
    """Log-probs at the ``width`` stored positions, zeros before the response."""
    # The response comes first: vLLM's text mode calls a response-only tensor "full".
    values = source.get(_RESPONSE_LOG_PROBS, None)
    expected = width if values is None else source.get(data.RESPONSE_TOKENS, values).numel()
    values = (_require(source, data.LOG_PROBS) if values is None else values).reshape(-1).float()
    if len(values) != expected:
        raise ValueError(f"log_probs has {len(values)} values for {expected} tokens")
    return torch.nn.functional.pad(values, (width - expected, 0))


def _real_tokens(source: TensorDictBase, full: Tensor, pad_token_id: int) -> Tensor:
    """True from the first to the last real token.

    The masks of the wrappers are ``tokens != pad``, with a hole where the model sampled the padding
    token inside a response; the tokens after the hole were conditioned on it.
    """
    mask = _mask(source, data.ATTENTION_MASK, len(full))
    if mask is None:
        padded = source.get(_PADDED, None)
        unpadded = getattr(padded, "data", padded) is False
        mask = (full != pad_token_id) | unpadded
    return (mask.cumsum(0) > 0) & (mask.flip(0).cumsum(0) > 0).flip(0)


def _prompt_length(source: TensorDictBase, real: Tensor, assistant: Tensor | None) -> int:
    """Number of real prompt tokens of a row."""
    prompt_mask = source.get(data.PROMPT_MASK, None)
    if prompt_mask is not None:
        return int(prompt_mask.sum())
    prompt = source.get(data.PROMPT_TOKENS, None)
    if prompt is not None:
        # tokens.full is the stored prompt, padding included, followed by the response.
        return int(real[: len(prompt)].sum())
    if assistant is None:
        raise KeyError(
            f"{data.PROMPT_TOKENS} and {data.ASSISTANT_MASK} are both missing, so sampled tokens "
            "cannot be told from the prompt; keep the wrapper's 'tokens' and 'masks'")
    return int(real[: _first_true(assistant & real)].sum())


def _first_true(mask: Tensor) -> int:
    """Index of the first True, or the length of ``mask``."""
    return int((mask.cumsum(0) == 0).sum())


def _mask(source: TensorDictBase, key: NestedKey, width: int) -> Tensor | None:
    mask = source.get(key, None)
    if mask is not None and mask.numel() != width:
        raise ValueError(f"{key} has {mask.numel()} values for {width} tokens of {data.TOKENS}")
    return None if mask is None else mask.reshape(-1).bool()


def _require(source: TensorDictBase, key: NestedKey) -> Tensor:
    value = source.get(key, None)
    if value is None:
        fix = "generate in mode 'history' or 'tokens': vLLMWrapper's 'text' has no prompt tokens"
        if key == data.LOG_PROBS:
            fix = "build the wrapper with return_log_probs=True"
        raise KeyError(f"{key} is missing from the TorchRL batch; {fix}")
    return value


def _scalar(source: TensorDictBase, key: NestedKey) -> Tensor:
    value = source.get(key, None)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{key} must be a tensor in every row, got {type(value).__name__}; use integer group "
            "ids, and PolicyVersion(version_type='int')")
    if value.numel() != 1:
        raise ValueError(
            f"{key} has shape {tuple(value.shape)} in a row; expected one number, so reduce it "
            "(rewards: the sum) before the conversion")
    return value.reshape(())


def _token_values(
    sources: list[TensorDictBase], rows: list[_Row], key: NestedKey, out: TensorDict
) -> Tensor:
    """Per-token values ``[rows, T]``, neutral outside the sampled tokens.

    ``[rows, 1]`` if every row has a single value.
    """
    dtype, neutral = ((torch.int64, data.NO_VERSION) if key == data.POLICY_VERSIONS else
                      (torch.float32, 0.0))
    if all(source[key].numel() == 1 for source in sources):
        return torch.stack([source[key].reshape(1).to(dtype) for source in sources])
    aligned = []
    for source, row in zip(sources, rows, strict=True):
        values, L = source[key].reshape(-1).to(dtype), len(row.tokens)
        if len(values) == len(row.real):
            values = values[row.real]
        if len(values) not in (1, L):
            raise ValueError(
                f"{key} has {len(values)} values for {L} tokens; score the sampled tokens "
                "(input_mode='tokens') rather than the re-rendered history")
        aligned.append(values.expand(L).masked_fill(~row.assistant, neutral))
    return _pad(aligned, out[data.TOKENS].shape[1], neutral, dtype)


def _dense_rows(rows: list[_Row], pad_token_id: int) -> TensorDict:
    prompts = [row.tokens[: row.prompt_length] for row in rows]
    responses = [row.tokens[row.prompt_length :] for row in rows]
    P, R = (max(map(len, part), default=0) for part in (prompts, responses))
    prompt_lengths = torch.tensor([row.prompt_length for row in rows])
    ones = [torch.ones_like(row.assistant) for row in rows]
    return TensorDict({
        data.PROMPT_TOKENS: _pad(prompts, P, pad_token_id, torch.int64),
        data.PROMPT_MASK: torch.arange(P) < prompt_lengths[:, None],
        data.RESPONSE_TOKENS: _pad(responses, R, pad_token_id, torch.int64),
        data.TOKENS: _pad([row.tokens for row in rows], P + R, pad_token_id, torch.int64),
        data.ATTENTION_MASK: _pad(ones, P + R, False, torch.bool),
        data.ASSISTANT_MASK: _pad([row.assistant for row in rows], P + R, False, torch.bool),
        data.LOG_PROBS: _pad([row.log_probs for row in rows], P + R, 0.0, torch.float32),
    }, batch_size=[len(rows)])


def _pad(rows: list[Tensor], width: int, value: float, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def _next_entries(row: TensorDictBase, length: int) -> TensorDict:
    truncated = row.get(data.TRUNCATED, None)
    done = torch.ones(1, dtype=torch.bool, device=row.device)
    out = TensorDict(done=done, terminated=done if truncated is None else ~truncated)
    out["truncated"] = ~out["terminated"]
    if data.REWARD in row.keys(True):
        out[data.REWARD[1:]] = row[data.REWARD][:, None]
    for key in (data.REWARD_ERROR, data.SUCCESS):
        if key in row.keys(True):
            out[key[1:]] = row[key]
    if data.REF_LOG_PROBS in row.keys(True):
        out[data.REF_LOG_PROBS[1:]] = row[data.REF_LOG_PROBS][:length]
    return out


def _collected_rows(td: TensorDictBase) -> list[TensorDictBase]:
    """All rows of ``td`` in order, without those that only pad a trajectory."""
    rows = [td]
    for _ in range(td.ndim):
        rows = [row for stack in rows for row in stack.unbind(0)]
    return [row for row in rows if _COLLECTOR_MASK not in row.keys(True) or row[_COLLECTOR_MASK]]
