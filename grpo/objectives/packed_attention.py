"""Attention over packed rows, as an attention function of Transformers.

Transformers tells packed rows apart by a mask of all tokens by all tokens, and computes what the
mask then hides. Here each row is a segment of its own, for which PyTorch has a kernel on GPUs
(:func:`torch.nn.attention.varlen.varlen_attn`), and its keys may lie in another row, see
:mod:`grpo.objectives.packing`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from grpo.objectives.packing import PackedRows, Segments

try:
    from torch.nn.attention.varlen import varlen_attn
    _OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    varlen_attn, _OPTIONS = None, frozenset()

__all__ = ["NAME", "inputs", "install", "why_not"]

NAME = "grpo_packed"
#: Head sizes beyond this have no kernel.
_WIDEST_HEAD = 256


def why_not(model: nn.Module) -> str | None:
    """Why a model cannot be given this attention; None: it can be tried."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", NAME) or not hasattr(model, "set_attn_implementation"):
        return f"its attention is {implementation!r}, not 'sdpa'"
    weight = model.get_input_embeddings().weight
    if weight.device.type == "cpu":
        return None
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if varlen_attn is None or weight.device.type != "cuda":
        return "this PyTorch has no attention for rows of several lengths on this device"
    if weight.dtype not in (torch.bfloat16, torch.float16) or head > _WIDEST_HEAD or head % 8:
        return f"there is no kernel for {weight.dtype} and heads of {head}"
    return None


def install(model: nn.Module) -> None:
    """Let a model of Transformers attend by :func:`attend`; other batches are computed as before.

    It stays, because layers that are computed again in the backward pass ask for it by name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def inputs(model: nn.Module, rows: PackedRows) -> dict[str, Any]:
    """What a model with this attention is called with.

    Raises:
        ValueError: if the model was given another attention since; it would mix the rows.
    """
    if (now := model.config._attn_implementation) != NAME:
        raise ValueError(f"the model's attention is {now!r} since it was tried with packed rows; "
                         "build the loss anew after set_attn_implementation")
    # A mask of four dimensions counts as made: Transformers makes no other.
    made = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.tokens.device)
    return {"input_ids": rows.tokens, "position_ids": rows.position_ids, "attention_mask": made,
            "use_cache": False, **rows.segments._asdict()}


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    key_slots: Tensor | None = None, cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, **options: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it, ``[1, H, N, D]`` to ``[1, N, H, D]``.

    Without segments it is that of ``sdpa``.

    Raises:
        ValueError: for what the kernels cannot compute.
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            sliding_window=sliding_window, **options)
    if dropout or any(options.get(name) is not None
                      for name in ("softcap", "s_aux", "position_bias")):
        raise ValueError("packed rows have no kernel for dropout, caps, sinks or biases of "
                         "attention scores")
    segments = Segments(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, key_slots)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    if key_slots is not None:
        key, value = _Taken.apply(key, key_slots), _Taken.apply(value, key_slots)
    compute = _by_kernel if query.is_cuda else _by_segment
    return compute(query, key, value, segments, scaling, sliding_window)[None], None


class _Taken(torch.autograd.Function):
    """``source[slots]``; a prompt's gradients are added up in float32, one for each of its rows."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.length = len(source)
        return source[slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros((ctx.length, *gradient.shape[1:]), dtype=wide)
        return total.index_add_(0, slots, gradient.to(wide)).to(gradient.dtype), None


def _by_kernel(
    query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, segments: Segments,
    scale: float | None, window: int | None,
) -> Tensor:
    options: dict[str, Any] = {"scale": scale} if "scale" in _OPTIONS else {}
    if not options and scale is not None and scale != query_NHD.shape[-1] ** -0.5:
        query_NHD = query_NHD * (scale * query_NHD.shape[-1] ** 0.5)
    if "window_size" in _OPTIONS:  # queries see ``window`` keys, themselves among them
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None:
        raise ValueError("this PyTorch has no kernel for packed rows and a sliding window")
    else:
        options["is_causal"] = True
    if "enable_gqa" in _OPTIONS:
        options["enable_gqa"] = key_MKD.shape[1] != query_NHD.shape[1]
    elif times := query_NHD.shape[1] // key_MKD.shape[1] - 1:
        key_MKD, value_MKD = (x.repeat_interleave(times + 1, 1) for x in (key_MKD, value_MKD))
    return varlen_attn(query_NHD.contiguous(), key_MKD.contiguous(), value_MKD.contiguous(),
                       segments.cu_seq_lens_q, segments.cu_seq_lens_k, segments.max_length_q,
                       segments.max_length_k, **options)


def _by_segment(
    query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, segments: Segments,
    scale: float | None, window: int | None,
) -> Tensor:
    """The same, row after row."""
    rows = [part.transpose(0, 1) for x, starts in (
        (query_NHD, segments.cu_seq_lens_q), (key_MKD, segments.cu_seq_lens_k),
        (value_MKD, segments.cu_seq_lens_k)) for part in x.split(starts.diff().tolist())]
    count = len(rows) // 3
    out = []
    for query, key, value in zip(rows[:count], rows[count:2 * count], rows[2 * count:],
                                 strict=True):
        queries, keys = query.shape[1], key.shape[1]
        if not queries:
            continue
        place = torch.arange(keys - queries, keys, device=query.device)[:, None]
        seen = torch.arange(keys, device=query.device)
        mask = seen <= place if window is None else (seen <= place) & (seen > place - window)
        out.append(scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scale,
            enable_gqa=key.shape[0] != query.shape[0])[0].transpose(0, 1))
    return torch.cat(out)
