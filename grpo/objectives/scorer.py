"""``TokenScorer``: a causal language model and a batch in, log-probs and entropies out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grpo.data import pack, scatter_tokens
from grpo.objectives.head import (
    PartLoss,
    default_chunk_size,
    fused_loss,
    linear_log_probs,
    log_probs_from_logits,
    sum_dtype,
)

HeadKind = Literal["auto", "fused", "chunked", "logits"]

# Configuration fields by which architectures transform logits after the output matrix.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Predictions(NamedTuple):
    """What the model predicts the chosen tokens from.

    Attributes:
        states: hidden states ``[N, D]``, or logits ``[N, V]`` where the head is ``"logits"``.
        targets_N: int64 ``[N]``, the tokens.
        index_N: int64 ``[N]``, their places in the flattened batch.
    """

    states: Tensor
    targets_N: Tensor
    index_N: Tensor


class TokenScorer(nn.Module):
    """Log-prob and entropy of the tokens of a batch under a causal language model.

    Args:
        model: a Hugging Face causal language model, or any module that maps ``input_ids`` and
            ``attention_mask`` to an object with ``.logits``.
        temperature: the temperature the tokens were sampled at; logits are divided by it.
        head: ``"logits"`` asks the model for all logits, ``"chunked"`` applies the output matrix
            in tiles, ``"fused"`` lets a loss be differentiated tile by tile (:meth:`fused_loss`);
            ``"auto"`` takes tiles where they give the same numbers.
        chunk_size: tokens a chunk; None: by device, see
            :func:`~grpo.objectives.head.default_chunk_size`.
        entropy_gradient: whether the entropy is differentiated or only reported.
        packing: compute on rows laid end to end instead of padded rows.

    Raises:
        ValueError: for ``head="chunked"`` or ``"fused"`` on a model whose logits are more than
            ``hidden @ weight.T``, and for an unknown ``head``.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1))
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> mask = torch.tensor([[False, True, True]])
        >>> log_probs, entropy = TokenScorer(model)(tokens, torch.ones_like(mask), mask)
        >>> log_probs.shape, log_probs[0, 0].item()
        (torch.Size([1, 3]), 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        head: HeadKind = "auto",
        chunk_size: int | None = None,
        entropy_gradient: bool = True,
        packing: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive: tokens sampled greedily "
                             "have no sampling distribution to train on")
        if head not in ("auto", "fused", "chunked", "logits"):
            raise ValueError(f"head={head!r} is unknown; use 'auto', 'fused', 'chunked' or "
                             "'logits'")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} must be at least 1 token, or None")
        obstacle = _why_not_chunked(model)
        if head in ("chunked", "fused") and obstacle:
            raise ValueError(f"head={head!r} does not fit this model: {obstacle}; use head='auto'")
        self.model = model
        self.temperature = float(temperature)
        self.chunked = head != "logits" and not obstacle
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient
        self.packing = packing

    @property
    def head_weight(self) -> Tensor:
        """The output matrix ``[V, D]``."""
        return self.model.get_output_embeddings().weight

    def forward(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score the tokens under ``mask_BT``.

        Args:
            tokens_BT: int64 ``[B, T]``, right-padded.
            attention_mask_BT: bool ``[B, T]``.
            mask_BT: bool ``[B, T]``, tokens to score; column 0 has nothing before it to be
                predicted from and must be False.

        Returns:
            ``(log_probs_BT, entropy_BT)``, zero outside ``mask_BT``.
        """
        predictions = self.predict(tokens_BT, attention_mask_BT, mask_BT)
        shape = tuple(tokens_BT.shape)
        log_probs_N, entropy_N = self.score(predictions)
        return (scatter_tokens(log_probs_N, predictions.index_N, shape),
                scatter_tokens(entropy_N, predictions.index_N, shape))

    def predict(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor
    ) -> Predictions:
        """Run the model up to its head and keep what the tokens of ``mask_BT`` follow from."""
        # Position t is predicted by the output at t - 1, so targets are read one to the right.
        index_N = mask_BT.flatten().nonzero()[:, 0]
        targets_N = tokens_BT.flatten()[index_N]
        if self.packing:
            packed = pack(tokens_BT, attention_mask_BT)
            # With a cache, Transformers takes the packed rows for one row: each then attends to
            # those before it.
            inputs = {"input_ids": packed.tokens, "position_ids": packed.position_ids,
                      "use_cache": False}
            slot_of = torch.zeros(tokens_BT.numel(), dtype=torch.int64, device=tokens_BT.device)
            slot_of[packed.index] = torch.arange(len(packed.index), device=tokens_BT.device)
            source_N = slot_of[index_N - 1]
        else:
            inputs = {"input_ids": tokens_BT, "attention_mask": _padding_mask(attention_mask_BT)}
            source_N = index_N - 1
        return Predictions(self.outputs(inputs).flatten(0, 1)[source_N], targets_N, index_N)

    def outputs(self, inputs: dict[str, Any]) -> Tensor:
        """Hidden states ``[B, T, D]``, or logits ``[B, T, V]`` where the head is ``"logits"``."""
        if self.chunked:
            return self.model.base_model(**{**inputs, "use_cache": False}).last_hidden_state
        return self.model(**inputs).logits

    def score(
        self, predictions: Predictions, *, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(log_probs_N, entropy_N)`` of the predicted tokens."""
        options = {"temperature": temperature or self.temperature,
                   "entropy_gradient": self.entropy_gradient}
        if not self.chunked:
            return log_probs_from_logits(predictions.states, predictions.targets_N, **options)
        return linear_log_probs(
            predictions.states, self.head_weight, predictions.targets_N,
            chunk_size=self.tokens_per_chunk(predictions), **options)

    def most_likely(self, predictions: Predictions, k: int) -> tuple[Tensor, Tensor]:
        """Log-probs and ids of the ``k`` most likely tokens of each position, both ``[N, k]``.

        The log-probs are those of temperature 1, whatever the scorer's.
        """
        parts = []
        for states in predictions.states.split(self._rows_of_logits(predictions)):
            logits = states @ self.head_weight.t() if self.chunked else states
            log_probs = logits.to(sum_dtype(logits.dtype)).log_softmax(-1)
            parts.append(log_probs.topk(k))
        if not parts:
            empty = predictions.states.new_zeros(0, k)
            return empty, empty.long()
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _rows_of_logits(self, predictions: Predictions) -> int:
        """Positions whose raised logits fit a chunk's memory."""
        return max(1, self.tokens_per_chunk(predictions) // 8)

    def fused_loss(
        self, predictions: Predictions, part_loss: PartLoss, *, borders: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`grpo.objectives.head.fused_loss`."""
        return fused_loss(
            predictions.states, self.head_weight, predictions.targets_N, part_loss,
            borders=borders, temperature=self.temperature, entropy_gradient=self.entropy_gradient)

    def tokens_per_chunk(self, predictions: Predictions) -> int:
        """``chunk_size``, or the default for the device and the vocabulary."""
        return self.chunk_size or default_chunk_size(predictions.states, self.head_weight)


def _padding_mask(attention_mask_BT: Tensor) -> Tensor | None:
    # Right padding cannot reach real tokens through causal attention. A mask is only needed to
    # tell rows apart, so without padding the faster mask-free kernels are used.
    return None if bool(attention_mask_BT.all()) else attention_mask_BT


def _why_not_chunked(model: nn.Module) -> str | None:
    """Why ``hidden @ weight.T`` would not be this model's logits, or None."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(output, nn.Linear) or not hasattr(model, "base_model"):
        return "it has no linear output embedding"
    if getattr(model.base_model, "lm_head", None) is not None:
        return "its base model has an output head of its own (an adapter around a whole model?)"
    if output.bias is not None:
        return "its output embedding has a bias"
    for field in _LOGIT_TRANSFORMS:
        if getattr(getattr(model, "config", None), field, None) not in (None, 1.0):
            return f"its configuration sets {field}"
    return None
