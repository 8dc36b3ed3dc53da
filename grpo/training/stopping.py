"""SIGTERM and Ctrl-C as requests to stop: what was trained is saved before the run ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal has ended the run. Not an ``Exception``, so that no reward function catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell says of a process that the signal has ended: 143 or 130."""
        return 128 + self.number


class StopRequests:
    """Turns SIGTERM and SIGINT into :class:`Stopped`, where that is wanted; a context manager.

    Between the points where it is wanted a signal only leaves a note, so that nothing is left half
    done; a second Ctrl-C ends the process at once. Outside of Python's main thread, where signals
    cannot be handled, nothing is changed.

    Attributes:
        asked: number of the signal that came; None: none.
        insisted: whether a second Ctrl-C has come, which may have ended anything halfway.

    Examples:
        >>> with StopRequests() as requests:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     try:
        ...         requests.check()
        ...     except Stopped as stopped:
        ...         print(stopped, stopped.exit_code)
        stopped by SIGTERM 143
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.insisted = False
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raise :class:`Stopped` if a signal has come."""
        if self.asked is not None:
            raise Stopped(self.asked)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While something is done that may be dropped: a signal raises in the middle of it."""
        self._at_once = True
        try:
            self.check()
            yield
        except SystemError as error:  # compiled code, such as Ray's, wraps what is raised in it
            if isinstance(error.__cause__, Stopped):
                raise error.__cause__ from None
            raise
        finally:
            self._at_once = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked == number == signal.SIGINT:
            self.insisted = True
            raise Stopped(number)
        first, self.asked = self.asked is None, number
        if self._at_once:
            self._at_once = False  # what cleans up after it is not interrupted again
            raise Stopped(number)
        if first:  # not print(), which a handler may have interrupted
            os.write(2, f"\n{signal.Signals(number).name}: the run ends after this step; Ctrl-C "
                        "twice ends it at once, without saving\n".encode())


def interrupts_end_at_once() -> None:
    """Let Ctrl-C end this process with one line, until a run handles signals itself.

    For the seconds in which libraries are imported: nothing has been started that would have to be
    ended, and what is raised in the middle of an import may be taken for a fault of the library.
    """
    _end_at_once((signal.SIGINT,), lambda: None)


def signals_end_at_once(clean_up: Callable[[], None]) -> None:
    """The same for SIGTERM, too, where libraries are imported and something has been started, which
    ``clean_up`` ends. It may be called in the middle of anything, so it takes no locks."""
    _end_at_once(_SIGNALS, clean_up)


def _end_at_once(numbers: Iterable[int], clean_up: Callable[[], None]) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"\nstopped by {signal.Signals(number).name}\n".encode())
        clean_up()
        os._exit(128 + number)

    for number in numbers:
        signal.signal(number, end)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep the handlers of SIGTERM and SIGINT from a library that installs its own, also below
    Python, where Ray's aborts the process on SIGTERM.

    Raises:
        Stopped: where the library's own has ended the process with the number of the signal.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    except SystemExit as error:
        if error.code not in _SIGNALS:
            raise
        raise Stopped(error.code) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def signals_end_the_process() -> Iterator[None]:
    """End the process with the code of the signal that stopped it, once all is cleaned up.

    What a trainer does not handle itself, as while it is being set up, is dropped.
    """
    try:
        with StopRequests() as requests, requests.at_once():
            yield
    except Stopped as stopped:
        print(f"{stopped}; what was started has been ended", file=sys.stderr)
        sys.exit(stopped.exit_code)
