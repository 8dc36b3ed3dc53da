"""Every supported architecture shares its weights with a real engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("family_checks.py")


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("families", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_engines_of_all_families_generate_with_the_trainers_parameters(families):
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", families, str(CHECKS)],
                          cwd=CHECKS.parents[2], env={**os.environ, "HF_HUB_OFFLINE": "1"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:]  # also if nothing was collected
