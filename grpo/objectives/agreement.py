"""Whether what we compute is what a model computes, measured on a few tokens before training.

Log-probs are right only if three things hold of a model, and its configuration does not tell. Its
logits are the last hidden states times the output matrix, with nothing capped, scaled or added
afterwards. A row in a batch, padded or packed, has the logits of that row alone; recurrent and
convolutional layers may carry the state of one row into the next. And its attention caps scores if
the model was trained with a cap, which some kernels ignore.

The tests are chosen such that rounding cannot hide a difference: the output matrix is tried on
hidden states large and small, and rows by changing *another* row, which must not move this one.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

#: Greatest distance of two results that differ by rounding only, relative to their own size: of the
#: same operations in another order, and of a whole model on inputs of another shape.
SAME_OPERATIONS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.03,
                   torch.float16: 0.03}
SAME_MODEL = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}
#: GPUs may multiply float32 in reduced precision.
CUDA_FLOAT32 = 1e-2

#: Standard deviations of the logits that the head is tried with: caps show in large ones, biases in
#: small ones.
_LOGIT_SIZES = (0.1, 1.0, 10.0, 50.0)
_LONG, _SHORT = 9, 7  # lengths of the rows, in tokens
_START = 3  # tokens at the start of a row that other rows may share

# Attention to tokens that are cut off, or chosen, by where they lie in the whole sequence.
_FROM_LENGTHS = ("attention_chunk_size", "index_topk", "indexer_budget")


@dataclass(frozen=True)
class Gap:
    """How far two results for the same tokens are apart."""

    relative: float  # distance of the logits, around their mean, relative to their size
    nats: float  # greatest difference of two log-probs

    @classmethod
    def between(cls, ours_NV: Tensor, own_NV: Tensor, *, worst: bool = False) -> Gap:
        """Gap of two tables of logits ``[N, V]``; of the worst position, or over all of them."""
        ours_NV, own_NV = (x.double() if x.dtype == torch.float64 else x.float()
                           for x in (ours_NV, own_NV))
        nats = (ours_NV.log_softmax(-1) - own_NV.log_softmax(-1)).abs().max()
        ours_NV, own_NV = (x - x.mean(-1, keepdim=True) for x in (ours_NV, own_NV))
        size, distance = (x.norm(dim=-1) if worst else x.norm()
                          for x in (own_NV, ours_NV - own_NV))
        return cls((distance / size.clamp_min(1e-30)).max().item(), nats.item())

    def within(self, allowed: float) -> bool:
        """Whether rounding explains it; NaN is never explained."""
        return self.relative <= allowed

    def __str__(self) -> str:
        return f"{self.relative:.1%} of the logits' size, up to {self.nats:.2g} nats"


def can_try(model: nn.Module) -> bool:
    """Whether a model can be run now: its weights have values and are not sharded, and its
    attention runs on their device."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None or any(param.is_meta for param in model.parameters()):
        return False
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    return not (isinstance(embedding.weight, DTensor)
                or "flash" in attention and embedding.weight.device.type == "cpu")


