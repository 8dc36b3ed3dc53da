"""The frozen reference policy of a KL penalty."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import nn

from grpo import data
from grpo.objectives.head import TokenScorer


class ReferenceScorer:
    """Write the log-probs of a frozen reference policy into rollouts.

    Args:
        model: the reference, frozen here.
        temperature: of the rollouts.
        max_tokens: token budget of a micro-batch.
    """

    def __init__(self, model: nn.Module, *, temperature: float, max_tokens: int) -> None:
        self.scorer = TokenScorer(model.eval().requires_grad_(False), temperature=temperature)
        self.max_tokens = max_tokens
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def __call__(self, rollout: TensorDictBase) -> TensorDictBase:
        rows = rollout.batch_size[0]
        out = torch.zeros_like(rollout[data.LOG_PROBS])
        numbered = rollout.select(data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK)
        numbered["row"] = torch.arange(rows)
        for part in data.split_rows(numbered, max_tokens=self.max_tokens):
            part = part.to(self.device)
            log_probs, _ = self.scorer(part[data.TOKENS], part[data.ATTENTION_MASK],
                                       part[data.ASSISTANT_MASK])
            out[part["row"].cpu(), : log_probs.shape[1]] = log_probs.float().cpu()
        rollout[data.REF_LOG_PROBS] = out
        return rollout
