"""Calls that cannot take for ever."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, TypeVar

from grpo.system.threads import in_background

T = TypeVar("T")


class LateError(TimeoutError):
    """A call took longer than its deadline allows."""


def call_with_deadline(fn: Callable[..., T], *args: Any, seconds: float) -> T:
    """``fn(*args)``, or :class:`LateError` once ``seconds`` have passed.

    In the main thread an alarm interrupts ``fn`` itself; code that holds the interpreter for long,
    such as one big regular expression, is interrupted when it returns. In other threads ``fn`` runs
    in a thread of its own, which is left behind when it is late.

    Raises:
        LateError: naming the limit. What ``fn`` raises surfaces unchanged.

    Examples:
        >>> call_with_deadline(max, 1, 2, seconds=1.0)
        2
        >>> call_with_deadline(time.sleep, 10, seconds=0.01)
        Traceback (most recent call last):
        ...
        grpo.system.deadline.LateError: took longer than 0.01 s
    """
    if threading.current_thread() is threading.main_thread():
        return _with_alarm(fn, args, seconds)
    call = in_background(fn, *args)
    wait([call], seconds)
    if not call.done():
        raise LateError(f"took longer than {seconds:g} s")
    return call.result()


def _with_alarm(fn: Callable[..., T], args: tuple, seconds: float) -> T:
    def expire(signum: int, frame: object) -> None:
        raise LateError(f"took longer than {seconds:g} s")

    started = time.monotonic()
    previous = signal.signal(signal.SIGALRM, expire)
    # Repeated, for functions that catch every exception and carry on.
    outer_delay, outer_interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        return fn(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer_delay:  # somebody else's alarm, which goes on
            left = outer_delay - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), outer_interval)
