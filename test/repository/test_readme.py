"""Every command and every program in README.md, docs/environments.md, docs/objectives.md and
docs/async.md runs, and the names and settings in the guide to the objectives are those of the
code."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.objectives import registry
from grpo.objectives.aggregate import Aggregation
from grpo.objectives.estimators import AdvantageEstimator
from grpo.objectives.kl import KLEstimator
from grpo.objectives.mismatch import make_mismatch
from grpo.objectives.scorer import HeadKind
from grpo.objectives.terms import Proximal

from ..support import (
    REPO,
    blocks,
    code_in,
    commands,
    environment,
    finished,
    several_runs,
    table_rows,
)

README = (REPO / "README.md").read_text()
GUIDE = (REPO / "docs" / "objectives.md").read_text()
WORLDS = (REPO / "docs" / "environments.md").read_text()
ASYNC_GUIDE = (REPO / "docs" / "async.md").read_text()
SCRIPT = "sota-implementations/grpo/grpo.py"
ASYNC_SCRIPT = "sota-implementations/grpo/grpo-async.py"

#: Functions on the page, and the modules that its commands name for them.
MODULES = {"brevity": "my_rewards.py", "again": "my_steps.py"}

#: Appended to every command of the script: the same code on less work.
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8",
           "train.checkpoint_frequency=1"]


def commands_of(program: str, page: str = README) -> list[str]:
    return [line for line in commands(page) if line.startswith(program)]


def run(command: list[str], folder: Path, cache: Path) -> str:
    return finished(command, folder, environment(cache, PYTHONPATH=str(folder)))


def several(runs: list[list[str]], folder: Path, cache: Path) -> str:
    return "".join(several_runs([[str(REPO / SCRIPT), *arguments] for arguments in runs], folder,
                                environment(cache, PYTHONPATH=str(folder))))


@pytest.mark.parametrize("page", [README, WORLDS, GUIDE, ASYNC_GUIDE],
                         ids=["README", "environments", "objectives", "async"])
def test_no_command_is_left_out(page):
    known = sum(len(commands_of(prefix, page))
                for prefix in ("make ", f"python {SCRIPT}", f"python {ASYNC_SCRIPT}"))
    assert known == len(commands(page)) > 0


def on_less_work(command: str, model_folder: Path, gsm8k_rows: Path) -> list[str]:
    """The command's arguments, with stand-ins for what a test cannot have: a downloaded model, a
    folder of the reader's own."""
    arguments = [a.replace("Qwen/Qwen2.5-1.5B-Instruct", str(model_folder))
                 .replace("path/to/gsm8k", str(gsm8k_rows)) for a in shlex.split(command)[2:]]
    smaller = list(SMALLER)
    if any(a.startswith("inference_model.max_tokens=") for a in arguments):
        smaller.remove("inference_model.max_tokens=4")  # what a conversation needs
    if any(a.startswith("model.name=") for a in arguments):
        smaller.remove("model.warm_start_steps=5")
        # The compiled path is for GPUs; on a CPU its set-up alone takes minutes.
        arguments = [a for a in arguments if a != "train_model.compile=true"]
        arguments.append(f"env.data_path={gsm8k_rows}")
    return [*arguments, *smaller]


# One command is enough to start vLLM, several times over.
WITH_VLLM = [command for command in commands_of(f"python {SCRIPT}") if "--multirun" in command]
REASONING_GYM = [command for command in commands_of(f"python {SCRIPT}", WORLDS)
                 if "env=reasoning_gym" in command]
ATROPOS = [(script, command) for script in (SCRIPT, ASYNC_SCRIPT)
           for command in commands_of(f"python {script}", WORLDS) if "env=atropos" in command]
VERIFIERS = [command for command in commands_of(f"python {SCRIPT}", WORLDS)
             if "env=verifiers" in command]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("command", WITH_VLLM)
