"""Functions that test_apart.py calls in other processes, which import this module by its name."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path


def leave_children(folder: str) -> int:
    """Two processes that go on: a plain one, and one with a session and a parent of its own."""
    for hidden in (False, True):
        if os.fork() == 0:
            if hidden:
                os.setsid()
                if os.fork():
                    os._exit(0)
            Path(folder, str(os.getpid())).touch()
            time.sleep(60)
            os._exit(0)
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return os.getpid()


def leave_children_and_compute(folder: str) -> None:
    leave_children(folder)
    eval("9**9**9")


def fork_and_return() -> int:
    os.fork()
    return os.getpid()


def eat(gib: float) -> int:
    return len(bytearray(int(gib * 2**30)))


def draw() -> float:
    return random.random()
