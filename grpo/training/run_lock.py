"""One process a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo.config.schema import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep a run's folder to this process, until the end of the context or of the process.

    The system gives the lock back however the process ends, also over NFS. ``run.lock`` says who
    has it: host, process id and when it started. On a file system without locks, what is written
    there counts alone, so that after ``kill -9`` on another host it has to be removed by hand.
    The folder is made where it is missing.

    Raises:
        ConfigError: if another process has it, naming host, process and start.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder):
        ...     with locked(folder):  # doctest: +ELLIPSIS
        ...         pass
        Traceback (most recent call last):
        ...
        grpo.config.keys.ConfigError: ... is in use by process ... on ... since ...
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_in_use(run_dir, _holder(path))) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("the file system of %s has no locks (%s)", run_dir, error)
            if _may_run(holder := _holder(path)):
                raise ConfigError(f"{_in_use(run_dir, holder)}. If that process is gone, remove "
                                  f"{path}") from None
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _holder(path: Path) -> dict[str, object]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it has just ended, or is just about to write
        return {}


def _in_use(run_dir: Path, holder: dict[str, object]) -> str:
    who = "another process"
    if holder:
        who = f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    return (f"{run_dir} is in use by {who}; two runs in one folder would overwrite each other: end "
            "that one, or give this one a folder of its own")


def _may_run(holder: dict[str, object]) -> bool:
    """Whether a holder is on another host, or a process that is alive on this one."""
    if not holder or holder["host"] != socket.gethostname():
        return bool(holder)
    return Path(f"/proc/{holder['pid']}").exists()
