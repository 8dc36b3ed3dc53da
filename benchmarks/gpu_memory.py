"""Memory in use on GPUs, as ``nvidia-smi`` says it: of all processes, contexts and caches too."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import NamedTuple

_SECONDS = 0.1  # between two looks


class Memory(NamedTuple):
    """Bytes of one GPU."""

    total: int
    used: int


class _Bytes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def gpu_names() -> list[str]:
    """Number or UUID of each GPU that this process may use; none without the driver's library."""
    nvml = _library()
    if nvml is None:
        return []
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count.value)] if visible is None else [
        name.strip() for name in visible.split(",") if name.strip()]


def gpu_memory(name: str) -> Memory:
    """Memory of the GPU with this number or UUID.

    Raises:
        RuntimeError: if the driver knows no such GPU.
    """
    nvml, handle, bytes_ = _library(), ctypes.c_void_p(), _Bytes()
    if name.isdigit():
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle)))
    else:
        _check(nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(bytes_)))
    return Memory(bytes_.total, bytes_.used)


class PeakMemory:
    """The most memory in use while the context is open, by GPU.

    A thread looks ten times a second. What other programs hold counts as well, so measure alone;
    ``before`` is what was in use at the start.

    Examples:
        >>> with PeakMemory() as memory:
        ...     pass
        >>> len(memory.peak_gib) == len(gpu_names())
        True
    """

    def __init__(self) -> None:
        self._gpus = gpu_names()
        self._before = [gpu_memory(name).used for name in self._gpus]
        self._peak = list(self._before)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def before_gib(self) -> list[float]:
        """GiB in use on each GPU at the start."""
        return [round(used / 2**30, 2) for used in self._before]

    @property
    def peak_gib(self) -> list[float]:
        """GiB in use on each GPU when it was most, so far."""
        return [round(used / 2**30, 2) for used in self._peak]

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            used = [gpu_memory(name).used for name in self._gpus]
            self._peak = [max(pair) for pair in zip(self._peak, used, strict=True)]
            if self._over.wait(_SECONDS):
                return


def _library() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the NVIDIA driver's library answers with error {status}; see "
                           "nvmlReturn_t in its documentation")
