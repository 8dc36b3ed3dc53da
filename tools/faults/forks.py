"""Commands as forked children of a process that has imported everything once.

Each runs as ``python script arguments`` would, in a session of its own, and ends as that would:
with the same exit code, after the interpreter's own last acts.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Fork:
    """A running child; the constructor starts it.

    Args:
        what: is called in the child.
        log: standard output and error.
        cwd: folder that it runs in.
        env: further environment variables.
        argv: ``sys.argv`` of the child.
    """

    def __init__(self, what: Callable[[], object], *, log: Path, cwd: Path,
                 env: Mapping[str, str], argv: Sequence[str]) -> None:
        self.log = log
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _become(log, cwd, env, argv)
                code = _code_of(what)
            finally:
                os._exit(code)

    def wait(self, *, timeout: float) -> int | None:
        """Exit code, minus the number of the signal that ended it; None after ``timeout``
        seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None

    def end(self) -> None:
        """Kill it and its session, whatever of it is left."""
        kill(members(self.pid))
        with suppress(ChildProcessError):  # it has been waited for
            os.waitpid(self.pid, 0)


def command(path: Path | str) -> Callable[[], object]:
    """What ``python path`` does for a script, ``python -m path`` for the name of a module."""
    if isinstance(path, Path):
        return lambda: runpy.run_path(str(path), run_name="__main__")
    return lambda: runpy.run_module(path, run_name="__main__", alter_sys=True)


def kill(pids: Iterable[int]) -> None:
    """Kill processes, of which some may just have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def members(session: int, mark: str = "") -> dict[int, str]:
    """Running processes of a session, or with ``mark`` in their environment, and their commands."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            marked = mark and mark.encode() in (folder / "environ").read_bytes().split(b"\0")
            if fields[0] not in "ZX" and (int(fields[3]) == session or marked):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended
    return found


def _become(log: Path, cwd: Path, env: Mapping[str, str], argv: Sequence[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = list(argv)


def _code_of(what: Callable[[], object]) -> int:
    """Run to the end, as the interpreter does."""
    code = 0
    try:
        what()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
