"""What tests of weights in a real engine share: prompts, a training step, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from grpo import GRPOLoss, data, total_loss
from grpo.policies.base import Sampling
from grpo.policies.handle import InProcessEngine
from grpo.policies.inprocess import start_engine, stop_engine
from grpo.policies.vllm import VLLMPolicy
from grpo.training.optim import MasterAdamW
from grpo.weights.layout import LayoutError

# The longest fills a block of the prefix cache (128 tokens on a CPU).
PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40 + 50 * row)] for row in range(4)]


@contextmanager
def running_engine(folder, **options) -> Iterator[InProcessEngine]:
    """vLLM with a saved model in float32, in this process or one of its own."""
    pytest.importorskip("vllm")
    engine = InProcessEngine(start_engine(
        str(folder), device=torch.device("cpu"), dtype=torch.float32, max_model_len=256,
        max_num_seqs=64, **options))
    try:
        yield engine
    finally:
        stop_engine(engine.llm)


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


def assert_updates_arrive(model, weights, policy, *, updates: int = 3, lr: float = 1e-2) -> None:
    """Train and publish: after each update the engine computes with the trainer's weights."""
    optimizer = MasterAdamW(model.parameters(), lr=lr)
    for version in range(1, updates + 1):
        assert train_once(model, policy, optimizer) > 1e-3
        assert weights.publish() == version
        assert gap(model, policy) < 1e-4
        assert weights.differing() == weights.unshared() == []


def assert_only_its_own_model_is_shared(share, folder, narrower) -> None:
    """``share`` refuses another shape, type or values by name, and leaves a model as it was."""
    with pytest.raises(LayoutError, match=r"self_attn\.q_proj\.weight: shape \(16, 16\) does not"):
        share(narrower)
    model = load(folder, dtype=torch.bfloat16)
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    with pytest.raises(LayoutError, match=r"q_proj\.weight: dtype torch\.bfloat16 here, "
                                          r"torch\.float32 in the engine"):
        share(model)
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == before
    model = load(folder)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"different weights.*model\.norm\.weight"):
        share(model)


@contextmanager
def running_request(llm, **options) -> Iterator[None]:
    """A request that has begun and is unfinished."""
    from vllm import SamplingParams

    core = llm.llm_engine
    core.add_request("busy", {"prompt_token_ids": PROMPTS[0]},
                     SamplingParams(max_tokens=20, ignore_eos=True), **options)
    core.step()
    try:
        yield
    finally:
        core.abort_request(["busy"])
        while core.has_unfinished_requests():
            core.step()
