"""``TokenScorer``: a causal language model and a batch in, log-probs and entropies out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from grpo.data import scatter_tokens
from grpo.objectives import packed_attention
from grpo.objectives.agreement import Trial, can_try, product, say_once, trying
from grpo.objectives.head import (
    PartLoss,
    default_chunk_size,
    fused_loss,
    linear_log_probs,
    log_probs_from_logits,
    product_dtypes,
    sum_dtype,
)
from grpo.objectives.packing import pack

HeadKind = Literal["auto", "fused", "chunked", "logits"]


class Predictions(NamedTuple):
    """What the model predicts the chosen tokens from."""

    states: Tensor  # hidden states [N, D], or logits [N, V] where the head is "logits"
    targets_N: Tensor  # int64, the tokens
    index_N: Tensor  # int64, their places in the flattened batch


class TokenScorer(nn.Module):
    """Log-prob and entropy of the tokens of a batch under a causal language model.

    Before its first batch, or when :attr:`chunked` or :meth:`measure` is asked for, the model is
    tried on a few tokens: whether tiles of its output matrix give its logits, and a row in a batch
    those of the row alone, see :mod:`grpo.objectives.agreement`.

    Args:
        model: a Hugging Face causal language model, or any module that maps ``input_ids`` and
            ``attention_mask`` to an object with ``.logits``.
        temperature: the temperature the tokens were sampled at; logits are divided by it.
        head: ``"logits"`` asks the model for all logits, ``"chunked"`` applies the output matrix
            in tiles, ``"fused"`` lets a loss be differentiated tile by tile (:meth:`fused_loss`);
            ``"auto"`` takes tiles where they give the same numbers, and logs why where they do not.
        chunk_size: tokens a chunk; None: by device.
        entropy_gradient: whether the entropy is differentiated or only reported.
        packing: compute on rows laid end to end instead of padded rows. Rows of a group share their
            prompt where the model's attention allows it, see :mod:`grpo.objectives.packing`.
        fp32_head: compute logits in float32 where the model has half precision; the weights stay
            as they are.

    Raises:
        ValueError: for an option out of range; when the model is tried, for what does not fit it.

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
        fp32_head: bool = False,
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
        if fp32_head and head == "logits":
            raise ValueError("fp32_head=True is not read by head='logits', which are the model's "
                             "own; use head='auto'")
        # Data-parallel wrappers hold the model as ``module``.
        if packing and not hasattr(getattr(model, "module", model), "get_input_embeddings"):
            raise ValueError(f"packing=True cannot be tried on {type(model).__name__}, whose rows "
                             "might see each other: it has no get_input_embeddings(); give it one, "
                             "or set packing=False")
        self.model = model
        self.temperature = float(temperature)
        self.head, self.fp32_head = head, fp32_head
        self.chunk_size = chunk_size
        self.entropy_gradient = entropy_gradient
        self.packing = packing
        self._chunked, self._measured = head != "logits", False
        self._sharing = False
        if obstacle := _why_not_chunked(model):
            self._without_tiles(obstacle)

    @property
    def chunked(self) -> bool:
        """Whether the output matrix is applied in tiles here, rather than by the model."""
        self.measure()
        return self._chunked

    @property
    def shares_prompts(self) -> bool:
        """Whether rows of a batch that begin with the same tokens compute them once."""
        self.measure()
        return self._sharing

    def measure(self) -> None:
        """Try the model on a few tokens, once; without effect where that cannot be done yet.

        Raises:
            ValueError: for what the model cannot do, with what to change.
        """
        if not self._measured:
            self._measure(self.packing)

    def _measure(self, packing: bool) -> None:
        # With an argument, because FSDP2 on a GPU cannot wrap a method that takes none.
        if not can_try(self.model):
            return
        with trying(self.model):
            trial = Trial(self.model)
            if reason := trial.why_not_causal():
                raise ValueError(reason)
            if self._chunked and (reason := trial.why_not_tiles()):
                self._without_tiles(reason)
            reason = trial.why_not_packed() if packing else None
            if packing and not reason:
                self._share_if_possible(trial)
            if reason := reason or trial.why_not_together(self._logits):
                raise ValueError(
                    f"packing=True does not fit this model: {reason}; set packing=False "
                    "(train.packing=false)" if packing else
                    f"batches do not fit this model: {reason}; give one row at a time")
            if reason := trial.why_not_capped():
                say_once(f"{reason}; load the model with attn_implementation='eager' if it was "
                         "trained with the cap")
        self._measured = True

    def _share_if_possible(self, trial: Trial) -> None:
        """Attend by segments, which may share keys, where the model computes the same with it."""
        if (reason := packed_attention.why_not(self.model)) is None:
            before = self.model.config._attn_implementation
            packed_attention.install(self.model)
            self._sharing = True
            try:
                reason = trial.why_not_together(self._logits)
            except (TypeError, ValueError) as error:  # arguments or shapes that it cannot have
                reason = str(error)
            if reason:
                self._sharing = False
                self.model.set_attn_implementation(before)
        if reason:
            say_once(f"packed rows of {type(self.model).__name__} do not share their prompts: "
                     f"{reason}")

    def _without_tiles(self, reason: str) -> None:
        """Take the model's own logits, where they were not ruled out."""
        if self.head in ("chunked", "fused"):
            raise ValueError(f"head={self.head!r} does not fit this model: {reason}; use "
                             "head='auto' (train_model.head=auto)")
        if self.fp32_head:
            raise ValueError(f"fp32_head=True does not fit this model: {reason}, so it computes "
                             "them itself; set fp32_head=False (train_model.fp32_head=false)")
        if self._chunked and hasattr(self.model, "config"):
            say_once(f"head='auto' takes all logits from {type(self.model).__name__}: {reason}")
        self._chunked = False

    def _logits(self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Logits ``[N, V]`` that the tokens of ``mask_BT`` follow from, row by row."""
        found = self._predict(tokens_BT, attention_mask_BT, mask_BT)
        return product(found.states, self.head_weight) if self._chunked else found.states

    @property
    def head_weight(self) -> Tensor:
        """The output matrix ``[V, D]``."""
        return self.model.get_output_embeddings().weight

    def forward(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Score the tokens under ``mask_BT``.

        Args:
            tokens_BT: int64, right-padded.
            attention_mask_BT: bool.
            mask_BT: bool, tokens to score; column 0 has nothing before it to be predicted from and
                must be False.

        Returns:
            ``(log_probs_BT, entropy_BT)``, zero outside ``mask_BT``.
        """
        predictions = self.predict(tokens_BT, attention_mask_BT, mask_BT)
        return tuple(scatter_tokens(values_N, predictions.index_N, tuple(tokens_BT.shape))
                     for values_N in self.score(predictions))

    def predict(self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor) -> Predictions:
        """Run the model up to its head and keep what the tokens of ``mask_BT`` follow from."""
        self.measure()
        return self._predict(tokens_BT, attention_mask_BT, mask_BT)

    def _predict(
        self, tokens_BT: Tensor, attention_mask_BT: Tensor, mask_BT: Tensor
    ) -> Predictions:
        # Position t is predicted by the output at t - 1, so targets are read one to the right.
        index_N = mask_BT.flatten().nonzero()[:, 0]
        targets_N = tokens_BT.flatten()[index_N]
        if self.packing:
            packed = pack(tokens_BT, attention_mask_BT, mask_BT if self._sharing else None)
            # With a cache, Transformers takes the packed rows for one row: each then attends to
            # those before it.
            inputs = (packed_attention.inputs(self.model, packed) if self._sharing else
                      {"input_ids": packed.tokens, "position_ids": packed.position_ids,
                       "use_cache": False})
            source_N = packed.slots[index_N - 1]
        else:
            # Right padding cannot reach real tokens through causal attention. A mask is only needed
            # to tell rows apart, so without padding the faster mask-free kernels are used.
            mask = None if bool(attention_mask_BT.all()) else attention_mask_BT
            inputs = {"input_ids": tokens_BT, "attention_mask": mask}
            source_N = index_N - 1
        return Predictions(self.outputs(inputs).flatten(0, 1)[source_N], targets_N, index_N)

    def outputs(self, inputs: dict[str, Any]) -> Tensor:
        """Hidden states ``[B, T, D]``, or logits ``[B, T, V]`` where the head is ``"logits"``."""
        if self._chunked:
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
            float32_logits=self.fp32_head, chunk_size=self.tokens_per_chunk(predictions),
            **options)

    def most_likely(self, predictions: Predictions, k: int) -> tuple[Tensor, Tensor]:
        """Log-probs at temperature 1 and ids of each position's ``k`` most likely tokens."""
        parts = []
        # Logits are raised to float32 here, and sorted: more memory than a chunk is meant for.
        rows = max(1, self.tokens_per_chunk(predictions) // 8)
        for states in predictions.states.split(rows):
            logits = product(states, self.head_weight) if self.chunked else states
            log_probs = logits.to(sum_dtype(logits.dtype)).log_softmax(-1)
            parts.append(log_probs.topk(k))
        if not parts:
            empty = predictions.states.new_zeros(0, k)
            return empty, empty.long()
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def fused_loss(
        self, predictions: Predictions, part_loss: PartLoss, *, borders: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`grpo.objectives.head.fused_loss`."""
        return fused_loss(
            predictions.states, self.head_weight, predictions.targets_N, part_loss,
            borders=borders, temperature=self.temperature, entropy_gradient=self.entropy_gradient,
            float32_logits=self.fp32_head)

    def product_dtype(self, predictions: Predictions) -> torch.dtype:
        """What hidden states and the output matrix are multiplied in."""
        return product_dtypes(predictions.states, self.head_weight, self.fp32_head)[0]

    def tokens_per_chunk(self, predictions: Predictions) -> int:
        """``chunk_size``, or the default for the device and the vocabulary."""
        return self.chunk_size or default_chunk_size(
            predictions.states, self.head_weight, float32_logits=self.fp32_head)


def _why_not_chunked(model: nn.Module) -> str | None:
    """Why ``hidden @ weight.T`` cannot be this model's logits, as it is built; None: it may be."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(output, nn.Linear) or not hasattr(model, "base_model"):
        return "it has no linear output embedding"
    if getattr(model.base_model, "lm_head", None) is not None:
        return "its base model has an output head of its own (an adapter around a whole model?)"
    if output.bias is not None:
        return "its output embedding has a bias"
    return None
