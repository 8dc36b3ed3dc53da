"""Adapters on the trainer's model: what they train, what they leave alone, how they are saved."""

from __future__ import annotations

import json

import pytest
import torch

from grpo import data
from grpo.objectives import TokenScorer
from grpo.policies.scoring import ReferenceScorer
from grpo.weights.adapters import (
    AdapterDisabledReference,
    adapters,
    adapters_disabled,
    load_adapter_tensors,
    make_lora,
    save_adapter,
)
from grpo.weights.fingerprint import fingerprint
from grpo.weights.layout import base_parameters
from grpo.weights.lora import HTTPLoRASync
from grpo.weights.proof import WeightProof

from .faults import FAULTS, Changing, Faulty, params, updates_until_found

pytest.importorskip("peft")
TOKENS = torch.tensor([[3, 4, 5, 6]])


def randomise(model) -> None:
    """B is zero at first: without this no adapter changes anything."""
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.normal_(std=0.3)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def test_only_adapters_train_and_the_base_keeps_its_memory(tiny_model):
    before = {name: param.data_ptr() for name, param in tiny_model.named_parameters()}
    model = make_lora(tiny_model, r=4)
    assert model is tiny_model
    assert {name: p.data_ptr() for name, p in base_parameters(model).items()} == before
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(adapters(model)) == 2 * 7


def test_a_new_adapter_changes_nothing_and_a_trained_one_can_be_switched_off(tiny_model):
    base = logits(tiny_model)
    model = make_lora(tiny_model, r=4)
    assert torch.equal(logits(model), base)
    randomise(model)
    changed = logits(model)
    assert (changed - base).abs().max() > 0.1
    with adapters_disabled(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), changed)
    assert all(a.a.requires_grad and a.b.requires_grad for a in adapters(model).values())


def test_adapters_are_switched_on_again_after_an_error_and_frozen_ones_stay_frozen(tiny_model):
    model = make_lora(tiny_model, r=4)
    randomise(model)
    changed = logits(model)
    frozen = adapters(model)["model.layers.0.mlp.up_proj"].a.requires_grad_(False)
    with pytest.raises(KeyError), adapters_disabled(model):
        raise KeyError
    assert torch.equal(logits(model), changed)
    assert not frozen.requires_grad


def test_the_folded_factors_are_what_the_model_adds(tiny_model):
    model = make_lora(tiny_model, r=4, alpha=12)
    randomise(model)
    name = "model.layers.1.mlp.down_proj"
    factors = adapters(model)[name].tensors()
    layer = model.get_submodule(name)
    x = torch.randn(5, 16, dtype=torch.float64)
    added = layer(x) - layer.base_layer(x)
    torch.testing.assert_close(added, x @ factors["lora_A"].T @ factors["lora_B"].T)


def test_targets_and_layers_can_be_chosen(tiny_model):
    model = make_lora(tiny_model, target_modules=["q_proj", "down_proj"], layer_indices=[1])
    assert list(adapters(model)) == ["model.layers.1.self_attn.q_proj",
                                     "model.layers.1.mlp.down_proj"]


def test_adapters_have_the_dtype_of_their_weights(make_model):
    model = make_lora(make_model(dtype=torch.bfloat16), r=2)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_the_scorer_still_finds_the_output_head(tiny_model):
    assert TokenScorer(make_lora(tiny_model)).chunked


@pytest.mark.parametrize(("options", "message"), [
    ({"r": 0}, "r=0 must be a whole number"),
    ({"r": 2.5}, "r=2.5 must be a whole number"),
    ({"alpha": 0}, "alpha=0 must be positive"),
    ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    ({"target_modules": "q_proj"}, "target_modules='q_proj' must be a list"),
    ({"target_modules": []}, r"target_modules=\[\] must be a list"),
    ({"target_modules": ["q_proj", "query"]}, r"called \['query'\]; there are .*'q_proj'"),
    ({"target_modules": ["lm_head"]}, r"called \['lm_head'\]"),
    ({"layer_indices": [1, 2]}, r"\[2\] are not among the model's layers 0 to 1"),
    ({"layer_indices": []}, "would leave nothing to train"),
])
def test_options_are_checked(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        make_lora(tiny_model, **options)
    assert all(param.requires_grad for param in tiny_model.parameters())


def test_a_model_gets_adapters_once(tiny_model):
    make_lora(tiny_model)
    with pytest.raises(ValueError, match="already has LoRA adapters"):
        make_lora(tiny_model)


def test_a_model_without_adapters_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="no LoRA adapters; make them with make_lora"):
        adapters(tiny_model)
    with pytest.raises(ValueError, match="no LoRA adapters"):
        AdapterDisabledReference(tiny_model, temperature=1.0, max_tokens=100)


def test_adapters_that_are_more_than_two_factors_are_named(tiny_model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model, LoraConfig(r=2, use_dora=True, target_modules=["v_proj"]))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.v_proj: .*another kind"):
        adapters(model)


