"""A plan whose times are measured here: what it then predicts is what a run takes."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import hydra
import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra

from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import ConfigError
from grpo.config.schema import Config, load_config
from grpo.envs.tasks.arithmetic import ArithmeticTask
from grpo.policies.model_shape import LoRA
from grpo.run.build_rewards import reward_function
from grpo.run.cli.names import recipes
from grpo.run.plan import calibrate
from grpo.run.plan.calibrate import Measured
from grpo.run.plan.costs import H200, Layout, decode_seconds, train_seconds
from grpo.run.plan.options import PlanOptions
from grpo.run.plan.planner import make_planner
from grpo.run.plan.simulate import Work

KEYS = ["device=cpu", "env.num_envs=8", "env.repeats=4", "inference_model.backend=transformers",
        "model.warm_start_steps=5", "inference_model.max_tokens=24"]


def planner_of(tmp_path, *keys: str, **options):
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        config = load_config(hydra.compose("grpo_async", overrides=[*KEYS, *keys]), AsyncConfig)
    return make_planner(config, frozenset(), PlanOptions(num_gpus=2, **options), tmp_path)


def measured(monkeypatch, planner) -> Config:
    """The configuration that a calibration runs."""
    seen = []
    monkeypatch.setattr(calibrate, "_measure", lambda config, _: seen.append(config))
    with pytest.raises(AttributeError):  # as nothing was measured
        calibrate.calibrated(planner)
    return seen[0]


def test_what_is_measured_is_a_run_on_one_device(tmp_path, monkeypatch):
    planner = planner_of(tmp_path, "train_model.num_devices=2", "ref_model.num_devices=1",
                         "inference_model.num_devices=2", "train.kl_to_ref_coeff=0.1")
    config = measured(monkeypatch, planner)
    assert not config.has_workers and config.train_model.ranks == 1


@pytest.mark.parametrize("keys", [
    ["logging.backends=[wandb]", "logging.wandb_project=x"],
    ["ref_model.num_devices=2", "ref_model.sharded=true", "train.kl_to_ref_coeff=0.1"],
    ["train.overlong_buffer=0.5", "train.overlong_factor=0.5"], ["train.max_sampling_rounds=4"],
    ["eval.benchmarks=[gsm8k]", "eval.at_checkpoints=true", "eval.samples=4"],
    ["logging.num_samples=2"],
], ids=" ".join)
def test_keys_that_a_run_accepts_can_be_measured(tmp_path, monkeypatch, keys):
    config = measured(monkeypatch, planner_of(tmp_path, *keys))
    assert not config.has_workers and config.logging.backends == []
    assert config.train.max_sampling_rounds is None and config.eval.benchmarks is None
    named = planner_of(tmp_path, "ref_model.name=other", "train.kl_to_ref_coeff=0.1")
    assert measured(monkeypatch, named).ref_model.name == "other"


def test_a_punishment_of_long_completions_is_called_though_these_are_cut(tmp_path, monkeypatch):
    config = measured(monkeypatch, planner_of(
        tmp_path, "inference_model.max_tokens=1000", "inference_model.max_model_len=1200",
        "env.reward=[exact_match,soft_overlong_punishment]",
        "env.reward_options={soft_overlong_punishment: {max_completion_len: 1000, "
        "soft_punish_cache: 200}}"))
    assert config.max_tokens == 256
    reward_function(config, ArithmeticTask)  # refuses limits that no completion reaches


def test_environments_that_ask_are_not_measured(tmp_path):
    keys = ["env=atropos", "env.url=http://127.0.0.1:8000", "inference_model.max_tokens=null"]
    with pytest.raises(ConfigError, match="calibrate=true .* env=atropos .*remove it"):
        planner_of(tmp_path, *keys, calibrate=True)
    planner_of(tmp_path, *keys)


@pytest.mark.parametrize(("keys", "lora"), [
    ([], False), (["train_model.lora.enabled=true"], True),
    (["train_model.lora.enabled=true", "train_model.quantization=int8"], True)], ids=str)
def test_what_is_measured_is_compiled_where_the_run_is(tmp_path, monkeypatch, keys, lora):
    """Though its rows are shorter, for which compiling may not pay."""
    def compiled(tokens: int) -> bool:
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(recipes()), version_base=None):
            config = load_config(hydra.compose("grpo_async_gsm8k", overrides=[
                "model.name=Qwen/Qwen2.5-0.5B-Instruct", f"inference_model.max_tokens={tokens}",
                "train.data_epochs=null", "train.total_dialog_turns=null", "train.max_steps=100",
                *keys]), AsyncConfig)
        planner = make_planner(config, frozenset(), PlanOptions(num_gpus=2, gpu_memory_gib=139.8),
                               tmp_path)
        short = measured(monkeypatch, planner)
        training = planner.plan(Layout(train=1, engines=0,
                                       lora=LoRA(rank=16) if lora else None)).training
        assert short.max_tokens <= 256 and short.train_model.lora.enabled == lora
        assert (short.train_model.compile, short.train.packing) == (
            training.compiled, training.packed)
        return training.compiled

    quantised = "train_model.quantization=int8" in keys
    assert not compiled(256) and compiled(16_000) != quantised


def test_what_the_run_prints_goes_to_a_file_that_has_a_number(tmp_path, monkeypatch, capsys):
    """An engine that captures CUDA graphs asks for the number of the standard output."""
    def assemble(*_):
        print("a banner", sys.stdout.fileno())
        raise StopIteration

    monkeypatch.setattr(calibrate, "assemble", assemble)
    with pytest.raises(StopIteration):
        calibrate.calibrated(planner_of(tmp_path))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_step_takes_what_the_plan_says(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen, real = [], calibrate._measure
    monkeypatch.setattr(calibrate, "_measure",
                        lambda *arguments: seen.append(real(*arguments)) or seen[-1])
    planner = planner_of(tmp_path)
    begin = time.monotonic()
    found = calibrate.calibrated(planner, seconds=3.0)
    assert time.monotonic() - begin < 60
    [measured] = seen
    planned = found.plan(Layout(train=1, engines=0))
    assert planned.outcome.step == pytest.approx(measured.seconds["step"], rel=0.35)
    assert planned.phases.train(32 * measured.mean_tokens) == pytest.approx(
        measured.seconds["train"] + measured.seconds["optimizer"], rel=0.05)
    # Lengths are those that were seen, what lies between devices is as before.
    assert found.options.response_tokens == round(measured.lengths.mean())
    assert found.options.prompt_tokens == round(measured.prompt_tokens) != 256
    assert "this machine" in found.costs.source and found.costs.link_rate == H200.link_rate


def test_lengths_that_were_given_or_cut_stay(tmp_path):
    measured = Measured({}, 10.0, 1.0, np.array([5.0, 10.0]), 0.01, 7.0, False)
    given = planner_of(tmp_path, prompt_tokens=99, response_tokens=3, sigma=0.1)
    assert calibrate._with_lengths(given, measured) == given.options
    long = planner_of(tmp_path, "inference_model.max_tokens=1000")
    assert calibrate._with_lengths(long, measured).response_tokens is None
    assert calibrate._with_lengths(long, measured).prompt_tokens == 7


@pytest.mark.parametrize("whole_batch", [True, False])
@pytest.mark.parametrize("rollouts", [1, 4])
def test_decode_steps_are_scaled_to_what_was_measured(tmp_path, whole_batch, rollouts):
    """A GPU that is three times as slow, in a process that is as fast, is found again."""
    shape = planner_of(tmp_path).shape
    work = Work(groups=64, rows=8, prompt_tokens=10, max_tokens=100, mean_tokens=50, sigma=0.0)
    slow = replace(H200, decode_rate=1e8 * shape.parameters, decode_floor=1e-6, decode_scale=3.0)
    rows = 512 // rollouts
    lengths = np.tile(np.repeat([20.0, 40.0], rows // 2), rollouts)

    def step(costs, count: int) -> float:
        return decode_seconds(costs, shape, work, Layout(train=1, engines=0), count)

    alive = ([rows] * 40 if whole_batch else [rows] * 20 + [rows // 2] * 20) * rollouts
    measured = Measured({}, 30.0, sum(step(slow, count) for count in alive), lengths, 1e-6, 10.0,
                        whole_batch, rollouts)
    plain = replace(slow, decode_floor=0.0, decode_scale=1.0)
    assert calibrate._scale(measured, 1e-6, lambda count: step(plain, count)) == \
        pytest.approx(3.0, rel=1e-3)
    # Where the process alone takes longer than all that was measured, the rate is the table's.
    assert calibrate._scale(measured, 1e3, lambda count: step(plain, count)) == 1.0


@pytest.mark.parametrize(("keys", "lora"), [
    (["train_model.lora.enabled=true"], LoRA(rank=16)),
    (["train_model.lora.enabled=false", "train.optim_batch_size=8", "train.epochs=2"], None)])
def test_what_was_measured_is_planned_as_it_was_measured(tmp_path, keys, lora):
    """What adapters cost beside a training of all weights, and several optimizer steps beside one,
    is in the measured times already."""
    planner = planner_of(tmp_path, *keys)
    seconds = {"step": 3.0, "train": 1.0, "optimizer": 0.5, "canary": 0.1, "generate": 1.0}
    work = Work(groups=8, rows=4, prompt_tokens=10, max_tokens=24, mean_tokens=10, sigma=0.0)
    costs = calibrate._fitted(planner.costs, planner, work, Measured(
        seconds, 10.0, 1.0, np.full(32, 10.0), 0.1, 10.0, True))
    alone = Layout(train=1, engines=0, lora=lora)
    training = planner.plan(alone).training
    assert train_seconds(costs, planner.shape, work, alone, training, 320) == pytest.approx(1.5)
    assert decode_seconds(costs, planner.shape, work, alone, 1) == pytest.approx(0.1, rel=1e-3)


def test_a_gpu_that_is_not_there_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="calibrate=true measures a GPU, and PyTorch sees none"):
        planner_of(tmp_path, "device=auto", calibrate=True)
