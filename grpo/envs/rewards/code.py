"""A reward for programs: the share of tests that they pass."""

from __future__ import annotations

import json
import math
import time

from grpo.envs.rewards.registry import RewardResult, register_reward
from grpo.envs.tasks.base import Problem
from grpo.system.sandbox import missing_isolation, run_python

#: Below these no program is right, whatever it is: Python itself does not start in less memory.
_LEAST = {"seconds": 0.05, "total_seconds": 0.05, "memory": 0.0625, "file_size": 0.001}
_FENCE, _END = "```python\n", "```"


def check_code(*, unsafe: bool, **limits: float) -> None:
    """Raises ValueError for limits within which no program is right, and where programs cannot be
    kept from network, files and processes."""
    for name, value in limits.items():
        if not _LEAST[name] <= value < math.inf:
            raise ValueError(f"{name}={value} of the reward 'code' must be a finite number of at "
                             f"least {_LEAST[name]:g}, or every program fails")
    missing = missing_isolation()
    if missing and not unsafe:
        said = "; ".join(f"{name} ({why})" for name, why in missing.items())
        raise ValueError(f"the reward 'code' runs what the model writes, and this system cannot "
                         f"keep it from: {said}. Run it where user namespaces and Landlock are "
                         "allowed, or set its option unsafe=true where nothing can be harmed")


@register_reward("code", apart=True, check=check_code)
def code(
    completion: str, problem: Problem, *, seconds: float = 4.0, total_seconds: float = 20.0,
    memory: float = 1.0, file_size: float = 16.0, unsafe: bool = False,
) -> RewardResult:
    r"""The share of the problem's tests that the program in the completion passes; all: a success.

    The program is the last block between ```` ```python ```` and ```` ``` ````; without one the
    reward is 0. ``problem.answer`` is JSON, a list of ``{"input": ..., "output": ...}``: for each
    the program is started anew, gets the input on standard input, and passes if it ends with exit
    code 0 and has written the output, but for space at the end of lines and empty lines at the end.

    Args:
        completion: in Markdown.
        problem: with its tests.
        seconds: of computing for a test; by the clock it may take twice as long.
        total_seconds: by the clock for all tests; those that are left then are not passed. Below
            ``env.reward_timeout``.
        memory: GiB of address space.
        file_size: MiB of each file that it writes.
        unsafe: run it even where it cannot be kept from network, files or processes.

    Raises:
        ValueError: if the problem has no such tests.

    Examples:
        >>> tests = '[{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "3"}]'
        >>> text = "So:\n```python\nprint(sum(map(int, input().split())))\n```"
        >>> code(text, Problem(prompt="Add.", answer=tests, id="p0"), unsafe=True)
        RewardResult(reward=0.5, success=False)
    """
    tests = _tests(problem)
    program = program_in(completion)
    if program is None:
        return RewardResult(0.0, False)
    without = tuple(missing_isolation()) if unsafe else ()
    passed, deadline = 0, time.monotonic() + total_seconds
    for given, expected in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        done = run_python(program, given, seconds=min(seconds, left / 2), memory=int(
            memory * 2**30), file_size=int(file_size * 2**20), without=without)
        passed += done.code == 0 and _lines(done.output) == _lines(expected)
    return RewardResult(passed / len(tests), passed == len(tests))


def program_in(completion: str) -> str | None:
    r"""The last complete Python block; None if there is none.

    Examples:
        >>> program_in("```python\na = 1\n```\nBetter:\n```python\na = 2\n```")
        'a = 2\n'
    """
    found, start = None, completion.find(_FENCE)
    while start >= 0:
        start += len(_FENCE)
        end = completion.find(_END, start)
        if end < 0:
            break
        found, start = slice(start, end), completion.find(_FENCE, end + len(_END))
    return None if found is None else completion[found]


def _tests(problem: Problem) -> list[tuple[str, str]]:
    try:
        tests = [(test["input"], test["output"]) for test in json.loads(problem.answer)]
    except (ValueError, TypeError, KeyError):
        tests = []
    if not tests or not all(isinstance(text, str) for test in tests for text in test):
        raise ValueError(f"problem {problem.id!r} has no tests: its answer must be a JSON list of "
                         f'{{"input": text, "output": text}}, not {problem.answer!r:.80}')
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