def test_the_reference_is_the_model_before_its_adapters(make_model, make_batch):
    batch = make_batch(make_model())
    frozen = ReferenceScorer(make_model(), temperature=0.7, max_tokens=20)(batch.clone())
    model = make_lora(make_model(), r=4, dropout=0.5)
    randomise(model)
    model.train()
    ours = AdapterDisabledReference(model, temperature=0.7, max_tokens=20)(batch.clone())
    torch.testing.assert_close(ours[data.REF_LOG_PROBS], frozen[data.REF_LOG_PROBS])
    assert model.training
    assert any(param.requires_grad for param in model.parameters())
    trained = ReferenceScorer(model, temperature=0.7, max_tokens=20)(batch.clone())
    assert (trained[data.REF_LOG_PROBS] - ours[data.REF_LOG_PROBS]).abs().max() > 0.1


def test_a_saved_adapter_is_what_peft_loads(make_model, tmp_path):
    from peft import PeftModel

    model = make_lora(make_model(), r=4, alpha=12, target_modules=["q_proj", "up_proj"])
    randomise(model)
    folder = save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_model(), str(folder), autocast_adapter_dtype=False)
    assert torch.equal(logits(loaded), logits(model))
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert list(adapters(loaded)) == list(adapters(model))
    b = load_adapter_tensors(folder)["model.layers.0.mlp.up_proj"]["lora_B"]
    assert torch.equal(b, adapters(model)["model.layers.0.mlp.up_proj"].b)


def test_saving_replaces_the_folder_and_leaves_nothing_else(tiny_model, tmp_path):
    model = make_lora(tiny_model, r=2)
    save_adapter(model, tmp_path / "adapter")
    (tmp_path / "adapter" / "stale").touch()
    randomise(model)
    save_adapter(model, tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors"}


class Server:
    """Loads adapters as the engine server does: from the folder, each under a name of its own."""

    SCALING = 32 / 2  # the default alpha at rank 2

    def __init__(self):
        self.loaded, self.versions = {}, []

    def load_lora(self, path, *, name, version):
        name = f"{name}-v{len(self.loaded) + 1}"
        self.loaded[name] = load_adapter_tensors(path)
        self.versions.append(version)
        return name

    def lora_fingerprints(self, shapes):
        if not self.loaded:
            return [{}]
        *_, newest = self.loaded.values()
        held = {f"{module}.lora_A": factors["lora_A"] for module, factors in newest.items()}
        held |= {f"{module}.lora_B": factors["lora_B"] * self.SCALING
                 for module, factors in newest.items()}
        return [{name: ["float64", 0, rows, 0, columns, fingerprint(held[name])]
                 for name, (rows, columns) in shapes.items()}]


def test_each_version_is_loaded_once_and_the_newest_two_folders_stay(tiny_model, tmp_path):
    server, model = Server(), make_lora(tiny_model, r=2)
    sync = HTTPLoRASync(server, model, folder=tmp_path, version=4)
    assert (sync.lora_name, len(sync.differing())) == (None, 28)
    for version in (5, 6, 7):
        randomise(model)
        assert sync.publish() == sync.version == version
        assert sync.differing() == sync.unshared() == []
    assert (server.versions, sync.lora_name) == ([5, 6, 7], "policy-v3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_step_6", "adapter_step_7"]
    name = "model.layers.1.self_attn.k_proj"
    assert torch.equal(server.loaded["policy-v3"][name]["lora_B"], adapters(model)[name].b)
    with torch.no_grad():
        adapters(model)[name].b.add_(1.0)
    assert sync.differing() == [f"{name}.lora_B"]


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_a_server_that_keeps_an_older_adapter_fails_the_proof(tiny_model, tmp_path, fault):
    server, model = Server(), make_lora(tiny_model, r=2)
    sync = HTTPLoRASync(server, model, folder=tmp_path)
    sync.publish()
    WeightProof(sync).self_test(Changing(model))
    assert sync.version == 1 and [path.name for path in tmp_path.iterdir()] == ["adapter_step_1"]

    class Lossy(Faulty):
        """Loads into new memory each time, so that the newest load is hit."""

        def publish(self):
            *_, before = server.loaded.values()
            version = self.weights.publish()
            *_, newest = server.loaded.values()
            for name in newest if self.active else ():
                if fault == FAULTS[0] or name == "model.layers.1.mlp.up_proj":
                    newest[name] = before[name]
            return version

    lossy = Lossy(sync, [params(model)])
    assert updates_until_found(lossy, model) == 1 or fault == FAULTS[1]


def test_a_version_that_the_server_refused_does_not_count(tiny_model, tmp_path):
    server = Server()
    sync = HTTPLoRASync(server, make_lora(tiny_model, r=2), folder=tmp_path)
    sync.publish()

    def refuse(path, *, name, version):
        raise RuntimeError("no room")

    server.load_lora = refuse
    with pytest.raises(RuntimeError, match="no room"):
        sync.publish()
    assert (sync.version, sync.lora_name) == (1, "policy-v1")
    del server.load_lora
    assert sync.publish() == 2
    assert (server.versions, sync.lora_name) == ([1, 2], "policy-v2")
