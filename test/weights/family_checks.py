"""One copy of the weights for every supported architecture, each with an engine of its own.

Collected by ``test_families.py``, in a process apart: when one in-process engine ends, all others
lose torch.distributed.

Trainer and engine compute attention differently, so that their log-probs agree means that every
parameter lies where the engine looks for it, that scaled rotary tables, windows and soft caps are
the same on both sides, and that nothing is derived from the weights once and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo import data
from grpo.objectives import TokenScorer
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.diagnosis import engine_outputs, trainer_outputs
from grpo.weights.layout import engine_layout
from grpo.weights.shared import SingleCopy

from .families import FAMILIES, VOCABULARY, load_family, save_family
from .steps import gap, policy_of

# The longest is longer than the sliding windows and than the context Llama's frequencies are
# scaled from. No prompt contains UNSEEN.
PROMPTS = [[5 + (7 * row + 3 * i) % 200 for i in range(size)]
           for row, size in enumerate((2, 9, 60))]
UNSEEN = VOCABULARY - 1
# The others differ from these in a detail.
COMMON = ("llama", "qwen3-tied", "qwen3-moe", "gemma3", "phi3")
# Engines run until the process ends: beside another one an engine starts in half a second, after
# stop_engine() in five.
RUNNING: list[Any] = []


@dataclass
class Shared:
    """A model, the engine that holds its weights, and what generates with it."""

    model: Any
    weights: SingleCopy
    policy: VLLMPolicy
    engine_module: nn.Module

    def sample(self) -> Tensor:
        """Log-probs ``[B, T]`` of tokens drawn with the same random numbers in each call."""
        self.weights.publish()
        return self.policy.with_sampling(max_tokens=1).generate_from_ids(PROMPTS)[data.LOG_PROBS]

    def check(self) -> float:
        """Greatest difference between both sides' log-probs; past 1e-4 the canary raises."""
        self.weights.publish()
        canary = Canary(self.policy, TokenScorer(self.model), self.weights, prompts=PROMPTS,
                        tolerance=(1e-4, 1e-4))
        return canary.check().max_abs_diff


