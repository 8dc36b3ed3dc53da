"""The wheel, installed where there is no clone: the commands of docs/first-run.md, typed as they
stand and in their order, and processes that commands start.

What an index would give is the environment of these tests: its packages are on the path of the new
environment, without its links to this repository. pip finds the wheel in a folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import grpo
from grpo.report.loggers import read_jsonl

from ..support import REPO, commands, finished
from .test_commands import of_kind

PAGE = (REPO / "docs" / "first-run.md").read_text()
VENV, INSTALL = "python -m venv .venv", "pip install "
#: What says where this library is, and what belongs to whoever runs these tests.
_FOREIGN = ("PYTHON", "VIRTUAL_ENV", "PIP_", "HF_", "XDG_", "HYDRA_", "GRPO_", "CONDA")
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8", "env.task.num_test=8",
           "inference_model.backend=transformers", "device=cpu"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since building writes beside the sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPO / name, source)
    for name in ("grpo", "config"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    finished([sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation",
              "--wheel-dir", folder], source, dict(os.environ))
    path, = folder.glob("torchrl_grpo-*.whl")
    return path


class Host:
    """A host that has what an index would give, and a reader's new home."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.work, home = folder / "work", folder / "home"
        self.work.mkdir()
        home.mkdir()
        self.env = {name: value for name, value in os.environ.items()
                    if not name.startswith(_FOREIGN)}
        self.env |= {"HOME": str(home), "PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_INDEX": "1",
                     "PIP_NO_DEPS": "1", "PIP_CONFIG_FILE": os.devnull, "COLUMNS": "100",
                     "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = self.work / ".venv" / "lib" / version / "site-packages"
        # After pip, which would take this repository for what it is told to install.
        self._link = f"echo {sysconfig.get_path('purelib')} > {packages}/shared.pth"

    def type(self, lines: list[str], *, seconds: float = 1200.0) -> list[str]:
        """What each line says, of one shell; it stops at one that fails."""
        script = ["exec 2>&1; set -e"]
        for line in lines:
            script += ["echo '@@@'", line, *([self._link] if line.startswith(INSTALL) else [])]
        done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=self.work, env=self.env,
                              capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout.split("@@@\n")[1:]


@pytest.fixture(scope="module")
def host(tmp_path_factory, wheel) -> Host:
    return Host(tmp_path_factory.mktemp("host"), wheel)


@pytest.fixture(scope="module")
def first_run(host) -> dict[str, str]:
    """Each line of the page, and what it says."""
    pytest.importorskip("vllm")
    lines = commands(PAGE)
    return dict(zip(lines, host.type(lines), strict=True))


def test_the_first_run_page_is_typed_as_it_stands(host, first_run):
    known = (VENV, "source .venv/bin/activate", INSTALL, "grpo ")
    assert len(first_run) == 7 and all(line.startswith(known) for line in first_run)
    installs = [said for line, said in first_run.items() if line.startswith(INSTALL)]
    assert "Successfully installed torchrl-grpo" in installs[0]
    assert len(installs) == 2 and not any("does not provide the extra" in said for said in installs)
    assert re.search(r"^no problems, ", first_run["grpo doctor"], re.MULTILINE)
    run, evaluation = host.work / "first-run", host.work / "first-evaluation"
    rewards = [row["reward/mean"] for row in read_jsonl(run / "metrics.jsonl")
               if "reward/mean" in row]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1 and sum(rewards[-10:]) > 9
    for folder in (run, evaluation):
        assert "<html" in (folder / "report.html").read_text()
    record, = (evaluation / "metrics").glob("eval_iter_*.json")
    assert json.loads(record.read_text())["tasks"]


def test_the_package_is_that_of_the_wheel(host, first_run):
    said = host.type(["source .venv/bin/activate", "python -c 'import grpo; print(grpo.__file__)'",
                      "grpo --version"])
    place, = host.work.glob(".venv/lib/*/site-packages/grpo/__init__.py")
    assert Path(said[1].strip()) == place and said[2] == f"torchrl-grpo {grpo.__version__}\n"
    assert str(REPO) not in "".join(first_run.values())


def test_workers_ranks_and_plans_are_those_of_the_wheel(host, first_run):
    """Workers on Ray, ranks and a sweep: processes that find the package by themselves."""
    pytest.importorskip("ray")
    small = " ".join(SMALLER)
    said = host.type([
        "source .venv/bin/activate",
        f"grpo train-async hydra.run.dir=workers inference_model.num_devices=2 {small}",
        f"grpo train hydra.run.dir=ranks train_model.num_devices=2 {small}",
        f"grpo train --multirun --config-name grpo hydra.sweep.dir=sweep train.seed=0,1 {small}",
        "grpo train --help", "grpo serve --help",
        "grpo plan model.name=Qwen/Qwen2.5-1.5B-Instruct num_gpus=2 gpu_memory_gib=80 --rows 2"])
    assert "2 workers on Ray" in said[1] and "2 ranks" in said[2]
    assert "config/" not in said[4] or "grpo train [" in said[4]
    assert "grpo train" in said[6]
    for name in ("workers", "ranks", "sweep/0", "sweep/1"):
        assert (host.work / name / "final_model").is_dir(), name
        log = "grpo-async.log" if name == "workers" else "grpo.log"
        assert (host.work / name / log).exists()


def test_lines_of_pip_in_the_table_of_commands_name_extras_of_the_wheel(host, first_run):
    lines = [text for row in of_kind("install") for text in row.here]
    said = host.type(["source .venv/bin/activate", *(f"{line} --dry-run" for line in lines)])
    assert len(said) == len(lines) + 1 > 2
    assert "does not provide the extra" not in "".join(said)
    unknown = host.type(["source .venv/bin/activate",
                         'pip install "torchrl-grpo[no-such]" --dry-run'])
    assert "does not provide the extra" in unknown[1]
