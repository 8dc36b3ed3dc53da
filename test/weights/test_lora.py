"""LoRA with real vLLM engines: every way an update travels, and what the engine then computes."""

from __future__ import annotations

import pytest
import torch

from grpo.objectives import TokenScorer
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy
from grpo.training.optim import MasterAdamW
from grpo.weights.adapters import adapters, adapters_disabled, make_lora, save_adapter
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.layout import base_parameters, engine_layout, view
from grpo.weights.lora import LoRASync

from . import steps
from .faults import complaint
from .steps import (
    PROMPTS,
    assert_updates_arrive,
    gap,
    load,
    running_engine,
    running_request,
    train_once,
)

pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAX_RANK = 8
# The set-ups of an update: (how, rank, alpha); views need alpha = rank = the engine's greatest.
SETUPS = [("views", 8, 8), ("write", 4, 12), ("write", 8, 8), ("load", 4, 12)]


@pytest.fixture(scope="module", params=["in process", "own process"])
def engine(request, model_folder):
    separate = request.param == "own process"
    with running_engine(model_folder, separate_process=separate, max_lora_rank=MAX_RANK,
                        max_loras=2) as engine:
        assert bool(engine.workers) == separate
        yield engine


@pytest.fixture
def make(model_folder, engine):
    """A model with trained adapters, its sync, and policies with and without the adapter."""
    opened = []

    def build(how, r, alpha, *, adapter_id=1, **options):
        torch.manual_seed(adapter_id)
        model = make_lora(load(model_folder), r=r, alpha=alpha, **options)
        randomise(model)
        sync = LoRASync(model, engine, how=how, adapter_id=adapter_id, name=f"a{adapter_id}")
        opened.append(sync)
        return model, sync, policy_of(engine, sync)

    yield build
    for sync in opened:
        sync.close()
    engine.llm.reset_prefix_cache()


def policy_of(engine, sync=None) -> VLLMPolicy:
    return steps.policy_of(engine.llm, sync, max_tokens=12,
                           lora_request=sync.lora_request if sync else None)


def randomise(model, std: float = 0.1) -> None:
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.normal_(std=std)


@pytest.mark.parametrize(("how", "r", "alpha"), SETUPS)
def test_log_probs_agree_after_every_update(make, engine, how, r, alpha):
    model, sync, policy = make(how, r, alpha)
    base = {name: param.detach().clone() for name, param in base_parameters(model).items()}
    assert sync.how == how
    assert gap(model, policy) < 1e-4
    assert_updates_arrive(model, sync, policy)
    assert engine.version == 3
    assert all(torch.equal(param, base[name]) for name, param in base_parameters(model).items())
    with adapters_disabled(model):
        assert gap(model, policy_of(engine)) < 1e-4
        assert gap(model, policy) > 1e-2, "the adapter changed nothing"


@pytest.mark.parametrize("how", ["write", "load"])
def test_an_update_that_was_not_published_is_seen(make, how):
    model, sync, policy = make(how, 4, 8)
    canary = Canary(policy, TokenScorer(model), sync, prompts=PROMPTS)
    assert canary.check().max_abs_diff < 1e-4
    name = "model.layers.1.self_attn.v_proj"
    with torch.no_grad():
        adapters(model)[name].b.normal_()
    assert sync.differing() == [f"{name}.lora_B"]
    text = complaint(canary.check)
    assert f"these parameters differ: {name}.lora_B (v part of qkv_proj);" in text
    assert "the first layer output that differs is that of layers.1" in text
    assert "an update that reached the other tensors but not these" in text
    sync.publish()
    assert canary.check().max_abs_diff < 1e-4


def test_views_are_the_engines_memory_and_losing_it_is_seen(make):
    model, sync, policy = make("auto", MAX_RANK, MAX_RANK)
    assert sync.how == "views"
    canary = Canary(policy, TokenScorer(model), sync, prompts=PROMPTS)
    randomise(model, std=0.3)  # in place, so nothing else has to happen but to drop old caches
    assert sync.differing() == []
    sync.publish()
    canary.check()
    name = "model.layers.0.mlp.gate_proj"
    adapters(model)[name].a.data = adapters(model)[name].a.data.clone()
    with pytest.raises(StaleWeightsError, match=f"{name}.lora_A no longer lies"):
        canary.check()


