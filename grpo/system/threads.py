"""Calls that may hang, in threads that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Call ``function`` in a thread that cannot keep the process alive when it hangs; the future
    has what it returns or raises.

    Examples:
        >>> in_background(max, 1, 2).result(timeout=10)
        2
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for the future
            future.set_exception(error)

    name = getattr(function, "__name__", type(function).__name__)
    threading.Thread(target=run, daemon=True, name=f"call-{name}").start()
    return future
