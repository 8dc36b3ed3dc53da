"""The formulas of the ledger against what real models, heads and caches hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from grpo.objectives.head import (
    default_chunk_size,
    fused_loss,
    linear_log_probs,
    log_probs_from_logits,
)
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.memory import head_bytes, layer_bytes, outer_bytes

from .memory_probe import AllocationTracker, family, real_model

MEASURED_HEAD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "head_h200.json"
FAMILIES = ("Qwen2Config", "LlamaConfig", "Qwen3Config")
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def kept_bytes(model, *, rows: int = 4, width: int = 64) -> float:
    """Bytes a token that a forward pass up to the head saves for the backward pass."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    storages = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[0, width // 2:] = False
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.randint(2, 200, (rows, width)), attention_mask=mask,
                         use_cache=False)
    return sum(storage.nbytes() for storage in storages.values()) / (rows * width)


# -- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_real_model(name, tied):
    config = family(name, tie_word_embeddings=tied)
    params = list(real_model(config).parameters())
    shape = ModelShape.of(config)
    assert shape.parameters == sum(param.numel() for param in params)
    assert shape.tensors == len(params)


def test_a_folder_gives_the_sizes_of_its_configuration(tmp_path):
    config = family("Qwen2Config")
    config.save_pretrained(tmp_path)
    assert ModelShape.of(str(tmp_path)) == ModelShape.of(config)


def test_a_model_is_counted_once_and_anew_when_its_folder_has_changed(tmp_path, monkeypatch):
    family("Qwen2Config", vocab_size=71).save_pretrained(tmp_path)
    first = ModelShape.of(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ModelShape, "_count", None)  # nothing is built again
        assert ModelShape.of(str(tmp_path)) == first
    family("Qwen2Config", vocab_size=72).save_pretrained(tmp_path)
    assert ModelShape.of(str(tmp_path)).vocabulary == 72 == first.vocabulary + 1


@HALF_AND_FULL
@pytest.mark.parametrize("name", FAMILIES)
def test_kv_cache_of_a_token_is_that_of_transformers(name, dtype):
    from transformers import DynamicCache

    config = family(name)
    model, cache = real_model(config, dtype).eval(), DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 5, dtype=torch.int64), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 10 * ModelShape.of(config).kv_bytes_per_token(dtype)


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_adapters_are_those_of_peft(targets):
    peft = pytest.importorskip("peft")
    config = family("Qwen2Config")
    adapted = peft.get_peft_model(real_model(config), peft.LoraConfig(
        r=3, target_modules="all-linear" if targets is None else list(targets)))
    trainable = [param.numel() for param in adapted.parameters() if param.requires_grad]
    assert sorted(ModelShape.of(config).adapter_sizes(LoRA(rank=3, targets=targets))) == sorted(
        trainable)


def test_a_lora_target_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"\['qkv'\].*down_proj"):
        ModelShape.of(family("Qwen2Config")).adapter_sizes(LoRA(targets=("qkv",)))


# -- activations ----------------------------------------------------------------------------------


@HALF_AND_FULL
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_keeps_what_the_formula_says(name, attention, dtype):
    config, deeper = family(name), family(name, num_hidden_layers=3)
    config._attn_implementation = deeper._attn_implementation = attention
    measured = kept_bytes(real_model(deeper, dtype)) - kept_bytes(real_model(config, dtype))
    formula = layer_bytes(ModelShape.of(config), dtype, row_tokens=64,
                          eager_attention=attention == "eager")
    assert formula == pytest.approx(measured, rel=0.02)


@HALF_AND_FULL
@pytest.mark.parametrize("name, options", [
    ("Gemma2Config", {}), ("Gemma3TextConfig", {}), ("Phi3Config", {}),
    ("Qwen3MoeConfig", {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 4}),
    ("MixtralConfig", {"num_experts_per_tok": 2, "num_local_experts": 4}),
])
def test_other_families_are_within_a_tenth(name, options, dtype):
    config, deeper = family(name, **options), family(name, num_hidden_layers=3, **options)
    measured = kept_bytes(real_model(deeper, dtype)) - kept_bytes(real_model(config, dtype))
    formula = layer_bytes(ModelShape.of(config), dtype, row_tokens=64)
    assert formula == pytest.approx(measured, rel=0.1)


