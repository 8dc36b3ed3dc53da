"""A child process that leads a group of its own, writes to a log, and dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo.system.processes import all_running, command_line

# Seconds between asking a group to end and ending it.
GRACE = 10.0


class Child:
    """A running command; the constructor starts it.

    It leads a process group of its own, and :meth:`stop` ends that group and nothing else. A shell
    in the group holds a pipe from this process: when this process is gone, however it went, the
    shell ends the group, so the command itself needs to know nothing of it.

    Args:
        command: program and arguments.
        log_path: standard output and error are appended to it; its folder is made.
        env: further environment variables.
        cwd: folder that it runs in; None: this process's.

    Raises:
        OSError: if the log cannot be opened.

    Examples:
        >>> import sys, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     child = Child([sys.executable, "-c", "print('hello')"],
        ...                   log_path=Path(folder, "log"))
        ...     child.wait(timeout=30), child.ending(), child.last_lines(), child.stop()
        (True, 'exit code 0', ['hello'], None)
    """

    def __init__(
        self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sh", str(GRACE), *command], stdin=subprocess.PIPE,
                stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
                start_new_session=True, cwd=cwd)

    @property
    def pid(self) -> int:
        """Id of the process and of its group; ours until :meth:`stop` returns."""
        return self._process.pid

    def alive(self) -> bool:
        """True while the command itself runs; what it started may outlive it until the stop."""
        return self.exit_code() is None

    def wait(self, *, timeout: float) -> bool:
        """Wait until the command has ended; False if it has not after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def exit_code(self) -> int | None:
        """The command's exit code, minus the signal that ended it, or None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # WNOWAIT leaves the dead process's id reserved, so that stop() cannot hit another's.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def ending(self) -> str:
        """How the command ended, for messages."""
        code = self.exit_code()
        if code is None:
            return "nothing, it runs"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def last_lines(self, count: int = 30) -> list[str]:
        return last_lines(self.log_path, count)

    def stop(self, *, timeout: float = GRACE) -> None:
        """End the group: ask the command, wait ``timeout`` seconds, then kill what is left.

        Without effect if that was done before. Returns when the whole group is gone.
        """
        if self._process.returncode is not None:
            return
        if self.alive():
            os.kill(self.pid, signal.SIGTERM)
            self.wait(timeout=timeout)
        # The leader has not been waited for, so that the id of its group cannot be another's yet.
        end_group(self.pid)
        self._process.wait()
        self._process.stdin.close()


def end_group(group: int, *, timeout: float = 5.0) -> None:
    """Kill all processes of a group whose leader has not been waited for; Python's resource tracker
    last, ``timeout`` seconds later.

    The tracker ends by itself when the others have, after it removed the shared memory and the
    semaphores that they could not; killed with them it would leave those until the next boot.
    """
    deadline = time.monotonic() + timeout
    while (members := _members(group)) and time.monotonic() < deadline:
        for pid, command in members.items():
            if "multiprocessing.resource_tracker" not in command:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if members:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, str]:
    """Running processes of a group and their command lines."""
    return {pid: command_line(pid) for pid, process in all_running().items()
            if process.group == group}


def last_lines(path: Path, count: int = 30) -> list[str]:
    """The end of a text file; nothing if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as log:
        return [line.rstrip("\n") for line in deque(log, maxlen=count)]


def log_tail(path: Path, count: int = 30) -> str:
    """The end of a log, set for the end of an error message."""
    text = "\n".join(f"  | {line}" for line in last_lines(path, count))
    return f"; the end of {path}:\n{text or '  (nothing was written)'}"


# $1: seconds that the group may take to end; the rest: the command, which takes the shell's place.
# The subshell reads the pipe to its end, which comes when the parent is gone.
_WATCHED = """
grace=$1; shift
exec 3<&0 </dev/null
( trap '' TERM INT HUP; cat <&3 >/dev/null; kill -s TERM 0; sleep "$grace"; kill -s KILL 0 ) &
exec 3<&-
exec "$@"
"""


@contextmanager
def variables_for_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started meanwhile, by whatever library, find these in their environment.

    Examples:
        >>> with variables_for_children({"CUDA_VISIBLE_DEVICES": "2"}):
        ...     os.environ["CUDA_VISIBLE_DEVICES"]
        '2'
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def package_environment() -> dict[str, str]:
    """Variables with which a child finds this very package, whatever lies in the folder that it is
    started in."""
    folders = (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONSAFEPATH": "1"}
