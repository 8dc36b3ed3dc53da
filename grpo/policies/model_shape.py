"""Sizes of a model, read of its configuration: no weight is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo.objectives.agreement import capped_layers
from grpo.objectives.scorer import TokenScorer


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a causal language model.

    Examples:
        >>> from transformers import Qwen2Config
        >>> shape = ModelShape.of(Qwen2Config(
        ...     vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        ...     num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True))
        >>> f"{shape.parameters:,}"
        '1,543,714,304'
    """

    parameters: int  # values in all of them; a tied matrix counts once
    tensors: int  # number of parameters
    hidden: int  # D
    intermediate: int  # width of the feed-forward part, of one expert where there are several
    experts: int  # that work on a token; 0 without mixture of experts
    layers: int  # of the decoder
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_dim: int  # width of a head
    vocabulary: int  # V
    norm_width: int  # summed widths of a layer's norms, those of queries and keys excepted
    qk_norm_width: int  # summed widths of the norms of queries and keys; 0 without
    #: ``(layer, name, in_features, out_features)`` of the decoder's linear layers.
    linears: tuple[tuple[int, str, int, int], ...]
    tiled: bool  # whether log-probs can be computed from hidden states tile by tile
    context: int | None  # greatest number of tokens; None where the model does not say
    architecture: str = ""  # model_type of its configuration
    caps_attention: bool = False

    @classmethod
    def of(cls, model: str | Any) -> ModelShape:
        """Sizes of a folder or hub id (only its ``config.json`` is read), or of a configuration.

        Those of one model are counted once.
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
    """Adapters, and the linear layers that they are added to."""

    rank: int = 16  # of all adapters
    targets: tuple[str, ...] | None = None  # last parts of the linear layers' names; None: all
    layers: tuple[int, ...] | None = None  # numbers of decoder layers; None: all


def _changes_logits(config: Any) -> bool:
    """Judged by names: only a model with weights can be tried, see
    :mod:`grpo.objectives.agreement`.
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