@pytest.fixture(scope="module", params=[
    name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def shared(request, tmp_path_factory) -> Shared:
    return share(save_family(request.param, tmp_path_factory.mktemp(request.param)))


def share(folder: Path) -> Shared:
    """Start an engine with a saved model, and let it share the trainer's weights."""
    from grpo.policies.inprocess import engine_module, start_engine

    skip_inspection(folder)
    engine = start_engine(str(folder), device=torch.device("cpu"), dtype=torch.float32,
                          max_model_len=128, max_num_seqs=8)
    RUNNING.append(engine)
    model = load_family(folder)
    weights = SingleCopy(model, engine)
    policy = VLLMPolicy(engine, Sampling(max_tokens=8), pad_token_id=0, eos_token_ids=(),
                        version=lambda: weights.version)
    return Shared(model, weights, policy, engine_module(engine))


def skip_inspection(folder: Path) -> None:
    """vLLM looks at a class it meets for the first time in a process of its own: 20 s each."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    for name in AutoConfig.from_pretrained(folder).architectures:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def update(model: nn.Module, *, seed: int) -> None:
    """Write into every parameter in place, as an optimizer does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.97).add_(0.02 * torch.randn_like(param))


def test_log_probs_agree_before_and_after_updates_of_every_parameter(shared):
    before = shared.sample()
    assert shared.check() < 1e-4
    for seed in (1, 2):
        update(shared.model, seed=seed)
        assert shared.check() < 1e-4
    assert (shared.sample() - before).abs().max() > 1e-2
    assert shared.weights.unshared() == []


def test_the_engine_sees_an_update_of_each_single_parameter(shared):
    before = shared.sample()
    assert torch.equal(shared.sample(), before)
    torch.manual_seed(4)
    for name, param in shared.model.named_parameters():
        with torch.no_grad():
            param.add_(0.05 * torch.randn_like(param))
        after = shared.sample()
        assert not torch.equal(after, before), name
        before = after


def test_only_the_padding_of_the_vocabulary_stays_the_engines(shared):
    weights = shared.weights
    padding = {name: tensor.detach()[VOCABULARY:].clone()
               for name, tensor in weights.engine_params.items()
               if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    assert all(len(rows) == 62 for rows in padding.values())
    before = {name: tensor.detach().clone() for name, tensor in weights.engine_params.items()}
    update(shared.model, seed=3)
    for name, tensor in weights.engine_params.items():
        rows = (tensor != before[name]).reshape(len(tensor), -1).any(1)
        assert rows[:VOCABULARY].all(), name  # no other matrix has more rows
        assert torch.equal(tensor[VOCABULARY:], padding.get(name, tensor[VOCABULARY:])), name


def test_a_tied_head_is_one_parameter_on_both_sides_and_moves_with_the_embedding(shared):
    embedding = shared.engine_module.model.embed_tokens
    head = getattr(shared.engine_module, "lm_head", embedding)  # vLLM's Gemma 2 has none
    ours = shared.model.get_input_embeddings().weight
    assert ours.data_ptr() == embedding.weight.data_ptr()
    assert shared.model.lm_head.weight.data_ptr() == head.weight.data_ptr()
    tied = shared.model.config.tie_word_embeddings
    assert (shared.model.lm_head.weight is ours) == tied
    assert (head.weight is embedding.weight) == tied
    before = shared.sample()
    original = ours.detach()[UNSEEN].clone()
    with torch.no_grad():
        ours[UNSEEN] *= 1.5  # never an input, so only the head can show it
    assert torch.equal(shared.sample(), before) != tied
    shared.check()
    with torch.no_grad():
        ours[UNSEEN] = original


def test_every_layer_puts_out_the_same_on_both_sides(shared):
    shared.weights.publish()
    prompt = PROMPTS[-1]
    ours, theirs = trainer_outputs(shared.model, prompt), engine_outputs(shared.policy, prompt)
    assert list(ours) == list(theirs) == ["embed_tokens", "layers.0", "layers.1", "norm"]
    for name in ours:
        assert (ours[name] - theirs[name]).norm() < 1e-5 * ours[name].norm(), name


def test_the_canary_names_a_head_of_which_one_row_differs(shared, monkeypatch):
    head = shared.model.lm_head.weight
    name = "model.embed_tokens" if shared.model.config.tie_word_embeddings else "lm_head"
    memory = head.data
    head.data = memory.clone()
    monkeypatch.setattr(shared.weights, "unshared", lambda: [])
    memory[UNSEEN] += 5.0
    with pytest.raises(StaleWeightsError, match=rf"these parameters differ: {name}\.weight; all "
                                                "layer outputs agree"):
        shared.check()
    memory.copy_(head.data)
    head.data = memory
    shared.check()


def test_buffers_keep_their_values(shared):
    fresh = dict(load_family(shared.model.config._name_or_path).named_buffers())
    ours = dict(shared.model.named_buffers())
    assert ours.keys() == fresh.keys()
    assert any("inv_freq" in name for name in ours)
    assert all(torch.equal(ours[name], fresh[name]) for name in fresh)


def test_names_and_shapes_alone_give_the_same_layout_with_tied_names_listed_once_or_twice(shared):
    def shapes(module: nn.Module, **options) -> dict[str, Tensor]:
        memory: dict[int, Tensor] = {}
        return {name: memory.setdefault(id(p), torch.empty_like(p, device="meta"))
                for name, p in module.named_parameters(**options)}

    places = shared.weights.places
    assert engine_layout(shapes(shared.model), shapes(shared.engine_module)) == places
    twice = engine_layout(shapes(shared.model, remove_duplicate=False),
                          shapes(shared.engine_module, remove_duplicate=False))
    assert twice.pop("lm_head.weight") == places.get("lm_head.weight",
                                                     places["model.embed_tokens.weight"])
    places = {name: place for name, place in places.items() if name != "lm_head.weight"}
    assert twice == places


@pytest.mark.slow
def test_a_routing_that_the_engine_does_not_have_is_found_before_anything_is_trained(tmp_path):
    """vLLM's OLMoE never weighs the chosen experts anew."""
    from transformers import AutoConfig

    folder = save_family("olmoe", tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.norm_topk_prob = True
    config.save_pretrained(folder)
    shared = share(folder)
    with pytest.raises(StaleWeightsError, match="all synchronised parameters are equal.*another "
                                                "routing to experts"):
        shared.check()


@pytest.mark.slow
def test_adapters_on_the_attention_of_experts_reach_the_engine(tmp_path):
    pytest.importorskip("peft")
    from grpo.policies.handle import InProcessEngine
    from grpo.policies.inprocess import start_engine
    from grpo.weights.adapters import make_lora
    from grpo.weights.lora import LoRASync

    folder = save_family("qwen3-moe", tmp_path)
    skip_inspection(folder)
    engine = start_engine(str(folder), device=torch.device("cpu"), dtype=torch.float32,
                          max_model_len=256, max_num_seqs=8, max_lora_rank=8)
    RUNNING.append(engine)
    model = make_lora(load_family(folder), r=8, alpha=8)
    weights = LoRASync(model, InProcessEngine(engine))
    policy = policy_of(engine, weights, lora_request=weights.lora_request)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.add_(0.1 * torch.randn_like(param))
    weights.publish()
    assert gap(model, policy) < 1e-4
    assert gap(load_family(folder), policy) > 1e-2, "the adapter changed nothing"
    assert weights.differing() == []
