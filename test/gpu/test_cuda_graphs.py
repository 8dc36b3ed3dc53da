"""On a GPU: weight updates reach an engine whose CUDA graphs were captured before them."""

from __future__ import annotations

import copy

import pytest
import torch

from grpo import GRPOLoss, data, total_loss
from grpo.objectives import TokenScorer, packed_attention
from grpo.policies.base import Sampling
from grpo.policies.inprocess import start_engine, stop_engine
from grpo.policies.vllm import VLLMPolicy
from grpo.training.optim import MasterAdamW
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.shared import SingleCopy

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40)] for row in range(8)]


@pytest.fixture
def shared(gpu_folder):
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda", 0)
    engine = start_engine(str(gpu_folder), device=device, dtype=torch.bfloat16, max_model_len=128,
                          max_num_seqs=64)
    model = AutoModelForCausalLM.from_pretrained(gpu_folder, dtype=torch.bfloat16)
    weights = SingleCopy(model, engine)
    policy = VLLMPolicy(engine, Sampling(max_tokens=16), pad_token_id=0, eos_token_ids=(1,),
                        version=lambda: weights.version)
    yield model, weights, policy
    stop_engine(engine)


def test_graphs_are_on_and_follow_every_update(shared):
    model, weights, policy = shared
    config = policy.engine.llm_engine.vllm_config
    assert not config.model_config.enforce_eager
    assert config.compilation_config.cudagraph_mode.name != "NONE"
    assert all(param.is_cuda for param in model.parameters())
    canary = Canary(policy, TokenScorer(model), weights, prompts=PROMPTS[:4])
    greedy = policy.with_sampling(temperature=0.0)
    optimizer = MasterAdamW(model.parameters(), lr=2e-3)
    canary.check()
    before = greedy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS]
    for version in range(1, 6):
        batch = policy.generate_from_ids(PROMPTS * 4).to("cuda")
        even = (batch[data.TOKENS] % 2 == 0) & batch[data.ASSISTANT_MASK]
        batch[data.REWARD] = even.sum(-1, keepdim=True).float()
        batch[data.GROUP_ID] = torch.arange(8, device="cuda").repeat(4)
        total_loss(GRPOLoss(model)(batch)).backward()
        optimizer.step()
        assert weights.publish() == version
        assert canary.check().mean_abs_diff < 0.1
    assert weights.unshared() == []
    after = greedy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS]
    assert not torch.equal(before, after)


def test_a_stale_engine_is_noticed_in_bfloat16(shared):
    model, weights, policy = shared
    canary = Canary(policy, TokenScorer(model), weights, prompts=PROMPTS[:4])
    canary.check()
    for param in model.parameters():
        param.data = param.data.clone()
    weights.unshared = lambda: []  # leave it to the numbers
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(30.0)
    weights.publish()
    with pytest.raises(StaleWeightsError, match=r"layers\.2\.mlp\.down_proj\.weight; the first "
                                                r"layer output that differs is that of layers\.2,"):
        canary.check()


def test_packed_rows_score_like_padded_ones(shared):
    model, _, policy = shared
    policy = VLLMPolicy(policy.engine, Sampling(max_tokens=16), pad_token_id=0,
                        eos_token_ids=tuple(range(0, 60)))
    batch = policy.generate_from_ids([p[: 5 + 4 * i] for i, p in enumerate(PROMPTS)]).to("cuda")
    arguments = (batch[data.TOKENS], batch[data.ATTENTION_MASK], batch[data.ASSISTANT_MASK])
    with torch.no_grad():
        padded, _ = TokenScorer(model)(*arguments)
        packed, _ = TokenScorer(model, packing=True)(*arguments)
    torch.testing.assert_close(padded, packed, rtol=0, atol=0.1)


def gradients(model, batch, *, packing: bool) -> torch.Tensor:
    model.zero_grad()
    total_loss(GRPOLoss(model, packing=packing)(batch)).backward()
    return torch.cat([param.grad.float().flatten() for param in model.parameters()])


def test_rows_that_share_their_prompt_have_the_gradient_of_padded_ones(shared):
    model, _, policy = shared
    policy = VLLMPolicy(policy.engine, Sampling(max_tokens=60), pad_token_id=0,
                        eos_token_ids=tuple(range(0, 8)))
    batch = policy.generate_from_ids([p for p in PROMPTS for _ in range(4)]).to("cuda")
    batch[data.GROUP_ID] = torch.arange(8, device="cuda").repeat_interleave(4)
    batch[data.ADVANTAGE] = torch.randn(32, 1, generator=torch.Generator().manual_seed(0)).cuda()
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("sdpa")
    wanted, padded = gradients(exact, batch, packing=False), gradients(model, batch, packing=False)
    packed = gradients(model, batch, packing=True)
    assert packed_attention._takes_groups  # its keys and values are not repeated
    error = (padded - wanted).norm()
    assert (packed - wanted).norm() < 1.5 * error + 1e-3 * wanted.norm()


def test_rows_cross_the_borders_of_blocks(shared):
    model, _, policy = shared
    assert policy.engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    policy = VLLMPolicy(policy.engine, Sampling(max_tokens=80), pad_token_id=0,
                        eos_token_ids=(1,), ignore_eos=True)
    batch = policy.generate_from_ids([p[: 3 + row] for row in range(37) for p in PROMPTS])
    batch = batch.to("cuda")
    with torch.no_grad():
        scored, _ = TokenScorer(model)(
            batch[data.TOKENS], batch[data.ATTENTION_MASK], batch[data.ASSISTANT_MASK])
    difference = (scored - batch[data.LOG_PROBS]).abs()
    assert difference.max() < 0.3 and difference[batch[data.ASSISTANT_MASK]].mean() < 0.03
