"""Every supported architecture shares its weights with a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support import python_tests

CHECKS = Path(__file__).with_name("family_checks.py")


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("families", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_engines_of_all_families_generate_with_the_trainers_parameters(families):
    pytest.importorskip("vllm")
    python_tests(CHECKS, "-m", families, seconds=580.0)
