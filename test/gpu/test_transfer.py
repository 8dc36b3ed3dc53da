"""On two GPUs: weights go from the trainer's to the engine's, whose CUDA graphs see them."""

from __future__ import annotations

import os

import pytest
import torch

from grpo import data
from grpo.objectives import TokenScorer
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy
from grpo.system.child_process import variables_for_children
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.channel import TransferError
from grpo.weights.proof import WeightProof
from grpo.weights.transfer import WeightTransfer

from ..weights.faults import Changing, nudge

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = [[5 + (7 * row + i) % 200 for i in range(40)] for row in range(8)]


@pytest.fixture(scope="module")
def folder(gpu_folder):
    return gpu_folder


def start(folder, devices: str):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from grpo.policies.lifecycle import remember, starting

    torch.zeros(1, device="cuda:0")  # this process has counted its GPUs by then
    with variables_for_children({"CUDA_VISIBLE_DEVICES": devices}), starting():
        # A share of the GPU would be measured, wrongly where others use the GPU meanwhile.
        llm = LLM(str(folder), dtype="bfloat16", max_model_len=256, gpu_memory_utilization=0.05,
                  kv_cache_memory_bytes=1 << 30, logprobs_mode="processed_logprobs",
                  distributed_executor_backend="mp",
                  worker_extension_cls="grpo.weights.worker.extension.WeightWorker",
                  tensor_parallel_size=len(devices.split(",")))
    remember(llm)
    return llm


def need(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.fixture(scope="module")
def other_gpu(folder):
    need(2)
    from grpo.policies.handle import InProcessEngine
    from grpo.policies.inprocess import stop_engine

    llm = start(folder, "1")
    yield llm, InProcessEngine(llm)
    stop_engine(llm)


@pytest.fixture(scope="module")
def same_gpu(folder):
    need(1)
    from grpo.policies.handle import InProcessEngine
    from grpo.policies.inprocess import stop_engine

    llm = start(folder, "0")
    yield llm, InProcessEngine(llm)
    stop_engine(llm)


def changed(folder, *, seed: int, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda:0")
    change(model, seed=seed)
    return model


def change(model, *, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn_like(param))


def check_updates(llm, engine, model, weights) -> None:
    policy = VLLMPolicy(llm, Sampling(max_tokens=12), pad_token_id=0, eos_token_ids=(1,),
                        version=lambda: weights.version)
    canary = Canary(policy, TokenScorer(model), weights, prompts=PROMPTS)
    assert weights.differing()
    with pytest.raises(StaleWeightsError):
        canary.check()
    for version in (1, 2):
        assert weights.publish() == version == engine.version
        assert weights.differing() == []
        canary.check()
        assert (policy.generate_from_ids(PROMPTS)[data.POLICY_VERSION] == version).all()
        change(model, seed=10 + version)
        assert weights.differing()
    weights.close()


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 512 << 20])
def test_another_gpus_engine_generates_with_each_update(other_gpu, folder, bucket_bytes):
    llm, engine = other_gpu
    model = changed(folder, seed=bucket_bytes)
    check_updates(llm, engine, model, WeightTransfer(
        model, engine, backend="nccl", bucket_bytes=bucket_bytes, timeout=60.0))


@pytest.mark.parametrize("fault", ["a skipped update", "one tensor"])
def test_a_loss_between_two_gpus_that_no_canary_sees_fails_the_proof(other_gpu, folder, fault):
    llm, engine = other_gpu
    model = changed(folder, seed=8)
    weights = WeightTransfer(model, engine, backend="nccl", timeout=60.0)
    weights.publish()
    policy = VLLMPolicy(llm, Sampling(max_tokens=12), pad_token_id=0, eos_token_ids=(1,),
                        version=lambda: weights.version)
    canary = Canary(policy, TokenScorer(model), weights, prompts=PROMPTS)
    proof = WeightProof(weights, interval=3)
    proof.self_test(Changing(model))
    assert weights.version == engine.version == 1
    for _ in range(4):
        nudge(model)
        weights.publish()
        proof.check()
    norm = model.model.norm.weight
    if fault == "one tensor":  # the trainer sends what it once was
        send, old = weights._path.send, norm.detach().clone()

        def lossy(tensors, deadline):
            present = norm.detach().clone()
            norm.data.copy_(old)
            torch.cuda.synchronize()
            send(tensors, deadline)
            norm.data.copy_(present)

        weights._path.send = lossy
    else:
        weights._path.send = lambda tensors, deadline: list(tensors)
    with pytest.raises(StaleWeightsError, match="differ to the bit"):
        for _ in range(3 if fault == "one tensor" else 1):
            nudge(model)
            weights.publish()
            canary.check()
            proof.check()
    weights.close()


def test_float32_masters_are_rounded_on_the_way(other_gpu, folder):
    llm, engine = other_gpu
    model = changed(folder, seed=3, dtype=torch.float32)
    weights = WeightTransfer(model, engine, backend="nccl", timeout=60.0)
    weights.publish()
    assert weights.differing() == []


def test_the_same_gpus_engine_copies_out_of_the_trainers_memory(same_gpu, folder):
    llm, engine = same_gpu
    model = changed(folder, seed=4)
    check_updates(llm, engine, model, WeightTransfer(model, engine, backend="ipc", timeout=60.0))


def test_a_hanging_transfer_is_an_error_and_a_later_one_succeeds(
        other_gpu, folder, monkeypatch):
    from grpo.weights import channel

    _, engine = other_gpu
    model = changed(folder, seed=5)
    weights = WeightTransfer(model, engine, backend="nccl", timeout=60.0)
    weights.publish()
    monkeypatch.setattr(channel.Channel, "broadcast", lambda self, tensors: list(tensors) and [])
    weights.timeout = 5.0
    with pytest.raises(TransferError, match="look at the trainer, which stopped sending"):
        weights.publish()
    monkeypatch.undo()
    assert engine.alive()
    weights.timeout = 60.0
    change(model, seed=6)
    weights.publish()
    assert weights.differing() == []


def test_two_workers_hold_their_shards(folder):
    """Tensor parallel on GPUs 1 and 2; also with GPU 0's, NCCL has three members."""
    need(3)
    from grpo.policies.handle import InProcessEngine
    from grpo.policies.inprocess import stop_engine

    llm = start(folder, "1,2")
    try:
        engine = InProcessEngine(llm)
        model = changed(folder, seed=7)
        check_updates(llm, engine, model, WeightTransfer(
            model, engine, backend="nccl", timeout=60.0))
    finally:
        stop_engine(llm)