def test_script_command_runs(command, tmp_path, cache, model_folder, gsm8k_rows):
    pytest.importorskip("vllm")
    arguments = on_less_work(command, model_folder, gsm8k_rows)
    output = run([sys.executable, str(REPO / SCRIPT), *arguments], tmp_path, cache)
    assert "held-out accuracy" in output


@pytest.mark.slow
def test_other_script_commands_run(tmp_path, cache, model_folder, gsm8k_rows):
    for function, module in MODULES.items():
        source = next(block for block in blocks("python", README + WORLDS)
                      if f"def {function}" in block)
        (tmp_path / module).write_text(source)
    runs = [[*on_less_work(command, model_folder, gsm8k_rows),
             "inference_model.backend=transformers"]
            for command in commands_of(f"python {SCRIPT}", README + WORLDS)
            if command not in WITH_VLLM + REASONING_GYM + VERIFIERS
            and "env=atropos" not in command]
    output = several(runs, tmp_path, cache)
    assert output.count("held-out accuracy") == len(runs) > 0


@pytest.mark.slow
def test_commands_with_reasoning_gym_run(tmp_path, cache):
    pytest.importorskip("reasoning_gym", reason="needs `pip install reasoning-gym`")
    runs = [[*shlex.split(command)[2:], *SMALLER, "inference_model.backend=transformers",
             "env.task.num_train=20", "env.task.num_test=4"] for command in REASONING_GYM]
    output = several(runs, tmp_path, cache)
    assert output.count("held-out accuracy") == len(runs) > 0
    assert "got no reward" not in output


@pytest.mark.slow
def test_commands_with_verifiers_run(tmp_path, cache):
    if not hasattr(pytest.importorskip("verifiers"), "load_environment"):
        pytest.skip("needs the extra verifiers")
    (tmp_path / "my_env.py").write_text(
        next(block for block in blocks("python", WORLDS) if "def load_environment" in block))
    runs = [[*shlex.split(command)[2:], *SMALLER, "inference_model.backend=transformers"]
            for command in VERIFIERS]
    output = several(runs, tmp_path, cache)
    assert output.count("held-out accuracy") == len(runs) > 0
    assert "got no reward" not in output


@pytest.mark.slow
@pytest.mark.parametrize("script, command", ATROPOS)
def test_commands_with_atropos_run(script, command, tmp_path, cache, python):
    arguments = [argument.replace("examples/", f"{REPO}/examples/")
                 for argument in shlex.split(command)[2:]]
    output = finished(
        # Groups of a model that is always wrong are left out by the environment.
        [sys.executable, str(REPO / script), *arguments, "model.warm_start_steps=60",
         "env.num_envs=2", "train.max_steps=2", "train.checkpoint_frequency=1",
         "inference_model.backend=transformers", "device=cpu"], tmp_path,
        environment(cache, GRPO_ATROPOS_PYTHON=str(python)))
    assert "2 iterations" in output and "workers" * ("async" in script) in output


@pytest.mark.parametrize("command", [
    *commands_of(f"python {ASYNC_SCRIPT}"),
    *(pytest.param(command, marks=pytest.mark.slow)
      for command in commands_of(f"python {ASYNC_SCRIPT}", ASYNC_GUIDE))])
def test_asynchronous_command_runs(command, tmp_path, cache, model_folder, gsm8k_rows):
    pytest.importorskip("ray")
    arguments = [*on_less_work(command, model_folder, gsm8k_rows),
                 "inference_model.backend=transformers", "device=cpu"]
    output = run([sys.executable, str(REPO / ASYNC_SCRIPT), *arguments], tmp_path, cache)
    assert "held-out accuracy" in output and "a step took" in output


@pytest.mark.parametrize("page", [README, WORLDS, GUIDE],
                         ids=["README", "environments", "objectives"])
