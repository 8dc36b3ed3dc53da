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

NAME = "grpo_packed"
#: Head sizes beyond this have no kernel.
_WIDEST_HEAD = 256
#: Whether the kernel takes fewer heads of keys than of queries. Where it has no option that says
#: so, before PyTorch 2.12, :func:`install` tries it: repeated keys and values are kept for the
#: backward pass, six times as many with 12 heads over 2.
_takes_groups = "enable_gqa" in _OPTIONS


def why_not(model: nn.Module) -> str | None:
    """Why a model cannot be given this attention; None: it can be tried."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", NAME) or not hasattr(model, "set_attn_implementation"):
        return f"its attention is {implementation!r}, not 'sdpa'"
    weight = model.get_input_embeddings().weight
    text, head = config.get_text_config(), 0
    try:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except (AttributeError, RuntimeError):  # it has none, or one for each layer
        pass
    return no_kernel(weight.device, weight.dtype, head)


def no_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why attention of packed rows cannot be computed there; None: it can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not _OPTIONS >= {"scale", "window_size"}:
        return "this PyTorch has no attention for rows of several lengths on this device"
    if dtype not in (torch.bfloat16, torch.float16) or (
            not 0 < head_dim <= _WIDEST_HEAD or head_dim % 8):
        return f"there is no kernel for {dtype} and heads of {head_dim or 'several sizes'}"
    return None


def install(model: nn.Module) -> None:
    """Let a model of Transformers attend by :func:`attend`; other batches are computed as before.

    It stays, because layers that are computed again in the backward pass ask for it by name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    global _takes_groups
    weight = model.get_input_embeddings().weight
    if weight.is_cuda and not _takes_groups:
        _takes_groups = _groups_agree(weight.device, weight.dtype)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def inputs(model: nn.Module, rows: PackedRows) -> dict[str, Any]:
    """What a model with this attention is called with; ValueError if it has another one now."""
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

    Without segments it is that of ``sdpa``; ValueError for what the kernels cannot compute.
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
    times = query_NHD.shape[1] // key_MKD.shape[1]
    if times > 1 and not _takes_groups:
        key_MKD, value_MKD = (x.repeat_interleave(times, 1) for x in (key_MKD, value_MKD))
    options = {"enable_gqa": times > 1} if "enable_gqa" in _OPTIONS else {}
    return varlen_attn(
        query_NHD.contiguous(), key_MKD.contiguous(), value_MKD.contiguous(),
        segments.cu_seq_lens_q, segments.cu_seq_lens_k, segments.max_length_q,
        segments.max_length_k, scale=scale,
        # Queries see ``window`` keys, themselves among them.
        window_size=(-1 if window is None else window - 1, 0), **options)


def _groups_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes the same, gradients too, without repeated keys and values."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(6, heads, 64, device=device, dtype=dtype, generator=generator,
                    requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([0, 2, 6], device=device, dtype=torch.int32)

    def run(times: int) -> list[Tensor]:
        keys, values = (x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value))
        out = varlen_attn(query, keys, values, starts, starts, 4, 4, window_size=(-1, 0))
        return [out, *torch.autograd.grad(out.square().sum(), (query, key, value))]

    try:
        with torch.enable_grad():
            pairs = zip(run(1), run(2), strict=True)
            return all(torch.allclose(one, other, atol=0.1, rtol=0.05) for one, other in pairs)
    except RuntimeError:
        return False


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
