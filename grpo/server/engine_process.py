"""A server as a child process: started on a free port, watched, and ended with all it started."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.policies.client import EngineClient
from grpo.system.child_process import end_group, last_lines, log_tail
from grpo.system.lifeline import GRACE, TOKEN_VARIABLE, bind


class EngineStartError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


def server_command(model: str, **options: Any) -> list[str]:
    """The command of :mod:`grpo.server.serve` for a folder or hub id.

    The options are those of its command line, with underscores; True stands for a switch, None and
    False leave an option out.

    Examples:
        >>> server_command("tiny", max_model_len=64, enforce_eager=True)[2:]
        ['grpo.server.serve', '--model', 'tiny', '--max-model-len', '64', '--enforce-eager']
    """
    command = [sys.executable, "-m", "grpo.server.serve", "--model", model]
    for name, value in options.items():
        if value is None or value is False:
            continue
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(str(value))
    return command


class EngineProcess:
    """A server process; a context manager that starts it, waits for its health, and stops it.

    The port is bound here and handed to the child, so nobody can take it in between. The child
    leads a process group of its own; :meth:`stop` ends that group and nothing else. The child's
    standard input is a pipe from this process: a child that calls
    :func:`~grpo.system.lifeline.exit_with_parent` (the server does) sees it close and ends itself
    if this process is killed.

    Args:
        command: the server's command, for example from :func:`server_command`. ``--fd N`` and
            ``--exit-with-parent`` are added.
        host: address to listen on.
        port: 0 takes a free one.
        log_path: where the child's output goes; default: a new file in the temporary folder.
        token: access token, handed over through the environment.
        env: further environment variables.
        start_timeout: seconds from the start until ``/health`` answers.

    Examples:
        >>> with EngineProcess(server_command(path)) as server:          # doctest: +SKIP
        ...     server.client().generate([[5, 6, 7]], max_tokens=8)
    """

    def __init__(
        self, command: Sequence[str], *, host: str = "127.0.0.1", port: int = 0,
        log_path: str | Path | None = None, token: str | None = None,
        env: dict[str, str] | None = None, start_timeout: float = 600.0,
    ) -> None:
        self.command, self.env = list(command), env or {}
        self.host, self.token, self.start_timeout = host, token, start_timeout
        self._wanted_port = port
        self._log_path = Path(log_path) if log_path else None
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> EngineProcess:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    def client(self, **options: Any) -> EngineClient:
        """A client of this server; options as of :class:`~grpo.policies.client.EngineClient`."""
        return EngineClient(self.url, token=self.token, **options)

    def start(self) -> None:
        """Start the child; does not wait for it.

        Raises:
            OSError: if the port is taken or the command cannot be run.
            RuntimeError: if it has been started already.
        """
        if self._process is not None:
            raise RuntimeError(f"process {self._process.pid} was started already; stop() it first")
        env = {**os.environ, **self.env}
        if self.token is not None:
            env[TOKEN_VARIABLE] = self.token
        if self._log_path is None:
            fd, name = tempfile.mkstemp(prefix="grpo-engine-", suffix=".log")
            os.close(fd)
            self._log_path = Path(name)
        self.log_path = self._log_path
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with bind(self.host, self._wanted_port) as sock, self.log_path.open("wb") as log:
            self.port = sock.getsockname()[1]
            self._process = subprocess.Popen(
                [*self.command, "--fd", str(sock.fileno()), "--exit-with-parent"],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env,
                pass_fds=[sock.fileno()], start_new_session=True)
        self._deadline = time.monotonic() + self.start_timeout
        atexit.register(self.stop)

    def wait_ready(self) -> None:
        """Wait until ``/health`` answers.

        Raises:
            EngineStartError: if the child ends, or is not ready ``start_timeout`` seconds after its
                start; the message has the last lines of its log.
        """
        client = self.client(timeout=2.0)
        while not client.alive():
            if not self.alive():
                raise EngineStartError(f"the server ended with {self._ending()} before it was "
                                       f"ready{log_tail(self.log_path)}")
            if time.monotonic() > self._deadline:
                raise EngineStartError(
                    f"waited {self.start_timeout:g} s for {self.url}/health; if the model is large "
                    f"raise start_timeout, else see what it was doing{log_tail(self.log_path)}")
            time.sleep(0.1)

    def alive(self) -> bool:
        """True while the child runs."""
        # WNOWAIT leaves the dead child's id reserved, so that stop() cannot hit another's.
        return self._process is not None and os.waitid(
            os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def check(self) -> None:
        """Raise RuntimeError with the last lines of the child's log if it has ended."""
        if not self.alive():
            raise RuntimeError(f"the server ended with {self._ending()}{log_tail(self.log_path)}")

    def last_lines(self, count: int = 30) -> list[str]:
        """The end of the child's output."""
        return last_lines(self.log_path, count)

    def stop(self, *, timeout: float = GRACE) -> None:
        """End the child and its process group: ask it, wait ``timeout`` seconds, then kill. Without
        effect if it is not running."""
        if self._process is None:
            return
        process, group = self._process, self.pid
        if self.alive():
            os.kill(group, signal.SIGTERM)
            deadline = time.monotonic() + timeout
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        # Workers may outlive a server that crashed. Its id stays reserved until it is waited for.
        end_group(group)
        process.wait()
        process.stdin.close()
        self._process = None
        atexit.unregister(self.stop)

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            raise RuntimeError("the server is not running; start() it first")
        return self._process

    def _ending(self) -> str:
        ending = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if ending.si_code == os.CLD_EXITED:
            return f"exit code {ending.si_status}"
        return f"signal {signal.Signals(ending.si_status).name}"
