"""The canary with a real vLLM engine of which exactly one tensor is wrong."""

from __future__ import annotations

import pytest
import torch

from grpo.objectives import TokenScorer
from grpo.policies.inprocess import engine_module
from grpo.weights.canary import Canary
from grpo.weights.layout import base_parameters, view
from grpo.weights.shared import SingleCopy

from .faults import complaint
from .steps import PROMPTS, load, policy_of

pytestmark = pytest.mark.vllm

#: Parameter, rows of it that are damaged, what the canary calls it, first output that differs.
DAMAGES = [
    ("model.layers.1.self_attn.k_proj.weight", 1, "(k part of qkv_proj)", "layers.1"),
    ("model.layers.0.self_attn.q_proj.bias", None, "(q part of qkv_proj)", "layers.0"),
    ("model.layers.1.mlp.gate_proj.weight", None, "(gate part of gate_up_proj)", "layers.1"),
    ("model.layers.0.mlp.down_proj.weight", 1, "", "layers.0"),
    ("model.layers.1.input_layernorm.weight", None, "", "layers.1"),
    ("model.norm.weight", None, "", "norm"),
    ("model.embed_tokens.weight", None, "", "embed_tokens"),
]


class Copied(SingleCopy):
    """The same, but the trainer has parameters of its own and publishing copies them."""

    def __init__(self, model, engine) -> None:
        super().__init__(model, engine)
        for param in model.parameters():
            param.data = param.data.clone()

    @torch.no_grad()
    def publish(self, *, now: bool = False) -> int:
        for name, param in base_parameters(self.model).items():
            view(self.places[name], self.engine_params).copy_(param)
        return super().publish()

    def unshared(self) -> list[str]:
        return []


@pytest.fixture(scope="module")
def run(model_folder, engine):
    """Weights, and a canary that agreed; the engine gets its weights back."""
    model = load(model_folder)
    weights = Copied(model, engine)
    original = {name: tensor.detach().clone() for name, tensor in weights.engine_params.items()}
    canary = Canary(policy_of(engine, weights), TokenScorer(model), weights, prompts=PROMPTS)
    weights.publish()
    assert canary.check().max_abs_diff < 1e-4
    yield weights, canary
    with torch.no_grad():
        for name, tensor in weights.engine_params.items():
            tensor.copy_(original[name])
    engine.reset_prefix_cache()


@pytest.mark.parametrize(("name", "rows", "group", "layer"), DAMAGES,
                         ids=[f"{name}-{rows or 'all'}" for name, rows, *_ in DAMAGES])
def test_a_damaged_tensor_of_the_engine_is_named_and_the_first_layer_that_it_changes(
        run, name, rows, group, layer):
    weights, canary = run
    torch.manual_seed(0)
    with torch.no_grad():
        damaged = view(weights.places[name], weights.engine_params)[:rows]
        damaged.add_(torch.randn_like(damaged))
    assert weights.engine.reset_prefix_cache()
    text = complaint(canary.check)
    assert f"policy version {weights.version}: engine and trainer disagree" in text
    assert f"these parameters differ: {f'{name} {group}'.strip()};" in text
    assert f"the first layer output that differs is that of {layer}, by" in text
    assert "an update that reached the other tensors but not these" in text
    weights.publish()
    assert canary.check().max_abs_diff < 1e-4


def test_a_missed_update_is_told_from_another_model(run):
    weights, canary = run
    torch.manual_seed(1)
    with torch.no_grad():
        for param in weights.model.parameters():
            param.add_(0.01 * torch.randn_like(param))
    assert "a missed update" in complaint(canary.check)
    weights.publish()
    canary.check()
    before = {name: value.clone() for name, value in weights.model.state_dict().items()}
    with torch.no_grad():
        for param in weights.model.parameters():
            param.normal_()
    assert "the engine serves another model" in complaint(canary.check)
    weights.model.load_state_dict(before)  # so great weights leave no room for rounding
    weights.publish()
    canary.check()


def test_a_stale_prefix_cache_is_told_from_another_temperature(run, engine):
    weights, canary = run
    torch.manual_seed(2)
    with torch.no_grad():
        for name, param in base_parameters(weights.model).items():
            param.mul_(1.1)
            view(weights.places[name], weights.engine_params).copy_(param)
    text = complaint(canary.check)
    assert "all synchronised parameters are equal; all layer outputs agree within" in text
    assert "Likely cause: a stale prefix cache" in text
    weights.publish()
    canary.check()
    warm = Canary(policy_of(engine, weights).with_sampling(temperature=0.83), canary.scorer,
                  weights, prompts=PROMPTS)
    text = complaint(warm.check)
    assert "all synchronised parameters are equal; all layer outputs agree within" in text
    assert "another temperature: the engine's log-probs are those of 0.83, the trainer" in text


def test_memory_that_the_engine_replaced_is_named(run, engine):
    weights, canary = run
    theirs = engine_module(engine).model.layers[1].mlp.down_proj
    shared = theirs.weight
    theirs.weight = torch.nn.Parameter(shared.data.clone(), requires_grad=False)
    with torch.no_grad():
        weights.model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    weights.publish()  # into memory that nobody reads any more
    text = complaint(canary.check)
    assert "these parameters differ: model.layers.1.mlp.down_proj.weight;" in text
    assert "their storage was replaced" in text
    theirs.weight = shared
    weights.publish()
    canary.check()
