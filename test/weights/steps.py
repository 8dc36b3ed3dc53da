"""What tests of weights in a real engine share: prompts, a training step, and the comparison."""

from __future__ import annotations

import torch

from grpo import GRPOLoss, data, total_loss
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy

# The longest fills a block of the prefix cache (128 tokens on a CPU).
PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40 + 50 * row)] for row in range(4)]


def load(folder, dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def policy_of(llm, weights=None, *, max_tokens: int = 8, **options) -> VLLMPolicy:
    """Samples from ``llm``; rows carry the version of ``weights``."""
    return VLLMPolicy(llm, Sampling(max_tokens=max_tokens), pad_token_id=0, eos_token_ids=(1,),
                      version=lambda: weights.version if weights else 0, **options)


def gap(model, policy) -> float:
    """Greatest difference between the engine's log-probs and a plain Hugging Face forward."""
    batch = data.trim(policy.generate_from_ids(PROMPTS))
    tokens, mask = batch[data.TOKENS], batch[data.ASSISTANT_MASK]
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=batch[data.ATTENTION_MASK]).logits
    log_probs = (logits[:, :-1] / policy.sampling.temperature).log_softmax(-1)
    log_probs = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    return (log_probs - batch[data.LOG_PROBS][:, 1:])[mask[:, 1:]].abs().max().item()


def train_once(model, policy, optimizer) -> float:
    """A GRPO step that rewards even tokens; returns how far the weights moved."""
    batch = policy.generate_from_ids(PROMPTS * 4)
    even = (batch[data.TOKENS] % 2 == 0) & batch[data.ASSISTANT_MASK]
    batch[data.REWARD] = even.sum(-1, keepdim=True).float()
    batch[data.GROUP_ID] = torch.arange(4).repeat(4)
    params = [param for param in model.parameters() if param.requires_grad]
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = None
    total_loss(GRPOLoss(model)(batch)).backward()
    optimizer.step()
    return max((new - old).abs().max().item() for new, old in zip(params, before, strict=True))
