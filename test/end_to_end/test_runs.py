"""Whole runs of ``grpo.py``: what they learn, what they leave behind, how they refuse bad input."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo.config.schema import load_config
from grpo.run.assemble import assemble

from ..config.configs import composed
from ..envs import chat_worlds
from ..envs.worlds import sums
from .conftest import ASYNC, SCRIPT

TINY = ("model.warm_start_steps=20", "env.num_envs=4", "env.repeats=4",
        "train.total_dialog_turns=32", "train.checkpoint_frequency=0")


@pytest.mark.parametrize("backend", [
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]), "transformers"])
def test_rewarding_short_answers_gives_empty_ones_within_15_steps(runner, backend):
    """The trivial task that fails when ratios, signs or weight updates are wrong."""
    runner.run(f"inference_model.backend={backend}", "env.reward=negative_length",
               "model.warm_start_steps=150", "env.num_envs=64", "train.total_dialog_turns=7680",
               "inference_model.max_tokens=8", "train.eval_frequency=0", "optimizer.lr=3e-3",
               "optimizer.schedule=constant", "hydra.run.dir=outputs/short")
    rows = runner.metrics(runner.folder / "outputs" / "short")
    assert rows[-1]["step"] == 15
    first, last = rows[1]["reward/mean"], rows[-1]["reward/mean"]
    assert first < -1.5, "the model should start with answers of about two digits"
    assert last > -0.1, f"answers are still {-last:.2f} characters long"


@pytest.mark.slow
def test_the_verifiers_reward_rises_on_problems_of_reasoning_gym(runner):
    """With a digit a completion: the embedded model finds which are most often the divisor."""
    pytest.importorskip("reasoning_gym", reason="needs `pip install reasoning-gym`")
    runner.run("env=reasoning_gym", "env.name=gcd", "env.task.options={max_numbers: 2}",
               "env.task.system_prompt=null", "env.task.num_train=400", "env.task.num_test=16",
               "inference_model.backend=transformers", "inference_model.max_tokens=1",
               "model.warm_start_steps=150", "env.num_envs=16", "env.repeats=8",
               "train.max_steps=32", "train.eval_frequency=0", "train.checkpoint_frequency=0",
               "optimizer.lr=1e-3", "optimizer.schedule=constant", "hydra.run.dir=outputs/gcd")
    rows = runner.metrics(runner.folder / "outputs" / "gcd")[1:]
    assert len(rows) == 32 and not sum(row["reward/errors"] for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[24:]) / 8 > sum(rewards[:8]) / 8 + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, ASYNC])
def test_the_reward_of_a_torchrl_environment_rises(runner, script):
    """In grpo-async.py each worker makes the environment for itself."""
    runner.environment["PYTHONPATH"] += os.pathsep + str(Path(chat_worlds.__file__).parent)
    runner.run("env=chat_env", "env.id='chat_worlds:sevens'", "env.task.num_test=10",
               "inference_model.backend=transformers", "inference_model.max_tokens=3",
               "model.warm_start_steps=150", "env.num_envs=8", "env.repeats=8",
               "train.max_steps=24", "train.eval_frequency=0", "train.checkpoint_frequency=0",
               "optimizer.lr=2e-3", "optimizer.schedule=constant", "hydra.run.dir=outputs/sevens",
               script=script)
    rows = [row for row in runner.metrics(runner.folder / "outputs" / "sevens")
            if "reward/mean" in row]
    assert not sum(row["reward/errors"] for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3


@pytest.mark.slow
def test_the_rubrics_reward_rises_on_an_environment_of_verifiers(runner):
    """The embedded model knows sums, but not how a chat asks for them. With a digit a completion
    some are right by chance; with more the rubric's other function makes them empty before."""
    if not hasattr(pytest.importorskip("verifiers"), "load_environment"):
        pytest.skip("needs the extra verifiers")
    source = Path(sums.__file__)
    (runner.folder / source.name).write_text(source.read_text())
    runner.environment["PYTHONPATH"] += os.pathsep + str(runner.folder)
    runner.run("env=verifiers", "env.id=sums", "env.task.args={highest: 4}", "env.task.num_test=9",
               "inference_model.backend=transformers", "inference_model.max_tokens=1",
               "model.warm_start_steps=150", "env.num_envs=16", "env.repeats=8",
               "train.max_steps=32", "train.eval_frequency=0", "train.checkpoint_frequency=0",
               "optimizer.lr=1e-3", "optimizer.schedule=constant", "hydra.run.dir=outputs/sums")
    rows = runner.metrics(runner.folder / "outputs" / "sums")[1:]
    assert len(rows) == 32 and not sum(row["reward/errors"] for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[24:]) / 8 > sum(rewards[:8]) / 8 + 0.1, rewards


