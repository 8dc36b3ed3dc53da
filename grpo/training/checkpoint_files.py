"""Files of a checkpoint: room for them, a record of them, and what has become of them."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grpo.weights.adapters import has_adapters

#: Beside tensors: tokenizer, configuration, headers.
_OTHER_BYTES = 32 << 20


class NotSavedError(OSError):
    """A checkpoint or model could not be written; nothing of it is left, what was there is."""


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold: ``needed`` bytes in a folder that need not exist.

    Raises:
        NotSavedError: naming the folder, what is needed and what is free.

    Examples:
        >>> check_room(Path("."), 1)
        >>> check_room(Path("."), 1 << 60)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        grpo.training.checkpoint_files.NotSavedError: ...1,099,511,627,776.0 MiB...
    """
    if (free := free_bytes(folder)) < needed:
        raise NotSavedError(f"{folder} needs {needed / 2**20:,.1f} MiB, but {free / 2**20:,.1f} "
                            "MiB are free on its disk; free some, or lower train.keep_checkpoints")


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder that need not exist.

    Raises:
        NotSavedError: if that cannot be read, as of a network disk that is gone.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free
    except OSError as error:
        raise NotSavedError(f"what is free on the disk of {folder} cannot be read: {error}; see "
                            "whether the disk is there") from error


def saved_bytes(model: nn.Module, state: Any = None) -> int:
    """About how many bytes a model, or its adapter, and a state take on disk."""
    adapters, dtype = has_adapters(model), getattr(model, "trained_dtype", None)
    size = sum(param.numel() * (dtype or param.dtype).itemsize for param in model.parameters()
               if param.requires_grad or not adapters)
    return size + _tensor_bytes(state) + _OTHER_BYTES


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def record(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file in a folder, by relative path."""
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(folder.rglob("*")) if path.is_file()}


def first_difference(folder: Path, recorded: dict[str, dict[str, Any]]) -> str | None:
    """What is wrong with the first file that is not as recorded; None if all are.

    Sizes are compared before anything is read.
    """
    for name, known in recorded.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != known["bytes"]:
            return f"{name} has {size:,} of {known['bytes']:,} bytes"
    for name, known in recorded.items():
        if _sha256(folder / name) != known["sha256"]:
            return f"{name} is not what was written: its checksum differs"
    return None


def flush(folder: Path) -> None:
    """Make sure that the files of a folder are on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
