"""What is started before PyTorch is imported: only what the run then asks for, and it ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from grpo.config.asynchronous import AsyncConfig, with_workers
from grpo.config.keys import ConfigError
from grpo.config.schema import Config, load_config
from grpo.report.starting import Starting
from grpo.run import ahead, build, build_async
from grpo.run.ahead import Ahead, Imports
from grpo.run.cli.script import what_runs
from grpo.run.placement import DevicePlan, plan_devices
from grpo.training.stopping import Stopped

from ..config.configs import FOLDER, composed
from ..support import REPO, STARTED_IN, started, wait_until, with_variable
from .warm import SCRIPTS

PLAN = DevicePlan("cpu", (0,), (), ((1,),))
IMPORTS = Imports("transformers", "cpu", None)
REFERENCE = ("train.kl_to_ref_coeff=0.1", "ref_model.num_devices=2")


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch):
    monkeypatch.setattr(ahead, "_started", [])


@pytest.mark.parametrize("name, given", [
    ("grpo_async", ()),
    ("grpo_async", ("inference_model.num_devices=3", "inference_model.backend=transformers")),
    ("grpo_async", REFERENCE),
    ("grpo_async", ("ref_model.num_devices=2",)),
    ("grpo_async", (*REFERENCE, "train_model.lora.enabled=true")),
    ("grpo_async", ("inference_model.enforce_eager=false", "train_model.num_devices=2")),
    ("grpo_async", ("train_model.devices=[0]", "inference_model.devices=[0]")),
    ("grpo", ("inference_model.num_devices=2",)),
    ("grpo", ("train.objective=maxent_listwise", "train.aggregation=prompt", "maxent.beta=0.1",
              "ref_model.num_devices=1")),
    ("grpo_async_gsm8k", ("env.task.num_train=8",))])
def test_what_is_started_is_what_the_checked_run_asks_for(name, given):
    values = composed(name, *given)
    config = load_config(values, AsyncConfig) if "async" in name else with_workers(
        load_config(values, Config))
    plan = plan_devices(config, kind="cpu", available=None)
    assert ahead._guess(values) == (plan, build_async._imports(config, "cpu"))


@pytest.mark.parametrize("kind, expected", [("cuda", ((1,), (2,))), ("cpu", ((1,), (2,)))])
def test_engines_on_gpus_have_those_of_the_plan(monkeypatch, kind, expected):
    monkeypatch.setattr(ahead, "_sees_gpus", lambda: kind == "cuda")
    plan, imports = ahead._guess(composed("grpo_async", "inference_model.num_devices=2"))
    assert (plan.kind, plan.engines, imports.device) == (kind, expected, kind)
    parallel = composed("grpo_async", "inference_model.num_devices=4",
                        "inference_model.tensor_parallel_size=2")
    # On a CPU there are no parallel engines, which the run will say.
    assert (ahead._guess(parallel) is None) == (kind == "cpu")


@pytest.mark.parametrize("name, given", [
    ("grpo", ()),
    ("grpo_async", ("ray.address=auto",)),
    ("grpo_async", ("env=atropos", "env.url=http://127.0.0.1:1")),
    ("grpo_async", ("inference_model.num_devices=-1",)),
    ("grpo_async", ("inference_model.num_devices=many",)),
    ("grpo_async", ("inference_model.tensor_parallel_size=2",)),
    ("grpo", ("inference_model.tensor_parallel_size=two",)),
    ("grpo", ("train_model.devices=1", "inference_model.devices=1")),
    ("grpo_async", ("inference_model.devices=[a]",)),
    ("grpo_async", ("inference_model.devices=${nowhere}",))])
def test_nothing_is_started_without_need_or_where_a_value_is_none(name, given):
    assert ahead._guess(composed(name, *given)) is None


def test_nothing_is_started_where_ray_is_not_installed(monkeypatch):
    monkeypatch.setattr(ahead, "ray_available", lambda: False)
    assert ahead._guess(composed("grpo_async")) is None


@pytest.mark.parametrize("devices, version, seen", [
    (None, "2.9.0", True), ("1", "2.9.0+cu128", True), (None, "2.9.0+cpu", False),
    ("", "2.9.0", False), ("-1", "2.9.0", False)])
def test_gpus_are_seen_without_pytorch(monkeypatch, tmp_path, devices, version, seen):
    monkeypatch.setattr(ahead, "_DEVICES", tmp_path)
    monkeypatch.setattr(ahead, "version", lambda name: version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert not ahead._sees_gpus()
    (tmp_path / "nvidia0").touch()
    assert ahead._sees_gpus() == seen


@pytest.mark.parametrize("argv, overrides", [
    (["train.seed=3"], {"seed": 3}), ([], {"seed": 0}), (["-m", "train.seed=3,4"], None),
    (["--config-dir", "."], None)])
def test_the_command_line_is_composed_but_sweeps_and_recipes_of_others(
        monkeypatch, argv, overrides):
    monkeypatch.setattr(sys, "argv", ["grpo-async.py", *argv])
    found = what_runs(FOLDER, "grpo_async")
    assert found is None if overrides is None else found.train.seed == overrides["seed"]


# -- whether the run takes it ----------------------------------------------------------------------


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def waiting(ended):
    """What was started ahead, for ``PLAN`` or another one."""
    def make(plan: DevicePlan = PLAN) -> Ahead:
        ahead._started.append(Ahead(plan, IMPORTS, {0: "actor"}, lambda: ended.append("ahead")))
        return ahead._started[-1]

    return make


def test_workers_that_fit_are_taken_once(waiting, ended):
    there = waiting()
    assert ahead.taken(replace(PLAN, available=8), IMPORTS) is there
    assert ahead.taken(PLAN, IMPORTS) is None and ended == []


@pytest.mark.parametrize("plan, imports", [
    (replace(PLAN, engines=((1,), (2,))), IMPORTS), (replace(PLAN, train=(1,)), IMPORTS),
    (PLAN, replace(IMPORTS, device="cuda")), (PLAN, replace(IMPORTS, enforce_eager=True))])
def test_workers_that_do_not_fit_are_ended_with_their_ray(waiting, ended, plan, imports):
    waiting()
    assert ahead.taken(plan, imports) is None
    assert ended == ["ahead"] and ahead.taken(plan, imports) is None


@pytest.mark.parametrize("fits", [True, False])
def test_a_run_ends_the_ray_that_it_takes_or_starts_its_own(waiting, ended, monkeypatch, fits):
    pytest.importorskip("ray")
    monkeypatch.setattr(build_async, "start_own_ray", lambda plan: lambda: ended.append("own"))
    monkeypatch.setattr(build, "vllm_available", lambda: False)
    waiting(PLAN if fits else replace(PLAN, train=(3,)))
    with ExitStack() as at_end:
        places = build_async.open_ray(load_config({"device": "cpu"}, AsyncConfig), at_end,
                                      Starting(print))
        assert places.ahead == ({0: "actor"} if fits else {})
        assert ended == ([] if fits else ["ahead"])
    assert ended == (["ahead"] if fits else ["ahead", "own"])


@pytest.mark.parametrize("error, code, said", [
    (ConfigError("Ray could not be started: why"), "error: Ray could not be started: why", ""),
    (Stopped(signal.SIGTERM), 143, "stopped by SIGTERM")])
def test_a_ray_that_does_not_start_ends_the_command_in_a_line(
        monkeypatch, capfd, error, code, said):
    def fail(plan):
        raise error

    pytest.importorskip("ray")
    monkeypatch.setattr(ahead, "start_own_ray", fail)
    monkeypatch.setattr(ahead, "signals_end_at_once", lambda clean_up: None)
    ended: list[str] = []
    monkeypatch.setattr(ahead, "end_descendants", lambda: ended.append("all"))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(SystemExit) as ending:
        ahead.start_ahead(composed("grpo_async"))
    assert ended == ["all"]
    assert ending.value.code == code and capfd.readouterr().err.strip() == said


def test_beside_a_pytorch_that_is_imported_already_nothing_is_started(monkeypatch):
    monkeypatch.setattr(ahead, "start_own_ray", lambda plan: pytest.fail("Ray was started"))
    ahead.start_ahead(composed("grpo_async"))
    assert ahead._started == []


def test_looking_at_what_to_start_imports_neither_pytorch_nor_ray():
    code = ("import sys; sys.argv[1:] = ['inference_model.num_devices=2'];"
            "from pathlib import Path; from grpo.run import ahead;"
            "from grpo.run.cli.script import what_runs;"
            f"plan, _ = ahead._guess(what_runs(Path({str(FOLDER)!r}), 'grpo_async'));"
            "print(plan.engines, {'torch', 'ray', 'vllm'} & sys.modules.keys())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(REPO)})
    assert done.stdout == "((1,), (2,)) set()\n", done.stderr


# -- whole commands --------------------------------------------------------------------------------


def begun(folder: Path, *overrides: str) -> AbstractContextManager[subprocess.Popen]:
    return started([SCRIPTS / "grpo-async.py", "inference_model.num_devices=2",
                    "inference_model.backend=transformers", *overrides], folder)


def waits(folder: Path) -> bool:
    return sum("RolloutWorker" in line for line in with_variable(STARTED_IN, folder)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("at", ["gcs_server", "raylet/raylet", "RolloutWorker"])
def test_a_signal_leaves_nothing_that_was_started_ahead(tmp_path, name, at):
    pytest.importorskip("ray")
    number = signal.Signals[name]
    with begun(tmp_path) as process:
        wait_until(lambda: any(at in line for line in with_variable(STARTED_IN, tmp_path)),
                   seconds=200.0, every=0.1, alive=process,
                   said=lambda: "" if process.poll() is None else process.stderr.read())
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped by {name}" in err and "Traceback" not in err
    assert with_variable(STARTED_IN, tmp_path) == []


@pytest.mark.slow
def test_a_refused_configuration_leaves_nothing_that_was_started_ahead(tmp_path):
    pytest.importorskip("ray")
    with begun(tmp_path, "train.epochs=0") as process:
        _, err = process.communicate(timeout=250)
    assert process.returncode == 1 and "train.epochs=0: " in err and "Traceback" not in err
    assert with_variable(STARTED_IN, tmp_path) == []


@pytest.mark.slow
def test_workers_that_were_started_ahead_are_those_that_generate(tmp_path):
    """Their processes are there before PyTorch is, and no others come."""
    pytest.importorskip("ray")
    with begun(tmp_path, "model.warm_start_steps=2", "env.num_envs=2", "env.repeats=2",
                 "train.total_dialog_turns=8", "train.eval_frequency=0") as process:
        wait_until(lambda: waits(tmp_path), seconds=250.0, every=0.1, alive=process)
        before = workers(tmp_path)
        line = next(line for line in process.stdout if "rollout worker 1: there" in line)
        assert line and workers(tmp_path) == before
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "step 2/2" in out


def workers(folder: Path) -> set[str]:
    """Ids of the processes of rollout workers."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if f"{STARTED_IN}={folder}".encode() in environment and (
                    "RolloutWorker" in (process / "cmdline").read_text()):
                found.add(process.name)
        except OSError:  # another user's, or it has just ended
            continue
    return found
