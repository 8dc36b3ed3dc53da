"""Log-prob and entropy of given tokens from hidden states, without the ``[N, V]`` logits.

Both functions multiply hidden states with the output matrix tile by tile:

* :func:`linear_log_probs` returns log-probs and entropies for any loss. What the loss makes of them
  is only known in the backward pass, so most logits are computed there a second time.
* :func:`fused_loss` is told the loss: it differentiates the loss of one part of the tokens while
  their logits are at hand, so nothing is computed twice.

Sums over tiles are kept in float32 (float64 for float64 input). Tiles have the dtype of the hidden
states or the output matrix, the wider, and are raised to float32 before the softmax; with
``float32_logits`` the product is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo.objectives.head_tiles import LOWEST, Statistics, fold, grad_

#: Bytes of one tile of logits, and of logits kept from the forward for the backward pass.
TILE_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
KEPT_BYTES = {"cuda": 512 * 2**20, "cpu": 0}

#: Tokens whose logits make one chunk on a GPU, and the bytes of a chunk elsewhere.
GPU_CHUNK, CPU_CHUNK_BYTES = 8192, 64 * 2**20

#: Loss of a part of the tokens: ``(log_probs_n, entropy_n, start, stop) -> terms [L]``.
PartLoss = Callable[[Tensor, Tensor, int, int], Tensor]


def log_probs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """``(log_probs_N, entropy_N)`` of targets under the softmax of logits, in nats.

    Half precision is raised to float32 first. Without ``entropy_gradient`` the entropy is a value
    alone, which saves its part of the graph.

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
        # 0 log 0 = 0: a logit of -inf, for an entry that the model rules out, must not be NaN.
        entropy_N = normaliser_N - (probs_NV * logits_NV.clamp(min=LOWEST)).sum(-1)
    return target_N - normaliser_N, entropy_N


