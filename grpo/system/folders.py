"""Folders that something will be written to, looked at before it is."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(folder: Path) -> str | None:
    """Make a folder, and say why nothing can be written there; None if something can.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     (Path(place) / "file").touch()
        ...     why_not_writable(Path(place) / "new"), why_not_writable(Path(place) / "file")
        (None, 'File exists')
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
