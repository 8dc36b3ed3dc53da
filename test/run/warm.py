"""Commands as people type them, without the ten seconds that importing PyTorch takes each time.

A process that has imported the library forks one for each command line. Nothing else differs: the
script is read again, with the arguments, the folder and the environment that were given.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = REPO / "sota-implementations" / "grpo"
#: What is typed, and the file or module that runs.
COMMANDS = {
    "grpo": "grpo.run.cli.console",
    "grpo.py": SCRIPTS / "grpo.py", "grpo-async.py": SCRIPTS / "grpo-async.py",
    "grpo-offline.py": SCRIPTS / "grpo-offline.py",
    "atropos-grpo": "grpo.run.cli.atropos", "atropos-grpo-run": "grpo.run.cli.launch"}
_IMPORTED = ("grpo.run.build_async", "grpo.run.assemble_atropos", "grpo.run.build_team",
             "grpo.run.resume", "grpo.run.fast_defaults", "grpo.run.cli.script",
             "grpo.run.cli.flags", "hydra", "transformers.models.qwen2.modeling_qwen2")


@dataclass(frozen=True)
class Done:
    """How a command ended, and the seconds that it took."""

    code: int
    out: str
    err: str
    seconds: float


class Warm:
    """The process that has imported everything; a context manager."""

    def __enter__(self) -> Warm:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"})
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def run(self, command: str, *argv: str, folder: Path, timeout: float = 60.0,
            **environment: str) -> Done:
        """Run one of :data:`COMMANDS` in a folder to its end, or kill it after ``timeout`` seconds.
        """
        with tempfile.TemporaryDirectory() as logs:
            print(json.dumps({
                "command": command, "argv": argv, "folder": str(folder), "timeout": timeout,
                "environment": environment, "logs": logs}), file=self._server.stdin, flush=True)
            code, seconds = json.loads(self._server.stdout.readline())
            out, err = (Path(logs, name).read_text(errors="replace") for name in ("out", "err"))
        return Done(code, out, err, seconds)


def _serve() -> None:
    global huggingface_hub
    for name in _IMPORTED:
        importlib.import_module(name)
    import huggingface_hub

    gc.freeze()  # children share these pages
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed here is no answer
    for line in sys.stdin:
        call = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _end(call)
        code = _wait(pid, started + call["timeout"])
        print(json.dumps([code, time.monotonic() - started]), file=answers, flush=True)


def _wait(pid: int, deadline: float) -> int:
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(done[1])


def _end(call: dict) -> NoReturn:
    """Run the command and end as Python does, but without taking PyTorch apart."""
    code = 0
    try:
        _become(call)
    except SystemExit as ending:
        code = ending.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  shown, as Python would
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _become(call: dict) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        with open(Path(call["logs"], name), "wb") as file:
            os.dup2(file.fileno(), number)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.chdir(call["folder"])
    os.environ.update(call["environment"])
    # What Python and a library read when they start.
    sys.path[:0] = call["environment"].get("PYTHONPATH", "").split(os.pathsep)
    huggingface_hub.constants.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    target = COMMANDS[call["command"]]
    sys.argv = [str(target) if isinstance(target, Path) else call["command"], *call["argv"]]
    if isinstance(target, Path):
        runpy.run_path(str(target), run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