@pytest.mark.slow
@HALF_AND_FULL
def test_compiled_layers_keep_what_the_formula_says(dtype):
    def compiled(layers: int) -> float:
        model = real_model(family("Qwen2Config", num_hidden_layers=layers), dtype)
        torch._dynamo.reset()
        for layer in model.base_model.layers:
            # The partitioner decides what is kept; code generation changes nothing about it.
            layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition")
        return kept_bytes(model)

    formula = layer_bytes(ModelShape.of(family("Qwen2Config")), dtype, row_tokens=64,
                          compiled=True)
    assert formula == pytest.approx(compiled(3) - compiled(2), rel=0.1)


@HALF_AND_FULL
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_forward_pass_keeps_layers_and_what_surrounds_them(checkpointing, dtype):
    config = family("Qwen2Config", num_hidden_layers=6)
    model, shape = real_model(config, dtype), ModelShape.of(config)
    of_layer = layer_bytes(shape, dtype, row_tokens=64)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        of_layer = 64 * dtype.itemsize
    formula = 6 * of_layer + outer_bytes(shape, dtype)
    assert formula == pytest.approx(kept_bytes(model), rel=0.3 if checkpointing else 0.05)


# -- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, head, chunk_size", [
    ("fused_loss, entropy", "fused", None),
    ("fused_loss, entropy, 2048 tokens", "fused", 2048),
    ("linear_log_probs, entropy", "chunked", None),
    ("plain logits, entropy", "logits", None),
])
def test_the_head_takes_what_was_measured_on_a_gpu(way, head, chunk_size):
    measured = json.loads(MEASURED_HEAD.read_text())["ways"][way]["gib"]
    shape = ModelShape.of(family("Qwen2Config", vocab_size=151_936, hidden_size=1536))
    sizes = head_bytes(shape, torch.bfloat16, head=head, tokens=8192, device="cuda",
                       chunk_size=chunk_size)
    assert (sizes.work + sizes.gradients) / 2**30 == pytest.approx(measured, rel=0.05)


@HALF_AND_FULL
@pytest.mark.parametrize("head", ["fused", "chunked", "logits"])
def test_the_head_takes_what_is_allocated_on_a_cpu(head, dtype):
    config = family("Qwen2Config", vocab_size=40_000, hidden_size=32)
    tokens, chunk = 512, 256
    hidden = torch.randn(tokens, 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(40_000, 32, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 40_000, (tokens,))
    with AllocationTracker() as allocations:
        if head == "fused":
            loss, *_ = fused_loss(hidden, weight, targets, lambda lp, h, a, b: -lp.sum()[None],
                                  borders=range(0, tokens + 1, chunk))
        elif head == "chunked":
            loss = linear_log_probs(hidden, weight, targets, chunk_size=chunk)[0]
        else:
            loss = log_probs_from_logits(hidden @ weight.t(), targets)[0]
        loss.sum().backward()
    sizes = head_bytes(ModelShape.of(config), dtype, head=head, tokens=tokens, device="cpu",
                       chunk_size=chunk)
    assert sizes.work + sizes.gradients == pytest.approx(allocations.peak, rel=0.3)


@HALF_AND_FULL
def test_without_a_chunk_size_the_head_takes_that_of_the_device(dtype):
    shape = ModelShape.of(family("Qwen2Config", vocab_size=50_000))
    chunk = default_chunk_size(torch.empty(1, 64, dtype=dtype), torch.empty(50_000, 64))
    sizes = [head_bytes(shape, dtype, head="fused", tokens=4096, device="cpu", chunk_size=size)
             for size in (None, chunk)]
    assert sizes[0] == sizes[1]


def test_a_frozen_output_matrix_has_no_gradient():
    shape = ModelShape.of(family("Qwen2Config"))
    sizes = [head_bytes(shape, torch.float32, head="fused", tokens=8, device="cpu",
                        weight_gradient=needed).gradients for needed in (True, False)]
    assert sizes[0] - sizes[1] == 4 * 256 * 64
