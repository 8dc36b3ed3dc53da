"""What the tests of ``GRPOLoss`` share: a batch with every entry, and the gradient of a loss."""

from __future__ import annotations

import torch

from grpo import total_loss

#: The least that an objective of whole groups needs.
LISTWISE = {"objective": "maxent_listwise", "aggregation": "prompt"}


def with_every_entry(batch, seed=0):
    """The batch with all that some option reads."""
    generator = torch.Generator().manual_seed(seed)
    mask = batch["masks", "all_assistant_mask"]
    shape = mask.shape
    batch["log_probs", "proximal"] = mask * (
        batch["log_probs", "full"] + 0.4 * torch.randn(shape, generator=generator))
    batch["masks", "high_entropy"] = (torch.rand(shape, generator=generator) < 0.5) & mask
    batch["distill", "token_ids"] = torch.randint(23, (*shape, 3), generator=generator)
    batch["distill", "log_probs"] = torch.randn(*shape, 3, generator=generator) - 3
    weights = torch.rand(len(batch), generator=generator)
    total = torch.zeros(len(batch)).index_add(0, batch["group_id"], weights)
    batch["listwise_weight"] = (weights / total[batch["group_id"]])[:, None]
    return batch


def keys(batch):
    """What a scorer reads."""
    return (batch["tokens", "full"], batch["masks", "all_attention_mask"],
            batch["masks", "all_assistant_mask"])


def gradient(loss, batch):
    parameters = list(loss.actor_network.parameters())
    grads = torch.autograd.grad(total_loss(loss(batch)), parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])
