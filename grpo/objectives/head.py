"""Log-prob and entropy of given tokens, without the ``[B, T, V]`` logits.

:class:`TokenScorer` runs a causal language model up to its last hidden state, keeps the positions
that enter the loss, and applies the output head to them in checkpointed chunks: at any time the
logits of one chunk exist, in the forward as in the backward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.data import pack, scatter_tokens

HeadKind = Literal["auto", "chunked", "logits"]

# Configuration fields by which architectures transform logits after the output matrix.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def log_probs_from_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each row, in nats.

    Args:
        logits_NV: ``[N, V]``; half precision is raised to float32 first.
        targets_N: int64 ``[N]``.
        temperature: the one the tokens were sampled at.
        entropy_gradient: False gives the entropy's value alone and saves its part of the graph.

    Returns:
        ``(log_probs_N, entropy_N)``, float32 (float64 for float64 logits).

    Examples:
        >>> log_probs, entropy = log_probs_from_logits(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(log_probs.item(), 4), round(entropy.item(), 4)
        (-1.3863, 1.3863)
    """
    if logits_NV.dtype in (torch.bfloat16, torch.float16):
        logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    normaliser_N = logits_NV.logsumexp(-1)
    target_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probs_NV = (logits_NV - normaliser_N[:, None]).exp()
        entropy_N = normaliser_N - (probs_NV * logits_NV).sum(-1)
    return target_N - normaliser_N, entropy_N


def _score_chunk(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    return log_probs_from_logits(hidden_ND @ weight_VD.t(), targets_N, temperature=temperature,
                                 entropy_gradient=entropy_gradient)


def chunked_log_probs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
    chunk_size: int = 4096,
    score_chunk=_score_chunk,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of ``targets_N`` under ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden_ND: last hidden states, ``[N, D]``.
        weight_VD: output matrix, ``[V, D]``.
        targets_N: int64 ``[N]``.
        temperature: sampling temperature.
        entropy_gradient: see :func:`log_probs_from_logits`.
        chunk_size: tokens whose logits exist at a time.
        score_chunk: the function applied to a chunk; a compiled one may be passed.

    Returns:
        ``(log_probs_N, entropy_N)`` with gradients to ``hidden_ND`` and ``weight_VD``.

    Examples:
        >>> h, w = torch.zeros(3, 2), torch.zeros(5, 2)
        >>> lp, _ = chunked_log_probs(h, w, torch.tensor([0, 1, 4]), chunk_size=2)
        >>> bool(torch.allclose(lp.exp(), torch.full((3,), 0.2)))
        True
    """
    log_probs, entropies = [], []
    for hidden, targets in zip(hidden_ND.split(chunk_size), targets_N.split(chunk_size),
                               strict=True):
        # Recomputing the chunk's logits in the backward is what keeps the memory at one chunk.
        lp, entropy = checkpoint(score_chunk, hidden, weight_VD, targets, temperature,
                                 entropy_gradient, use_reentrant=False)
        log_probs.append(lp)
        entropies.append(entropy)
    if not log_probs:
        empty = hidden_ND.sum(-1) * weight_VD.sum()  # keeps the graph, so backward still works
        return empty, empty
    return torch.cat(log_probs), torch.cat(entropies)


class TokenScorer(nn.Module):
    """Log-prob and entropy of the tokens of a batch under a causal language model.

    Args:
        model: a Hugging Face causal language model, or any module that maps ``input_ids`` and
            ``attention_mask`` to an object with ``.logits``.
        temperature: the temperature the tokens were sampled at; logits are divided by it.
        head: ``"chunked"`` applies the output matrix in chunks, ``"logits"`` asks the model for
            all logits; ``"auto"`` takes the first where it gives the same numbers.
        chunk_size: tokens a chunk.
        entropy_gradient: whether the entropy is differentiated or only reported.
        packing: compute on rows laid end to end instead of padded rows.
        compile_head: compile the function applied to a chunk.

    Raises:
        ValueError: for ``head="chunked"`` on a model whose logits are more than
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
        chunk_size: int = 4096,
        entropy_gradient: bool = True,
        packing: bool = False,
        compile_head: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive: tokens sampled greedily "
                             "have no sampling distribution to train on")
        if head not in ("auto", "chunked", "logits"):
            raise ValueError(f"head={head!r} is unknown; use 'auto', 'chunked' or 'logits'")
        obstacle = _why_not_chunked(model)
        if head == "chunked" and obstacle:
            raise ValueError(f"head='chunked' does not fit this model: {obstacle}; use head='auto'")
        self.model = model
        self.temperature = float(temperature)
        self.chunked = head != "logits" and not obstacle
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient
        self.packing = packing
        self._score_chunk = torch.compile(_score_chunk) if compile_head else _score_chunk

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
        shape = tuple(tokens_BT.shape)
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
        log_probs_N, entropy_N = self._score(inputs, source_N, targets_N)
        return (scatter_tokens(log_probs_N, index_N, shape),
                scatter_tokens(entropy_N, index_N, shape))

    def _score(self, inputs: dict, source_N: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        if not self.chunked:
            logits = self.model(**inputs).logits
            return log_probs_from_logits(logits.flatten(0, 1)[source_N], targets_N,
                                         temperature=self.temperature,
                                         entropy_gradient=self.entropy_gradient)
        hidden = self.model.base_model(**{**inputs, "use_cache": False}).last_hidden_state
        return chunked_log_probs(
            hidden.flatten(0, 1)[source_N],
            self.model.get_output_embeddings().weight,
            targets_N,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            chunk_size=self.chunk_size,
            score_chunk=self._score_chunk,
        )


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
