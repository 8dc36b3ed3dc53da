"""What runs when vLLM is imported for the first time is not kept alive by that."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, weakref
from grpo.engines.first_import import import_vllm

class Trainer:
    pass

def job():
    trainer = Trainer()
    import_vllm()
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    return weakref.ref(trainer)

found = job()
gc.collect()
print("the trainer is", "gone" if found() is None else "alive")
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_first_import_of_vllm_keeps_no_trainer_alive():
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                          timeout=280)
    assert done.stdout.splitlines()[-1] == "the trainer is gone", done.stderr[-2000:]
