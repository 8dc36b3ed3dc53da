"""Runs that train adapters: what moves, what is saved, and that it loads elsewhere."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from grpo.policies.base import Policy
from grpo.report.loggers import read_jsonl
from grpo.run.identity import identity_changes
from grpo.training.checkpoint import find_checkpoint
from grpo.weights.adapters import adapters, adapters_disabled, load_adapter_tensors
from grpo.weights.layout import base_parameters

from ..training import runs

peft = pytest.importorskip("peft")

LORA = ("train.total_dialog_turns=64", "train.checkpoint_frequency=2", "optimizer.lr=1e-2",
        "optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.kl_to_ref_coeff=0.05",
        "train_model.lora.enabled=true", "train_model.lora.r=4", "train_model.lora.alpha=8")


@pytest.fixture
def run(train):
    """Run the trainer with adapters."""
    return lambda name, *overrides, **options: train(name, *LORA, *overrides, **options)


def values_of(model) -> dict[str, torch.Tensor]:
    return {f"{name}.{part}": tensor.detach().clone() for name, adapter in adapters(model).items()
            for part, tensor in (("A", adapter.a), ("B", adapter.b))}


def rows_of(path, *, after: int) -> list[dict]:
    return [row for row in runs.timeless(read_jsonl(path / "metrics.jsonl"))
            if row["step"] > after]


def test_adapters_train_alone_and_the_rest_is_the_reference(run, tmp_path, model_folder):
    from transformers import AutoModelForCausalLM

    trainer = run("a")
    base = dict(AutoModelForCausalLM.from_pretrained(model_folder,
                                                     dtype=torch.float32).named_parameters())
    assert all(torch.equal(param, base[name])
               for name, param in base_parameters(trainer.model).items())
    assert all(adapter.b.abs().max() > 0 for adapter in adapters(trainer.model).values())
    rows = rows_of(tmp_path / "a", after=0)
    # Before the first update the policy is its own reference; then it leaves it.
    assert rows[0]["policy/kl_to_ref"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["policy/kl_to_ref"] > 1e-5
    assert all(row["canary/max_abs_diff"] < 1e-4 for row in rows)
    state = torch.load(tmp_path / "a" / "checkpoints" / "step_000004" / "state.pt")
    assert len(state["optimizer"]["adamw"]) == 2 * len(adapters(trainer.model))


def test_the_saved_adapter_is_what_peft_loads(run, tmp_path, model_folder):
    """Onto the model the run started from, which the files themselves name."""
    trainer = run("a")
    folder = tmp_path / "a" / "final_adapter"
    assert not (tmp_path / "a" / "final_model").exists()
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    assert loaded.peft_config["default"].base_model_name_or_path == str(model_folder)
    tokens = torch.arange(10, 30)[None]
    with torch.no_grad():
        ours, theirs = trainer.model.eval()(tokens).logits, loaded(tokens).logits
        with adapters_disabled(trainer.model):
            without = trainer.model(tokens).logits
    torch.testing.assert_close(ours, theirs)
    assert (ours - without).abs().max() > 1e-3
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert (folder / "tokenizer.json").exists()


def test_a_run_goes_on_with_its_adapter_as_if_it_had_not_stopped(run, tmp_path, monkeypatch):
    started_at = []
    monkeypatch.setattr(Policy, "start_at", lambda self, version: started_at.append(version))
    whole = run("whole")
    # What a run leaves behind that is killed after two iterations.
    (tmp_path / "cut").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_000002",
                    tmp_path / "cut" / "checkpoints" / "step_000002")
    checkpoint = find_checkpoint(str(tmp_path / "cut"), root=tmp_path, exp_name="arithmetic")
    assert not checkpoint.model_folder.exists()
    resumed = run("cut", checkpoint=checkpoint)
    assert started_at == [2]  # an engine that counts for itself would be told
    assert rows_of(tmp_path / "cut", after=2) == rows_of(tmp_path / "whole", after=2)
    ours, theirs = values_of(whole.model), values_of(resumed.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    saved = load_adapter_tensors(tmp_path / "cut" / "final_adapter")
    assert all(torch.equal(saved[name]["lora_B"], adapter.b)
               for name, adapter in adapters(whole.model).items())


@pytest.mark.parametrize(("changed", "kind"), [
    ("train_model.lora={enabled: false, r: 16, alpha: 32}", "has no model/ but adapter/"),
    ("train_model.lora.r=2", "holds another adapter .*use the r, target_modules")])
def test_a_checkpoint_of_other_adapters_is_refused(run, tmp_path, changed, kind):
    run("a", "train.total_dialog_turns=32")
    checkpoint = find_checkpoint(str(tmp_path / "a"), root=tmp_path, exp_name="arithmetic")
    with pytest.raises(ValueError, match=kind):
        run("b", changed, checkpoint=checkpoint)


@pytest.mark.parametrize(("key", "value"), [("enabled", False), ("r", 8), ("alpha", 16.0),
                                            ("target_modules", ["q_proj"]), ("dropout", 0.1)])
def test_other_adapters_are_another_run(key, value):
    lora = {"enabled": True, "r": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": None}
    old, new = ({"train_model": {"lora": options}} for options in (lora, {**lora, key: value}))
    assert identity_changes(old, new) == [f"train_model.lora.{key}: {lora[key]} -> {value}"]


def test_dropout_is_in_the_training_and_not_in_the_proof(run, tmp_path):
    """It moves ratios, because the tokens were sampled without; the canary looks at the weights."""
    trainer = run("a", "train_model.lora.dropout=0.3", "train.proximal=scored")
    rows = rows_of(tmp_path / "a", after=0)
    assert all(row["canary/max_abs_diff"] < 1e-4 for row in rows)
    assert trainer.model.training
    plain = run("b", "train.proximal=scored")
    assert any(not torch.equal(one, other) for one, other in zip(
        values_of(trainer.model).values(), values_of(plain.model).values(), strict=True))
    # Without an update the ratio is 1, with dropout it is not.
    spread = [max(abs(row["policy/ratio_max"] - 1), abs(row["policy/ratio_min"] - 1))
              for row in (rows[1], rows_of(tmp_path / "b", after=0)[1])]
    assert spread[0] > 1e-3 > spread[1]
