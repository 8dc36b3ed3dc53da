"""Run the fast tests in two parts: those that start a vLLM engine one after the other, because an
engine takes all cores; the others side by side, one a core.

    python tools/run_tests.py [pytest options]
"""

from __future__ import annotations

import os
import subprocess
import sys

NOTHING_SELECTED = 5  # pytest's exit status when no test was chosen
MOST_WORKERS = 8


def run(marks: str, *options: str, **environment: str) -> int:
    """One call of pytest; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", f"({marks}) and not slow and not gpu"]
    return subprocess.run([*command, *options, *sys.argv[1:]],
                          env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment).returncode


def main() -> int:
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    results = [run("vllm"),
               # One thread each: the threads of several processes would wait for each other.
               run("not vllm", "-n", str(workers), OMP_NUM_THREADS="1")]
    failed = [status for status in results if status not in (0, NOTHING_SELECTED)]
    nothing = all(status == NOTHING_SELECTED for status in results)
    return failed[0] if failed else NOTHING_SELECTED if nothing else 0


if __name__ == "__main__":
    sys.exit(main())
