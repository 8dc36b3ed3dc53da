"""Weights reach an engine that compiles its layers, as it does on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("compiled_checks.py")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("engine", ["plain", "adapted", "separate"])
def test_a_compiled_engine_computes_with_each_update(engine, tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", engine, str(CHECKS)],
                          cwd=CHECKS.parents[2], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-8000:]  # also if nothing was collected
