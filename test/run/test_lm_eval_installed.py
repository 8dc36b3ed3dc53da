"""The tests of tasks of lm-eval with the real package, in an environment of its own: it brings
scikit-learn, which Transformers imports in every process that finds it.
"""

from __future__ import annotations

import re

import pytest

from grpo.config.evaluation import LM_EVAL_PACKAGE

from ..support import REPO, environment, finished, interpreter_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]  # installs, then tests with vLLM


def test_the_metrics_are_those_of_lm_eval(tmp_path):
    python = interpreter_with(LM_EVAL_PACKAGE, tmp_path / "venv")
    told = finished([python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider",
                     "test/run/test_lm_eval.py", "grpo/training/harness.py"],
                    REPO, environment(), seconds=1500)
    assert re.search(r"\b1 skipped", told) and re.search(r"\b[1-9]\d? passed", told), told[-2000:]
