"""One copy of the weights with a real vLLM engine: sharing, updates, what the canary catches."""

from __future__ import annotations

import pytest
import torch

from grpo import data
from grpo.objectives import TokenScorer
from grpo.training.optim import MasterAdamW
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.proof import WeightProof
from grpo.weights.shared import SingleCopy

from .faults import Changing, nudge
from .steps import (
    PROMPTS,
    assert_only_its_own_model_is_shared,
    assert_updates_arrive,
    gap,
    load,
    policy_of,
    running_request,
    train_once,
)

pytestmark = pytest.mark.vllm


@pytest.fixture
def shared(model_folder, engine):
    """Model, weights and policy around the session's engine, which gets its weights back."""
    model = load(model_folder)
    weights = SingleCopy(model, engine)
    original = {name: tensor.detach().clone() for name, tensor in weights.engine_params.items()}
    policy = policy_of(engine, weights, max_tokens=12)
    yield model, weights, policy
    with torch.no_grad():
        for name, tensor in weights.engine_params.items():
            tensor.copy_(original[name])
    engine.reset_prefix_cache()


def canary(model, weights, policy, **options) -> Canary:
    # The longest alone: it cuts all to the length of the shortest, which fills no block of a cache.
    return Canary(policy, TokenScorer(model), weights, prompts=PROMPTS[-1:], **options)


def test_every_parameter_lies_in_the_engines_memory(shared):
    model, weights, _ = shared
    assert weights.unshared() == []
    engine_storages = {t.untyped_storage().data_ptr() for t in weights.engine_params.values()}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == engine_storages
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree_before_and_after_updates(shared, temperature):
    model, weights, policy = shared
    policy = policy.with_sampling(temperature=temperature)
    assert gap(model, policy) < 1e-4
    assert_updates_arrive(model, weights, policy)
    assert policy.generate_from_ids(PROMPTS)[data.POLICY_VERSION].tolist() == [3] * 4


def test_canary_names_a_parameter_whose_storage_was_replaced(shared):
    model, weights, policy = shared
    check = canary(model, weights, policy)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight.data = layer.weight.data.clone()  # the sharing is broken, the values still agree
    with pytest.raises(StaleWeightsError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        check.check()


def test_another_model_is_refused_by_name_and_stays_as_it_was(
        model_folder, make_model, tokenizer, engine):
    narrower = make_model(dtype=torch.float32, vocab_size=len(tokenizer))
    assert_only_its_own_model_is_shared(lambda model: SingleCopy(model, engine), model_folder,
                                        narrower)


def test_an_engine_that_stops_leaves_the_others_of_its_process_running(shared, model_folder):
    from grpo.policies.inprocess import start_engine, stop_engine

    model, weights, policy = shared
    other = start_engine(str(model_folder), device=torch.device("cpu"), dtype=torch.float32,
                         max_model_len=128, max_num_seqs=8)
    stop_engine(other)
    assert torch.distributed.is_initialized()
    train_once(model, policy, MasterAdamW(model.parameters(), lr=1e-2))
    weights.publish()
    assert gap(model, policy) < 1e-4


def test_publish_while_requests_run_is_an_error(shared):
    _, weights, policy = shared
    with running_request(policy.engine), pytest.raises(
            RuntimeError, match="requests are still running"):
        weights.publish()
    weights.publish()


def test_an_engine_that_replaced_a_tensor_fails_the_proof_where_no_canary_sees_it(shared, engine):
    from grpo.policies.inprocess import engine_module

    model, weights, policy = shared
    proof, check = WeightProof(weights, interval=3), canary(model, weights, policy)
    proof.self_test(Changing(model))
    assert weights.version == 0
    for _ in range(4):
        nudge(model)
        weights.publish()
        proof.check()
    layer = engine_module(engine).model.layers[1].mlp.down_proj
    ours = layer.weight.data
    layer.weight.data = ours.clone()
    try:
        with pytest.raises(StaleWeightsError, match=r"1 of the tensors compared differ to the bit: "
                                                    r"model\.layers\.1\.mlp\.down_proj\.weight"):
            for _ in range(3):
                nudge(model)
                weights.publish()
                check.check()
                proof.check()
    finally:
        layer.weight.data = ours
