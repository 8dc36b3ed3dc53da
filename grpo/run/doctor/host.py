"""Checks of the machine: memory that processes share, ports, limits, folders, the hub."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

from grpo.config.atropos_section import AtroposSection
from grpo.run.doctor.findings import Finding
from grpo.system.folders import why_not_writable
from grpo.system.http_call import split_url
from grpo.system.ports import holder_of

_MIB, _GIB = 1 << 20, 1 << 30
#: Below this much, NCCL, vLLM's workers or Ray's object store do not start.
_SHM_NEEDED, _SHM_ENOUGH = 256 * _MIB, 2 * _GIB
#: Sockets and files of an engine with its workers, and of Ray with its own.
_FILES_NEEDED, _FILES_ENOUGH = 1024, 8192
_DISK_NEEDED, _DISK_ENOUGH = 1 * _GIB, 20 * _GIB


def size(count: float) -> str:
    """
    Examples:
        >>> size(64 << 20), size(3 << 29)
        ('64 MiB', '1.5 GiB')
    """
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB else f"{count / _MIB:,.0f} MiB"


def default_ports() -> dict[int, str]:
    """Ports that commands take unless they are told others -> what for, and the flag."""
    section = AtroposSection()
    return {split_url(section.url)[1]: "the API of Atropos (grpo hub --port, grpo atropos "
                                       "--atropos-url)",
            section.vllm_port: "the engine (grpo serve --port, grpo atropos --vllm-port)"}


def check_shm(folder: Path = Path("/dev/shm")) -> Finding:
    """Shared memory, through which processes of one host hand tensors to each other."""
    if not folder.is_dir():
        return Finding("shm", "problem", f"{folder} is not there", "mount a tmpfs there, or start "
                       "the container with --shm-size=8g")
    found = os.statvfs(folder)
    free, whole = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    said = f"{folder}: {size(free)} of {size(whole)} are free"
    if free >= _SHM_ENOUGH:
        return Finding("shm", "ok", said)
    return Finding("shm", "problem" if free < _SHM_NEEDED else "remark", said,
                   "start the container with --shm-size=8g" if whole < _SHM_ENOUGH else
                   f"remove what ended runs have left there (ls -l {folder})")


def check_port(port: int, use: str) -> Finding:
    """Whether a server can listen; ``use`` says for what."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        by = holder_of(port) or error.strerror
        return Finding(f"port {port}", "remark", f"taken: {by}",
                       f"give another for {use}, unless that is what listens")
    return Finding(f"port {port}", "ok", f"free for {use.partition(' (')[0]}")


def check_files() -> Finding:
    """How many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _FILES_ENOUGH or soft == resource.RLIM_INFINITY:
        return Finding("files", "ok", f"{soft:,} may be open")
    able = hard == resource.RLIM_INFINITY or hard >= _FILES_ENOUGH
    return Finding("files", "problem" if soft < _FILES_NEEDED else "remark",
                   f"a process may have {soft:,} open, an engine with its workers and Ray need "
                   f"{_FILES_ENOUGH:,}",
                   f"ulimit -n {_FILES_ENOUGH}" if able else
                   f"raise the hard limit, which is {hard:,} (nofile in "
                   "/etc/security/limits.conf, or docker run --ulimit nofile=65536)")


def check_folder(name: str, folder: Path, change: str) -> Finding:
    """Whether runs can write to a folder, and have room there; ``change`` names another."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if problem := why_not_writable(there):
        return Finding(name, "problem", f"{folder} cannot be written to ({problem})", change)
    free = shutil.disk_usage(there).free
    said = f"{folder}: {size(free)} are free"
    if free >= _DISK_ENOUGH:
        return Finding(name, "ok", said)
    return Finding(name, "problem" if free < _DISK_NEEDED else "remark", said +
                   "; a checkpoint of 1.5 B parameters takes 20", f"make room, or {change}")


def check_hub() -> Finding:
    """Whether models and data sets can be fetched; a machine without a network needs none."""
    from huggingface_hub import constants

    from grpo.policies.model_source import why_no_hub

    why = "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else why_no_hub()
    if why is None:
        return Finding("hub", "ok", f"{constants.ENDPOINT} answers")
    return Finding("hub", "remark", f"not asked: {why}", "name models by their folders; grpo train "
                   "without model.name needs no hub")


def check_cache() -> Finding:
    """Where what comes from the hub is kept."""
    from huggingface_hub import constants

    return check_folder("cache", Path(constants.HF_HUB_CACHE), "set HF_HOME to another folder")


#: Variables of vLLM -> values with which runs fail or go another way, and why.
_CONTRADICT = {
    "VLLM_USE_MODELSCOPE": (("1", "true"), "problem", "vLLM takes models from ModelScope, the "
                            "trainer from the hub"),
    "VLLM_WORKER_MULTIPROC_METHOD": (("fork",), "problem", "workers that are forked from a process "
                                     "with threads may hang"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (("1",), "remark", "runs set it to 0, and "
                                       "inference_model.engine=process does what it is for"),
}


def check_variables() -> list[Finding]:
    """Whether variables of vLLM contradict what runs do."""
    found = []
    for name, (values, status, why) in _CONTRADICT.items():
        if (value := os.environ.get(name, "")).lower() in values:
            found.append(Finding("variables", status, f"{name}={value}: {why}", f"unset {name}"))
    port = os.environ.get("VLLM_PORT", "0")
    if not port.isdigit():
        found.append(Finding("variables", "problem", f"VLLM_PORT={port} is no number, so vLLM does "
                             "not start", "unset VLLM_PORT; Kubernetes sets it where a service is "
                             "called vllm, whose name can be changed"))
    return found or [Finding("variables", "ok", "none of vLLM's contradicts")]