def test_python_programs_run(page, model_folder, tmp_path):
    # As the checkpoint that the pages name, it is bfloat16.
    for part in (AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16),
                 AutoTokenizer.from_pretrained(model_folder)):
        part.save_pretrained(tmp_path)
    found = blocks("python", page)
    if find_spec("verifiers") is None:  # an extra, whose program is run with its command
        found = [source for source in found if "import verifiers" not in source]
    assert found
    for source in found:
        names = {"__name__": "page"}
        exec(compile(source.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tmp_path)), "page", "exec"),
             names)
        if "optimizer" in names:  # what it trains can move by its learning rate
            assert {weight.dtype for weight in names["model"].parameters()} == {torch.float32}


@pytest.mark.parametrize("command", sorted({*commands_of("make "), *commands_of("make ", WORLDS)}))
def test_make_target_exists(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPO, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    started = {"test": "run_tests.py", "train": SCRIPT, "train-atropos": "grpo.run.cli.launch",
               "gpu-acceptance": "gpu_acceptance.py"}
    assert started[command.split()[1]] in done.stdout


@pytest.mark.vllm
@pytest.mark.skipif(not list((REPO / ".venv").glob("ready-*")),
                    reason="this is no environment made by `make`")
def test_make_train_runs(cache):
    output = run(["make", "train", f"ARGS={' '.join(SMALLER)} hydra.run.dir={cache}/run"], REPO,
                 cache)
    assert "held-out accuracy" in output


# -- docs/objectives.md ---------------------------------------------------------------------------


def test_commands_of_the_guide_run(tmp_path, cache, model_folder):
    runs = [[*shlex.split(command.replace("path/to/teacher", str(model_folder)))[2:], *SMALLER,
             "inference_model.backend=transformers", "env.task.num_test=8"]
            for command in commands_of(f"python {SCRIPT}", GUIDE)]
    output = several(runs, tmp_path, cache)
    assert output.count("held-out accuracy") == len(runs) > 0


def test_preset_table_is_what_the_presets_set():
    table = {name.strip("`"): sets.strip("`") for name, sets, *_ in table_rows(GUIDE, "2 Presets")}
    assert set(table) == {path.stem for path in (REPO / "config" / "preset").glob("*.yaml")}
    for name, sets in table.items():
        preset = OmegaConf.load(REPO / "config" / "preset" / f"{name}.yaml")
        said = OmegaConf.create({})
        for part in sets.split():
            key, value = part.split("=")
            key = key if "." in key else f"train.{key}"
            OmegaConf.update(said, key, OmegaConf.create(f"v: {value}").v)
        assert said == preset, name


@pytest.mark.parametrize("heading, names", [
    ("3 Objectives", [name for name, objective in registry._OBJECTIVES.items()
                      if objective.function.__module__.startswith("grpo.")]),
    ("4 Advantages and shaping", get_args(AdvantageEstimator)),
    ("5 Aggregation", get_args(Aggregation)),
    ("6 KL", get_args(KLEstimator)),
    ("7 Mismatch and stale data", get_args(Proximal)),
    ("11 The head", set(get_args(HeadKind)) - {"auto"}),
])
def test_guide_has_a_row_for_every_name(heading, names):
    first_cells = " ".join(row[0] for row in table_rows(GUIDE, heading))
    assert set(names) <= set(code_in(first_cells))


def test_guide_has_a_row_for_every_correction():
    with pytest.raises(ValueError, match="use some of") as error:
        make_mismatch({"?": 1.0})
    known = str(error.value).split("use some of ")[1].split(", ")
    assert set(known) <= {name for row in table_rows(GUIDE, "7 Mismatch and stale data")
                          for name in code_in(row[0])}


def test_defaults_in_the_objective_table_are_those_of_the_code():
    checked = 0
    for names, _, defaults, *_ in table_rows(GUIDE, "3 Objectives"):
        for name in code_in(names):
            said = eval(f"dict({', '.join(code_in(defaults))})")
            assert registry.get_objective(name).options == said, name
            checked += len(said)
    assert checked > 10
