"""Calls in processes of their own, for code that may hold the interpreter for ever.

A thread that computes ``9**9**9`` lets no other thread run, not even the one that keeps deadlines.
A process can be ended, and all that it has started with it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.system.apart_child import CHUNK, END, ENDED, HELLO, MORE, packets
from grpo.system.child_process import package_environment
from grpo.system.deadline import LateError

_LOOK = 0.05  # seconds between two looks, when an exception from outside comes through
_START, _ENDING = 120.0, 15.0  # seconds for a process to begin, and to be gone with all it started

# A process that is forked from this one must not hold them open when this one is gone.
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [one.close() for one in list(_connections)])


class ApartError(RuntimeError):
    """A call in another process raised; the message says what.

    Attributes:
        frames: where, each a file, a line number, a function and a line.
    """

    def __init__(self, message: str, frames: Sequence[tuple] = ()) -> None:
        super().__init__(message)
        self.frames = frames


class EndedError(ApartError):
    """The process of a call has ended."""


class ComputingError(EndedError, LateError):
    """A call took more processor time than it may."""


class CallsApart:
    """Make calls in children, which are started as they are needed.

    They are forks of one process that has the ``imports``, so a new one costs milliseconds. What
    interrupts the caller meanwhile, such as a deadline, ends the child and all that it has started;
    another takes its place. Processes that a call leaves behind are ended when it returns.

    Args:
        processes: children at most, so calls at a time; others wait for them.
        seconds: of computing after which a call ends with its child; None: as long as it takes.
        imports: modules that calls use, which are imported before the first one counts, and
            ``"module:function"`` that prepares more.
        memory: bytes of memory that a child may take besides what the imports have; then it gets a
            ``MemoryError``. None: what there is.

    Examples:
        >>> calls = CallsApart(1, seconds=30, imports=["fractions"])
        >>> calls(divmod, 7, 2)
        (3, 1)
        >>> calls(divmod, 7, 0)
        Traceback (most recent call last):
        ...
        grpo.system.apart.ApartError: ZeroDivisionError: integer division or modulo by zero
    """

    def __init__(
        self, processes: int, *, imports: Sequence[str], seconds: float | None = None,
        memory: int | None = None,
    ) -> None:
        self.seconds, self.imports, self.memory = seconds, list(imports), memory
        self._places = [_Place() for _ in range(processes)]
        self._free, self._starting = threading.Condition(), threading.Lock()
        self._forker: tuple[subprocess.Popen, socket.socket] | None = None

    def __call__(self, fn: Callable[..., Any] | str, *args: Any) -> Any:
        """As :meth:`call`, without options."""
        return self.call(fn, args)

    def call(
        self, fn: Callable[..., Any] | str, args: Sequence[Any], options: dict | None = None, *,
        within: float | None = None, computing: float | None = None, seed: int | None = None,
    ) -> Any:
        """What ``fn(*args, **options)`` returns there.

        Args:
            fn: a function of a module, or where it is, ``"package.module:name"``.
            args: pickled, like what is returned.
            options: the same.
            within: seconds until it is late.
            computing: in the place of ``seconds``.
            seed: of the random generators that all code of a process shares; None leaves them.

        Raises:
            ApartError: if it raises.
            EndedError: if its process ends; :class:`ComputingError` after too much computing.
            LateError: if it is late.
        """
        computing = computing or self.seconds
        request = pickle.dumps((fn, tuple(args), options or {}, computing or 0.0, seed))
        place = self._take()
        try:
            place.child = place.child or self._start()
            answer = _ask(place.child, request, within)
        except BaseException:  # whoever waits has been interrupted, or it is late
            place.end_child()
            self._give_back(place)
            raise
        returned, value, last = (False, None, True) if isinstance(answer, int) else (
            pickle.loads(answer))
        if last:
            place.end_child()
        self._give_back(place)
        if answer == -signal.SIGPROF:
            raise ComputingError(f"took more than {computing:g} s of computing")
        if isinstance(answer, int):
            raise EndedError(f"its process has ended, exit code {answer}")
        if not returned:
            kind, text, frames = value
            raise ApartError(f"{kind}: {text}", frames)
        return value

    def prepare(self) -> None:
        """Begin to import what calls use."""
        with self._starting:
            self._forker = self._forker or self._start_forker()

    def _take(self) -> _Place:
        me = threading.current_thread()
        with self._free:
            while True:
                for place in sorted(self._places, key=lambda place: place.child is None):
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

    def _start(self) -> socket.socket:
        """A connection to a new process that waits for calls."""
        for _ in range(2):  # the process that forks may have been ended by somebody
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _connections.add(ours)
            self.prepare()
            with self._starting, theirs:
                try:
                    socket.send_fds(self._forker[1], [b"1"], [theirs.fileno()])
                except OSError:
                    self._end_forker()
                    continue
            if _packet(ours, time.monotonic() + _START) == HELLO:
                return ours
            with self._starting:
                self._end_forker()
        raise EndedError("no process for the call could be started; its standard error says why")

    def _start_forker(self) -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair()
        _connections.add(ours)
        options = {"imports": self.imports, "memory": self.memory, "path": sys.path}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "grpo.system.apart_child", str(theirs.fileno()),
                 json.dumps(options)], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, **package_environment()})
        return process, ours

    def _end_forker(self) -> None:
        if self._forker is not None:
            process, connection = self._forker
            self._forker = None
            connection.close()
            process.kill()
            process.wait()


@dataclass(eq=False)
class _Place:
    """Where one call is made at a time: the thread that waits for it, and the child, if any."""

    owner: threading.Thread | None = None
    child: socket.socket | None = None

    def end_child(self) -> None:
        """End it at once, with all that it has started."""
        child, self.child = self.child, None
        if child is None:
            return
        with child:
            try:
                child.shutdown(socket.SHUT_WR)
                deadline = time.monotonic() + _ENDING
                while (packet := _packet(child, deadline)) and packet[:1] != ENDED:
                    pass
            except OSError:  # it is gone
                pass


def _ask(child: socket.socket, request: bytes, within: float | None) -> bytes | int:
    """The answer to a request, or the exit code of a child that has ended."""
    deadline = math.inf if within is None else time.monotonic() + within
    message, packet = [], b""
    try:
        for part in packets(request):
            if not _ready(child, select.POLLOUT, deadline):
                raise LateError(f"took longer than {within:g} s")
            child.send(part)
        while (packet := _packet(child, deadline) or b"")[:1] in (MORE, END):
            message.append(packet[1:])
            if packet[:1] == END:
                return b"".join(message)
    except ConnectionError:
        pass
    if time.monotonic() > deadline and not packet:
        raise LateError(f"took longer than {within:g} s")
    return int(packet[1:] or -signal.SIGKILL)


def _packet(child: socket.socket, deadline: float) -> bytes | None:
    """The next one, empty where there will be none; None if it is late."""
    try:
        return child.recv(CHUNK + 1) if _ready(child, select.POLLIN, deadline) else None
    except ConnectionError:
        return b""


def _ready(child: socket.socket, event: int, deadline: float) -> bool:
    """Wait until it can be read or written, with looks for exceptions from outside."""
    poll = select.poll()
    poll.register(child, event)
    while not poll.poll(1000 * max(min(_LOOK, deadline - time.monotonic()), 0.0)):
        if time.monotonic() > deadline:
            return False
    return True
