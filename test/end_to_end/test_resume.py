"""Killed at any moment, a run goes on as if nothing had happened."""

from __future__ import annotations

import signal

import pytest

from ..training.runs import timeless

SMALL = ("model.warm_start_steps=20", "env.num_envs=8", "env.repeats=4",
         "train.total_dialog_turns=384", "train.eval_frequency=3", "train.checkpoint_frequency=4",
         "train.optim_batch_size=16", "optimizer.warmup_steps=2", "train.entropy_coeff=0.01",
         "entropy_controller.target=1.0", "entropy_controller.step=0.002",
         "entropy_controller.maximum=0.02", "train.kl_to_ref_coeff=0.02", "kl_controller.kind=band",
         "kl_controller.target=0.01", "train.max_sampling_rounds=2")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    pytest.param(("backend=vllm",), marks=pytest.mark.vllm),
    pytest.param(("backend=vllm", "engine=process"), marks=pytest.mark.vllm),
    ("backend=transformers",)], ids=" ".join)
def test_killed_run_resumes_with_the_metrics_of_an_uninterrupted_one(runner, options):
    chosen = (*SMALL, *(f"inference_model.{option}" for option in options))
    runner.run(*chosen, "train.exp_name=whole", "hydra.run.dir=outputs/whole")
    killed_dir = runner.folder / "outputs" / "killed"
    process = runner.start(*chosen, "train.exp_name=killed", "hydra.run.dir=outputs/killed")
    runner.wait_for_rows(process, killed_dir, 8)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    reached = runner.metrics(killed_dir)[-1]["step"]
    assert 7 <= reached < 12, "the run was over before it could be killed"

    output = runner.run(*chosen, "train.exp_name=killed", "resume=auto")
    assert "resumed at iteration" in output
    whole = timeless(runner.metrics(runner.folder / "outputs" / "whole")[1:])
    resumed = timeless(runner.metrics(killed_dir)[1:])
    assert [row["step"] for row in resumed] == list(range(1, 13))
    assert resumed == whole
    for name in ("control/entropy_coeff", "control/kl_to_ref_coeff"):
        assert len({row[name] for row in whole}) > 1


def test_resume_auto_without_a_checkpoint_starts_a_new_run(runner):
    output = runner.run(*SMALL, "inference_model.backend=transformers", "resume=auto",
                        "train.total_dialog_turns=32", "train.exp_name=new")
    assert "no checkpoint of 'new'" in output


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_or_passed_over(runner):
    chosen = (*SMALL, "inference_model.backend=transformers", "train.total_dialog_turns=32",
              "train.checkpoint_frequency=1")
    runner.run(*chosen, "hydra.run.dir=outputs/first")
    output = runner.run(*chosen, "train.seed=1", "resume=outputs/first", expect=1)
    assert "belongs to another run (train.seed: 0 -> 1)" in output
    output = runner.run(*chosen, "train.seed=1", "resume=auto")
    assert "no checkpoint of 'arithmetic' with these settings yet" in output
