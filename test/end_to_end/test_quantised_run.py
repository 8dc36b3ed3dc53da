"""Runs whose adapters sit on a quantised base: one policy on both sides, saved, gone on with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from grpo.report.loggers import read_jsonl
from grpo.training.checkpoint import find_checkpoint
from grpo.weights.adapters import adapters
from grpo.weights.quantised import quantised_layers

from ..training import runs
from .conftest import ASYNC

peft = pytest.importorskip("peft")
pytest.importorskip("torchao")

ADAPTERS = ("train_model.lora.enabled=true", "train_model.lora.r=4", "train_model.lora.alpha=8",
            "optimizer.schedule=constant", "optimizer.warmup_steps=0")
SHORT = (*ADAPTERS, "train.total_dialog_turns=64", "train.checkpoint_frequency=2",
         "optimizer.lr=1e-2", "train.kl_to_ref_coeff=0.05")
kinds = pytest.mark.parametrize("kind", ["int8", "nf4"])


def proofs(rows: list[dict]) -> list[float]:
    """What the canary measured after each update; an evaluation has a row without."""
    return [row["canary/max_abs_diff"] for row in rows if "canary/max_abs_diff" in row]


def rows_of(path: Path, *, after: int = 0) -> list[dict]:
    return [row for row in runs.timeless(read_jsonl(path / "metrics.jsonl"))
            if row["step"] > after]


@kinds
def test_the_base_stays_in_bits_and_the_adapter_fits_what_was_written_of_it(train, tmp_path, kind):
    trainer = train("a", *SHORT, f"train_model.quantization={kind}")
    assert len([*quantised_layers(trainer.model)]) == 7 * len(trainer.model.model.layers)
    rows = rows_of(tmp_path / "a")
    assert rows[0]["policy/kl_to_ref"] == pytest.approx(0, abs=1e-6)  # of the quantised model
    assert rows[-1]["policy/kl_to_ref"] > 1e-5
    assert all(found < 1e-4 for found in proofs(rows)) and len(proofs(rows)) > 3
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        str(tmp_path / "a" / "final_adapter"), dtype=torch.float32).eval()
    tokens = torch.arange(10, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(tokens).logits, loaded(tokens).logits)


def test_a_run_goes_on_with_the_same_bits(train, tmp_path):
    options = (*SHORT, "train_model.quantization=nf4")
    whole = train("whole", *options)
    (tmp_path / "cut").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step_000002",
                    tmp_path / "cut" / "checkpoints" / "step_000002")
    checkpoint = find_checkpoint(str(tmp_path / "cut"), root=tmp_path, exp_name="arithmetic")
    resumed = train("cut", *options, checkpoint=checkpoint)
    assert rows_of(tmp_path / "cut", after=2) == rows_of(tmp_path / "whole", after=2)
    for name, adapter in adapters(whole.model).items():
        assert torch.equal(adapters(resumed.model)[name].b, adapter.b)


@pytest.mark.slow
@kinds
def test_reward_rises_on_a_quantised_base(runner, kind):
    """The embedded model, whose additions are often wrong, with Transformers."""
    runner.run(*ADAPTERS, f"train_model.quantization={kind}", "optimizer.lr=5e-3",
               "inference_model.backend=transformers", "train.max_steps=40",
               "train.eval_frequency=40", "train.checkpoint_frequency=0", "hydra.run.dir=run")
    rows = runner.metrics(runner.folder / "run")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert all(found < 1e-4 for found in proofs(rows)) and len(proofs(rows)) == 40


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("script", "steps", "options"), [
    ("grpo", 3, ()), ("grpo", 3, ("inference_model.engine=process",)),
    ("grpo", 1, ("inference_model.engine=server", "inference_model.weight_sync=restart")),
    ("grpo-async", 3, ()), ("grpo-async", 3, ("inference_model.backend=transformers",))])
def test_engines_have_the_values_that_the_bits_stand_for(runner, script, steps, options):
    """Were they started from the model as it was, the canary would end the run at once."""
    where = {"script": ASYNC} if script == "grpo-async" else {}
    runner.run(*ADAPTERS, "train_model.quantization=nf4", "optimizer.lr=1e-2", "env.num_envs=4",
               "env.repeats=4", f"train.max_steps={steps}", "train.eval_frequency=0",
               "model.warm_start_steps=20", *options, "hydra.run.dir=run", **where)
    rows = runner.metrics(runner.folder / "run")
    assert all(found < 1e-4 for found in proofs(rows)) and len(proofs(rows)) == steps
    first = next(row for row in rows if "policy/ratio_max" in row)
    assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
