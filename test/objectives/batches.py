"""What the tests share: a batch with every entry, the gradient of a loss, and memory."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Largest(TorchDispatchMode):
    """The greatest ``measure(tensor)`` of all tensors that operations returned."""

    def __init__(self, measure) -> None:
        super().__init__()
        self.measure, self.size = measure, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.size = max([self.size, *map(self.measure, tensors)])
        return out
