"""The canary: silent when both sides agree, precise when they do not."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from grpo.objectives.scorer import TokenScorer
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.in_flight import PeriodicUpdates
from grpo.weights.shared import SameModule

from .faults import complaint

PROMPTS = [[5, 6, 7], [8], [9, 10]]


def make_policy(model, *, temperature: float = 1.0) -> TransformersPolicy:
    return TransformersPolicy(model, Sampling(max_tokens=8, temperature=temperature),
                              pad_token_id=0, eos_token_ids=(), max_model_len=32)


def make_canary(model, policy, *, temperature: float = 1.0, **options) -> Canary:
    return Canary(policy, TokenScorer(model, temperature=temperature),
                  SameModule(model, version=7), prompts=PROMPTS, **options)


def train(model) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.01 * torch.randn_like(param))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_policy_agree_before_and_after_an_update(byte_model, temperature):
    policy = make_policy(byte_model, temperature=temperature)
    canary = make_canary(byte_model, policy, temperature=temperature)
    for _ in range(2):
        report = canary.check()
        assert 0 <= report.mean_abs_diff <= report.max_abs_diff < 1e-4
        train(byte_model)


def test_a_check_may_be_started_and_finished_later(byte_model):
    canary, in_one = (make_canary(byte_model, make_policy(byte_model)) for _ in range(2))
    canary.start()
    torch.rand(3)  # what happens meanwhile does not matter
    assert canary.finish() == in_one.check()


def test_a_check_that_is_finished_after_the_next_update_is_told_apart(byte_model):
    policy = make_policy(copy.deepcopy(byte_model))
    canary = make_canary(byte_model, policy)
    canary.start()
    train(byte_model)
    with pytest.raises(StaleWeightsError, match="engine and trainer disagree"):
        canary.finish()


def test_compiled_layers_are_scored_uncompiled(byte_model):
    torch.compiler.reset()  # the layers' code may have been compiled too often before
    compiled = []

    def count(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    canary = make_canary(byte_model, make_policy(copy.deepcopy(byte_model)))
    for layer in byte_model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=count)
    for _ in range(2):
        canary.check()
    assert not compiled
    byte_model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert compiled


def test_a_policy_at_another_temperature_is_found_and_the_temperature_suspected(byte_model):
    canary = make_canary(byte_model, make_policy(byte_model, temperature=0.8))
    text = complaint(canary.check)
    assert "policy version 7: engine and trainer disagree on the same tokens" in text
    assert "(allowed 2e-05, 1e-04)" in text
    assert "another temperature: the engine's log-probs are those of 0.80, the trainer" in text


def with_a_copy(model) -> tuple[Canary, torch.nn.Module]:
    """A canary around a policy with its own copy of the model, and that copy."""
    engine = copy.deepcopy(model)
    return Canary(make_policy(engine), TokenScorer(model), SameModule(model, used=lambda: engine),
                  prompts=PROMPTS), engine


@pytest.mark.parametrize(("name", "called", "found"), [
    ("lm_head.weight", "lm_head.weight", "all layer outputs agree within"),
    ("model.norm.weight", "model.norm.weight", "differs is that of norm"),
    ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight (up part of "
     "gate_up_proj)", "differs is that of layers.1"),
    ("model.embed_tokens.weight", "model.embed_tokens.weight", "differs is that of embed_tokens"),
])
def test_the_tensor_that_differs_is_named_and_the_first_layer_that_it_changes(
        make_model, tokenizer, name, called, found):
    canary, engine = with_a_copy(make_model(dtype=torch.float32, vocab_size=len(tokenizer),
                                            tie_word_embeddings=False))
    canary.check()
    with torch.no_grad():
        engine.get_parameter(name).add_(torch.randn_like(engine.get_parameter(name)))
    text = complaint(canary.check)
    assert f"these parameters differ: {called};" in text
    assert found in text
    assert "an update that reached the other tensors but not these" in text


def test_many_tensors_that_differ_are_counted(byte_model):
    canary, _ = with_a_copy(byte_model)
    train(byte_model)
    text = complaint(canary.check)
    assert "model.embed_tokens.weight, " in text and "more;" in text
    assert "a missed update" in text


def test_equal_tensors_that_are_computed_with_differently_are_told_apart(byte_model):
    canary, engine = with_a_copy(byte_model)
    attention = engine.model.layers[1].self_attn
    attention.scaling *= 2
    text = complaint(canary.check)
    assert "all synchronised parameters are equal; the first layer output that differs" in text
    assert "the engine computes layers.1 differently from equal tensors" in text


def test_a_policy_whose_layers_cannot_be_read_is_compared_without_them(byte_model):
    canary, engine = with_a_copy(byte_model)
    engine.model.layers = torch.nn.Sequential(*engine.model.layers)  # no list of layers
    train(byte_model)
    assert "layer outputs could not be compared" in complaint(canary.check)


def test_a_nan_is_a_disagreement(byte_model):
    canary = make_canary(byte_model, make_policy(copy.deepcopy(byte_model)))
    with torch.no_grad():
        byte_model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(StaleWeightsError):
        canary.check()


def test_the_tolerance_can_be_set_and_follows_the_precision(byte_model):
    policy = make_policy(byte_model, temperature=0.99)
    with pytest.raises(StaleWeightsError):
        make_canary(byte_model, policy).check()
    report = make_canary(byte_model, policy, tolerance=(1.0, 1.0)).check()
    assert report.max_abs_diff > 1e-4
    assert make_canary(byte_model.bfloat16(), policy).tolerance[1] > 0.1


def test_checking_does_not_disturb_the_random_numbers_of_the_policy(byte_model):
    policy = make_policy(byte_model)
    make_canary(byte_model, policy).check()
    assert policy.calls == 0
    assert policy.sampling.max_tokens == 8


def test_same_module_counts_its_updates(byte_model):
    weights = SameModule(byte_model, version=3)
    assert [weights.publish(), weights.publish(), weights.version] == [4, 5, 5]
    assert weights.differing() == []


def test_it_has_nothing_to_say_while_the_engine_is_behind_on_purpose(byte_model):
    weights = PeriodicUpdates(SameModule(byte_model), interval=2)
    canary = Canary(make_policy(copy.deepcopy(byte_model)), TokenScorer(byte_model), weights,
                    prompts=PROMPTS)
    assert canary.check().max_abs_diff < 1e-4
    train(byte_model)
    weights.publish()
    assert math.isnan(canary.check().max_abs_diff)
    weights.publish()  # which brings nothing to the copy
    with pytest.raises(StaleWeightsError):
        canary.check()
