"""One process's tensors in another process's hands, as the same memory.

The owner exports tensors into a :class:`Handover`, text that travels as a file or a message; the
other side maps it. On a CPU the memory is an anonymous file (``memfd_create``) that others open
through ``/proc``: it has no name in the file system, so nothing is left behind when either side is
killed. On a GPU it is a CUDA IPC handle for each storage.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo.weights.handover_file import (
    Handover,
    HandoverError,
    Kind,
    Owner,
    StaleHandoverError,
    StorageEntry,
    TensorEntry,
    process_start,
)

# Tensors start at multiples of a cache line, as torch's own allocations do.
_ALIGNMENT = 64


def export_shared_memory(
    params: Mapping[str, Tensor], *, model: str, owner: Owner, tensor_parallel_size: int = 1
) -> Handover:
    """Move CPU tensors into one anonymous shared file, in place.

    Each tensor's ``data`` is rebound to the file, storage by storage, so at most one storage exists
    twice at a time. Tensors that share memory share it afterwards. The file lives as long as this
    process keeps it open (:func:`release` closes it) or anybody has it mapped.

    Args:
        params: contiguous CPU tensors or parameters; all users of a storage must be among them.
        model: see :class:`~grpo.weights.handover_file.Handover`.
        owner: whose process this is.
        tensor_parallel_size: of the engine.

    Raises:
        HandoverError: for tensors that are not contiguous or not on the CPU.

    Examples:
        >>> weights = {"norm.weight": torch.ones(3)}
        >>> handover = export_shared_memory(weights, model="tiny", owner="trainer")
        >>> mapped = map_tensors(handover)
        >>> mapped["norm.weight"][0] = 5.0
        >>> weights["norm.weight"]
        tensor([5., 1., 1.])
    """
    _check_exportable(params, "cpu")
    starts, size = _storage_starts(params)
    fd = os.memfd_create("grpo-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # A file that shrinks kills those who have it mapped.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    entries = [_entry(name, tensor, 0, starts[_address(tensor)]) for name, tensor in params.items()]
    moved: set[int] = set()
    for entry, tensor in zip(entries, params.values(), strict=True):
        if _address(tensor) != memory.data_ptr():  # else it is there under another name
            _move(tensor, memory, entry, start=starts[_address(tensor)], moved=moved)
    handle = {"fd": fd, "inode": os.fstat(fd).st_ino}
    return _handover("shared_memory", [StorageEntry("cpu", size, handle)], entries,
                     model=model, owner=owner, tensor_parallel_size=tensor_parallel_size)


def export_cuda_ipc(
    params: Mapping[str, Tensor], *, model: str, owner: Owner, tensor_parallel_size: int = 1
) -> Handover:
    """Describe GPU tensors so that one other process can map them; nothing is moved.

    Torch counts the users of every exported storage, so call this once for each process that maps
    the result, and keep the tensors alive while it does. Arguments are those of
    :func:`export_shared_memory`, for CUDA tensors.

    Raises:
        HandoverError: for tensors that are not contiguous or not on a GPU, and for memory that CUDA
            IPC cannot export.
    """
    _check_exportable(params, "cuda")
    _check_segments(params)
    # Readers must find finished values, whatever stream wrote them.
    for device in {tensor.device for tensor in params.values()}:
        torch.cuda.synchronize(device)
    storages: list[StorageEntry] = []
    number: dict[int, int] = {}
    entries = []
    for name, tensor in params.items():
        if _address(tensor) not in number:
            number[_address(tensor)] = len(storages)
            storages.append(_share_cuda(name, tensor.untyped_storage()))
        entries.append(_entry(name, tensor, number[_address(tensor)], 0))
    return _handover("cuda_ipc", storages, entries, model=model, owner=owner,
                     tensor_parallel_size=tensor_parallel_size)


def export_tensors(
    params: Mapping[str, Tensor], *, model: str, owner: Owner, tensor_parallel_size: int = 1
) -> Handover:
    """Export by the kind that suits the tensors' device; see the functions above."""
    on_gpu = any(tensor.is_cuda for tensor in params.values())
    export = export_cuda_ipc if on_gpu else export_shared_memory
    return export(params, model=model, owner=owner, tensor_parallel_size=tensor_parallel_size)


def map_tensors(handover: Handover) -> dict[str, Tensor]:
    """The owner's tensors by name, in this process: who writes to them writes to its memory.

    The mapping stays valid while any of the tensors lives. On a CPU it then outlives the owner; on
    a GPU the owner must live.

    Args:
        handover: from an export of another process (on a CPU also of this one).

    Raises:
        StaleHandoverError: if the owner is gone.
        HandoverError: if the memory cannot be opened here.
    """
    handover.check_owner()
    if handover.kind == "shared_memory":
        memories = [_open_shared_memory(handover, storage) for storage in handover.storages]
    else:
        memories = _open_cuda_ipc(handover)
    return {entry.name: _tensor_at(entry, memories[entry.storage]) for entry in handover.tensors}


def release(handover: Handover) -> None:
    """Close the file of a handover that this process exported; mappings of it stay valid, but
    nobody can make another."""
    if handover.kind == "shared_memory" and handover.pid == os.getpid():
        for storage in handover.storages:
            os.close(storage.handle["fd"])


def _handover(
    kind: Kind, storages: list[StorageEntry], entries: list[TensorEntry], **facts: Any
) -> Handover:
    pid = os.getpid()
    return Handover(kind=kind, pid=pid, process_start=process_start(pid), storages=tuple(storages),
                    tensors=tuple(entries), **facts)


