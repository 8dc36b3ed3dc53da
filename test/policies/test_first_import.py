"""What runs when vLLM is imported for the first time is not kept alive by that."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, weakref
from grpo.policies.first_import import import_vllm

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


INTERRUPTED = """
import os, signal, threading, time
from grpo.policies import first_import
from grpo.training.stopping import signals_end_the_process

def importing():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)

first_import._import = importing
with signals_end_the_process():
    first_import.import_vllm()
"""


def test_ctrl_c_does_not_wait_for_the_import():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "stopped by SIGINT; what was started has been ended\n"