@pytest.mark.parametrize(("r", "alpha", "reason"), [
    (MAX_RANK, 2 * MAX_RANK, "scaled by 2.0"), (4, 4, "has a rank of 4, below")])
def test_views_that_would_change_training_are_refused(make, r, alpha, reason):
    with pytest.raises(ValueError, match=f"how='views' is impossible: .*{reason}"):
        make("views", r, alpha)
    assert make("auto", r, alpha)[1].how == "write"


@pytest.mark.parametrize("how", ["write", "load"])
def test_a_subset_of_modules_and_layers(make, how):
    model, sync, policy = make(how, 2, 4, target_modules=["k_proj", "up_proj", "o_proj"],
                               layer_indices=[1])
    assert gap(model, policy) < 1e-4
    randomise(model, std=0.5)
    sync.publish()
    assert gap(model, policy) < 1e-4


def test_two_adapters_live_side_by_side(make):
    first = make("write", 4, 8)
    second = make("load", 8, 8, adapter_id=2)
    assert first[1].target.slot != second[1].target.slot
    for model, sync, policy in (first, second, first):
        randomise(model)
        sync.publish()
        assert gap(model, policy) < 1e-4
    assert gap(second[0], second[2]) < 1e-4
    assert gap(first[0], second[2]) > 1e-2


def test_a_saved_adapter_is_served_from_disk(make, engine, tmp_path):
    from vllm.lora.request import LoRARequest

    model, _, _ = make("write", 4, 12)
    request = LoRARequest("saved", 7, str(save_adapter(model, tmp_path / "adapter")))
    policy = policy_of(engine)
    policy.lora_request = request
    assert engine.llm.llm_engine.add_lora(request)
    try:
        assert gap(model, policy) < 1e-4
    finally:
        engine.llm.llm_engine.remove_lora(7)


def test_an_adapter_that_the_engine_dropped_is_an_error(make, engine):
    model, sync, _ = make("write", 4, 8)
    engine.llm.llm_engine.remove_lora(sync.adapter_id)
    assert len(sync.differing()) == 2 * len(adapters(model))
    with pytest.raises(RuntimeError, match="moved adapter 'a1' from slot 0 to None"):
        sync.publish()
    assert sync.version == 0


def test_publish_while_requests_run_is_an_error(make, engine):
    _, sync, _ = make("write", 4, 8)
    with running_request(engine.llm, lora_request=sync.lora_request), pytest.raises(
            RuntimeError, match="requests are still running"):
        sync.publish()
    assert sync.publish() == 1


def test_requests_that_reload_the_adapter_at_every_step_are_refused(make, engine):
    import msgspec

    _, sync, _ = make("write", 4, 8)
    request = msgspec.structs.replace(sync.lora_request, load_inplace=True)
    with pytest.raises(ValueError, match="load_inplace=True"):
        VLLMPolicy(engine.llm, Sampling(max_tokens=1), pad_token_id=0, eos_token_ids=(1,),
                   lora_request=request)


def test_adapters_on_a_base_in_the_engines_memory(model_folder, make, engine):
    """One copy of the base, one of the adapters: nothing of the policy exists twice."""
    if engine.workers:
        pytest.skip("the base is shared in process here")
    from grpo.policies.inprocess import engine_module

    model, sync, policy = make("views", MAX_RANK, MAX_RANK)
    theirs = base_parameters(engine_module(engine.llm))
    places = engine_layout(base_parameters(model), theirs)
    for name, param in base_parameters(model).items():
        assert torch.equal(param.data, view(places[name], theirs))
        param.data = view(places[name], theirs)
    optimizer = MasterAdamW(model.parameters(), lr=1e-2)
    train_once(model, policy, optimizer)
    sync.publish()
    assert gap(model, policy) < 1e-4
    assert all(param.data_ptr() == view(places[name], theirs).data_ptr()
               for name, param in base_parameters(model).items())
