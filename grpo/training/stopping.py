"""SIGTERM and Ctrl-C as requests to stop: what was trained is saved before the run ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN_SECONDS = 0.05  # until a signal is sent again: Python has left the __del__ by then


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

    What is raised may get lost. Python drops it where it happens to run a ``__del__`` or a callback
    of a weak reference; then the signal is sent again. A library may catch it; then
    :meth:`at_once` raises it at its end, and requests inside of others take over the note. Those
    that end by an exception hand theirs back.

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
        self._hook = sys.unraisablehook

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
            for around in self._around():
                self.asked = self.asked or around.asked
            self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is not None and self.asked is not None:
            for around in self._around():  # whose cleaning up is not interrupted, either
                around.asked, around._at_once = around.asked or self.asked, False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            sys.unraisablehook = self._hook
        self._before = {}

    def _around(self) -> list[StopRequests]:
        """The requests that these are inside of."""
        owners = map(_owner, self._before.values())
        return [owner for owner in owners if owner is not None]

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
            self.check()
        except SystemError as error:  # compiled code, such as Ray's, wraps what is raised in it
            if isinstance(error.__cause__, Stopped):
                raise error.__cause__ from None
            raise
        finally:
            self._at_once = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside of :meth:`at_once`, while something is done that cannot be dropped: a signal
        raises at its end. What ends by an exception is left to that."""
        at_once, self._at_once = self._at_once, False
        try:
            yield
        finally:
            self._at_once = at_once and self.asked is None
        if at_once:
            self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked == number == signal.SIGINT:
            self.insisted = True
            raise Stopped(number)
        first, self.asked = self.asked is None, number
        if self._at_once:
            self._at_once = False  # what cleans up after it is not interrupted again
            raise Stopped(number)
        if first:  # not print(), which a handler may have interrupted
            _say(f"\n{signal.Signals(number).name}: the run ends after this step; Ctrl-C twice "
                 "ends it at once, without saving\n")

    def _dropped(self, what: sys.UnraisableHookArgs) -> None:
        """Hook for exceptions that Python drops: a signal among them is sent again."""
        if not isinstance(what.exc_value, Stopped):
            self._hook(what)
            return
        number, self.asked, self._at_once = what.exc_value.number, None, True
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()


def _owner(handler: Any) -> StopRequests | None:
    """The requests that a handler of signals belongs to."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequests) else None


@contextmanager
def signals_held_back() -> Iterator[None]:
    """:meth:`StopRequests.held_back` of those that get the signals now, if there are any."""
    requests = _owner(signal.getsignal(signal.SIGTERM))
    with nullcontext() if requests is None else requests.held_back():
        yield


def _say(text: str) -> None:
    """Also in a handler, and where Ctrl-C has ended the reader of a pipe, too."""
    with suppress(OSError):
        os.write(2, text.encode())


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
    for number in numbers:
        signal.signal(number, lambda number, frame: end_at_once(number, clean_up))


_ending = threading.RLock()  # held by the thread that ends this process


def end_at_once(number: int, clean_up: Callable[[], None]) -> None:
    """End this process for a signal, with one line and the code that a shell knows it by. It does
    not return, also where another thread is ending the process already."""
    with _ending:
        _say(f"\nstopped by {signal.Signals(number).name}\n")
        clean_up()
        os._exit(128 + number)


@contextmanager
def a_thread_ends_at_once(clean_up: Callable[[], None]) -> Iterator[None]:
    """As :func:`signals_end_at_once`, where a library keeps Python's main thread, in which handlers
    run, or installs handlers of its own that take their time."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in _SIGNALS:
                end_at_once(number[0], clean_up)
        os.close(reader)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


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
        with suppress(OSError):
            print(f"{stopped}; what was started has been ended", file=sys.stderr)
        sys.exit(stopped.exit_code)
