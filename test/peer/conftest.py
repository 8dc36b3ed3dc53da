"""Comparisons with other systems, each in a Python of its own.

For atroposlib the variable ``GRPO_ATROPOS_PYTHON`` names it, or else it is that of
``.venv-atropos``; without either these tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Not for our pytest: their imports are the peer's.
collect_ignore = ["atroposlib_checks"]

REPO = Path(__file__).parents[2]
CHECKS = Path(__file__).parent / "atroposlib_checks"
NEEDED = "atroposlib, torch, requests, pytest, pytest_asyncio"
HOW = ("run `make atropos-env` and `.venv-atropos/bin/pip install pytest pytest-asyncio requests "
       "torch`, or name such a Python by GRPO_ATROPOS_PYTHON")


@pytest.fixture(scope="session")
def python() -> str:
    """The Python that has atroposlib and what its tests import."""
    python = os.environ.get("GRPO_ATROPOS_PYTHON") or str(REPO / ".venv-atropos/bin/python")
    if not Path(python).exists():
        pytest.skip(f"{python} is not there; {HOW}")
    probe = subprocess.run([python, "-c", f"import {NEEDED}"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{python}: {probe.stderr.splitlines()[-1]}; {HOW}")
    return python


@pytest.fixture
def peer_tests(python, tmp_path) -> Callable[..., str]:
    """Run pytest in that Python, with further variables; returns what it printed."""
    settings = tmp_path / "empty.ini"
    settings.write_text("[pytest]\nasyncio_mode = auto\n")

    def run(*arguments: str | Path, at_least: int, **variables: str) -> str:
        completed = subprocess.run(
            [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-c", settings,
             "--confcutdir", CHECKS, "--rootdir", CHECKS, "--import-mode=importlib", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=240,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""} | variables)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        passed = re.search(r"(\d+) passed", completed.stdout)
        assert passed and int(passed[1]) >= at_least, completed.stdout
        assert "skipped" not in completed.stdout, completed.stdout
        return completed.stdout

    return run
