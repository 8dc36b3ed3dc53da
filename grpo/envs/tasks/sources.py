"""Rows of data sets: local files, and the Hugging Face hub."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: A row and where it stands, for messages.
PlacedRow = tuple[str, Any]


def read_jsonl(folder: Path, split: str) -> Iterator[PlacedRow]:
    """Rows of ``SPLIT.jsonl`` in the folder of ``env.data_path``.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: for a line that is no JSON.
    """
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        missing = "has no such file" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"env.data_path={str(folder)!r} {missing} (looked for {path}); point it to a folder "
            "with train.jsonl and test.jsonl, or leave it out to load env.dataset from the hub")
    yield from _jsonl(path)


def file_rows(path: Path) -> Iterator[PlacedRow]:
    """Rows of a jsonl, json, csv or parquet file.

    Raises:
        FileNotFoundError: if it is not there.
        ImportError: if a parquet file needs a package that is not installed.
        ValueError: for a file of another kind, or one that cannot be read as what it is called.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix not in _READERS:
        raise ValueError(f"{path} is no data set that can be read; use one of "
                         f"{', '.join(sorted(_READERS))}")
    return _READERS[path.suffix](path)


def hub_rows(
    dataset: str, config: str | None, split: str, *, key: str, instead: str
) -> Iterator[PlacedRow]:
    """Rows of a data set of the hub, read with the ``datasets`` package.

    Args:
        dataset: its id.
        config: its configuration; None: the only one.
        split: its split, as ``datasets`` takes it.
        key: that gives its id, for messages.
        instead: what to set where the hub cannot be reached, for messages.

    Raises:
        FileNotFoundError: if it cannot be loaded.
        ImportError: if ``datasets`` is not installed.
        ValueError: if it has no such configuration or split, as ``datasets`` says.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(f"reading {dataset!r} from the hub needs the datasets package: pip "
                          f"install datasets (or set {instead})")
    import datasets

    try:
        rows = datasets.load_dataset(dataset, config, split=split)
    except OSError as error:  # not found, no access, no network
        raise FileNotFoundError(
            f"cannot load data set {dataset!r}, config {config!r}, split {split!r}: {error}; check "
            f"{key} and the network, or set {instead}") from error
    for number, row in enumerate(rows):
        yield f"{dataset}, split {split}, row {number}", row


def _jsonl(path: Path) -> Iterator[PlacedRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(line, where)


def _json(path: Path) -> Iterator[PlacedRow]:
    rows = _parsed(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}; write one "
                         "row a line into a .jsonl file")
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _csv(path: Path) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            yield f"{path}, row {number}", row


def _parquet(path: Path) -> Iterator[PlacedRow]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow: pip install datasets") from error
    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
#: How names of files end that :func:`file_rows` reads.
SUFFIXES = tuple(_READERS)