def linear_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, temperature: float = 1.0,
    entropy_gradient: bool = True, float32_logits: bool = False, chunk_size: int = 8192,
    tile_bytes: int | None = None, kept_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of ``targets_N`` under ``softmax(hidden @ weight.T / temperature)``.

    Args:
        hidden_ND: last hidden states, ``[N, D]``.
        weight_VD: output matrix, ``[V, D]``.
        targets_N: int64 ``[N]``, each in ``[0, V)``.
        temperature: sampling temperature.
        entropy_gradient: False: the entropy is a value without gradient.
        float32_logits: do not round logits to half precision; see :func:`fused_loss`.
        chunk_size: tokens of a tile. With more tokens than that, the gradient of the weight is
            summed in a float32 buffer of its size.
        tile_bytes: size of a tile of logits; None: by device, see ``TILE_BYTES``.
        kept_bytes: logits kept for the backward pass instead of being computed again; None: by
            device, see ``KEPT_BYTES``.

    Returns:
        ``(log_probs_N, entropy_N)``, float32 (float64 for float64 input), with gradients to
        ``hidden_ND`` and ``weight_VD``.

    Raises:
        ValueError: for shapes that do not fit.

    Examples:
        >>> h, w = torch.zeros(3, 2), torch.zeros(5, 2)
        >>> lp, _ = linear_log_probs(h, w, torch.tensor([0, 1, 4]))
        >>> bool(torch.allclose(lp.exp(), torch.full((3,), 0.2)))
        True
    """
    _check_shapes(hidden_ND, weight_VD, targets_N)
    device = hidden_ND.device.type
    log_probs_N, entropy_N = _LinearLogProbs.apply(
        hidden_ND, weight_VD, targets_N, 1.0 / temperature, float32_logits, chunk_size,
        TILE_BYTES.get(device, TILE_BYTES["cuda"]) if tile_bytes is None else tile_bytes,
        KEPT_BYTES.get(device, 0) if kept_bytes is None else kept_bytes)
    return log_probs_N, entropy_N if entropy_gradient else entropy_N.detach()


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, inverse_temperature, float32_logits,
                chunk_size, tile_bytes, kept_bytes):
        ctx.set_materialize_grads(False)
        dtypes = dtype, of_logits = product_dtypes(hidden_ND, weight_VD, float32_logits)
        vocab = weight_VD.shape[0]
        statistics = Statistics.empty(len(hidden_ND), dtype=sum_dtype(dtype),
                                      device=hidden_ND.device)
        kept_bytes = kept_bytes if any(ctx.needs_input_grad) else 0
        kept: dict[tuple[int, int], Tensor] = {}
        scratch = None
        width = min(vocab, _tile_width(min(len(hidden_ND), chunk_size), of_logits, tile_bytes))
        for start, stop in _ranges(len(hidden_ND), chunk_size):
            hidden = hidden_ND[start:stop].to(dtype)
            part = statistics.rows(start, stop)
            for left, right in _ranges(vocab, width):
                size = len(hidden) * (right - left) * of_logits.itemsize
                if size <= kept_bytes:
                    kept_bytes -= size
                    tile = kept[start, left] = hidden.new_empty(
                        len(hidden), right - left, dtype=of_logits)
                else:
                    scratch, tile = _tile(scratch, hidden, right - left, of_logits)
                _logits(hidden, weight_VD[left:right].to(dtype), into=tile)
                fold(tile, targets_N[start:stop], part, column=left,
                     inverse_temperature=inverse_temperature)
        log_probs_N, entropy_N, log_normaliser_N = statistics.finish()
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, log_normaliser_N, entropy_N)
        ctx.kept = kept
        ctx.options = inverse_temperature, chunk_size, tile_bytes, dtypes
        return log_probs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_prob_N, grad_entropy_N):
        hidden_ND, weight_VD, targets_N, log_normaliser_N, entropy_N = ctx.saved_tensors
        inverse_temperature, chunk_size, tile_bytes, (dtype, of_logits) = ctx.options
        if grad_log_prob_N is None:
            grad_log_prob_N = torch.zeros_like(log_normaliser_N)
        gradients = _Gradients(hidden_ND, weight_VD, ctx.needs_input_grad[:2],
                               chunks=-(-len(hidden_ND) // chunk_size))
        scratch, vocab = None, len(weight_VD)
        width = min(vocab, _tile_width(min(len(hidden_ND), chunk_size), of_logits, tile_bytes))
        for start, stop in _ranges(len(hidden_ND), chunk_size):
            rows = slice(start, stop)
            hidden = hidden_ND[rows].to(dtype)
            for left, right in _ranges(vocab, width):
                weight = weight_VD[left:right].to(dtype)
                tile = ctx.kept.pop((start, left), None)
                if tile is None:
                    scratch, tile = _tile(scratch, hidden, right - left, of_logits)
                    _logits(hidden, weight, into=tile)
                grad_(tile, targets_N[rows], log_normaliser_n=log_normaliser_N[rows],
                      entropy_n=entropy_N[rows], grad_log_prob_n=grad_log_prob_N[rows],
                      grad_entropy_n=None if grad_entropy_N is None else grad_entropy_N[rows],
                      column=left, inverse_temperature=inverse_temperature)
                gradients.add(tile, hidden, weight, rows=rows, columns=slice(left, right))
                if scratch is None and right - left == width:
                    scratch = tile.view(-1)  # a kept tile that is no longer needed
        return *gradients.finish(), None, None, None, None, None, None


class _Gradients:
    """Gradients of hidden states and weight, summed over tiles without losing precision."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, needed: Sequence[bool], *, chunks: int
    ) -> None:
        self.of_hidden = self.of_weight = None
        self.dtypes = hidden_ND.dtype, weight_VD.dtype
        if needed[0]:
            self.of_hidden = torch.empty_like(hidden_ND, dtype=sum_dtype(hidden_ND.dtype))
        if needed[1]:
            # A single chunk holds all tokens, so each slice of the weight is finished in one
            # product, whose sums the GPU keeps in float32.
            exact = weight_VD.dtype if chunks == 1 else sum_dtype(weight_VD.dtype)
            make = torch.empty_like if chunks else torch.zeros_like
            self.of_weight = make(weight_VD, dtype=exact)

    def add(self, tile: Tensor, hidden: Tensor, weight: Tensor, *, rows: slice,
            columns: slice) -> None:
        if self.of_hidden is not None:
            _multiply(tile, weight, into=self.of_hidden[rows], add=columns.start > 0)
        if self.of_weight is not None:
            _multiply(tile.t(), hidden, into=self.of_weight[columns], add=rows.start > 0)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        return tuple(None if grad is None else grad.to(dtype)
                     for grad, dtype in zip((self.of_hidden, self.of_weight), self.dtypes,
                                            strict=True))


