"""Bytes of the parts of a training step, from shapes alone.

A model is built on the ``meta`` device, which allocates nothing. Parameters, adapters and KV cache
are exact; what is kept for the backward pass is a formula, see :func:`layer_bytes`.
:mod:`grpo.run.devices` puts them into a ledger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from grpo.objectives.agreement import capped_layers
from grpo.objectives.head import GPU_CHUNK, KEPT_BYTES, TILE_BYTES, default_chunk_size
from grpo.objectives.scorer import TokenScorer

Head = Literal["fused", "chunked", "logits"]
DeviceType = Literal["cuda", "cpu"]

#: Bytes a logit with ``head="logits"``, measured: float32 copies, softmax and gradients.
LOGIT_BYTES = 20


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model.

    Attributes:
        parameters: values in all parameters; a tied matrix counts once.
        tensors: number of parameters.
        hidden: ``D``.
        intermediate: width of the feed-forward part, of one expert where there are several.
        experts: experts that work on a token; 0 without mixture of experts.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        vocabulary: ``V``.
        norm_width: summed widths of a layer's norms, those of queries and keys excepted.
        qk_norm_width: summed widths of the norms of queries and keys; 0 without.
        linears: ``(layer, name, in_features, out_features)`` of the decoder's linear layers.
        tiled: whether log-probs can be computed from hidden states tile by tile.
        context: greatest number of tokens; None where the model does not say.
        architecture: ``model_type`` of its configuration.

    Examples:
        >>> from transformers import Qwen2Config
        >>> shape = ModelShape.of(Qwen2Config(
        ...     vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        ...     num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True))
        >>> f"{shape.parameters:,}"
        '1,543,714,304'
    """

    parameters: int
    tensors: int
    hidden: int
    intermediate: int
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_width: int
    qk_norm_width: int
    linears: tuple[tuple[int, str, int, int], ...]
    tiled: bool
    context: int | None
    architecture: str = ""
    caps_attention: bool = False

    @classmethod
    def of(cls, model: str | Any) -> ModelShape:
        """Sizes of a folder or hub id (only its ``config.json`` is read), or of a configuration.

        A ledger asks for those of one model again and again; they are counted once.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model
        key = type(config).__name__ + config.to_json_string()
        if key not in _COUNTED:
            _COUNTED[key] = cls._count(config)
        return _COUNTED[key]

    @classmethod
    def _count(cls, config: Any) -> ModelShape:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        text, sizes = config.get_text_config(), [p.numel() for p in module.parameters()]
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        norms, qk_norms = _norm_widths(module, text.hidden_size, head_dim, heads, kv_heads)
        dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        experts = getattr(text, "num_experts_per_tok", None) or 0
        return cls(
            parameters=sum(sizes), tensors=len(sizes), hidden=text.hidden_size,
            intermediate=(getattr(text, "moe_intermediate_size", None) or dense) if experts
            else dense, experts=experts, layers=text.num_hidden_layers, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, vocabulary=text.vocab_size, norm_width=norms,
            qk_norm_width=qk_norms,
            tiled=TokenScorer(module).chunked and not _changes_logits(text),
            linears=tuple(_linears(module.base_model)),
            context=getattr(text, "max_position_embeddings", None),
            caps_attention=bool(capped_layers(module)),
            architecture=config.model_type)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize

    def adapter_sizes(self, lora: LoRA) -> list[int]:
        """Values of each adapter matrix: ``A`` is ``[rank, in]``, ``B`` is ``[out, rank]``.

        Raises:
            ValueError: if a target names no linear layer of the model, or it has no such layer.
        """
        known = {name for _, name, *_ in self.linears}
        if missing := set(lora.targets or ()) - known:
            raise ValueError(f"LoRA targets {sorted(missing)} are no linear layers of the model; "
                             f"it has {sorted(known)}")
        if missing := set(lora.layers or ()) - set(range(self.layers)):
            raise ValueError(f"LoRA layers {sorted(missing)} are not among the model's layers 0 to "
                             f"{self.layers - 1}")
        names = known if lora.targets is None else lora.targets
        layers = range(self.layers) if lora.layers is None else lora.layers
        return [lora.rank * width for layer, name, *sides in self.linears
                if name in names and layer in layers for width in sides]


# Shapes by the configuration that they are of.
_COUNTED: dict[str, ModelShape] = {}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters: their rank, and the linear layers they are added to; None: all of the decoder's.

    Attributes:
        rank: of all of them.
        targets: last parts of the layers' names.
        layers: numbers of decoder layers.
    """

    rank: int = 16
    targets: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None


def _changes_logits(config: Any) -> bool:
    """Whether the fields of a configuration look as if logits were capped or scaled.

    Only a model with weights can be tried, see :mod:`grpo.objectives.agreement`.
    """
    return any(value not in (None, 1.0) for name, value in vars(config).items()
               if re.search("^(final_|output_)?logits?_(soft_?cap|scal)|^lm_head_multiplier", name))


def _linears(decoder: nn.Module) -> Iterator[tuple[int, str, int, int]]:
    """``(layer, name, in_features, out_features)`` of the linear modules of decoder layers."""
    for path, part in decoder.named_modules():
        numbers = [int(piece) for piece in path.split(".") if piece.isdigit()]
        if isinstance(part, nn.Linear) and numbers:
            yield numbers[0], path.rsplit(".", 1)[-1], part.in_features, part.out_features


def _norm_widths(
    model: nn.Module, hidden: int, head_dim: int, heads: int, kv_heads: int
) -> tuple[int, int]:
    """Widths of a decoder layer's norms: those over hidden states, those over queries and keys."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        return 2 * hidden, 0
    plain = of_heads = 0
    for name, module in layers[0].named_modules():
        if "Norm" not in type(module).__name__:
            continue
        copies = {"q_norm": heads, "k_norm": kv_heads}.get(name.rsplit(".", 1)[-1])
        size = module.weight.numel()
        if copies is None:
            plain += size
        else:
            of_heads += size * copies if size == head_dim else size
    return plain, of_heads


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
    """What log-probs and their gradients take.

    Attributes:
        work: tiles and sums, until the head is done.
        gradients: gradients of output matrix and hidden states, until the backward pass has
            reached the embedding.
    """

    work: int
    gradients: int


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
