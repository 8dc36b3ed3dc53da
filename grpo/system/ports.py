"""Ports of this machine: who listens there, and which cannot lead to a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from grpo.system.http_call import split_url

_LISTENING = "0A"


def holder_of(port: int) -> str | None:
    """The process that listens at a TCP port, in words; None if nobody does, or it is not ours to
    see.

    Examples:
        >>> import os, socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     f"process {os.getpid()} (" in holder_of(server.getsockname()[1])
        True
    """
    inodes = {f"socket:[{fields[9]}]" for table in ("tcp", "tcp6")
              for fields in _rows(Path("/proc/net") / table)
              if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTENING}
    for folder in Path("/proc").iterdir() if inodes else ():
        if folder.name.isdigit() and _holds(folder, inodes):
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            return f"process {folder.name} ({' '.join(words).strip():.100})"
    return None


def _rows(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


def _holds(process: Path, inodes: set[str]) -> bool:
    links = []
    with suppress(OSError):  # another user's, or it has just ended
        links = list((process / "fd").iterdir())
    return any(_read(link) in inodes for link in links)


def _read(link: Path) -> str | None:
    """Where a link leads; None if it is gone, as that of the list of links itself always is."""
    try:
        return str(link.readlink())
    except OSError:
        return None


def check_ports(ports: Sequence[int], url: str) -> None:
    """Refuse ports that cannot lead to the server.

    Raises:
        ValueError: for one that is the server's own, or is named twice.

    Examples:
        >>> check_ports([9001], "http://127.0.0.1:9001")
        Traceback (most recent call last):
        ...
        ValueError: port 9001 is that of the engine itself, http://127.0.0.1:9001; leave it out
    """
    host, own = split_url(url)
    for at, port in enumerate(ports):
        if port and port in ports[:at]:
            raise ValueError(f"port {port} is named twice; leave one out")
        if port == own and host in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(f"port {port} is that of the engine itself, {url}; leave it out")
