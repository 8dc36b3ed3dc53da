"""On a GPU: an engine in a process of its own follows the trainer through CUDA IPC, graphs on."""

from __future__ import annotations

import time

import pytest
import torch

from grpo import GRPOLoss, data, total_loss
from grpo.objectives import TokenScorer
from grpo.policies.base import Sampling
from grpo.policies.handle import InProcessEngine
from grpo.policies.inprocess import start_engine, stop_engine
from grpo.policies.vllm import VLLMPolicy
from grpo.training.optim import MasterAdamW
from grpo.weights.adapters import make_lora
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.layout import view
from grpo.weights.lora import LoRASync
from grpo.weights.proof import WeightProof
from grpo.weights.shared import SharedCopy

from ..weights.faults import Changing, nudge

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40)] for row in range(8)]


@pytest.fixture(scope="module")
def engine(gpu_folder):
    engine = InProcessEngine(start_engine(
        str(gpu_folder), device=torch.device("cuda", 0), dtype=torch.bfloat16, max_model_len=128,
        max_num_seqs=64, separate_process=True, max_lora_rank=16))
    assert engine.workers
    yield engine
    stop_engine(engine.llm)


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def policy_of(engine, sync, **options):
    return VLLMPolicy(engine.llm, Sampling(max_tokens=16), pad_token_id=0, eos_token_ids=(1,),
                      version=lambda: sync.version, **options)


def step(model, policy, optimizer) -> None:
    """Reward even tokens, so that the weights really move."""
    batch = policy.generate_from_ids(PROMPTS * 4)
    even = (batch[data.TOKENS] % 2 == 0) & batch[data.ASSISTANT_MASK]
    batch[data.REWARD] = even.sum(-1, keepdim=True).float()
    batch[data.GROUP_ID] = torch.arange(len(PROMPTS)).repeat(4)
    total_loss(GRPOLoss(model)(batch.to("cuda"))).backward()
    optimizer.step()


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@pytest.mark.parametrize(("how", "r", "alpha"), [("views", 16, 16), ("write", 8, 16)])
def test_adapters_follow_under_cuda_graphs(engine, gpu_folder, how, r, alpha):
    torch.manual_seed(0)
    model = make_lora(load(gpu_folder).cuda(), r=r, alpha=alpha)
    sync = LoRASync(model, engine, how=how)
    try:
        policy = policy_of(engine, sync, lora_request=sync.lora_request)
        canary = Canary(policy, TokenScorer(model), sync, prompts=PROMPTS[:4])
        optimizer = MasterAdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        sync.publish()
        canary.check()
        seconds = []
        for _ in range(3):
            step(model, policy, optimizer)
            start = time.perf_counter()
            sync.publish()
            seconds.append(time.perf_counter() - start)
            canary.check()
            assert sync.differing() == []
        # Many, so that one meets no other process: a busy processor is no fault.
        seconds += [timed(sync.publish) for _ in range(200)]
        assert min(seconds) < 0.005, seconds
    finally:
        sync.close()


# Last, because it changes the weights that the module's engine was loaded with.
def test_one_memory_in_two_processes_under_cuda_graphs(engine, gpu_folder):
    model = load(gpu_folder)
    weights = SharedCopy(model, engine)
    assert all(param.is_cuda for param in model.parameters())
    policy = policy_of(engine, weights)
    greedy = policy.with_sampling(temperature=0.0)
    canary = Canary(policy, TokenScorer(model), weights, prompts=PROMPTS[:4])
    optimizer = MasterAdamW(model.parameters(), lr=2e-3)
    outputs, seconds = [greedy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS]], []
    for _ in range(3):
        step(model, policy, optimizer)
        start = time.perf_counter()
        weights.publish()
        seconds.append(time.perf_counter() - start)
        canary.check()
        assert weights.differing() == []
        outputs.append(greedy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS])
    assert all(not torch.equal(one, other)
               for one, other in zip(outputs, outputs[1:], strict=False))
    seconds += [timed(weights.publish) for _ in range(200)]
    assert min(seconds) < 0.010, seconds

    proof = WeightProof(weights)
    proof.self_test(Changing(model))
    proof.check()
    ours, weights.tensors = weights.tensors, {
        name: tensor.clone() for name, tensor in weights.tensors.items()}
    for name, param in model.named_parameters():  # a mapping that the engine does not use
        param.data = view(weights.places[name], weights.tensors)
    nudge(model)
    weights.publish()
    canary.check()
    with pytest.raises(StaleWeightsError, match="differ to the bit"):
        proof.check()
    weights.tensors = ours
    for name, param in model.named_parameters():
        param.data = view(weights.places[name], weights.tensors)
    weights.publish()

    with torch.no_grad():  # a parameter that is replaced, not written into
        norm = model.model.norm.weight
        norm.data = norm.data.clone()
    with pytest.raises(StaleWeightsError, match=r"norm\.weight"):
        canary.check()