def _check_exportable(params: Mapping[str, Tensor], device: str) -> None:
    if not params:
        raise HandoverError("there are no tensors to hand over")
    for name, tensor in params.items():
        if tensor.device.type != device:
            raise HandoverError(f"{name} lies on {tensor.device}, but this kind of handover is for "
                                f"{device} tensors; choose the kind by the engine's device")
        if not tensor.is_contiguous() or tensor.numel() == 0:
            raise HandoverError(f"{name} {tuple(tensor.shape)} is empty or not contiguous (strides "
                                f"{tensor.stride()}): the engine stores it in a form of its own, "
                                "which cannot be shared; use weights that are copied")


def _storage_starts(params: Mapping[str, Tensor]) -> tuple[dict[int, int], int]:
    """Where each storage begins in the file, by address, and the size of the file in bytes."""
    starts: dict[int, int] = {}
    size = 0
    for tensor in params.values():
        if _address(tensor) not in starts:
            starts[_address(tensor)] = size
            size += -(-tensor.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    return starts, size


def _move(
    tensor: Tensor, memory: Tensor, entry: TensorEntry, *, start: int, moved: set[int]
) -> None:
    """Copy the tensor's whole storage to byte ``start``, once, and rebind the tensor to it."""
    storage = tensor.untyped_storage()
    if start not in moved:
        raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        memory[start : start + storage.nbytes()].copy_(raw)
        moved.add(start)
    tensor.data = _tensor_at(entry, memory)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _entry(name: str, tensor: Tensor, storage: int, start: int) -> TensorEntry:
    """``tensor``, whose storage begins at byte ``start`` of handover storage ``storage``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, tuple(tensor.shape), dtype, storage,
                       start + tensor.storage_offset() * tensor.element_size())


def _tensor_at(entry: TensorEntry, memory: Tensor) -> Tensor:
    raw = memory[entry.offset : entry.offset + entry.num_bytes]
    return raw.view(entry.torch_dtype).view(entry.shape)


def _open_shared_memory(handover: Handover, storage: StorageEntry) -> Tensor:
    path = f"/proc/{handover.pid}/fd/{storage.handle['fd']}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        handover.check_owner()  # it may have ended just now
        raise HandoverError(f"{path}, the memory of the {handover.owner}'s weights, cannot be "
                            f"opened: {error.strerror}; both processes must run as the same user "
                            "and in the same container, and the owner must not have released it"
                            ) from error
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (storage.handle["inode"], storage.num_bytes):
            raise StaleHandoverError(f"{path} is no longer the memory that the handover describes; "
                                     f"let the {handover.owner} write it again")
        return torch.frombuffer(mmap.mmap(fd, storage.num_bytes), dtype=torch.uint8)
    finally:
        os.close(fd)  # the mapping does not need it


def _check_segments(params: Mapping[str, Tensor]) -> None:
    """Raise for memory of the expandable allocator, which has no CUDA IPC handle."""
    expandable = [(segment["address"], segment["address"] + segment["total_size"])
                  for segment in torch.cuda.memory_snapshot() if segment.get("is_expandable")]
    for name, tensor in params.items():
        if any(start <= tensor.data_ptr() < end for start, end in expandable):
            raise HandoverError(
                f"{name} lies in an expandable segment, which cannot be mapped by other processes; "
                "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF (or "
                "PYTORCH_ALLOC_CONF) of the process that owns the weights")


def _share_cuda(name: str, storage: torch.UntypedStorage) -> StorageEntry:
    try:
        (index, memory, num_bytes, memory_offset, ref_counter, ref_counter_offset, event,
         event_sync_required) = storage._share_cuda_()
    except RuntimeError as error:
        raise HandoverError(
            f"the memory of {name} cannot be exported through CUDA IPC: {error}. Engines started "
            "with enable_sleep_mode keep weights in memory that has no handle: start the engine "
            "without it") from error
    return StorageEntry(f"cuda:{index}", num_bytes, {
        "gpu": _gpu_uuid(index), "memory": _text(memory), "memory_offset": memory_offset,
        "ref_counter": _text(ref_counter), "ref_counter_offset": ref_counter_offset,
        "event": _text(event), "event_sync_required": bool(event_sync_required)})


def _open_cuda_ipc(handover: Handover) -> list[Tensor]:
    if handover.pid == os.getpid():
        raise HandoverError("a process cannot map its own GPU memory through CUDA IPC; trainer and "
                            "engine share one process here: use SingleCopy")
    if not torch.cuda.is_available():
        raise HandoverError(f"the weights lie on {handover.storages[0].device} of process "
                            f"{handover.pid}, but this process sees no GPU")
    torch.cuda.init()
    memories = []
    for storage in handover.storages:
        handle = storage.handle
        index = _device_index(handle["gpu"])
        untyped = torch.UntypedStorage._new_shared_cuda(
            index, _bytes(handle["memory"]), storage.num_bytes, handle["memory_offset"],
            _bytes(handle["ref_counter"]), handle["ref_counter_offset"], _bytes(handle["event"]),
            handle["event_sync_required"])
        empty = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")
        memories.append(empty.set_(untyped, 0, (storage.num_bytes,), (1,)))
    return memories


def _device_index(uuid: str) -> int:
    """This process's number of the GPU that another process counts differently."""
    here = [_gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in here:
        raise HandoverError(f"the weights lie on GPU {uuid}, which this process does not see (it "
                            f"sees {', '.join(here)}); add it to CUDA_VISIBLE_DEVICES")
    return here.index(uuid)


def _gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)