def fused_loss(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, part_loss: PartLoss, *,
    borders: Sequence[int], temperature: float = 1.0, entropy_gradient: bool = True,
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss and its gradient with each logit computed once.

    The tokens are cut into parts at ``borders``. For each part the logits are computed, the loss
    is differentiated by the part's log-probs and entropies, and the logits are overwritten with
    their gradient, from which those of hidden states and weight follow.

    Args:
        hidden_ND, weight_VD, targets_N, temperature, entropy_gradient: see
            :func:`linear_log_probs`.
        part_loss: ``(log_probs_n, entropy_n, start, stop) -> [L]`` loss terms of the tokens
            ``start`` to ``stop``, which must not depend on the other parts.
        borders: first token of each part, and ``N``; the longest part sets the peak memory.
        float32_logits: do not round logits to half precision inputs' dtype. On a GPU their gradient
            is rounded to it, for the products with hidden states and weight.

    Returns:
        ``(terms_L, log_probs_N, entropy_N)``. Only ``terms_L.sum()`` (or a multiple of it) can be
        differentiated: the terms' gradients are already added up.

    Raises:
        RuntimeError: in the backward pass, if the terms are weighted differently.

    Examples:
        >>> h, w = torch.zeros(2, 3, requires_grad=True), torch.zeros(5, 3)
        >>> terms, log_probs, entropy = fused_loss(
        ...     h, w, torch.tensor([0, 1]), lambda lp, entropy, start, stop: -lp.sum()[None],
        ...     borders=[0, 2])
        >>> round(terms.item(), 4)
        3.2189
    """
    _check_shapes(hidden_ND, weight_VD, targets_N)
    return _FusedLoss.apply(hidden_ND, weight_VD, targets_N, part_loss, tuple(borders),
                            1.0 / temperature, entropy_gradient, float32_logits)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, part_loss, borders, inverse_temperature,
                entropy_gradient, float32_logits):
        dtype, of_logits = product_dtypes(hidden_ND, weight_VD, float32_logits)
        weight = weight_VD.to(dtype)
        exact = sum_dtype(dtype)
        needed = ctx.needs_input_grad[:2]
        gradients = _Gradients(hidden_ND, weight_VD, needed, chunks=len(borders) - 1)
        log_probs_N = torch.empty(len(hidden_ND), dtype=exact, device=hidden_ND.device)
        entropy_N = torch.empty_like(log_probs_N)
        terms, scratch = [], None
        for start, stop in zip(borders[:-1], borders[1:], strict=True):
            rows = slice(start, stop)
            hidden, targets = hidden_ND[rows].to(dtype), targets_N[rows]
            scratch, tile = _tile(scratch, hidden, len(weight), of_logits)
            _logits(hidden, weight, into=tile)
            statistics = Statistics.empty(stop - start, dtype=exact, device=hidden.device)
            fold(tile, targets, statistics, column=0, inverse_temperature=inverse_temperature)
            log_probs, entropy, log_normaliser = statistics.finish()
            log_probs_N[rows], entropy_N[rows] = log_probs, entropy
            of_terms, grad_log_prob, grad_entropy = _differentiate(
                part_loss, log_probs, entropy, start, stop, entropy_gradient)
            terms.append(of_terms)
            grad_(tile, targets, log_normaliser_n=log_normaliser, entropy_n=entropy,
                  grad_log_prob_n=grad_log_prob, grad_entropy_n=grad_entropy, column=0,
                  inverse_temperature=inverse_temperature)
            gradients.add(tile, hidden, weight, rows=rows, columns=slice(0, len(weight)))
        ctx.gradients = gradients.finish()
        ctx.mark_non_differentiable(log_probs_N, entropy_N)
        return sum(terms[1:], terms[0]), log_probs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_terms_L, *_):
        scales = grad_terms_L.tolist()
        if any(scale != scales[0] for scale in scales):
            raise RuntimeError(
                f"the loss terms of a fused head must be added with equal weights, not {scales}: "
                "their gradients are already one. Weight them with the loss's coefficients, or "
                "build it with head='chunked'")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the fused head can be differentiated once; build the loss with "
                               "head='chunked' to call backward() again")
        if scales[0] != 1.0:
            gradients = tuple(None if grad is None else grad * scales[0] for grad in gradients)
        return *gradients, None, None, None, None, None, None


def _differentiate(
    part_loss: PartLoss, log_probs: Tensor, entropy: Tensor, start: int, stop: int,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss terms of a part, and the gradient of their sum by its log-probs and entropies."""
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        entropy = entropy.detach().requires_grad_(entropy_gradient)
        terms_L = part_loss(log_probs, entropy, start, stop)
        inputs = [log_probs, entropy] if entropy_gradient else [log_probs]
        grads = torch.autograd.grad(terms_L.sum(), inputs, materialize_grads=True)
    return terms_L.detach(), grads[0], grads[1] if entropy_gradient else None


def default_chunk_size(
    hidden_ND: Tensor, weight_VD: Tensor, *, float32_logits: bool = False
) -> int:
    """Tokens of a chunk unless the user sets it: enough to keep the device busy, and fitting."""
    of_state = hidden_ND.dtype.itemsize
    of_logit = max(of_state, 4 * float32_logits)  # bytes
    on_cpu = max(16, CPU_CHUNK_BYTES // (len(weight_VD) * of_logit))
    return GPU_CHUNK * of_state // of_logit if hidden_ND.is_cuda else on_cpu


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over a vocabulary: float32, or float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtypes(hidden: Tensor, weight: Tensor, float32_logits: bool) -> tuple[torch.dtype, ...]:
    """The dtype that hidden states and weight are multiplied in, and that of the logits."""
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)  # neither of them is rounded
    if torch.is_autocast_enabled(device) and not float32_logits:
        dtype = torch.get_autocast_dtype(device)
    return dtype, sum_dtype(dtype) if float32_logits else dtype


def _check_shapes(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> None:
    if (hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]
            or targets_N.shape != hidden_ND.shape[:1]):
        raise ValueError("expected hidden [N, D], weight [V, D] and targets [N]; got "
                         f"{tuple(hidden_ND.shape)}, {tuple(weight_VD.shape)} and "
                         f"{tuple(targets_N.shape)}")


def _ranges(total: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _tile_width(rows: int, dtype: torch.dtype, tile_bytes: int) -> int:
    # Multiples of 256 columns fit the tiles of matrix units.
    width = tile_bytes // max(1, rows * dtype.itemsize)
    return max(256, width // 256 * 256)


def _tile(
    scratch: Tensor | None, hidden: Tensor, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Memory for tiles, that of the last one where it suffices, and its start as a tile."""
    size = len(hidden) * width
    if scratch is None or len(scratch) < size:
        scratch = hidden.new_empty(size, dtype=dtype)
    return scratch, scratch[:size].view(len(hidden), width)


def _logits(hidden: Tensor, weight: Tensor, *, into: Tensor) -> None:
    if hidden.dtype != into.dtype:
        return _multiply(hidden, weight.t(), into=into, add=False)
    torch.mm(hidden, weight.t(), out=into)


def _multiply(left: Tensor, right: Tensor, *, into: Tensor, add: bool) -> None:
    """``into = left @ right``, or ``+=``, with the sum rounded once, to the dtype of ``into``."""
    # A GPU multiplies float32 gradients of logits in the half precision of the other factor.
    narrow = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    if not (into.is_cuda and narrow.itemsize < into.dtype.itemsize):
        torch.addmm(into, left.to(into.dtype), right.to(into.dtype), beta=int(add), out=into)
    elif add:
        torch.addmm(into, left.to(narrow), right.to(narrow), out_dtype=into.dtype, out=into)
    else:
        torch.mm(left.to(narrow), right.to(narrow), out_dtype=into.dtype, out=into)
