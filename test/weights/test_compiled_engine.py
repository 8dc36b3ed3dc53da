"""Weights reach an engine that compiles its layers, as it does on GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ..support import python_tests

CHECKS = Path(__file__).with_name("compiled_checks.py")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("engine", ["plain", "adapted", "separate"])
def test_a_compiled_engine_computes_with_each_update(engine, tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    python_tests(CHECKS, "-k", engine, TORCHDYNAMO_DISABLE="0", VLLM_CACHE_ROOT=str(tmp_path),
                 TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
