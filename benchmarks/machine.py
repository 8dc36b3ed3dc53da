"""What every benchmark writes beside its numbers, and how: from its first piece on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


def describe_machine(*, also: tuple[str, ...] = ()) -> dict:
    """Machine, versions (of the packages ``also`` named, too) and commit of a result."""
    import torch

    from grpo.system.versions import versions

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    more = {name: found.version for name in also
            for found in importlib.metadata.distributions(name=name)}
    return {"machine": gpu or f"{platform.machine()} CPU, {os.cpu_count()} cores",
            "versions": versions() | more | {"python": platform.python_version()},
            "commit": commit()}


def commit() -> str:
    """What ``GRPO_COMMIT`` says, for copies without their history, or git."""
    if said := os.environ.get("GRPO_COMMIT"):
        return said
    if shutil.which("git") is None:
        return "unknown"
    asked = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=REPO,
                           capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def save(result: dict, out: Path) -> None:
    """Write a result; a reader sees the file before or the one after."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.replace(out)


def write_result(result: dict, out: Path | None) -> None:
    """Print a result, and write it where asked to."""
    if out:
        save(result, out)
    print(json.dumps(result, indent=2))


class Recording:
    """A result that is on disk from its first piece on, for when the time is up before the end.

    ``complete`` is false in it until :meth:`finish`. SIGTERM ends the program like Ctrl-C does, so
    that temporary folders go and child processes end.

    Args:
        name: of the benchmark.
        out: where the result is written; None: it is printed at the end alone.
        **values: what is known from the start.

    Examples:
        >>> import tempfile
        >>> out = Path(tempfile.mkdtemp(), "result.json")
        >>> recording = Recording("hub", out, work="100 groups")
        >>> recording.add(seconds=[1.5])
        >>> json.loads(out.read_text())["complete"]
        False
    """

    def __init__(self, name: str, out: Path | None, **values: Any) -> None:
        command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        self.out = out
        self.result = {"benchmark": name, "complete": False, "command": shlex.join(command),
                       **values}
        signal.signal(signal.SIGTERM, _end)
        self._save()

    def add(self, **values: Any) -> None:
        """Add to the result, or replace what has these names, and write it."""
        self.result.update(values)
        self._save()

    def describe_machine(self, *, also: tuple[str, ...] = ()) -> None:
        """Add machine, versions and commit. Imports torch, which takes seconds."""
        self.add(**describe_machine(also=also))

    def finish(self, **values: Any) -> None:
        """Add the last values, write and print the result."""
        self.result.update(values, complete=True)
        write_result(self.result, self.out)

    def _save(self) -> None:
        if self.out is not None:
            save(self.result, self.out)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)
