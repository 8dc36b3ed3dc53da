"""Checks of GPUs: driver, PyTorch as it was built, NCCL, memory and who has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from grpo.run.doctor.findings import Finding
from grpo.run.doctor.host import size
from grpo.run.doctor.packages import installed, wanted

_SECONDS = 15.0
_MIB = 1 << 20
#: A GPU with more than this in use, or less than this free.
_USED, _NEEDED = 1024, 4096  # MiB
_FRESH = "a fresh environment with torchrl-grpo[vllm], whose torch has CUDA"


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one."""

    index: int
    uuid: str
    name: str
    total: int  # MiB
    used: int
    processes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """What ``nvidia-smi`` says; ``error`` why it says nothing, None where there is no driver."""

    version: str = ""
    cuda: str = ""  # the highest that the driver knows
    gpus: tuple[Gpu, ...] = field(default=())
    error: str | None = None

    @property
    def there(self) -> bool:
        return bool(self.version)


def ask_driver(seconds: float = _SECONDS) -> Driver:
    """Ask ``nvidia-smi``, which comes with the driver."""
    if shutil.which("nvidia-smi") is None:
        return Driver()
    try:
        page = _smi(seconds)
        found = re.search(r"CUDA (?:\w+ )?Version\s*:\s*([\d.]+)", page)
        rows = _rows(_smi(seconds, "--query-gpu=index,uuid,name,memory.total,memory.used,"
                                   "driver_version"))
        apps = _rows(_smi(seconds, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"))
    except subprocess.TimeoutExpired:
        return Driver(error=f"nvidia-smi has not answered after {seconds:g} s")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stdout", None) or str(error)
        return Driver(error=" ".join(said.split()))
    users: dict[str, list[str]] = {}
    for uuid, pid, name, used in apps:
        users.setdefault(uuid, []).append(f"process {pid} ({name}) {used} MiB")
    return Driver(rows[0][5] if rows else "?", found[1] if found else "", tuple(
        Gpu(int(index), uuid, name, int(total), int(used), tuple(users.get(uuid, ())))
        for index, uuid, name, total, used, _ in rows))


def _smi(seconds: float, *query: str) -> str:
    options = [*query, "--format=csv,noheader,nounits"] if query else []
    return subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, check=True,
                          timeout=seconds).stdout


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(", ")] for line in text.splitlines() if line]


def check_driver(driver: Driver) -> Finding:
    """The driver, and what it is for."""
    if driver.error:
        return Finding("driver", "problem", driver.error, "load or reinstall the NVIDIA driver; in "
                       "a container, start it with --gpus all")
    if not driver.there:
        return Finding("driver", "remark", "no NVIDIA driver: everything runs on the CPU",
                       "enough for the embedded model; in a container with GPUs, --gpus all")
    return Finding("driver", "ok", f"{driver.version}, for CUDA up to {driver.cuda or '?'}; "
                   + ", ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in driver.gpus))


def check_torch(facts: dict[str, Any], driver: Driver) -> Finding:
    """Whether PyTorch was built for the driver, and sees the GPUs."""
    version, cuda, seen = facts["version"], facts["cuda"], facts["devices"]
    if not driver.gpus:
        return Finding("torch", "ok", f"{version}, " + (
            f"for CUDA {cuda}" if cuda else "without CUDA"))
    if cuda is None:
        return Finding("torch", "problem", f"{version} is a build without CUDA, the driver has "
                       f"{len(driver.gpus)} GPUs", _FRESH)
    if driver.cuda and Version(cuda).major > Version(driver.cuda).major:
        return Finding("torch", "problem", f"{version} is built for CUDA {cuda}, the driver "
                       f"{driver.version} knows {driver.cuda}", "update the driver, or install a "
                       f"torch for CUDA {Version(driver.cuda).major} and a vLLM that fits it")
    if not seen:
        return Finding("torch", "problem", f"{version} for CUDA {cuda} sees none of "
                       f"{len(driver.gpus)} GPUs", "look at CUDA_VISIBLE_DEVICES, and restart "
                       "after an update of the driver")
    return Finding("torch", "ok", f"{version} for CUDA {cuda} sees {seen} of {len(driver.gpus)} "
                   "GPUs")


def check_nccl(facts: dict[str, Any], gpus: int) -> Finding:
    """NCCL, by which GPUs exchange gradients and weights."""
    if not gpus:
        return Finding("nccl", "ok", "not needed without GPUs")
    loaded = facts["nccl"]
    if loaded is None:
        return Finding("nccl", "remark" if gpus == 1 else "problem",
                       "this torch is built without it, so GPUs cannot work together", _FRESH)
    for one in wanted("torch"):
        if one.requirement.name.startswith("nvidia-nccl"):
            asked = str(one.requirement.specifier).removeprefix("==")
            if asked and Version(loaded).release != Version(asked).release:
                return Finding("nccl", "remark", f"{loaded} is loaded, torch came with {asked}",
                               "take the other from LD_LIBRARY_PATH, or LD_PRELOAD, unless it is "
                               "meant")
            if installed(one.requirement.name) is None:
                break
    return Finding("nccl", "ok", loaded)


def check_memory(driver: Driver) -> list[Finding]:
    """How much of each GPU is free, and who has the rest."""
    return [_memory(gpu) for gpu in driver.gpus]


def _memory(gpu: Gpu) -> Finding:
    free = gpu.total - gpu.used
    said = f"{size(free * _MIB)} of {size(gpu.total * _MIB)} are free"
    if gpu.used <= _USED:
        return Finding(f"GPU {gpu.index}", "ok", said)
    by = ", ".join(gpu.processes) or "processes that are not visible here"
    return Finding(f"GPU {gpu.index}", "problem" if free < _NEEDED else "remark",
                   f"{said}; the rest has {by}", "end what is not needed, or choose other GPUs "
                   "with CUDA_VISIBLE_DEVICES")
