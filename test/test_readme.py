"""Every command and every program in README.md runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()
SCRIPT = "sota-implementations/grpo/grpo.py"

#: Appended to every command of the script: the same code on less work.
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8",
           "train.checkpoint_frequency=1"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(prefix: str) -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(prefix)]


def run(command: list[str], folder: Path, cache: Path) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1",
                                "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=280, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_no_command_is_left_out():
    known = len(commands("make ")) + len(commands(f"python {SCRIPT}"))
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert known == len(lines)


@pytest.mark.vllm
@pytest.mark.parametrize("command", commands(f"python {SCRIPT}"))
def test_script_command_runs(command, tmp_path, cache, model_folder, gsm8k_rows):
    pytest.importorskip("vllm")
    arguments = shlex.split(command)[2:]
    # Stand-ins for what a test cannot have: a downloaded model, a folder of the reader's own.
    arguments = [a.replace("Qwen/Qwen2.5-1.5B-Instruct", str(model_folder))
                 .replace("path/to/gsm8k", str(gsm8k_rows)) for a in arguments]
    smaller = list(SMALLER)
    if "--multirun" not in arguments:  # one command is enough to start vLLM, several times over
        smaller.append("inference_model.backend=transformers")
    if any(a.startswith("model.name=") for a in arguments):
        smaller.remove("model.warm_start_steps=5")
        # The compiled path is for GPUs; on a CPU its set-up alone takes minutes.
        arguments = [a for a in arguments if a != "train_model.compile=true"]
        arguments.append(f"env.data_path={gsm8k_rows}")
    source = next(block for block in blocks("python") if "def brevity" in block)
    (tmp_path / "my_rewards.py").write_text(source)
    output = run([sys.executable, str(REPO / SCRIPT), *arguments, *smaller], tmp_path, cache)
    assert "held-out accuracy" in output


@pytest.fixture(scope="module")
def gsm8k_rows(tmp_path_factory):
    """Two splits in GSM8K's format, of our own making, as long as the configuration asks for."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = [f'{{"question": "{split}: {i}+1?", "answer": "#### {i + 1}"}}' for i in range(256)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_python_programs_run(model_folder):
    for source in blocks("python"):
        exec(compile(source.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model_folder)), "README.md",
                     "exec"), {"__name__": "readme"})


def test_own_loop_is_about_ten_lines_of_loop_and_loss():
    source = next(block for block in blocks("python") if "GRPOLoss(model)" in block)
    body = source[source.index("loss, optimizer"):]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("command", commands("make "))
def test_make_target_exists(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPO, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("pytest" if "test" in command else SCRIPT) in done.stdout


@pytest.mark.vllm
@pytest.mark.skipif(not list((REPO / ".venv").glob("ready-*")),
                    reason="this is no environment made by `make`")
def test_make_train_runs(cache):
    output = run(["make", "train", f"ARGS={' '.join(SMALLER)} hydra.run.dir={cache}/run"], REPO,
                 cache)
    assert "held-out accuracy" in output
