"""Two runs on the same cores: what their processes are told, and what it comes to."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo.config.schema import load_config
from grpo.envs.embedded import EmbeddedSpec, small_qwen2
from grpo.policies import inprocess
from grpo.report.loggers import METRICS_FILE, read_jsonl
from grpo.run import build_model, local_ray
from grpo.system.cores import share_cores

REPO = Path(__file__).parents[2]
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "VLLM_CPU_OMP_THREADS_BIND")
SHARING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# What a command's environment is when PyTorch, and OpenMP with it, is about to be loaded.
PROBE = """
import os, runpy, sys

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({k: os.environ[k] for k in sys.argv.pop().split(",") if k in os.environ})
            os._exit(0)

sys.meta_path.insert(0, Probe())
START
"""
RUN_SERVER = ("from grpo.server import serve as server; options = server.parser().parse_args("
              "['--model', 'm']); server.start_engine(options)")


@pytest.fixture
def clean(monkeypatch):
    """An environment of which nobody has said anything about threads."""
    for name in (*VARIABLES, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("start", [
    "runpy.run_path('sota-implementations/grpo/grpo.py', run_name='script')",
    "runpy.run_path('sota-implementations/grpo/grpo-async.py', run_name='script')",
    "import grpo.run.cli.train, grpo.run.cli.steps",
    "import grpo.run.cli.launch, grpo.run.assemble_atropos",
    "import grpo.run.cli.atropos, grpo.run.assemble_atropos",
    pytest.param(RUN_SERVER, marks=pytest.mark.skipif(
        not inprocess.vllm_available(), reason="needs vLLM"))],
    ids=["grpo.py", "grpo-async.py", "grpo train", "atropos-grpo-run", "atropos-grpo", "server"])
def test_a_command_shares_the_cores_before_openmp_is_loaded(clean, start):
    done = subprocess.run([sys.executable, "-c", PROBE.replace("START", start),
                           ",".join(VARIABLES)], cwd=REPO, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert eval(done.stdout or "None") == SHARING, done.stderr


@pytest.mark.parametrize(("given", "expected"), [
    ({}, SHARING),
    ({"OMP_WAIT_POLICY": "ACTIVE"},
     {"OMP_WAIT_POLICY": "ACTIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
    ({"GOMP_SPINCOUNT": "7", "VLLM_CPU_OMP_THREADS_BIND": "0-3"},
     {"GOMP_SPINCOUNT": "7", "VLLM_CPU_OMP_THREADS_BIND": "0-3"}),
    ({"KMP_BLOCKTIME": "5"}, {"KMP_BLOCKTIME": "5", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})])
def test_what_the_user_has_said_stays(given, expected):
    environment = {"PATH": "/bin", **given}
    assert share_cores(environment) == expected
    assert environment == {"PATH": "/bin", **expected}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_on_a_cpu_shares_the_cores_whoever_starts_it(clean, device):
    clean.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "TORCHDYNAMO_DISABLE"):
        clean.setenv(name, os.environ.get(name, "0"))  # so that they are put back
    inprocess._prepare_environment(device, enforce_eager=True)
    found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    assert found == (SHARING if device == "cpu" else {})


def test_workers_of_ray_share_the_cores_of_their_machine(clean):
    ray = pytest.importorskip("ray")
    started = {}
    clean.setattr(ray, "is_initialized", lambda: False)
    clean.setattr(ray, "init", lambda **options: started.update(options))
    local_ray.start_ray(address="local")()
    assert SHARING.items() <= started["runtime_env"]["env_vars"].items()


@pytest.mark.parametrize(("width", "given", "expected"), [
    (128, None, [1]), (136, None, [7]), (128, "2", [])])
def test_a_narrow_model_gets_one_thread_unless_the_user_says_how_many(clean, width, given,
                                                                      expected):
    chosen: list[int] = []
    clean.setattr(build_model, "set_num_threads", chosen.append)
    clean.setattr(build_model, "_ALL_THREADS", 7)
    if given is not None:
        clean.setenv("OMP_NUM_THREADS", given)
    model = small_qwen2(EmbeddedSpec(hidden_size=width, num_layers=1), 16)
    build_model.prepare_model(model, load_config({}))
    assert chosen == expected


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", [1]), ("adamw_cpu", [7])])
def test_beside_a_gpu_threads_are_for_an_optimizer_that_computes_on_the_cpu(clean, optimizer,
                                                                            expected):
    chosen: list[int] = []
    clean.setattr(build_model, "set_num_threads", chosen.append)
    clean.setattr(build_model, "_ALL_THREADS", 7)
    clean.setattr(torch.cuda, "is_available", lambda: True)
    clean.delenv("OMP_NUM_THREADS", raising=False)
    model = small_qwen2(EmbeddedSpec(hidden_size=136, num_layers=1), 16)
    build_model.prepare_model(model, load_config({"optimizer": {"name": optimizer}}))
    assert chosen == expected


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["in_process", "process"])
def test_two_runs_at_once_are_each_at_most_two_and_a_half_times_slower(clean, tmp_path, engine):
    """On two cores; the time of a step, of the steps that both runs were at."""
    pytest.importorskip("vllm")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    ratios = []
    for attempt in range(2):  # other work on the machine can only make a comparison wrong
        (alone,) = steps(tmp_path / f"alone{attempt}", 1, engine)
        both = steps(tmp_path / f"both{attempt}", 2, engine)
        start, end = max(rows[0][0] for rows in both), min(rows[-1][0] for rows in both)
        shared = [[took for at, took in rows if start < at - took and at <= end] for rows in both]
        assert min(map(len, shared)) >= 5, "the two runs were hardly there at the same time"
        ratios.append([statistics.median(times) / statistics.median(took for _, took in alone)
                       for times in shared])
        if max(ratios[-1]) <= 2.5:
            return
    pytest.fail(f"each run's step took this many times that of one alone: {ratios}")


def steps(folder: Path, count: int, engine: str) -> list[list[tuple[float, float]]]:
    """When each step ended and how long it took, for runs that start at the same time."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    command = [sys.executable, str(REPO / "sota-implementations" / "grpo" / "grpo.py"),
               f"train.total_dialog_turns={256 * 80}", "train.eval_frequency=0",
               "train.checkpoint_frequency=0", f"inference_model.engine={engine}"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    folder.mkdir()
    runs = [subprocess.Popen([*command, f"hydra.run.dir={folder / str(i)}"], cwd=folder, env=env,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: os.sched_setaffinity(0, cores))
            for i in range(count)]
    try:
        for run in runs:
            _, errors = run.communicate(timeout=400)
            assert run.returncode == 0, errors
    finally:
        for run in runs:
            run.kill()
    return [[(row["time"], row["time/step"]) for row in read_jsonl(folder / str(i) / METRICS_FILE)
             if row["step"] > 1 and "time/step" in row] for i in range(count)]
