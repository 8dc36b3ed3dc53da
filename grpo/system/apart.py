"""Calls in processes of their own, for code that may hold the interpreter for ever.

A thread that computes ``9**9**9`` lets no other thread run, not even the one that keeps deadlines.
A process can be ended.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo.system.child_process import package_environment

_LOOK = 0.05  # seconds between two looks, when an exception from outside comes through


class ApartError(RuntimeError):
    """A call in another process raised, or the process has ended; the message says what."""


class CallsApart:
    """Make calls in children, which are started as they are needed.

    What interrupts the caller meanwhile, such as a deadline, ends the child; another takes its
    place. Functions and arguments are pickled, so a function has to be one of a module.

    Args:
        processes: children at most, so calls at a time; others wait for them.
        seconds: of computing after which a call ends with its child, even where nobody is left to
            end it.
        imports: a module that calls use; it is imported before the first one counts.

    Examples:
        >>> calls = CallsApart(1, seconds=30, imports="fractions")
        >>> calls(divmod, 7, 2)
        (3, 1)
        >>> calls(divmod, 7, 0)
        Traceback (most recent call last):
        ...
        grpo.system.apart.ApartError: ZeroDivisionError: integer division or modulo by zero
    """

    def __init__(self, processes: int, *, seconds: float, imports: str) -> None:
        self.seconds, self.imports = seconds, imports
        self._places = [_Place() for _ in range(processes)]
        self._free = threading.Condition()

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """What ``fn(*args)`` returns there.

        Raises:
            ApartError: if it raises, or its process ends.
        """
        request, place = pickle.dumps((fn, args)), self._take()
        try:
            place.child = place.child or self._start()
            answer = _ask(place.child, request)
        except BaseException:  # whoever waits has been interrupted
            place.end_child()
            self._give_back(place)
            raise
        code = place.end_child() if answer is None else None
        self._give_back(place)
        if answer is None:
            raise ApartError(f"took more than {self.seconds:g} s of computing"
                             if code == -signal.SIGPROF else
                             f"its process has ended, exit code {code}")
        returned, value = pickle.loads(answer)
        if not returned:
            raise ApartError(value)
        return value

    def _take(self) -> _Place:
        me = threading.current_thread()
        with self._free:
            while True:
                for place in self._places:
                    if place.owner is None:
                        place.owner = me
                        return place
                    # Interrupted on its way, before it could give the place back.
                    if place.owner is me or not place.owner.is_alive():
                        place.owner = me
                        place.end_child()
                        return place
                self._free.wait(_LOOK)

    def _give_back(self, place: _Place) -> None:
        with self._free:
            place.owner = None
            self._free.notify()

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "grpo.system.apart", str(self.seconds), self.imports],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, **package_environment()})


@dataclass(eq=False)
class _Place:
    """Where one call is made at a time: the thread that waits for it, and the child, if any."""

    owner: threading.Thread | None = None
    child: subprocess.Popen | None = None

    def end_child(self) -> int | None:
        """End it at once; its exit code."""
        child, self.child = self.child, None
        if child is None:
            return None
        child.kill()
        code = child.wait()
        for pipe in (child.stdin, child.stdout):
            pipe.close()
        return code


def _ask(child: subprocess.Popen, request: bytes) -> bytes | None:
    """The answer to a request, each with its length before it; None if the child has ended."""
    try:
        message = len(request).to_bytes(8) + request
        while message:
            message = message[child.stdin.write(message):]
    except BrokenPipeError:
        return None
    length = _read(child, 8)
    return None if length is None else _read(child, int.from_bytes(length))


def _read(child: subprocess.Popen, count: int) -> bytes | None:
    read = b""
    while len(read) < count:
        while not select.select([child.stdout], [], [], _LOOK)[0]:
            pass
        part = child.stdout.read(count - len(read))
        if not part:
            return None
        read += part
    return read


def _serve(seconds: float) -> None:
    """Answer requests until standard input is closed: the parent is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no answer
    requests = sys.stdin.buffer
    while length := requests.read(8):
        fn, args = pickle.loads(requests.read(int.from_bytes(length)))
        # The system ends the process then, whatever holds the interpreter.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = True, fn(*args)
        except Exception as error:  # the caller is told of it
            answer = False, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        message = pickle.dumps(answer)
        answers.write(len(message).to_bytes(8) + message)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what becomes of a Ctrl-C
    importlib.import_module(sys.argv[2])
    _serve(float(sys.argv[1]))
