"""Scoring whole rollouts without gradient: by a frozen reference or teacher, by the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from grpo import data
from grpo.objectives.inputs import loss_mask
from grpo.objectives.scorer import TokenScorer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the context nothing is dropped out."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def score_rollout(
    scorer: TokenScorer, rollout: TensorDictBase, *, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every assistant token of a rollout.

    Args:
        scorer: model and temperature.
        rollout: dense batch ``[B]``; it stays where it is.
        max_tokens: token budget of a micro-batch.

    Returns:
        ``(log_probs_BT, entropy_BT)``, float32 on the rollout's device, 0 on other tokens.
    """
    log_probs_BT = torch.zeros_like(rollout[data.LOG_PROBS])
    entropy_BT = torch.zeros_like(log_probs_BT)
    home = log_probs_BT.device
    with evaluating(scorer.model):
        for rows, part in scoring_parts(scorer, rollout, max_tokens):
            scores = scorer(part[data.TOKENS], part[data.ATTENTION_MASK],
                            part[data.ASSISTANT_MASK])
            for out_BT, values in zip((log_probs_BT, entropy_BT), scores, strict=True):
                out_BT[rows, : values.shape[1]] = values.to(home, out_BT.dtype)
    return log_probs_BT, entropy_BT


@torch.no_grad()
def score_greedily(
    scorer: TokenScorer, batch: TensorDictBase, *, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of every assistant token, and whether no other was more likely.

    Args:
        scorer, max_tokens: as of :func:`score_rollout`.
        batch: ``[B]`` with tokens and masks.

    Returns:
        ``(log_probs_BT, greedy_BT)``, float32 and bool, 0 and False on other tokens.
    """
    shape, home = batch[data.TOKENS].shape, batch[data.TOKENS].device
    log_probs_BT = torch.zeros(shape, device=home)
    greedy_BT = torch.zeros(shape, dtype=torch.bool, device=home)
    with evaluating(scorer.model):
        for rows, part in scoring_parts(scorer, batch, max_tokens):
            predictions = scorer.predict(part[data.TOKENS], part[data.ATTENTION_MASK],
                                         part[data.ASSISTANT_MASK])
            values_N, _ = scorer.score(predictions)
            _, best_N1 = scorer.most_likely(predictions, 1)
            row_N, column_N = part[data.ASSISTANT_MASK].nonzero(as_tuple=True)
            place = rows.to(home)[row_N.to(home)], column_N.to(home)
            log_probs_BT[place] = values_N.to(home, torch.float32)
            greedy_BT[place] = (best_N1[:, 0] == predictions.targets_N).to(home)
    return log_probs_BT, greedy_BT


def scoring_parts(
    scorer: TokenScorer, rollout: TensorDictBase, max_tokens: int
) -> Iterator[tuple[Tensor, TensorDictBase]]:
    """Micro-batches of a rollout on the scorer's device, each with the numbers of its rows."""
    device = next(scorer.model.parameters()).device
    numbered = rollout.select(data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK,
                              data.GROUP_ID, strict=False)
    numbered["row"] = torch.arange(rollout.batch_size[0], device=rollout[data.TOKENS].device)
    # The first token of a row has no context to be predicted from.
    numbered[data.ASSISTANT_MASK] = loss_mask(numbered)
    for part in data.split_rows(numbered, max_tokens=max_tokens, packed=scorer.shares_prompts):
        yield part["row"], part.to(device)


class ReferenceScorer:
    """Write the log-probs of a frozen reference policy into rollouts.

    Args:
        model: the reference, frozen here.
        temperature: of the rollouts.
        max_tokens: token budget of a micro-batch.
        fp32_head: see :class:`~grpo.objectives.TokenScorer`; as the policy's.
    """

    def __init__(self, model: nn.Module, *, temperature: float, max_tokens: int,
                 fp32_head: bool = False) -> None:
        self.scorer = TokenScorer(model.eval().requires_grad_(False), temperature=temperature,
                                  fp32_head=fp32_head)
        self.scorer.measure()  # now, because a worker scores in several threads
        self.max_tokens = max_tokens

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        rollout[data.REF_LOG_PROBS], _ = score_rollout(self.scorer, rollout,
                                                       max_tokens=self.max_tokens)
        return rollout


class TeacherScorer:
    """Write what a teacher thinks of rollouts, for distillation.

    Args:
        model: the teacher, frozen here; it must share the policy's vocabulary.
        temperature: of the rollouts.
        max_tokens: token budget of a micro-batch.
        sampled_tokens: write ``("next", "teacher_log_probs", "full")``, its log-prob of each
            sampled token, for ``GroupAdvantage(reverse_kl_coeff=...)``.
        topk: write its so many most likely tokens at each position and their log-probs at
            temperature 1, under ``("distill", ...)``, for ``GRPOLoss(distill_coeff=...)``; None:
            do not.

    Raises:
        ValueError: if ``topk`` is below 1 or above the size of the vocabulary.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float, max_tokens: int,
        sampled_tokens: bool = True, topk: int | None = None,
    ) -> None:
        self.scorer = TokenScorer(model.eval().requires_grad_(False), temperature=temperature)
        self.scorer.measure()
        vocabulary = model.get_input_embeddings().num_embeddings
        if topk is not None and not 1 <= topk <= vocabulary:
            raise ValueError(f"topk={topk} must be between 1 and the {vocabulary} tokens of the "
                             "vocabulary")
        self.max_tokens, self.sampled_tokens, self.topk = max_tokens, sampled_tokens, topk

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        if self.sampled_tokens:
            rollout[data.TEACHER_LOG_PROBS], _ = score_rollout(self.scorer, rollout,
                                                               max_tokens=self.max_tokens)
        if self.topk is not None:
            rollout[data.DISTILL_IDS], rollout[data.DISTILL_LOG_PROBS] = self._most_likely(rollout)
        return rollout

    @torch.no_grad()
    def _most_likely(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        shape = (*rollout[data.TOKENS].shape, self.topk)
        home = rollout[data.TOKENS].device
        ids_BTK = torch.zeros(shape, dtype=torch.int64, device=home)
        log_probs_BTK = torch.full(shape, -torch.inf, device=home)
        for rows, part in scoring_parts(self.scorer, rollout, self.max_tokens):
            predictions = self.scorer.predict(part[data.TOKENS], part[data.ATTENTION_MASK],
                                              part[data.ASSISTANT_MASK])
            log_probs_NK, ids_NK = self.scorer.most_likely(predictions, self.topk)
            row_N, column_N = part[data.ASSISTANT_MASK].nonzero(as_tuple=True)
            place = rows[row_N.to(home)], column_N.to(home)
            ids_BTK[place] = ids_NK.to(home)
            log_probs_BTK[place] = log_probs_NK.to(home, torch.float32)
        return ids_BTK, log_probs_BTK


class ProximalScorer:
    """Write what the policy thinks of a rollout before its first update on it.

    ``("log_probs", "proximal")`` gets the trainer's log-probs, for ``GRPOLoss(proximal="scored")``;
    with ``entropy_fraction`` ``("masks", "high_entropy")`` marks the tokens with the highest
    entropies of the whole rollout, for ``GRPOLoss(high_entropy_only=True)``. Source of the latter:
    Wang et al. 2025 (arXiv:2506.01939), where a fraction of 0.2 did best.

    Args:
        scorer: the loss's own.
        max_tokens: token budget of a micro-batch.
        entropy_fraction: share of the loss tokens to mark, in (0, 1); None: no mask.

    Raises:
        ValueError: for a fraction outside (0, 1).
    """

    def __init__(
        self, scorer: TokenScorer, *, max_tokens: int, entropy_fraction: float | None = None
    ) -> None:
        if entropy_fraction is not None and not 0 < entropy_fraction < 1:
            raise ValueError(f"entropy_fraction={entropy_fraction} must be between 0 and 1, both "
                             "excluded; leave it at None to train on all tokens")
        self.scorer, self.max_tokens = scorer, max_tokens
        self.entropy_fraction = entropy_fraction

    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        log_probs_BT, entropy_BT = self._score(rollout)
        rollout[data.PROXIMAL_LOG_PROBS] = log_probs_BT
        if self.entropy_fraction is not None:
            rollout[data.HIGH_ENTROPY_MASK] = highest(entropy_BT, loss_mask(rollout),
                                                      fraction=self.entropy_fraction)
        return rollout

    def _score(self, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        return score_rollout(self.scorer, rollout, max_tokens=self.max_tokens)


def highest(values_BT: Tensor, mask_BT: Tensor, *, fraction: float) -> Tensor:
    """Mark the greatest ``fraction`` of the values under a mask, at least one, ties included.

    Examples:
        >>> values = torch.tensor([[1.0, 9.0, 5.0, 7.0]])
        >>> highest(values, torch.tensor([[True, False, True, True]]), fraction=0.5).tolist()
        [[False, False, True, True]]
    """
    chosen_N = values_BT[mask_BT]
    if not len(chosen_N):
        return mask_BT
    kept = min(len(chosen_N), max(1, -int(-fraction * len(chosen_N) // 1)))
    return mask_BT & (values_BT >= chosen_N.kthvalue(len(chosen_N) - kept + 1).values)
