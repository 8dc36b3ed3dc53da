"""The hub's memory on disk: a file that is only appended to, and rewritten when mostly old."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

Record = tuple[dict[str, Any], bytes]
# Checksum of the rest, length of the note, length of the body.
_HEADER = struct.Struct("<IIQ")
_MAGIC = b"grpo-hub-journal-1\n"


class Journal:
    """Records of a JSON note and a body of bytes, in the order they were appended.

    The operating system has a record when :meth:`append` returns, so it survives the end of this
    process, though not a loss of power. A damaged record is dropped with all that follows it.

    Args:
        path: the file; made if it is not there.

    Raises:
        ValueError: if the file is something else.
        BlockingIOError: if another process has it open.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal"
        >>> journal = Journal(path)
        >>> list(journal.replay())
        []
        >>> journal.append({"kind": "group"}, b"{}")
        >>> journal.close()
        >>> list(Journal(path).replay())
        [({'kind': 'group'}, b'{}')]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open(self.path)
        start = self._file.read(len(_MAGIC))
        if not _MAGIC.startswith(start):
            self._file.close()
            raise ValueError(f"journal={str(self.path)!r} is not a journal of the hub; name "
                             "another file, or remove it")
        if start != _MAGIC:  # new, or cut short
            self._file.seek(0)
            self._file.truncate()
            self._file.write(_MAGIC)
        self.size = len(_MAGIC)

    def replay(self) -> Iterator[Record]:
        """The records of the file, all of which must be read before the first is appended."""
        self._file.seek(len(_MAGIC))
        while record := self._read():
            yield record
        self._file.seek(self.size)
        self._file.truncate()

    def append(self, note: dict[str, Any], body: bytes = b"") -> None:
        """Add a record; OSError, and nothing of it stays, if it could not be written whole."""
        try:
            self.size += _write(self._file, note, body)
        except OSError:
            self._file.truncate(self.size)
            self._file.seek(self.size)
            raise

    def compact(self, records: Iterable[Record]) -> None:
        """Replace the file's content: all of it or, if interrupted, nothing."""
        path = self.path.with_name(self.path.name + ".new")
        file = self._open(path)
        file.truncate()
        size = file.write(_MAGIC)
        for note, body in records:
            size += _write(file, note, body)
        os.fsync(file.fileno())
        os.replace(path, self.path)
        self._file.close()
        self._file, self.size = file, size

    def close(self) -> None:
        self._file.close()

    def _open(self, path: Path) -> BinaryIO:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b",
                         buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise BlockingIOError(error.errno, f"journal {str(path)!r} is in use by another hub; "
                                  "stop it, or name another file") from None
        return file

    def _read(self) -> Record | None:
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        checksum, note_length, body_length = _HEADER.unpack(header)
        if self.size + _HEADER.size + note_length + body_length > os.fstat(
                self._file.fileno()).st_size:
            return None
        note, body = self._file.read(note_length), self._file.read(body_length)
        if zlib.crc32(body, zlib.crc32(note)) != checksum:
            return None
        self.size += _HEADER.size + note_length + body_length
        return orjson.loads(note), body


def _write(file: BinaryIO, note: dict[str, Any], body: bytes) -> int:
    raw = orjson.dumps(note)
    header = _HEADER.pack(zlib.crc32(body, zlib.crc32(raw)), len(raw), len(body))
    whole = b"".join((header, raw, body))
    # An unbuffered file may take less than all, as when the disk is full.
    written = file.write(whole)
    if written != len(whole):
        raise OSError(f"the journal took {written} of {len(whole)} bytes; is the disk full?")
    return written
