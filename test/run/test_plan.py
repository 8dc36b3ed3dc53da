"""``python -m grpo.run.plan``: what it prints can be typed, its memory is the ledger of a run, and
what it is told is checked."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from grpo.config.asynchronous import AsyncConfig, with_workers
from grpo.config.keys import ConfigError
from grpo.config.schema import load_config
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.cli.names import recipes
from grpo.run.device_memory import role_ledgers
from grpo.run.ledger import GIB
from grpo.run.placement import plan_devices
from grpo.run.plan.__main__ import main
from grpo.run.plan.costs import Layout
from grpo.run.plan.layouts import Planner
from grpo.run.plan.options import PlanOptions
from grpo.run.plan.page import HEADER, bottleneck, table
from grpo.run.plan.planner import make_planner
from grpo.run.plan.shapes import SIZES, shape_folder

MODEL = "model.name=Qwen/Qwen2.5-1.5B-Instruct"
SMALL = ["env.num_envs=8", "env.repeats=4", "inference_model.max_tokens=64", "gpu_memory_gib=139.8"]


def printed(capsys, *keys: str) -> str:
    main([*keys])
    return capsys.readouterr().out


def lines_to_type(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^  (grpo .*)$", text, re.MULTILINE)]


def composed(command: list[str]) -> AsyncConfig:
    """The configuration that a printed line makes."""
    program, name, option, recipe, *keys = command
    assert (program, option) == ("grpo", "--config-name") and name in ("train", "train-async")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        values = hydra.compose(recipe, overrides=keys)
    if name == "train-async":
        return load_config(values, AsyncConfig)
    config = load_config(values)
    return with_workers(config) if config.has_workers else config


def planner_of(tmp_path: Path, options: dict, *keys: str, recipe: str = "grpo_async_gsm8k"
               ) -> Planner:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(recipes()), version_base=None):
        config = load_config(hydra.compose(recipe, overrides=[MODEL, *keys]), AsyncConfig)
    return make_planner(config, frozenset(key.partition("=")[0] for key in keys),
                        PlanOptions(**{"gpu_memory_gib": 139.8} | options), tmp_path)


#: Of grpo-async.py alone.
APART = ["ray.start_timeout=300", "train.oversample=0.5", "train.update_at=group_border",
         "train.group_deadline=60", "train.rollout_timeout=100"]


@pytest.mark.parametrize("keys", [["num_gpus=2"], ["num_gpus=1"],
    ["num_gpus=2", "train_model.num_devices=2", *APART, "train_model.lora.enabled=false"],
    ["num_gpus=4", "inference_model.num_devices=3", "train.staleness=2"],
    ["num_gpus=2", "inference_model.devices=[1]"],
    ["num_gpus=4", "inference_model.num_devices=null"],
    ["num_gpus=3", "train_model.devices=[1,2]"],
    ["num_gpus=3", "train.kl_to_ref_coeff=0.1", "ref_model.devices=[0]"],
    ["num_gpus=4", "train.kl_to_ref_coeff=0.1", "ref_model.num_devices=2",
     "ref_model.sharded=true", "train_model.num_devices=1"],
    ["num_gpus=2", "ref_model.num_devices=1", "train_model.lora.enabled=true"],
    ["num_gpus=2", "ref_model.num_devices=1", "train_model.lora.enabled=true",
     "train.kl_to_ref_coeff=0.1"],
    ["num_gpus=3", "inference_model.tensor_parallel_size=2", "train_model.lora.enabled=false"],
    *(pytest.param(keys, marks=pytest.mark.slow) for keys in (
        ["num_gpus=4", "train.kl_to_ref_coeff=0.01"],
        ["num_gpus=16", "train_model.num_devices=4", "train.staleness=2"],
        ["num_gpus=16", "train_model.devices=[0,1,2,3]"],
        ["num_gpus=4", "inference_model.num_devices=2", "train_model.lora.enabled=true"]))],
    ids=" ".join)
def test_what_is_recommended_can_be_typed(capsys, keys):
    text = printed(capsys, MODEL, *keys, *SMALL)
    assert all(name in text for name in HEADER)
    given = [key for key in keys if "." in key and "null" not in key]
    commands = lines_to_type(text)
    assert len(commands) == (1 if any("lora.enabled" in key for key in given) else 2)
    layouts = re.findall(r"^recommended .*\((\d[\d+]*)", text, re.MULTILINE)
    for command, layout in zip(commands, layouts, strict=True):
        config = composed(command)
        counts = (config.train_model.ranks, config.inference_model.count, config.ref_model.count)
        assert layout == "+".join(str(n) for i, n in enumerate(counts) if n or not i)
        assert config.env.num_envs == 8 and config.model.name == MODEL.partition("=")[2]
        typed = [key for key in given if "async" in command[1] or (
            key not in APART and "staleness" not in key)]
        if config.train_model.lora.enabled:  # whose reference is the trainer's model
            typed = [key for key in typed if not key.startswith("ref_model.")]
        assert set(typed) <= set(command)
        if config.has_workers:  # the devices are enough
            plan_devices(config, kind="cuda", available=int(keys[0].partition("=")[2]))


@pytest.mark.parametrize(("keys", "trains", "reason"), [
    (["num_gpus=4", "train_model.lora.enabled=true", "train_model.quantization=int8"], {1},
     "train_model.quantization=int8 keeps whole matrices"),
    (["num_gpus=2", "optimizer.name=adafactor"], {1}, "optimizer.name=adafactor steps whole"),
    (["num_gpus=2", "train_model.layer_indices=[0,1]"], {1, 2}, "chooses weights to train")])
def test_layouts_that_no_run_accepts_are_left_out_and_counted(capsys, tmp_path, keys, trains,
                                                              reason):
    text = printed(capsys, MODEL, *keys, *SMALL)
    count, why = re.search(r"^(\d+) layouts are refused, the first: (.*)$", text,
                           re.MULTILINE).groups()
    assert reason in why and "the configuration has" not in text
    planner = planner_of(tmp_path, {"num_gpus": int(keys[0][-1])}, *keys[1:], *SMALL[:-1])
    plans, refused = planner.plans()
    assert len(refused) == int(count) and len([*planner.layouts()]) == len(plans) + len(refused)
    assert {plan.layout.train for plan in plans} == trains and lines_to_type(text)


def test_devices_that_are_given_are_fixed(tmp_path):
    def layouts(gpus: int, *keys: str) -> set[tuple[str, int, bool]]:
        plans, _ = planner_of(tmp_path, {"num_gpus": gpus}, *keys, *SMALL[:-1]).plans()
        return {(str(plan.layout), plan.layout.tensor_parallel, plan.layout.lora is not None)
                for plan in plans}

    assert layouts(3, "train_model.devices=[0,1]", "train_model.lora.enabled=false") == {
        ("2", 1, False), ("2+1", 1, False)}
    assert layouts(4, "inference_model.num_devices=3", "train_model.lora.enabled=false") == {
        ("1+3", 1, False)}
    assert layouts(3, "inference_model.devices=[1,2]", "train_model.lora.enabled=false") == {
        ("1+2", 1, False), ("1+2", 2, False)}
    # Alone on one device grpo.py takes the first.
    assert layouts(2, "train_model.devices=[1]", "train_model.lora.enabled=false") == {
        ("1+1", 1, False)}
    # The reference of adapters is the trainer's model.
    assert layouts(3, "train.kl_to_ref_coeff=0.1", "ref_model.num_devices=1") == {
        ("1+1+1", 1, False), ("1", 1, True), ("2", 1, True), ("3", 1, True), ("1+2", 1, True),
        ("1+2", 2, True), ("2+1", 1, True)}


def test_memory_is_that_of_the_runs_ledger(tmp_path):
    planner = planner_of(tmp_path, {"num_gpus": 4}, "train.kl_to_ref_coeff=0.1",
                         "inference_model.max_tokens=64")
    plan = planner.plan(Layout(train=2, engines=1, reference=1, staleness=1))
    config = composed(["grpo", "train-async", "--config-name", "grpo_async_gsm8k", MODEL,
                       "train.kl_to_ref_coeff=0.1", "inference_model.max_tokens=64", *plan.keys])
    chosen = config.changed(
        train={"max_tokens_per_micro_batch": plan.training.micro_batch,
               "packing": plan.training.packed}, train_model={"compile": plan.training.compiled})
    ledgers = role_ledgers(
        chosen, plan_devices(config, kind="cuda", available=4), planner.path, torch.device("cuda"),
        torch.bfloat16, "vllm", max_model_len=256 + 64, memory=int(139.8 * GIB))
    assert plan.ledgers == ledgers and list(ledgers) == ["train", "engine", "reference"]
    assert f"{ledgers['train'].total / GIB:.1f} + " in table([plan])


def test_what_takes_its_time_is_said_beside_the_page(capsys):
    main([MODEL, "num_gpus=2", *SMALL])
    said = capsys.readouterr()
    assert re.fullmatch(r"loading PyTorch and Transformers\nsimulating \d+ layouts\n", said.err)
    assert "simulating" not in said.out


def test_what_does_not_fit_is_left_out_and_counted(capsys):
    text = printed(capsys, "model.name=Qwen/Qwen2.5-7B", "num_gpus=4", "env.num_envs=8",
                   "env.repeats=4", "inference_model.max_tokens=64", "gpu_memory_gib=20",
                   "train_model.num_devices=2", "train_model.lora.enabled=false")
    assert re.search(r"^\d+ layouts do not fit; the nearest, .*, needs .* GiB a device$", text,
                     re.MULTILINE)
    assert "recommended" not in text and lines_to_type(text) == []


def test_a_reference_that_no_device_holds_is_planned_in_parts_on_one_machine(tmp_path):
    def reference(memory: float, hosts: int = 1) -> list[str]:
        planner = planner_of(tmp_path, {"num_gpus": 4, "gpu_memory_gib": memory,
                                        "gpus_per_host": 4 // hosts}, "train.kl_to_ref_coeff=0.1")
        layout = Layout(train=1, engines=1, reference=2, staleness=1)
        return [row.name for row in planner.plan(layout).ledgers["reference"].rows]

    assert reference(139.8) == ["reference", "head", "reserve"]  # 2.9 GiB of weights
    assert reference(3.5) == ["reference", "gathered", "head", "reserve"]
    assert reference(3.5, hosts=2) == ["reference", "head", "reserve"]


def test_layouts_are_those_that_the_scripts_accept(tmp_path):
    layouts = list(planner_of(tmp_path, {"num_gpus": 4}, "train.kl_to_ref_coeff=0.1").layouts())
    names = {(str(layout), layout.staleness, bool(layout.lora)) for layout in layouts}
    assert {("4", 0, False), ("2+2", 0, False), ("2+2", 1, True), ("2+1+1", 1, False)} <= names
    # The reference of adapters is the trainer's model; nobody generates in the last one.
    assert ("2+1+1", 1, True) not in names and ("2+0+2", 1, False) not in names
    assert all(layout.devices <= 4 for layout in layouts)
    # An engine and the trainer are on one host, and grpo.py on one alone.
    many = list(planner_of(tmp_path, {"num_gpus": 32, "gpus_per_host": 4}).layouts())
    assert {layout.train for layout in many} == {1, 2, 3, 4}
    assert all(layout.tensor_parallel <= 4 for layout in many)
    assert all(layout.staleness or not layout.engines for layout in many)
    # What the user has given stays.
    fixed = list(planner_of(tmp_path, {"num_gpus": 8}, "train_model.num_devices=2",
                            "inference_model.num_devices=4",
                            "inference_model.tensor_parallel_size=2", "train.staleness=3",
                            "train_model.lora.enabled=true").layouts())
    assert {(str(layout), layout.tensor_parallel, layout.lora) for layout in fixed} == {
        ("2+4", 2, LoRA(rank=16))}
    assert {layout.staleness for layout in fixed} == {0, 3}


def test_engines_that_would_idle_are_not_recommended(tmp_path):
    planner = planner_of(tmp_path, {"num_gpus": 32}, "train_model.lora.enabled=false",
                         "env.repeats=4", "inference_model.max_tokens=64",
                         "train_model.num_devices=8")
    plans, refused = planner.plans()
    assert not refused
    best = planner.recommended(plans, lora=False)
    assert best.layout.engines < 8 and best.outcome.step <= 1.03 * plans[0].outcome.step
    assert planner.recommended(plans, lora=True) is None
    one_less = planner.plan(Layout(**{**vars(best.layout), "engines": best.layout.engines - 1})) \
        if best.layout.engines > 1 else None
    assert one_less is None or one_less.outcome.step > 1.03 * plans[0].outcome.step


def test_the_options_are_read(tmp_path):
    def step(keys: tuple[str, ...] = (), **options) -> float:
        planner = planner_of(tmp_path, {"num_gpus": 2} | options, "env.repeats=4", *keys)
        return planner.plan(Layout(train=1, engines=1, staleness=1)).outcome

    usual = step()
    assert step(prompt_tokens=4000).train > usual.train
    assert step(response_tokens=100).tokens == pytest.approx(100 * 128, rel=0.1)
    alike, ragged = step(sigma=0.0, response_tokens=300), step(sigma=1.0, response_tokens=300)
    assert ragged.longest > alike.longest
    assert step(("inference_model.ignore_eos=true",)).tokens == 1024 * 128
    small = planner_of(tmp_path, {"num_gpus": 2, "gpu_memory_gib": 30.0}, "env.repeats=4")
    assert small.plan(Layout(train=1, engines=1, staleness=1)).training.micro_batch < \
        planner_of(tmp_path, {"num_gpus": 2}).plan(
            Layout(train=1, engines=1, staleness=1)).training.micro_batch
    rollouts = planner_of(tmp_path, {"num_gpus": 1}, "env.repeats=16", "env.num_envs=4",
                          "train.dialog_turns_per_batch=512", "inference_model.ignore_eos=true")
    together = planner_of(tmp_path, {"num_gpus": 1}, "env.repeats=16", "env.num_envs=4",
                          "inference_model.ignore_eos=true")
    eight, one = (planner.plan(Layout(train=1, engines=0)).outcome.generate
                  for planner in (rollouts, together))
    assert eight == pytest.approx(8 * one, rel=0.05)  # one after another
    with pytest.raises(ConfigError, match="response_tokens=2000 is more than .*1024"):
        step(response_tokens=2000)


@pytest.mark.parametrize(("keys", "counts"), [
    (["train.proximal=scored"], {"own_scores": 1}),
    (["train.entropy_top_fraction=0.2", "train.proximal=scored"], {"own_scores": 1}),
    (["distill.teacher={model}", "distill.topk_coeff=0.1"], {"own_scores": 1}),
    (["train_model.gradient_checkpointing=true"], {"checkpointing": True}),
    (["train.epochs=4", "train.kl_to_ref_coeff=0.01"], {"epochs": 4, "scores": True})])
def test_all_that_the_trainer_computes_is_counted(tmp_path, keys, counts):
    keys = [key.format(model=tmp_path) for key in keys]  # where the planner writes its config
    plan, usual = (planner_of(tmp_path, {"num_gpus": 1}, "env.repeats=4", *more).plan(
        Layout(train=1, engines=0)) for more in (keys, []))
    assert {name: getattr(plan.training, name) for name in counts} == counts
    assert plan.outcome.train > 1.3 * usual.outcome.train


@pytest.mark.parametrize("keys", [
    ["train_model.quantization=nf4", "train_model.lora.enabled=true"],
    ["train.max_sampling_rounds=4", "train.data_epochs=null", "train.max_steps=10"]],
    ids=lambda keys: keys[0])
def test_what_is_not_counted_is_named(capsys, keys):
    assert f"not counted: {keys[0]}, with which" in printed(
        capsys, MODEL, "num_gpus=1", *SMALL, *keys)


@pytest.mark.parametrize(("keys", "message"), [
    (["num_gpu=4"], "num_gpu: unknown key .*did you mean 'num_gpus'"),
    ([MODEL], "num_gpus is missing"),
    (["num_gpus=0"], "num_gpus=0: .*greater than or equal to 1"),
    (["num_gpus"], "num_gpus: has no value; write num_gpus=VALUE"),
    (["num_gpus=4", "train.stalenes=1"], "train.stalenes: unknown key .*staleness"),
    (["num_gpus=4", "resume=auto"], "resume: a plan is of a new run"),
    (["num_gpus=4", "--config-name", "grpo_gsm8k"], "give a recipe of grpo-async.py"),
    (["num_gpus=4", "train.staleness=-1"], "train.staleness=-1"),
    (["num_gpus=4", "model.name=./nowhere"], "there is no such folder"),
    ([MODEL, "num_gpus=2", "train_model.devices=[1,2]"],
     r"train_model.devices=\[1, 2\]: there is no GPU 2; .* raise num_gpus=2"),
    ([MODEL, "num_gpus=2", "train_model.devices=[0]", "inference_model.devices=[0,1]"],
     r"inference_model.devices=\[0, 1\]: .* GPU 0 .* give each role GPUs of its own"),
    ([MODEL, "num_gpus=2", "device=cpu", "train_model.devices=[0]"],
     r"train_model.devices=\[0\] numbers GPUs, .*device=cpu"),
    ([MODEL, "num_gpus=4", "inference_model.num_devices=3",
      "inference_model.tensor_parallel_size=2"],
     "num_gpus=4: no layout has what is given: inference_model.num_devices=3, "
     "inference_model.tensor_parallel_size=2"),
    # Of one's own, not of a layout of the plan's.
    ([MODEL, "num_gpus=1", "inference_model.max_tokens=64", "response_tokens=65"],
     "response_tokens=65 is more than"),
    ([MODEL, "num_gpus=1", "inference_model.ignore_eos=true", "sigma=0.6"],
     "sigma=0.6: with inference_model.ignore_eos=true .*max_tokens=1024 tokens; remove one"),
    ([MODEL, "num_gpus=1", "inference_model.ignore_eos=true", "response_tokens=50"],
     "response_tokens=50: with inference_model.ignore_eos=true"),
])
def test_what_cannot_be_planned_is_said_in_a_line(keys, message):
    with pytest.raises(SystemExit) as ended:
        main(keys)
    assert re.search(message, str(ended.value)) and "Traceback" not in str(ended.value)


def test_models_with_experts_are_refused(tmp_path):
    folder = tmp_path / "experts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 100}))
    with pytest.raises(SystemExit, match="has experts"):
        main(["num_gpus=2", f"model.name={folder}"])


@pytest.mark.parametrize(("name", "millions"), [
    ("Qwen/Qwen2.5-0.5B-Instruct", 494.03), ("Qwen/Qwen2.5-1.5B", 1543.71),
    ("Qwen/Qwen2.5-7B-Instruct", 7615.62), ("Qwen/Qwen2.5-32B", 32_763.88),
    ("Qwen/Qwen3-8B", 8190.74), ("Qwen/Qwen3-0.6B-Base", 596.05),
    ("meta-llama/Llama-3.1-8B-Instruct", 8030.26), ("meta-llama/Llama-3.2-1B", 1235.81)])
def test_sizes_are_those_that_the_models_are_published_with(tmp_path, name, millions):
    assert ModelShape.of(shape_folder(name, tmp_path)).parameters / 1e6 == pytest.approx(
        millions, abs=0.01)


def test_every_size_makes_a_model(tmp_path):
    """As many parameters as the name says, in billions, the embeddings of small ones aside."""
    for name in SIZES:
        shape = ModelShape.of(shape_folder(name, tmp_path / name))
        if name != "embedded":
            billions = float(re.search(r"([\d.]+)B$", name)[1])
            assert 0.8 * billions < shape.parameters / 1e9 < 1.25 * billions


def test_what_holds_a_step_up_is_named(tmp_path):
    def held_up(layout: Layout, *keys: str, **options) -> str:
        planner = planner_of(tmp_path, {"num_gpus": 8} | options, *keys)
        return bottleneck(planner.plan(layout))

    many = ("env.num_envs=128", "env.repeats=8")
    assert held_up(Layout(train=1, engines=7, staleness=1), *many) == "training"
    assert held_up(Layout(train=6, engines=1, staleness=1), *many) == "generation"
    assert held_up(Layout(train=2, engines=6, staleness=1), "env.num_envs=4") == \
        "the longest rollouts"
    assert held_up(Layout(train=2, engines=6, staleness=1), "env.num_envs=4",
                   "inference_model.max_tokens=8", prompt_tokens=8) == "the update"
    assert held_up(Layout(train=6, engines=1, reference=1, staleness=1), *many,
                   "train.kl_to_ref_coeff=0.1", "inference_model.max_tokens=32",
                   prompt_tokens=2000) == "the reference"


def test_the_command_starts_and_helps():
    done = subprocess.run([sys.executable, "-m", "grpo.run.plan", "--help"], text=True,
                          capture_output=True, timeout=120, env=os.environ)
    assert done.returncode == 0
    assert all(f"{key}=" in done.stdout for key in PlanOptions.model_fields)
