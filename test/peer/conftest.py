"""Comparisons with other systems, each in a Python of its own.

For atroposlib the variable ``GRPO_ATROPOS_PYTHON`` names it, or else it is that of
``.venv-atropos``; without either these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

# Not for our pytest: their imports are the peer's.
collect_ignore = ["atroposlib_checks"]

REPO = Path(__file__).parents[2]
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
