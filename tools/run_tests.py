"""Run the fast tests in two parts, each side by side, one a core: those that start a vLLM engine
file by file, because the tests of a file share it; then the others.

    python tools/run_tests.py [pytest options]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
NOTHING_SELECTED = 5  # pytest's exit status when no test was chosen
MOST_WORKERS, MOST_ENGINES = 8, 4


def run(marks: str, *options: str, **environment: str) -> int:
    """One call of pytest; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", f"({marks}) and not slow and not gpu"]
    return subprocess.run([*command, *options, *sys.argv[1:]],
                          env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment).returncode


def files_without(mark: str) -> list[str]:
    """Options by which pytest does not import files that lack a mark, which takes half a minute;
    ``test/conftest.py`` sees to it that a mark stands in the file of the test that has it."""
    files = [path for path in sorted((REPO / "test").rglob("test_*.py"))
             if f"mark.{mark}" not in path.read_text(encoding="utf-8")]
    return [f"--ignore={path}" for path in (REPO / "grpo", *files)]


def main() -> int:
    cores = os.cpu_count() or 1
    # One thread each: the threads of several processes would wait for each other.
    results = [run("vllm", "-n", str(min(cores, MOST_ENGINES)), "--dist", "loadfile",
                   *files_without("vllm"), OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind"),
               run("not vllm", "-n", str(min(cores, MOST_WORKERS)), OMP_NUM_THREADS="1")]
    failed = [status for status in results if status not in (0, NOTHING_SELECTED)]
    nothing = all(status == NOTHING_SELECTED for status in results)
    return failed[0] if failed else NOTHING_SELECTED if nothing else 0


if __name__ == "__main__":
    sys.exit(main())
