"""Bytes of the parts of a training step, from shapes alone.

Parameters, adapters and KV cache are exact; what is kept for the backward pass is a formula, see
:func:`layer_bytes`. :mod:`grpo.run.device_memory` puts them into a ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo.objectives.head import GPU_CHUNK, KEPT_BYTES, TILE_BYTES, default_chunk_size
from grpo.policies.model_shape import ModelShape

Head = Literal["fused", "chunked", "logits"]
DeviceType = Literal["cuda", "cpu"]

#: Bytes a logit with ``head="logits"``, measured: float32 copies, softmax and gradients.
LOGIT_BYTES = 20


def layer_bytes(
    shape: ModelShape, dtype: torch.dtype, *, row_tokens: int, compiled: bool = False,
    eager_attention: bool = False,
) -> int:
    r"""Bytes that one decoder layer keeps for the backward pass, a token.

    With :math:`b` bytes a value, :math:`n` the summed norm widths, :math:`q` and :math:`I` the
    widths of queries and feed-forward part and :math:`T` the tokens of a row, eager layers keep

    .. math:: (4 + 2b)\, n + b\, (4q + 4I + T)

    norms their float32 input, the normalised values and the output; attention queries, keys and
    values (repeated to the width of the queries), its output and the mask; the gated feed-forward
    part gate, its activation, up and their product. Compiled layers compute the normalised values
    and the activation again: :math:`b\,(2n + 4q + 3I + T)`. Attention without fused kernels keeps
    each head's ``[T, T]`` weights instead of the mask.

    Counted on dense Llama, Mistral, Qwen2 and Qwen3 layers the formula is exact to 2 %; it counts
    keys, values and masks of padded rows, without padding at most 10 % less is kept. Gemma and
    mixtures of experts are within 10 %. LoRA keeps less: the formula stays an upper bound.
    """
    b, heads_width = dtype.itemsize, shape.heads * shape.head_dim
    norms = shape.norm_width * (2 * b if compiled else 4 + 2 * b)
    norms += shape.qk_norm_width * (b if compiled else 4 + b)
    # Row maxima and sums of norms and attention, in float32.
    statistics = 4 * (shape.heads + 2)
    attention = 4 * heads_width * b
    if eager_attention:
        attention += shape.heads * row_tokens * (b if b >= 4 else 4 + b)
    else:
        attention += row_tokens * b
    kept = (3 if compiled else 4) * shape.intermediate
    feed_forward = b * max(1, shape.experts) * kept
    routed = 2 * b * shape.experts * shape.hidden  # each expert's own copy of its tokens
    return norms + statistics + attention + feed_forward + routed


def outer_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes a token that are kept outside the layers: token ids, last norm, head's input."""
    return 8 + 4 + shape.hidden * (4 + 2 * dtype.itemsize) + shape.hidden * dtype.itemsize


def transient_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes a token of the gradients in flight when a layer's backward pass begins.

    Of the feed-forward part's widest value, and of the residual stream in three float32 copies.
    """
    return max(1, shape.experts) * shape.intermediate * dtype.itemsize + 12 * shape.hidden


@dataclass(frozen=True)
class HeadBytes:
    """What log-probs and their gradients take."""

    work: int  # tiles and sums, until the head is done
    gradients: int  # of output matrix and hidden states, until all of the backward pass is done


def head_bytes(
    shape: ModelShape, dtype: torch.dtype, *, head: Head, tokens: int, device: DeviceType,
    chunk_size: int | None = None, weight_gradient: bool = True, fp32_head: bool = False,
) -> HeadBytes:
    """Bytes of the log-prob head for ``tokens`` scored tokens; see :mod:`grpo.objectives.head`.

    Args:
        shape: of the model.
        dtype: of hidden states and output matrix.
        head: ``"fused"``: a chunk's logits at a time; ``"chunked"``: a tile of them and some kept;
            ``"logits"``: all, in float32 and with their gradients.
        tokens: scored tokens of a micro-batch.
        device: decides the chunk, and how sums are made.
        chunk_size: tokens a chunk; None: by device.
        weight_gradient: False where the output matrix is frozen.
        fp32_head: float32 logits, whose gradients a GPU rounds to ``dtype`` to multiply them.

    Examples:
        >>> from transformers import Qwen2Config
        >>> shape = ModelShape.of(Qwen2Config(
        ...     vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=1))
        >>> sizes = head_bytes(shape, torch.bfloat16, head="fused", tokens=8192, device="cuda")
        >>> round((sizes.work + sizes.gradients) / 2**30, 2)  # measured: 2.82
        2.82
    """
    b, matrix, states = dtype.itemsize, shape.vocabulary * shape.hidden, tokens * shape.hidden
    half = b < 4
    gradients = b * (states + (matrix if weight_gradient else 0))
    if head == "logits":
        return HeadBytes(LOGIT_BYTES * tokens * shape.vocabulary, gradients)
    of_logit = 4 if fp32_head and half else b
    chunk = min(tokens, chunk_size or _default_chunk(shape, dtype, device) * b // of_logit)
    columns = shape.vocabulary
    if head == "chunked":
        columns = min(columns, max(256, TILE_BYTES[device] // (chunk * of_logit) // 256 * 256))
    tile = chunk * columns * of_logit
    if of_logit > b and device == "cuda":
        tile += chunk * columns * b
    sums = 4 * states if half else 0
    if weight_gradient and half and tokens > chunk:
        sums += 4 * matrix
    if half and device == "cpu":  # CPUs add up float32 copies of both factors
        sums += 4 * columns * (chunk + shape.hidden)
    if head == "fused":
        return HeadBytes(tile + sums, gradients)

    kept = min(KEPT_BYTES[device], tokens * shape.vocabulary * of_logit)
    return HeadBytes(max(kept + tile - gradients, max(kept, tile) + sums), gradients)


def _default_chunk(shape: ModelShape, dtype: torch.dtype, device: DeviceType) -> int:
    if device == "cuda":
        return GPU_CHUNK
    return default_chunk_size(torch.empty(0, dtype=dtype), torch.empty(shape.vocabulary, 0))
