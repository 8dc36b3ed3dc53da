"""The tests of ``env=verifiers`` with the real package, which has an environment of its own here:
it takes ``datasets`` and others back to versions that the development environment is not made of.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..support import REPO

pytestmark = pytest.mark.slow

TESTS = ("test/envs/test_verifiers.py", "test/end_to_end/test_runs.py::"
         "test_the_rubrics_reward_rises_on_an_environment_of_verifiers")


def call(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=REPO, env=os.environ | environment, text=True, timeout=900,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture
def python(tmp_path) -> Path:
    """An interpreter with the extra ``verifiers``, and this one's packages for all else."""
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    extra = re.search(r'^VERIFIERS = \["(.+)"\]$', (REPO / "setup.py").read_text(), re.MULTILINE)
    call(python, "-m", "pip", "install", "--quiet", extra[1])
    return python


def test_environments_of_verifiers_run_and_teach(python):
    told = call(python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *TESTS,
                PYTHONPATH=str(REPO), HF_HUB_OFFLINE="1")
    passed, skipped = (int(found[1]) if (found := re.search(rf"(\d+) {word}", told)) else 0
                       for word in ("passed", "skipped"))
    assert passed >= 25 and not skipped, told[-2000:]