@pytest.mark.vllm
def test_a_run_leaves_model_report_metrics_and_samples(runner):
    output = runner.run(*TINY, "hydra.run.dir=outputs/a", "logging.backends=[tensorboard,wandb]",
                        "logging.wandb_mode=offline")
    run_dir = runner.folder / "outputs" / "a"
    assert "held-out accuracy" in output and str(run_dir / "report.html") in output
    rows = runner.metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["policy/ratio_min"] == pytest.approx(1, abs=1e-3)
    assert rows[1]["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
    assert 0 <= rows[1]["canary/max_abs_diff"] < 1e-4
    assert rows[2]["policy/version"] == 2
    assert "<html" in (run_dir / "report.html").read_text()
    assert {p.name for p in (run_dir / "curves").iterdir()} >= {"reward.png", "accuracy.png"}
    assert json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0])
    assert list((run_dir / "tensorboard").iterdir())
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_final_model_loads_in_transformers(runner):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = runner.run(*TINY, "inference_model.backend=transformers", "preset=gspo",
                        "train.aggregation=token", "hydra.run.dir=outputs/a")
    assert ("preset gspo: train.objective=gspo, train.clip_epsilon=[0.0003, 0.0004], "
            "train.aggregation=token (not sequence)") in output
    folder = runner.folder / "outputs" / "a" / "final_model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("17+25=", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_finished_model_can_be_trained_further(runner):
    """``final_model/`` is loaded by Transformers and by vLLM, or this run could not start."""
    runner.run(*TINY, "hydra.run.dir=outputs/a")
    tiny = [option for option in TINY if not option.startswith("model.")]
    output = runner.run(*tiny, f"model.name={runner.folder}/outputs/a/final_model",
                        "train.kl_to_ref_coeff=0.05", "train_model.gradient_checkpointing=true",
                        "train.packing=true", "hydra.run.dir=outputs/b")
    assert "held-out accuracy" in output
    assert "policy/kl_to_ref" in runner.metrics(runner.folder / "outputs" / "b")[-1]


@pytest.mark.slow
def test_the_length_may_be_given_in_passes_over_the_problems(runner):
    output = runner.run(*TINY[:3], "train.data_epochs=0.3", "env.task.num_train=40",
                        "optimizer.warmup_steps=1",
                        "train.eval_frequency=0", "train.checkpoint_frequency=0",
                        "inference_model.backend=transformers", "hydra.run.dir=outputs/passes")
    assert runner.metrics(runner.folder / "outputs" / "passes")[-1]["step"] == 3  # of 4 problems
    words = " ".join(output.replace("│", " ").split())
    assert ("3 iterations (train.max_steps), 3 optimizer steps, 48 completions (train.total_dialog_"
            "turns), 0.3 passes over the training problems (train.data_epochs)") in words


@pytest.mark.slow
@pytest.mark.vllm
def test_gsm8k_runs_on_real_rows(runner, gsm8k_folder):
    runner.run("--config-name", "grpo_gsm8k", f"env.data_path={gsm8k_folder}", "env.num_envs=4",
               "env.repeats=4", "env.task.num_test=8", "inference_model.max_tokens=16",
               "train.total_dialog_turns=32", "hydra.run.dir=outputs/gsm8k")
    rows = runner.metrics(runner.folder / "outputs" / "gsm8k")
    assert rows[-1]["reward/errors"] == 0
    assert rows[-1]["tokens/response_max"] <= 16


BAD_INPUT = [
    (["env.data_path=x"], "data_path"),
    (["inference_model.kv_cache_memory_bytes=1"],
     "inference_model.kv_cache_memory_bytes=1 is not read"),
    (["train_model.compile=true", "device=cpu"], "train_model.compile=true is for GPUs"),
    (["--config-name=grpo_gsm8k", "env.data_path=./missing"], "env.data_path"),
    (["env.task.num_test=0"], "split 'test' is empty"),
    (["inference_model.max_tokens=4000"], "inference_model.max_tokens=4000 leaves no room"),
    (["preset=gspo", "train.mismatch={tis: 2.0}"], "set proximal='current'"),
    (["distill.teacher=./missing", "distill.topk_coeff=1"],
     "distill.teacher=./missing: there is no such folder"),
    (["env.max_prompt_tokens=3"], "nothing is left, raise env.max_prompt_tokens"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_INPUT, ids=str)
def test_bad_input_is_named_before_anything_is_generated(tmp_path, monkeypatch, overrides, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "grpo"
    if overrides[0].startswith("--config-name="):
        name, overrides = overrides[0].removeprefix("--config-name="), overrides[1:]
    with pytest.raises((ValueError, OSError)) as caught:
        config = load_config(composed(
            name, "inference_model.backend=transformers", "model.warm_start_steps=2"
            if not overrides[0].startswith("model.") else "train.seed=0", *overrides))
        assemble(config, tmp_path, None, ExitStack())
    assert message in str(caught.value)


def test_long_prompts_are_skipped_and_counted(runner):
    folder = runner.folder / "data"
    folder.mkdir()
    rows = [json.dumps({"question": "1+1?" + " please" * count, "answer": "#### 2"})
            for count in (0, 0, 1, 200)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    output = runner.run(
        "--config-name", "grpo_gsm8k", f"env.data_path={folder}", "env.num_envs=2", "env.repeats=2",
        "env.max_prompt_tokens=600", "inference_model.max_tokens=4", "train.total_dialog_turns=4",
        "inference_model.backend=transformers", "env.task.num_test=null",
        "model.warm_start_steps=20")
    assert "gsm8k train: 1 of 4 prompts are longer than env.max_prompt_tokens=600" in output
