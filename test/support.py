"""What tests of several rooms need: ports, commands, processes, waiting, pages and benchmarks."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

REPO = Path(__file__).resolve().parents[1]
BENCHMARKS = REPO / "benchmarks"
STARTED_IN = "GRPO_TEST_STARTED_IN"


def wait_until(condition: Callable[[], Any], *, seconds: float = 30.0,
               every: float = 0.01, alive: subprocess.Popen | None = None,
               said: Callable[[], str] = str) -> Any:
    """Wait for something that is true, and return it.

    Args:
        condition: asked again and again.
        seconds: after which the test fails.
        every: so many seconds; more where asking costs something.
        alive: process that must not end meanwhile.
        said: what is shown of a failure, such as the end of a log.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert alive is None or alive.poll() is None, f"the process has ended {said()}"
        assert time.monotonic() < deadline, f"not so after {seconds:g} s {said()}"
        time.sleep(every)
    return value


def free_ports(count: int) -> list[int]:
    """Ports for processes that are told theirs before they start."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                   for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def free_port() -> int:
    return free_ports(1)[0]


# -- processes -------------------------------------------------------------------------------------


def environment(cache: Path | None = None, **more: str) -> dict[str, str]:
    """Of a command that finds this library and nothing on the hub; ``cache`` keeps warm starts."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)} | (
        {} if cache is None else {"XDG_CACHE_HOME": str(cache)}) | more


def finished(command: list[str | Path], folder: Path, env: dict[str, str], *,
             seconds: float = 600.0, expect: int = 0) -> str:
    """Output and errors of a command that has ended as expected; pytest shows what one said that
    was still running when the time was up."""
    with tempfile.TemporaryFile() as said:
        def output() -> str:
            said.seek(0)
            return said.read().decode(errors="replace")

        try:
            done = subprocess.run(list(map(str, command)), cwd=folder, env=env, timeout=seconds,
                                  stdout=said, stderr=subprocess.STDOUT)
        except BaseException:
            print(output()[-8000:])
            raise
        assert done.returncode == expect, output()[-8000:]
        return output()


# Imports and charts take longer than small runs.
_SEVERAL = """
import json, runpy, sys
sys.path.insert(0, sys.argv[2])
from grpo.report import reporter
reporter.write_report = lambda *args, **kwargs: None
for number, arguments in enumerate(json.loads(sys.argv[1])):
    print(f"run {number}:", *arguments, flush=True)
    sys.argv = [*arguments, f"hydra.run.dir=run{number}"]
    runpy.run_path(arguments[0], run_name="__main__")
"""


def several_runs(runs: list[list[str]], folder: Path, env: dict[str, str], *,
                 seconds: float = 600.0) -> list[str]:
    """Output of scripts and their arguments, each run to its end in one process and without the
    report, in the folders ``run0``, ``run1`` ..."""
    output = finished([sys.executable, "-c", _SEVERAL, json.dumps(runs), REPO], folder, env,
                      seconds=seconds)
    return re.split(r"^run \d+: ", output, flags=re.MULTILINE)[1:]


def python_tests(path: Path, *options: str, seconds: float = 280.0, **more: str) -> None:
    """Run the tests of a file in a process apart; that none was collected is a failure, too."""
    finished([sys.executable, "-m", "pytest", "-q", *options, path], REPO, environment(**more),
             seconds=seconds)


def runs(pid: int) -> bool:
    """Whether a process is there and not only waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def with_variable(name: str, value: str | Path) -> list[str]:
    """Command lines of the processes that have inherited a variable, wherever they are."""
    found, mark = [], f"{name}={value}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:  # another user's, or it has just ended
            continue
    return found


@contextmanager
def started(command: list[str | Path], folder: Path) -> Iterator[subprocess.Popen]:
    """This Python as a terminal starts it: Ctrl-C there reaches all of its process group.

    All that it starts inherits :data:`STARTED_IN`, with the folder as its value.
    """
    process = subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(REPO), STARTED_IN: str(folder)})
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def interpreter_with(requirement: str, folder: Path) -> Path:
    """A Python with a package of its own, and this one's packages for all else."""
    def call(*command: str | Path) -> str:
        return finished([*command], REPO, environment(), seconds=900)

    call(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    call(python, "-m", "pip", "install", "--quiet", requirement)
    return python


# -- pages and benchmarks --------------------------------------------------------------------------


def blocks(language: str, page: str) -> list[str]:
    """The sources of a language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def commands(page: str) -> list[str]:
    """The lines of all shell blocks of a page."""
    return [line for block in blocks("bash", page) for line in block.splitlines() if line.strip()]


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of all tables of a section whose rows begin with code."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code_in(text: str) -> list[str]:
    """What stands in backticks, formulas left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"\$`[^`]*`\$", "", text))


def benchmark(name: str) -> ModuleType:
    """A benchmark as a module; they import each other from their folder."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
