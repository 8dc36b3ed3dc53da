"""A file of lines that loses none of them when the disk is full for a while."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)


class LogFile(logging.FileHandler):
    """A log file that waits where the disk is full: what a record says is on the screen, too.

    Python's own handler prints a traceback of itself for each record that it cannot write.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by logging while the error is handled."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class LineFile:
    """Lines, appended; each call of :meth:`append` is on disk whole or not at all.

    Lines that cannot be written wait, after one warning, and are tried again with the next ones and
    at the end.

    Args:
        path: parent folders are made. A torn last line, of a process that died, is cut off, as it
            would swallow the next one.

    Raises:
        OSError: if the file cannot be opened.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "lines")
        >>> file = LineFile(path)
        >>> file.append("one\\n"); file.append("two\\n"); file.close()
        >>> path.read_text().split()
        ['one', 'two']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with open(path, "r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (it stays open)
        self._waiting = b""

    def append(self, text: str) -> None:
        """Write whole lines, and those that have waited before them."""
        # A lone surrogate, which a tokenizer can produce, has no UTF-8 form; its backslash escape
        # is the JSON escape, so the line stays valid and reads back as the same text.
        warned = bool(self._waiting)
        self._waiting += text.encode("utf-8", errors="backslashreplace")
        if (error := self._write()) and not warned:
            logger.warning("%s could not be written (%s); its lines wait until it can", self.path,
                           error)

    def close(self) -> None:
        """Write what waits, and close the file; a second time without effect."""
        if self._file.closed:
            return
        if self._waiting and (error := self._write()):
            logger.warning("%s lacks its last %d lines (%s):\n%s", self.path,
                           self._waiting.count(b"\n"), error, self._waiting.decode())
        self._file.close()

    def _write(self) -> OSError | None:
        size, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(self._waiting):
                written += self._file.write(self._waiting[written:])
        except OSError as error:
            self._file.truncate(size)  # no half line stays
            return error
        self._waiting = b""
        return None
