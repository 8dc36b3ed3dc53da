"""The tests of ``env=verifiers`` with the real package, which has an environment of its own here:
it takes ``datasets`` and others back to versions that the development environment is not made of.
"""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

from ..support import REPO, environment, finished, interpreter_with

pytestmark = pytest.mark.slow

TESTS = ("test/envs/test_verifiers.py", "test/end_to_end/test_runs.py::"
         "test_the_rubrics_reward_rises_on_an_environment_of_verifiers")


def call(*command: str | Path) -> str:
    return finished([*command], REPO, environment(), seconds=900)


@pytest.fixture
def python(tmp_path) -> Path:
    (extra,) = (needed.partition(";")[0] for needed in requires("torchrl-grpo")
                if 'extra == "verifiers"' in needed)
    return interpreter_with(extra, tmp_path / "venv")


def test_environments_of_verifiers_run_and_teach(python):
    told = call(python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *TESTS)
    passed, skipped = (int(found[1]) if (found := re.search(rf"(\d+) {word}", told)) else 0
                       for word in ("passed", "skipped"))
    assert passed >= 25 and not skipped, told[-2000:]
