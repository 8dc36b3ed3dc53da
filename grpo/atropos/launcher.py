"""Environments as child processes: started in their own virtual environment, watched, restarted."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from grpo.atropos.client import (
    AtroposClient,
    AtroposError,
    AtroposTimeoutError,
    AtroposUnreachableError,
)
from grpo.atropos.environment_log import failed_import, import_fix, quoted, troubles
from grpo.system.child_process import GRACE, Child, last_lines, log_tail

logger = logging.getLogger(__name__)

PYTHON_VARIABLE = "GRPO_ATROPOS_PYTHON"
DEFAULT_PYTHON = Path(".venv-atropos/bin/python")
_PROBE = ("import importlib.metadata as m; "
          "print(m.version('atroposlib'), m.version('transformers'))")
_POLL = 0.2  # seconds between looks at the child
_ASK = 1.0  # seconds between questions to the API
_UNENDING = 1_000_000_000  # batches that no run comes to

State = Literal["new", "waiting for the API", "running", "restarting", "finished", "failed",
                "stopped"]


class EnvironmentProcessError(RuntimeError):
    """An environment has ended or is missing; the message quotes its log."""


def environment_python(path: str | Path | None = None) -> Path:
    """The interpreter that runs environments: ``path``, else the variable ``GRPO_ATROPOS_PYTHON``,
    else ``.venv-atropos/bin/python`` in the current folder.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it has no atroposlib, or a transformers other than 4.
    """
    chosen = Path(path or os.environ.get(PYTHON_VARIABLE) or DEFAULT_PYTHON).absolute()
    fix = f"run `make atropos-env`, or name another interpreter ({PYTHON_VARIABLE})"
    if not chosen.is_file():
        raise FileNotFoundError(f"the interpreter of the environments, {chosen}, is not there; "
                                f"{fix}")
    probe = subprocess.run([chosen, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    if probe.returncode:
        raise ValueError(f"{chosen} cannot run environments: "
                         f"{(probe.stderr.splitlines() or ['no output'])[-1]}; {fix}")
    atroposlib, transformers = probe.stdout.split()
    if transformers.split(".")[0] != "4":
        raise ValueError(f"{chosen} has transformers {transformers}, under which atroposlib "
                         f"{atroposlib} masks the wrong tokens; it needs transformers<5: {fix}")
    return chosen


def serve_flags(
    *, engine_url: str, model: str, tokenizer: str | Path, token: str | None = None,
    **env: Any,
) -> dict[str, Any]:
    """Flags of an environment's ``serve`` command for an engine of this library.

    Args:
        engine_url: of the engine's HTTP server, without ``/v1``.
        model: name that the server knows the model by.
        tokenizer: folder or hub id that transformers 4 reads, see
            :func:`grpo.envs.tokenizer_files.environment_tokenizer`.
        token: access token of the engine.
        **env: fields of the environment's configuration, such as ``group_size``.

    Examples:
        >>> flags = serve_flags(engine_url="http://127.0.0.1:9001", model="tiny",
        ...                     tokenizer="/models/tiny", group_size=8)
        >>> flags["env.group_size"], flags["openai.base_url"]
        (8, 'http://127.0.0.1:9001/v1')
    """
    return {
        # Who has started it ends it. Its own number would, by default at 1000, and the trainer's
        # before the last batches of one that leaves some out.
        "env.tokenizer_name": tokenizer, "env.use_wandb": False, "env.total_steps": _UNENDING,
        **{f"env.{name}": value for name, value in env.items()},
        "openai.base_url": engine_url.rstrip("/") + "/v1", "openai.model_name": model,
        "openai.tokenizer_name": tokenizer, "openai.server_type": "vllm",
        "openai.api_key": token or "none"}


class EnvironmentProcess:
    """An atroposlib environment's ``serve`` command, kept running; a context manager.

    A thread starts the command when the API answers, and watches it. If it fails, it is started
    again after ``backoff`` seconds, doubled each time up to 30. After more than ``max_restarts``
    failures in a row it is given up, and :meth:`check` raises with what it raised. Running for
    ``steady`` seconds ends the row. An end because the API went away is no failure, exit code 0
    means that the environment has finished, and one that lacks a module is given up at once, since
    no restart installs it.

    A hub of this library tells which environments are registered. One that is not, though a trainer
    has waited for it for ``register_timeout`` seconds, counts as failed. ``run-api`` does not tell.

    The child leads a process group of its own, which :meth:`stop` ends, and also the death of this
    process.

    Args:
        script: the environment's Python file.
        python: interpreter of its virtual environment, see :func:`environment_python`.
        api_url: of the API, ``run-api`` or a hub of this library.
        flags: further flags of ``serve``, see :func:`serve_flags`. None leaves one out.
        name: in messages, and as ``--env.wandb_name`` the name it registers under; default: that
            flag, or else the script's.
        log_path: its output is appended; default: a new file in the temporary folder.
        env: further environment variables.
        api_token: access token of a hub. It is part of the hub's address on the command line, which
            whoever may list this machine's processes can read.
        register_timeout: seconds that it may run without being registered.
        max_restarts: failures in a row that are forgiven.
        backoff: seconds before the first restart.
        steady: seconds of running that end a row of failures.

    Raises:
        FileNotFoundError: if there is no such script.
        ValueError: for a negative number, or a flag that is an option here.

    Examples:
        >>> with EnvironmentProcess("arithmetic_env.py", python=environment_python(),
        ...                         api_url="http://127.0.0.1:8000") as env:   # doctest: +SKIP
        ...     train(..., on_step=env.check)
    """

    def __init__(
        self,
        script: str | Path,
        *,
        python: str | Path,
        api_url: str,
        flags: Mapping[str, Any] | None = None,
        name: str | None = None,
        log_path: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        api_token: str | None = None,
        register_timeout: float = 300.0,
        max_restarts: int = 5,
        backoff: float = 1.0,
        steady: float = 60.0,
    ) -> None:
        self.script = Path(script).absolute()
        if not self.script.is_file():
            raise FileNotFoundError(f"the environment's script {self.script} is not there")
        for field, value in {"register_timeout": register_timeout, "max_restarts": max_restarts,
                             "backoff": backoff, "steady": steady}.items():
            if value < 0:
                raise ValueError(f"{field}={value} must be 0 or more")
        flags = dict(flags or {})
        for flag, option, value in (("env.rollout_server_url", "api_url", api_url),
                                    ("env.wandb_name", "name", name)):
            if value is not None and flag in flags:
                raise ValueError(f"flags has {flag}={flags[flag]}, which {option}={value} says; "
                                 "leave the first out")
        self.name = str(name or flags.get("env.wandb_name") or self.script.stem)
        self.api = AtroposClient(api_url, token=api_token, timeout=5.0)
        address = self.api.url.replace("://", f"://:{api_token}@", 1) if api_token else self.api.url
        self.command = serve_command(self.script, python=python, flags={
            **flags, "env.rollout_server_url": address, "env.wandb_name": self.name})
        self.env = dict(env or {})
        if log_path is None:
            fd, log_path = tempfile.mkstemp(prefix=f"grpo-{self.name}-", suffix=".log")
            os.close(fd)
        self.log_path = Path(log_path)
        self.register_timeout = register_timeout
        self.max_restarts, self.backoff, self.steady = max_restarts, backoff, steady
        self.state: State = "new"
        self.restarts = 0
        self._failures = 0  # in a row
        self._reason = ""
        self._log_start = 0  # of the last start, in bytes
        self._error: Exception | None = None  # of the thread, raised by check()
        self._grace = GRACE
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: Child | None = None

    def __enter__(self) -> EnvironmentProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Id of the running process and of its group; None while there is none."""
        child = self._child
        return child.pid if child else None

    def start(self) -> None:
        """Start the thread that runs the environment; RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError(f"environment {self.name!r} was started already")
        self._thread = threading.Thread(target=self._supervise, daemon=True,
                                        name=f"environment {self.name}")
        self._thread.start()

    def check(self) -> None:
        """Raise EnvironmentProcessError if the environment has been given up, with its last
        traceback or the last lines of its log."""
        if self.state == "failed":
            raise EnvironmentProcessError(
                f"environment {self.name!r} {self._reason}"
                f"{quoted(self.log_path, since=self._log_start)}") from self._error

    def troubles(self) -> str:
        """The errors in its log since its last start, or its end if it has finished and so sends
        nothing more; empty if there is neither."""
        if self.state == "finished":
            return (f"environment {self.name!r} has finished, of its own accord or after its "
                    f"env.total_steps batches{quoted(self.log_path, since=self._log_start)}")
        said = troubles(self.log_path, since=self._log_start)
        return said and f"environment {self.name!r} ({self.state}){said}"

    def registered(self) -> bool | None:
        """Whether it is registered; None if the API does not tell or does not answer."""
        try:
            hub = self.api.status().get("hub")
        except AtroposError:
            return None
        return None if hub is None else any(
            env["connected"] and env["name"].rpartition("_")[0] == self.name
            for env in hub["environments"])

    def wait_registered(self, *, timeout: float) -> None:
        """Wait until the environment is registered at the hub.

        Raises:
            EnvironmentProcessError: if it is given up, has ended, or needs more than ``timeout``
                seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.registered():
            self.check()
            if self.state in ("finished", "stopped") or time.monotonic() > deadline:
                raise EnvironmentProcessError(
                    f"environment {self.name!r} ({self.state}) is not registered at "
                    f"{self.api.url} after {timeout:g} s; it waits until a trainer has registered "
                    f"and asked for a batch, and run-api tells nobody{log_tail(self.log_path)}")
            time.sleep(_POLL)

    def last_lines(self, count: int = 30) -> list[str]:
        """The end of its output, over all starts."""
        return last_lines(self.log_path, count)

    def stop(self, *, timeout: float = GRACE) -> None:
        """End the environment and its process group for good, by force after ``timeout`` s."""
        self._grace = timeout
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self.state = self._run()
        except Exception as error:  # check() raises it in the caller's thread
            self._reason, self._error = f"cannot be run ({error}) and is given up", error
            self.state = "failed"

    def _run(self) -> State:
        """Run the environment until it finishes, is given up, or is told to stop."""
        while self._wait_for_api():
            started = time.monotonic()
            outcome = self._run_once()
            if outcome != "failed":
                return outcome
            if raised := failed_import(self.log_path, since=self._log_start):
                self._reason = import_fix(raised, python=self.command[0], script=self.script)
                return "failed"
            if not self._api_answers():
                logger.warning("environment %r ended because %s went away; it is started again "
                               "when that is back", self.name, self.api.url)
                continue
            self._failures = 1 if time.monotonic() - started > self.steady else self._failures + 1
            if self._failures > self.max_restarts:
                self._reason += f", {self._failures} times in a row, and is given up"
                logger.error("environment %r %s", self.name, self._reason)
                return "failed"
            self.state = "restarting"
            pause = restart_pause(self._failures, first=self.backoff)
            logger.warning("environment %r %s; restart in %g s (failure %d of %d forgiven)%s",
                           self.name, self._reason, pause, self._failures, self.max_restarts,
                           log_tail(self.log_path, 3))
            if self._stopping.wait(pause):
                break
            self.restarts += 1
        return "stopped"

    def _wait_for_api(self) -> bool:
        """Wait until the API answers; False if told to stop first."""
        self.state = "waiting for the API"
        while not self._stopping.is_set():
            if self._api_answers():
                return True
            self._stopping.wait(_POLL)
        return False

    def _api_answers(self) -> bool:
        try:
            self.api.info()
        except (AtroposUnreachableError, AtroposTimeoutError):
            return False
        except AtroposError:
            pass  # a refusal is an answer: the environment will say what is wrong
        return True

    def _run_once(self) -> Literal["finished", "failed", "stopped"]:
        """Start the environment, watch it until it ends, and end the rest of its process group."""
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        child = self._child = Child(self.command, log_path=self.log_path, env=self.env)
        self.state = "running"
        asked = overdue_since = time.monotonic()
        try:
            while child.alive():
                if self._stopping.wait(_POLL):
                    return "stopped"
                now = time.monotonic()
                if now - asked < _ASK:
                    continue
                asked = now
                if not self._overdue():
                    overdue_since = now
                elif now - overdue_since > self.register_timeout:
                    self._reason = f"was not registered within {self.register_timeout:g} s"
                    return "failed"
            self._reason = f"ended with {child.ending()}"
            return "finished" if child.exit_code() == 0 else "failed"
        finally:
            child.stop(timeout=self._grace if self._stopping.is_set() else GRACE)
            self._child = None

    def _overdue(self) -> bool:
        """Whether a trainer is registered at the hub and this environment is not."""
        if self.registered() is not False:
            return False
        try:
            return self.api.info()["batch_size"] > 0
        except AtroposError:
            return False


def serve_command(script: Path, *, python: str | Path, flags: Mapping[str, Any]) -> list[str]:
    """The command line of an environment's ``serve``. Each flag is one word with its value, because
    atroposlib would take a separate ``-1`` for a flag.

    Examples:
        >>> serve_command(Path("env.py"), python="python", flags={"env.total_steps": -1})
        ['python', '-u', 'env.py', 'serve', '--env.total_steps=-1']
    """
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return [str(python), "-u", str(script), "serve", *given]


def restart_pause(failures: int, *, first: float) -> float:
    """Seconds before the next start; doubled with each failure in a row, at most 30.

    Examples:
        >>> [restart_pause(failures, first=1.0) for failures in (1, 2, 5, 6, 5000)]
        [1.0, 2.0, 16.0, 30.0, 30.0]
    """
    return min(30.0, first * 2 ** min(failures - 1, 20))
