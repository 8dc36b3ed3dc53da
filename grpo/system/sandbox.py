"""Python programs that nobody has read, with few freedoms.

What is enforced, and by what, is in ``docs/rewards.md``. It keeps mistakes and mischief of a model
that is trained from a run and its machine. Against somebody who looks for faults of the kernel it
is no boundary; that takes a machine of its own.
"""

from __future__ import annotations

import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: What a program can be kept from.
ISOLATIONS = ("network", "files", "processes")
_ENDING = 10.0  # seconds that a process may take to be gone after SIGKILL
_SCRIPT = str(Path(__file__).with_name("sandbox_child.py"))
#: No variable of the run's own comes along: some are keys.
_VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
              "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class SandboxError(RuntimeError):
    """A program could not be run as it should be; it says nothing of the program."""


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    Attributes:
        output: what it wrote to standard output, up to the limit for files.
        code: its exit code, 128 and more for a signal; None if it was late.
    """

    output: str
    code: int | None


@functools.cache
def missing_isolation() -> dict[str, str]:
    """What this system cannot keep a program from, and why.

    Examples:
        >>> set(missing_isolation()) <= set(ISOLATIONS)
        True
    """
    done = subprocess.run([sys.executable, "-I", "-S", _SCRIPT], capture_output=True, text=True,
                          timeout=60)
    if done.returncode:
        raise SandboxError(f"what this system can isolate is not known: {done.stderr[-500:]}")
    return {name: why for name, why in json.loads(done.stdout).items() if why}


def run_python(
    program: str, given: str, *, seconds: float, memory: int, file_size: int,
    without: tuple[str, ...] = (),
) -> Finished:
    """Run a program in a temporary folder that it alone may write to.

    Args:
        program: its text.
        given: its standard input.
        seconds: of computing; by the clock it may take twice as long.
        memory: bytes of address space.
        file_size: bytes of each file, standard output included.
        without: names of :data:`ISOLATIONS` that it is not kept from.

    Raises:
        SandboxError: if it cannot be kept from something else.

    Examples:
        >>> run_python("print(int(input()) + 1)", "41", seconds=5, memory=1 << 29,
        ...            file_size=1 << 20, without=tuple(missing_isolation()))
        Finished(output='42\\n', code=0)
    """
    with (tempfile.TemporaryDirectory(prefix="grpo-program-", ignore_cleanup_errors=True) as name,
          tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout):
        path = Path(name, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        reader, writer = os.pipe()
        options = {"folder": name, "seconds": math.ceil(seconds), "memory": memory,
                   "file_size": file_size, "status": writer,
                   "isolate": [kind for kind in ISOLATIONS if kind not in without]}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", _SCRIPT, json.dumps(options), str(path)], stdin=stdin,
                stdout=stdout, stderr=subprocess.DEVNULL, cwd=name, pass_fds=[writer],
                env=_VARIABLES | {"HOME": name, "TMPDIR": name}, start_new_session=True)
            os.close(writer)
            code = _wait(process, 2 * seconds)
            if trouble := os.read(reader, 1000):
                raise SandboxError(f"the program was not run: {trouble.decode()}")
        finally:
            os.close(reader)
        stdout.seek(0)
        return Finished(stdout.read(file_size).decode("utf-8", "replace"), code)


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    """The exit code, or None after so many seconds; its group is gone then."""
    watch, ending = select.poll(), os.pidfd_open(process.pid)
    watch.register(ending, select.POLLIN)
    late = not watch.poll(1000 * seconds)
    if late:  # it ends the program, which may have left its group, and then itself
        process.terminate()
        watch.poll(1000 * _ENDING)
    os.close(ending)
    # The leader has not been waited for, so that the id of its group cannot be another's yet.
    os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return None if late else code
