"""The document that tells another process where tensors lie, and its JSON file."""

from __future__ import annotations

import base64
import binascii
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from grpo.system.processes import running

Kind = Literal["shared_memory", "cuda_ipc"]
Owner = Literal["engine", "trainer"]

FILE_NAME = "vllm_bridge_config.json"
_FORMAT = 1
_REWRITE = "let the owner of the weights write it again"
# What a storage's handle consists of; bytes travel as base64 text.
_HANDLE_FIELDS: dict[str, dict[str, type]] = {
    "shared_memory": {"fd": int, "inode": int},
    "cuda_ipc": {"gpu": str, "memory": str, "memory_offset": int, "ref_counter": str,
                 "ref_counter_offset": int, "event": str, "event_sync_required": bool},
}


class HandoverError(RuntimeError):
    """A handover is malformed, does not fit, or its memory cannot be opened."""


class StaleHandoverError(HandoverError):
    """The process that owns the memory is gone."""


@dataclass(frozen=True)
class StorageEntry:
    """A piece of memory on a device, as the owner counts them, and how to open it."""

    device: str
    num_bytes: int
    handle: dict[str, Any]


@dataclass(frozen=True)
class TensorEntry:
    """A contiguous tensor, ``offset`` bytes into storage number ``storage``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Handover:
    """Everything another process needs to map the owner's tensors.

    Attributes:
        model: folder or hub id the weights came from.
        tensor_parallel_size: of the engine; tensors are shards where it is above 1.
        owner: whose allocation the memory is.
        kind: ``shared_memory`` (CPU) or ``cuda_ipc``.
        pid: of the owning process.
        process_start: of that process, in clock ticks since boot; tells a reused pid.
        storages: the memory.
        tensors: the engine's tensors within it.

    Examples:
        >>> from grpo.weights.handover import export_shared_memory
        >>> handover = export_shared_memory({"norm.weight": torch.ones(3)}, model="tiny",
        ...                                 owner="trainer")
        >>> handover.tensors[0]
        TensorEntry(name='norm.weight', shape=(3,), dtype='float32', storage=0, offset=0)
        >>> Handover.from_dict(json.loads(json.dumps(handover.to_dict()))) == handover
        True
    """

    model: str
    tensor_parallel_size: int
    owner: Owner
    kind: Kind
    pid: int
    process_start: int
    storages: tuple[StorageEntry, ...]
    tensors: tuple[TensorEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can carry; :meth:`from_dict` reads them."""
        return {"format": _FORMAT, **asdict(self),
                "storages": [asdict(entry) for entry in self.storages],
                "tensors": [{**asdict(entry), "shape": list(entry.shape)}
                            for entry in self.tensors]}

    @classmethod
    def from_dict(cls, raw: Any, *, source: str = "the handover") -> Handover:
        """Read and check what :meth:`to_dict` returned.

        Raises:
            HandoverError: naming ``source`` and the field that is missing, unknown or wrong.
        """
        raw = _checked(raw, source, {
            "format": int, "model": str, "tensor_parallel_size": int, "owner": str, "kind": str,
            "pid": int, "process_start": int, "storages": list, "tensors": list})
        for field, allowed in (("format", (_FORMAT,)), ("owner", get_args(Owner)),
                               ("kind", get_args(Kind))):
            if raw[field] not in allowed:
                raise _wrong(source, field, raw[field], f"one of {allowed}")
        for field in ("tensor_parallel_size", "pid"):
            if raw[field] < 1:
                raise _wrong(source, field, raw[field], "at least 1")
        storages = tuple(_storage_entry(entry, raw["kind"], f"{source}: storages[{i}]")
                         for i, entry in enumerate(raw["storages"]))
        tensors = tuple(_tensor_entry(entry, storages, f"{source}: tensors[{i}]")
                        for i, entry in enumerate(raw["tensors"]))
        names = [tensor.name for tensor in tensors]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise _wrong(f"{source}: tensors[{i}]", "name", name, "a name used once")
        known = {field.name: raw[field.name] for field in fields(cls)}
        return cls(**{**known, "storages": storages, "tensors": tensors})

    def write(self, path: str | Path) -> Path:
        """Write the file at once and readable by this user alone: it gives access to the memory.

        Args:
            path: the file, or a folder to put ``vllm_bridge_config.json`` into.

        Returns:
            The file.
        """
        path = _file_at(path)
        # mkstemp makes files of mode 0600.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
        os.replace(temporary, path)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Handover:
        """Read a file, check every field, and that its owner lives.

        Args:
            path: the file, or the folder that holds ``vllm_bridge_config.json``.

        Raises:
            HandoverError: if there is no such file or a field of it is wrong.
            StaleHandoverError: if the owner is gone.
        """
        path = _file_at(path)
        if not path.is_file():
            raise HandoverError(f"{path}: there is no such file; start the owner of the weights "
                                "first, or correct the path")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise HandoverError(f"{path}: not valid JSON ({error}); {_REWRITE}") from error
        handover = cls.from_dict(raw, source=str(path))
        handover.check_owner(source=str(path))
        return handover

    def check_owner(self, *, source: str = "the handover") -> None:
        """Raise :class:`StaleHandoverError` if the owner is gone."""
        started = process_start(self.pid)
        if started == self.process_start:
            return
        now = "has ended" if started is None else "has ended and its number was used again"
        raise StaleHandoverError(
            f"{source}: process {self.pid}, the {self.owner} that owns the weights, {now} (or runs "
            f"in another container); restart it, and {_REWRITE}")


