"""Weights reach an engine that compiles its layers, as it does on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("compiled_checks.py")


@pytest.mark.vllm
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("engines", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_compiled_engines_compute_with_each_update(engines, tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", engines, str(CHECKS)],
                          cwd=CHECKS.parents[2], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:]  # also if nothing was collected
