"""Distillation from the top-k log-probs of a teacher.

The teacher's distribution over each token travels with the batch as its ``K`` most likely tokens,
``("distill", "token_ids")`` int64 ``[B, T, K]``, and their log-probs, ``("distill", "log_probs")``
float32 ``[B, T, K]``, at temperature 1, ``-inf`` where there are fewer.
Position ``t`` of both entries speaks of token ``t`` itself, as every token entry of a batch does:
it is what the teacher predicted from the tokens before ``t``.

The student's log-probs of these tokens are exact over the whole vocabulary
(:func:`topk_log_probs`); only the teacher's distribution is cut to ``K`` tokens and normalised
over them (:func:`topk_cross_entropy`). Source: Hinton et al. 2015 (arXiv:1503.02531), sec. 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo.objectives.scorer import Predictions, TokenScorer

#: Bytes of gathered rows of the output matrix that exist at a time.
GATHERED_BYTES = 64 * 2**20


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be positive and finite; 1.0 leaves the "
                         "distribution as it is")


def topk_cross_entropy(
    student_log_probs_NK: Tensor, teacher_log_probs_NK: Tensor, *, temperature: float = 1.0
) -> Tensor:
    r"""Cross-entropy of the teacher's top-k distribution with the student's, ``[N]``.

    .. math:: L_n = -\sum_k p_k \log \pi(k), \qquad
              p = \mathrm{softmax}_k(\log p_{teacher}(k) / T)

    The student's log-probs are over the whole vocabulary, at the student's temperature. The
    teacher's are constants and need not be normalised; entries of ``-inf`` are left out, and a
    token with none left has the term 0, without gradient. At least float32.

    Examples:
        >>> student = torch.tensor([[0.5, 0.25], [0.5, 0.25]]).log()
        >>> teacher = torch.tensor([[0.4, 0.4], [0.4, 0.0]]).log()
        >>> [round(x, 4) for x in topk_cross_entropy(student, teacher).tolist()]
        [1.0397, 0.6931]
    """
    _check_temperature(temperature)
    keep_NK = teacher_log_probs_NK != -torch.inf
    dtype = torch.promote_types(student_log_probs_NK.dtype, torch.float32)
    teacher_NK = teacher_log_probs_NK.detach().to(
        torch.promote_types(teacher_log_probs_NK.dtype, dtype)) / temperature
    teacher_NK = teacher_NK.masked_fill(~keep_NK, -torch.inf)
    # The last fill also replaces the NaN of a softmax over nothing but -inf.
    probs_NK = teacher_NK.softmax(-1).masked_fill(~keep_NK, 0.0)
    # 0 log 0 = 0; selecting before the product keeps what is left out from the gradient as well.
    student_NK = student_log_probs_NK.masked_fill(probs_NK == 0, 0.0)
    return -(probs_NK * student_NK).sum(-1)


def _gather_chunk(
    hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, dtype: torch.dtype
) -> Tensor:
    rows_NKD = torch.nn.functional.embedding(ids_NK, weight_VD).to(dtype)
    return torch.einsum("nd,nkd->nk", hidden_ND.to(dtype), rows_NKD)


def topk_log_probs(
    hidden_ND: Tensor, weight_VD: Tensor, ids_NK: Tensor, log_normaliser_N: Tensor, *,
    temperature: float = 1.0,
) -> Tensor:
    r"""Log-probs ``[N, K]`` of ``K`` given tokens a position, without the logits of the others.

    :math:`\log \pi(k) = h \cdot W_k / T - \log Z` with
    :math:`\log Z = \log \sum_v e^{h \cdot W_v / T}` (``log_normaliser_N``). The rows :math:`W_k`
    are gathered for a few positions at a time, about 64 MiB of them, and gathered again in the
    backward. At least float32, with gradients to all but the ids.
    """
    _check_temperature(temperature)
    dtype = torch.promote_types(
        torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
    bytes_a_position = max(1, ids_NK.shape[1] * weight_VD.shape[1] * dtype.itemsize)
    chunk_size = max(1, GATHERED_BYTES // bytes_a_position)
    logits_NK = torch.cat([
        checkpoint(_gather_chunk, hidden, weight_VD, ids, dtype, use_reentrant=False,
                   preserve_rng_state=False)
        for hidden, ids in zip(hidden_ND.split(chunk_size), ids_NK.split(chunk_size), strict=True)
    ])
    return logits_NK / temperature - log_normaliser_N[:, None]


def check_distillation(
    coeff: float | None, temperature: float | None, *, default: float, scorer: TokenScorer
) -> float:
    """The temperature of a loss's distillation term; ValueError for options that do not fit."""
    if coeff is None:
        if temperature is not None:
            raise ValueError(f"distill_temperature={temperature} is not read without "
                             "distill_coeff; set that, or remove it")
        return default
    if not 0 <= coeff < float("inf"):
        raise ValueError(f"distill_coeff={coeff} must be a number that is not negative")
    if not scorer.chunked:
        raise ValueError(f"distill_coeff={coeff} needs a model with a plain linear head, whose "
                         "rows give the log-probs of the teacher's tokens; with this model or "
                         "head='logits' that is not possible")
    temperature = default if temperature is None else temperature
    _check_temperature(temperature)
    return temperature


def distillation_terms(
    scorer: TokenScorer, predictions: Predictions, log_probs_N: Tensor, ids_NK: Tensor,
    teacher_log_probs_NK: Tensor, *, temperature: float,
) -> Tensor:
    """:func:`topk_cross_entropy` of each token under the scorer's model, both at ``temperature``.

    ``log_probs_N`` are those of the sampled tokens at the scorer's temperature.
    """
    if temperature != scorer.temperature:
        log_probs_N, _ = scorer.score(predictions, temperature=temperature)
    head = predictions.states, scorer.head_weight
    # The normaliser of the softmax follows from any one token's logit and log-prob.
    logit_N = topk_log_probs(*head, predictions.targets_N[:, None], torch.zeros_like(log_probs_N),
                             temperature=temperature)[:, 0]
    student_NK = topk_log_probs(*head, ids_NK, logit_N - log_probs_N, temperature=temperature)
    return topk_cross_entropy(student_NK, teacher_log_probs_NK, temperature=temperature)