class Trial:
    """A few rows of tokens for a model that :func:`can_try`, and the model's own logits for them.

    Nothing of the model is changed, and no random numbers of PyTorch's are drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self._generator = torch.Generator().manual_seed(0)
        special = _special_tokens(getattr(model, "config", None))
        some = range(min(len(embedding), 4096))
        self._tokens = torch.tensor([token for token in some if token not in special])
        self.row = self.random_row(_SHORT)
        self.own = self.logits(self.row)

    def random_row(self, length: int) -> Tensor:
        """int64 ``[length]``."""
        picks = torch.randint(len(self._tokens), (length,), generator=self._generator)
        return self._tokens[picks].to(self.device)

    def logits(self, row: Tensor) -> Tensor:
        """The model's own logits ``[length, V]`` of a row alone."""
        return self.model(input_ids=row[None], attention_mask=None).logits[0]

    def allowed(self, table: dict[torch.dtype, float]) -> float:
        """The relative distance that rounding explains for this dtype and device."""
        kind, dtype = self.device.type, self.dtype
        if torch.is_autocast_enabled(kind):  # around somebody's own loop
            dtype = torch.get_autocast_dtype(kind)
        if kind == "cuda" and dtype == torch.float32:
            return CUDA_FLOAT32
        return table.get(dtype, table[torch.float32])

    def why_not_tiles(self) -> str | None:
        """Why the last hidden states times the output matrix are not the logits; None: they are."""
        name, allowed = type(self.model).__name__, self.allowed(SAME_OPERATIONS)
        head = self.model.get_output_embeddings()
        hidden_ND = _hidden_states(head.weight, generator=self._generator)
        seen = []

        def replace(module: nn.Module, args: tuple) -> tuple:
            seen.append(args[0].shape)
            return (hidden_ND.expand(*args[0].shape[:-2], -1, -1), *args[1:])

        with head.register_forward_pre_hook(replace):
            own = self.logits(self.random_row(len(_LOGIT_SIZES)))
        if not seen:
            return f"{name} does not compute its logits with its output embedding"
        gap = Gap.between(hidden_ND @ head.weight.t(), own, worst=True)
        if not gap.within(allowed):
            return (f"the logits of {name} are more than hidden states times its output matrix "
                    f"(they differ by {gap})")
        states = self.model.base_model(
            input_ids=self.row[None], attention_mask=None, use_cache=False)
        if getattr(states, "last_hidden_state", None) is None:
            return f"the base model of {name} does not return its last hidden states"
        gap = Gap.between(product(states.last_hidden_state[0], head.weight), self.own, worst=True)
        if not gap.within(allowed):
            return (f"{name} changes the hidden states of its base model before it multiplies them "
                    f"with its output matrix (logits differ by {gap})")
        return None

    def why_not_causal(self) -> str | None:
        """Why the logits are no predictions of the next token; None: they are."""
        half = len(self.row) // 2
        gap = Gap.between(self.logits(self.row[:half]), self.own[:half])
        if gap.within(self.allowed(SAME_MODEL)):
            return None
        return (f"{type(self.model).__name__} sees the tokens that it should predict: its logits "
                f"for the start of a row change with the rest of the row (by {gap}). An encoder "
                "has to be told that it is a decoder (is_decoder=True in the model's "
                "configuration)")

    def why_not_together(self, logits: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
        """Why a row that shares a batch does not have the logits it has alone; None: it has.

        ``logits(tokens_BT, attention_mask_BT, mask_BT)`` computes a batch as it is to be computed;
        it returns those ``[N, V]`` that the tokens of ``mask_BT`` follow from.
        """
        def in_batch() -> Tensor:
            tokens_BT = torch.stack([self.random_row(_LONG) for _ in range(4)])
            tokens_BT[1, :_SHORT] = self.row
            tokens_BT[2, :_START] = tokens_BT[0, :_START]  # rows may share what they begin with
            tokens_BT[3, :_START] = self.row[:_START]
            real_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
            real_BT[1, _SHORT:] = False
            scored_BT = real_BT.clone()
            scored_BT[:, :_START] = False
            scored_BT[2, 1:] = True  # not all of it
            logits_NV = logits(tokens_BT, real_BT, scored_BT)
            return logits_NV[_LONG - _START :][: _SHORT - _START]

        first, second = in_batch(), in_batch()
        name, own = type(self.model).__name__, self.own[_START - 1 : -1]
        # The same operations on the same shapes: where rows are apart, nothing moves.
        if not (gap := Gap.between(second, first)).within(self.allowed(SAME_OPERATIONS)):
            return f"the logits of one row of {name} change with the tokens of another ({gap})"
        if not (gap := Gap.between(first, own)).within(self.allowed(SAME_MODEL)):
            return f"the logits of a row of {name} are not those of the row alone ({gap})"
        return None

    def why_not_packed(self) -> str | None:
        """Why rows that are packed reach into each other where they are long; None: they do not.

        A few tokens cannot show what begins at some thousand.
        """
        config = getattr(self.model, "config", None)
        for field in _FROM_LENGTHS if config is not None else ():
            if length := getattr(config.get_text_config(), field, None):
                return (f"{type(self.model).__name__} attends to all rows that are packed as if "
                        f"they were one, cut or chosen from by {field}={length}")
        return None

    def why_not_capped(self) -> str | None:
        """Why attention scores are not capped as the model's layers ask; None: they are."""
        if not (layers := capped_layers(self.model)):
            return None
        caps = [layer.attn_logit_softcapping for layer in layers]
        try:  # scores that are capped to nearly nothing attend to all tokens alike
            for layer, cap in zip(layers, caps, strict=True):
                layer.attn_logit_softcapping = cap * 1e-4
            moved = not torch.equal(self.logits(self.row), self.own)
        finally:
            for layer, cap in zip(layers, caps, strict=True):
                layer.attn_logit_softcapping = cap
        if moved:
            return None
        return (f"{type(self.model).__name__} caps attention scores at {caps[0]:g}, and the "
                f"implementation {self.model.config._attn_implementation!r} does not")


def capped_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that ask for their attention scores to be capped."""
    return [module for module in model.modules()
            if isinstance(getattr(module, "attn_logit_softcapping", None), float)]


def why_not_capped(model: nn.Module) -> str | None:
    """See :meth:`Trial.why_not_capped`; None also where the model cannot be tried."""
    if not capped_layers(model) or not can_try(model):
        return None
    with trying(model):
        return Trial(model).why_not_capped()


def product(states_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """``states @ weight.T`` in the wider dtype of the two."""
    dtype = torch.promote_types(states_ND.dtype, weight_VD.dtype)
    return states_ND.to(dtype) @ weight_VD.to(dtype).t()


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Within the context a model computes eagerly, without gradient, dropout or lasting effect."""
    training = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    gpus = [device] if device.type == "cuda" else []
    # Compiled layers would be compiled once more, for shapes that never come back.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(gpus), eager, _widened_inputs(model):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _widened_inputs(model: nn.Module) -> AbstractContextManager:
    """Within the context an output embedding that is wider than the model has inputs to match."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return nullcontext()
    return head.register_forward_pre_hook(
        lambda module, args: (args[0].to(module.weight.dtype), *args[1:]))


@functools.cache
def say_once(message: str) -> None:
    """Log a message once, though every scorer of a run comes to the same choice."""
    logger.warning(message)


def _hidden_states(weight_VD: Tensor, *, generator: torch.Generator) -> Tensor:
    """Random ``[len(_LOGIT_SIZES), D]`` whose logits have those standard deviations."""
    shape = len(_LOGIT_SIZES), weight_VD.shape[1]
    hidden_ND = torch.randn(shape, generator=generator).to(weight_VD)
    sizes_N = product(hidden_ND, weight_VD).float().std(-1).clamp_min(1e-30)
    wanted_N = torch.tensor(_LOGIT_SIZES, device=weight_VD.device)
    return hidden_ND * (wanted_N / sizes_N)[:, None].to(hidden_ND.dtype)


def _special_tokens(config: Any) -> set[int]:
    """Tokens that stand for something else than text, such as images, in nested configurations."""
    out: set[int] = set()
    for name, value in (vars(config).items() if config is not None else ()):
        if name.endswith(("token_id", "token_index")):
            out |= {v for v in (value if isinstance(value, list) else [value])
                    if isinstance(v, int)}
        elif hasattr(value, "model_type"):
            out |= _special_tokens(value)
    return out
