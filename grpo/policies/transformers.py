"""A policy that generates with the Hugging Face model itself, where vLLM is not installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from grpo import data
from grpo.objectives.head import log_probs_from_logits
from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Completions, Policy, RowListener, Sampling, first_of_rows
from grpo.policies.scoring import evaluating, score_greedily

#: Tokens of a batch whose given texts are scored.
_SCORED_AT_ONCE = 16_384


class TransformersPolicy(Policy):
    """Sample with a Hugging Face causal language model and its key-value cache.

    Trainer and policy share the module, so new weights are in use at once.

    Args:
        model: a Hugging Face causal language model.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        ignore_eos: always generate ``max_tokens``; for benchmarks.
        options: those of :class:`~grpo.policies.base.Policy`.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1))
        >>> policy = TransformersPolicy(model, Sampling(max_tokens=3), pad_token_id=0,
        ...                             eos_token_ids=(), max_model_len=32)
        >>> policy.generate_from_ids([[5, 6], [7]])["tokens", "response"].shape
        torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, sampling: Sampling, *, ignore_eos: bool = False,
                 **options: Any) -> None:
        super().__init__(sampling, **options)
        # Kept out of the module tree: the policy does not own the trainer's parameters.
        self._model = [model]
        self.ignore_eos = ignore_eos
        #: Numbers of the rows in a call that is divided over policies, and how many it has in all:
        #: each then draws what one policy would have drawn for its rows.
        self.drawn: tuple[list[int], int] | None = None

    @property
    def model(self) -> nn.Module:
        return self._model[0]

    can_score = True

    @torch.no_grad()
    def score(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        width = max(len(context) + len(answer) for context, answer in rows)
        lengths_B2 = torch.tensor([[len(context), len(context) + len(answer)]
                                   for context, answer in rows])
        column_T = torch.arange(width)
        batch = TensorDict({}, [len(rows)])
        batch[data.TOKENS] = data.pad_rows([[*context, *answer] for context, answer in rows],
                                           width, self.pad_token_id)
        batch[data.ATTENTION_MASK] = column_T < lengths_B2[:, 1:]
        batch[data.ASSISTANT_MASK] = (column_T >= lengths_B2[:, :1]) & batch[data.ATTENTION_MASK]
        log_probs_BT, greedy_BT = score_greedily(TokenScorer(self.model), batch,
                                                 max_tokens=_SCORED_AT_ONCE)
        return [*zip(log_probs_BT.double().sum(-1).tolist(),
                     (greedy_BT | ~batch[data.ASSISTANT_MASK]).all(-1).tolist(), strict=True)]

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        with evaluating(self.model):
            return self._sample(prompts, on_row)

    def _sample(self, prompts: list[list[int]], on_row: RowListener | None) -> Completions:
        from transformers import DynamicCache

        device = next(self.model.parameters()).device
        tokens, attention = _left_pad(prompts, self.pad_token_id, device)
        # A row may not outgrow the context, whatever the longest row still has room for.
        room_B = torch.tensor([min(self.sampling.max_tokens, self.max_model_len - len(p))
                               for p in prompts], device=device)
        position_ids = (attention.cumsum(-1) - 1).clamp(min=0)
        eos = torch.tensor(() if self.ignore_eos else self.eos_token_ids, dtype=torch.int64,
                           device=device)
        cache = DynamicCache(config=self.model.config)
        stopped_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        sampled, log_probs, running = [], [], []
        for step in range(int(room_B.max())):
            running_B = ~stopped_B & (step < room_B)
            if not running_B.any():
                break
            logits = self.model(input_ids=tokens, attention_mask=attention, use_cache=True,
                                position_ids=position_ids, past_key_values=cache,
                                logits_to_keep=1).logits[:, -1]
            tokens_B, log_probs_B = self._draw(logits)
            sampled.append(tokens_B)
            log_probs.append(log_probs_B)
            running.append(running_B)
            stopped_B = stopped_B | (running_B & torch.isin(tokens_B, eos))
            if on_row is not None:
                ended_B = running_B & (stopped_B | (step + 1 == room_B))
                rows = ended_B.nonzero().flatten()
                for row, said in zip(rows.tolist(), torch.stack(sampled, 1)[rows].tolist(),
                                     strict=True):
                    on_row(row, said)
            tokens = tokens_B[:, None]
            attention = torch.cat([attention, torch.ones_like(tokens)], dim=-1)
            position_ids = position_ids[:, -1:] + 1
        sizes = torch.stack(running).sum(0).tolist()
        return Completions(
            tokens=first_of_rows(torch.stack(sampled, 1), sizes),
            log_probs=first_of_rows(torch.stack(log_probs, 1), sizes),
            truncated=(~stopped_B).tolist())

    def _draw(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Next tokens and their log-probs under the distribution they are drawn from."""
        temperature = self.sampling.temperature
        if temperature == 0:
            tokens_B = logits_BV.argmax(-1)
        else:
            # Gumbel trick: argmax(log p + Gumbel noise) is a sample of p.
            rows, of = self.drawn or (slice(None), len(logits_BV))
            noise = logits_BV.new_empty(of, logits_BV.shape[1], dtype=torch.float32)
            noise_BV = noise.exponential_()[rows].log()
            tokens_B = (logits_BV.float() / temperature - noise_BV).argmax(-1)
        log_probs_B, _ = log_probs_from_logits(logits_BV, tokens_B, temperature=temperature or 1.0)
        return tokens_B, log_probs_B


def _left_pad(prompts: list[list[int]], value: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows that end in the same column, so that all of them continue at the next one."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[value] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask
