"""The wheel, installed where there is no clone: the commands of docs/first-run.md, typed as they
stand and in their order, and processes that commands start.

What an index would give is the environment of these tests: its packages are on the path of the new
environment, without its links to this repository. pip finds the wheel in a folder.
"""

from __future__ import annotations

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import grpo
from grpo.report.loggers import read_jsonl

from ..support import REPO, commands, finished
from .test_commands import of_kind

PAGE = (REPO / "docs" / "first-run.md").read_text()
VENV, ACTIVATE, INSTALL = "python -m venv .venv", "source .venv/bin/activate", "pip install "
#: What says where this library is, and what belongs to whoever runs these tests.
_FOREIGN = ("PYTHON", "VIRTUAL_ENV", "PIP_", "HF_", "XDG_", "HYDRA_", "GRPO_", "CONDA")
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8", "env.task.num_test=8",
           "device=cpu"]

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since building writes beside the sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPO / name, source)
    for name in ("grpo", "config", "recipes"):
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


@pytest.fixture
def host(tmp_path, wheel) -> Host:
    return Host(tmp_path, wheel)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_first_run_page_is_typed_as_it_stands(host):
    pytest.importorskip("vllm")
    lines = commands(PAGE)
    known = (VENV, ACTIVATE, INSTALL, "grpo ")
    assert len(lines) == 7 and all(line.startswith(known) for line in lines)
    said = dict(zip(lines, host.type(lines), strict=True))
    first, _ = (text for line, text in said.items() if line.startswith(INSTALL))
    assert "Successfully installed torchrl-grpo" in first
    assert re.search(r"^no problems, ", said["grpo doctor"], re.MULTILINE)
    run, evaluation = host.work / "first-run", host.work / "first-evaluation"
    rewards = [row["reward/mean"] for row in read_jsonl(run / "metrics.jsonl")
               if "reward/mean" in row]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1 and sum(rewards[-10:]) > 9
    for folder in (run, evaluation):
        assert "<html" in (folder / "report.html").read_text()
    record, = (evaluation / "metrics").glob("eval_iter_*.json")
    assert json.loads(record.read_text())["tasks"]


@pytest.mark.slow
@pytest.mark.vllm
def test_processes_that_commands_start_find_the_package_of_the_wheel(host):
    """Workers on Ray, ranks, an engine and the jobs of a sweep."""
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    small, transformers = " ".join(SMALLER), "inference_model.backend=transformers"
    said = host.type([
        VENV, ACTIVATE, next(line for line in commands(PAGE) if line.startswith(INSTALL)),
        "python -c 'import grpo; print(grpo.__file__)'", "grpo --version",
        "grpo train-async hydra.run.dir=workers train_model.num_devices=2 "
        f"inference_model.num_devices=2 {small} {transformers}",
        f"grpo train hydra.run.dir=engine inference_model.engine=process {small}",
        "grpo train --multirun --config-name grpo hydra.sweep.dir=sweep train.seed=0,1 "
        f"{small} {transformers}",
        "grpo plan model.name=Qwen/Qwen2.5-1.5B-Instruct num_gpus=2 gpu_memory_gib=80 --rows 2"])
    place, = host.work.glob(".venv/lib/*/site-packages/grpo/__init__.py")
    assert Path(said[3].strip()) == place and said[4] == f"torchrl-grpo {grpo.__version__}\n"
    assert "2 workers on Ray" in said[5] and "CPU, 2 ranks" in said[5]
    assert "\n  grpo train" in said[8]
    for name in ("workers", "engine", "sweep/0", "sweep/1"):
        assert (host.work / name / "final_model").is_dir(), name
        log = "grpo-async.log" if name == "workers" else "grpo.log"
        assert (host.work / name / log).exists()


def test_lines_of_pip_name_extras_of_the_wheel(wheel):
    lines = [line for line in commands(PAGE) if line.startswith(INSTALL)]
    lines += [text for row in of_kind("install") for text in row.here]
    with zipfile.ZipFile(wheel) as archive:
        name, = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(name))
        programs = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "grpo = grpo.run.cli.console:main" in programs and len(lines) > 4
    for line in lines:
        wanted = Requirement(shlex.split(line)[2])
        assert wanted.name == found["Name"]
        assert wanted.extras and wanted.extras <= set(found.get_all("Provides-Extra"))
