"""Reward functions that do what none should, each for one completion in two; other processes
import this module by its name."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

from grpo.envs.rewards.code import code

FOLDER = "GRPO_TEST_FOLDER"


def _spared(completion: str) -> bool:
    return sum(map(ord, completion)) % 2 == 0


def loops_in_c(completion, problem):
    return 1.0 if _spared(completion) else float(9**9**9)


def backtracks(completion, problem):
    return 1.0 if _spared(completion) else float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))


def raises(completion, problem):
    if not _spared(completion):
        raise KeyError("a fault of my own")
    return 1.0


def is_nan(completion, problem):
    return 1.0 if _spared(completion) else float("nan")


def eats_20_gib(completion, problem):
    return 1.0 if _spared(completion) else float(len(bytearray(20 << 30)))


def eats_bit_by_bit(completion, problem):
    eaten = []
    while not _spared(completion):
        eaten.append(bytearray(64 << 20))
    return 1.0


def forks(completion, problem):
    """And the copies, of which one has a session and a parent of its own, would never end."""
    if not _spared(completion):
        for hidden in (False, True):
            if os.fork() == 0:
                if hidden:
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                Path(os.environ.get(FOLDER, problem.answer), str(os.getpid())).touch()
                time.sleep(600)
        time.sleep(600)
    return 1.0


def forks_and_returns(completion, problem):
    os.fork()
    return 1.0


def ends(completion, problem):
    if not _spared(completion):
        os.abort()
    return 1.0


def exits(completion, problem):
    if not _spared(completion):
        raise SystemExit(3)
    return 1.0


def program_writes_outside(completion, problem):
    """As the model would have it run: a program that leaves its folder and calls a server."""
    outside = os.path.join(os.environ[FOLDER], "outside")
    program = "" if _spared(completion) else f"""
import socket
try: socket.create_connection(('127.0.0.1', {os.environ["GRPO_TEST_PORT"]}), 5)
except OSError: pass
open({outside!r}, 'w').write('x')
"""
    tests = replace(problem, answer=json.dumps([{"input": "", "output": "42"}]))
    return code(f"```python\n{program}print(42)\n```", tests)