def without_handles(value: Any) -> Any:
    """A document that says what the tensors are, but gives no access to them.

    Examples:
        >>> without_handles({"storages": [{"device": "cpu", "handle": {"fd": 7}}]})
        {'storages': [{'device': 'cpu'}]}
    """
    if isinstance(value, dict):
        return {key: without_handles(item) for key, item in value.items() if "handle" not in key}
    if isinstance(value, list):
        return [without_handles(item) for item in value]
    return value


def _file_at(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    process = running(pid)
    return process and process.started


def _wrong(where: str, field: str, value: Any, need: str) -> HandoverError:
    return HandoverError(f"{where}: field {field!r} is {value!r} but must be {need}; {_REWRITE}")


def _checked(raw: Any, where: str, spec: dict[str, type]) -> dict[str, Any]:
    """``raw``, if it is a dictionary with exactly the fields of ``spec``."""
    if not isinstance(raw, dict):
        raise HandoverError(f"{where}: must be an object with fields, not {raw!r}; {_REWRITE}")
    for field, kind in spec.items():
        if field not in raw:
            raise HandoverError(f"{where}: field {field!r} is missing; {_REWRITE}")
        # True is an int to isinstance.
        if kind is not object and type(raw[field]) is not kind:
            raise _wrong(where, field, raw[field], f"of type {kind.__name__}")
    for field in raw:
        if field not in spec:
            raise HandoverError(f"{where}: field {field!r} is unknown; {_REWRITE}")
    return raw


def _storage_entry(raw: Any, kind: str, where: str) -> StorageEntry:
    raw = _checked(raw, where, {"device": str, "num_bytes": int, "handle": dict})
    if raw["num_bytes"] < 1:
        raise _wrong(where, "num_bytes", raw["num_bytes"], "at least 1")
    handle = _checked(raw["handle"], f"{where}: handle", _HANDLE_FIELDS[kind])
    for field in ("memory", "ref_counter", "event") if kind == "cuda_ipc" else ():
        try:
            base64.b64decode(handle[field], validate=True)
        except binascii.Error as error:
            raise _wrong(f"{where}: handle", field, handle[field], "base64 text") from error
    return StorageEntry(**raw)


def _tensor_entry(raw: Any, storages: tuple[StorageEntry, ...], where: str) -> TensorEntry:
    raw = _checked(raw, where, {"name": str, "shape": object, "dtype": str, "storage": int,
                                "offset": int})
    shape = raw["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise _wrong(where, "shape", shape, "a list of sizes")
    if not isinstance(getattr(torch, raw["dtype"], None), torch.dtype):
        raise _wrong(where, "dtype", raw["dtype"], "the name of a torch dtype")
    if not 0 <= raw["storage"] < len(storages):
        raise _wrong(where, "storage", raw["storage"], f"below the {len(storages)} storages")
    entry = TensorEntry(**{**raw, "shape": tuple(shape)})
    last = storages[entry.storage].num_bytes - entry.num_bytes
    if not 0 <= entry.offset <= last or entry.offset % entry.torch_dtype.itemsize:
        raise _wrong(where, "offset", entry.offset, f"a multiple of {entry.torch_dtype.itemsize} "
                     f"up to {last}: {entry.name} {list(entry.shape)} does not fit otherwise")
    return entry
