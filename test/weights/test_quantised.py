"""A base in few bits beneath adapters: its gradients, its memory, what engines are given of it."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.config.schema import load_config
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.memory_plan import MemoryPlan, memory_ledger
from grpo.weights.adapters import adapters, make_lora
from grpo.weights.quantised import quantise_base, quantised_layers, require_torchao, write_base

from ..conftest import make_tiny_model

needed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
kinds = pytest.mark.parametrize("kind", ["int8", "nf4"])
CPU, TOKENS = torch.device("cpu"), torch.arange(2, 14)[None]
ADAPTERS = {"lora": {"enabled": True}}


def quantised_model(kind, **options):
    return quantise_base(make_tiny_model(dtype=torch.float32, **options), kind, device=CPU)


def written_out(model, **options):
    """A plain model with the values that the bits stand for."""
    plain = make_tiny_model(dtype=torch.float32, **options)
    with torch.no_grad():
        for name, layer in quantised_layers(model):
            plain.get_submodule(name).weight.copy_(layer.weight)
    return plain


def with_adapters(model):
    make_lora(model, r=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in adapters(model).values():
            for factor in (adapter.a, adapter.b):
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.3)
    return model


@needed
@kinds
def test_adapters_have_the_gradients_that_they_have_on_the_values_written_out(kind):
    ours = quantised_model(kind)
    theirs = with_adapters(written_out(ours))
    with_adapters(ours)
    for model in (ours, theirs):
        model(TOKENS).logits.log_softmax(-1)[..., 5].sum().backward()
    for name, adapter in adapters(ours).items():
        other = adapters(theirs)[name]
        assert adapter.b.grad.abs().max() > 1e-3
        torch.testing.assert_close(adapter.a.grad, other.a.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(adapter.b.grad, other.b.grad, rtol=1e-5, atol=1e-5)
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == {
        name for name, _ in ours.named_parameters() if ".lora_" in name}


@needed
@kinds
def test_what_engines_are_given_computes_the_same_to_the_bit(kind, tmp_path, tokenizer):
    model = quantised_model(kind, vocab_size=len(tokenizer))
    write_base(model, tokenizer, tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    unquantised = make_tiny_model(dtype=torch.float32, vocab_size=len(tokenizer))
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, loaded(TOKENS).logits)
        assert not torch.equal(model(TOKENS).logits, unquantised(TOKENS).logits)
    assert {p.name for p in tmp_path.iterdir()} == {"base"}
    assert (tmp_path / "base" / "tokenizer.json").exists()
    make_lora(model)  # whose files name what they fit
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


@needed
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_ledger_says(kind, dtype):
    sizes = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 101}
    plain = make_tiny_model(dtype=dtype, **sizes)
    model = quantise_base(copy.deepcopy(plain), kind, device=CPU)
    held = sum(p.nbytes for p in model.parameters()) + sum(
        getattr(layer, name).nbytes for _, layer in quantised_layers(model) for name in layer.kept)
    plan = MemoryPlan(shape=ModelShape.of(plain.config), dtype=dtype, device="cpu", tokens=8,
                      row_tokens=8, sharing="apart", lora=LoRA(), quantization=kind)
    rows = {row.name: row for row in memory_ledger(plan).rows}
    assert rows["weights"].bytes == held
    assert held < (0.5 if dtype is torch.float32 else 0.7) * sum(
        p.nbytes for p in plain.parameters())
    assert rows["written out"].bytes > 384 * 128 * dtype.itemsize


@needed
@kinds
def test_bits_stay_the_same_when_a_model_is_moved_or_copied(kind):
    model = quantised_model(kind)
    for other in (copy.deepcopy(model), copy.deepcopy(model).to("cpu"), model.float()):
        pairs = zip(quantised_layers(model), quantised_layers(other), strict=True)
        assert all(torch.equal(a.weight, b.weight) for (_, a), (_, b) in pairs)


@needed
def test_rounding_is_that_of_eight_and_of_four_bits():
    plain, error = make_tiny_model(dtype=torch.float32), {}
    for kind in ("int8", "nf4"):
        name, layer = next(quantised_layers(quantised_model(kind)))
        weight = plain.get_submodule(name).weight
        error[kind] = (layer.weight - weight).abs().max().item() / weight.abs().max().item()
    assert 0 < error["int8"] < 1 / 127 < error["nf4"] < 0.16


@needed
def test_models_that_cannot_be_quantised_are_refused():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    odd = make_tiny_model(dtype=torch.float32, hidden_size=12, intermediate_size=5)
    with pytest.raises(ValueError, match="nf4 takes 64 values at a time, but .* use int8"):
        quantise_base(odd, "nf4", device=CPU)
    experts = Qwen2MoeForCausalLM(Qwen2MoeConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_experts=2,
        shared_expert_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1))
    with pytest.raises(ValueError, match="train_model.quantization=int8: the experts of a layer"):
        quantise_base(experts, "int8", device=CPU)
    broken = make_tiny_model(dtype=torch.float32)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj has values that it cannot keep"):
        quantise_base(broken, "int8", device=CPU)


@pytest.mark.parametrize("found", [None, ModuleType("torchao.quantization")])
def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "torchao", None if found is None else ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", found)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchao>=0.18'"):
        require_torchao()


@pytest.mark.parametrize(("sections", "message"), [
    ({"train_model": {"quantization": "int8"}}, "set train_model.lora.enabled=true, or remove it"),
    ({"train_model": {"quantization": "nf4", "num_devices": 2, **ADAPTERS}},
     "2 devices of train_model have a slice of each"),
    ({"train_model": {"quantization": "nf4", "compile": True, **ADAPTERS}},
     "set train_model.compile=false"),
    ({"train_model": {"quantization": "nf4", **ADAPTERS},
      "inference_model": {"engine": "server", "url": "http://127.0.0.1:9001"}},
     "was started from others; remove the url"),
    ({"train_model": {"quantization": "int4", **ADAPTERS}}, "train_model.quantization='int4'")])
def test_configurations_that_cannot_be_exact_are_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        load_config(sections)


def test_weights_in_bits_are_no_copy_that_an_engine_could_read():
    assert load_config({"train_model": ADAPTERS}).shares_weights
    assert not load_config({"train_model": {"quantization": "int8", **ADAPTERS}}).shares_weights
