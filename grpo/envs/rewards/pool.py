"""Calls side by side, each with a deadline: plain functions in threads, coroutines on a loop.

A call that is late loses its place to the next one, and whoever waits for it learns so at once. Its
thread gets an exception, which ends loops in Python; what hangs below Python is left to itself,
which holds up neither the run nor its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import itertools
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from grpo.system.deadline import LateError

#: Whose places a call takes, and how many they are; those of None are the pool's.
Share: TypeAlias = tuple[Hashable, float]
_OF_ALL: Share = (None, math.inf)
#: Seconds between two exceptions for a thread that is late, for an event loop to answer, and that
#: the watcher sleeps at most.
_REPEAT, _PULSE, _NAP = 1.0, 0.2, 3600.0


class _GiveUp(SystemExit):
    """Raised in a thread that is late; nobody prints a SystemExit that ends a thread."""


@dataclass(eq=False)
class _Call:
    """One call: what is called, until when, and who gets to say what became of it."""

    fn: Callable[..., Any]
    args: tuple
    seconds: float
    share: Share
    number: int  # in the order of submission
    future: Future = field(default_factory=Future)
    deadline: float = math.inf
    thread: threading.Thread | None = None
    loop: _Loop | None = None
    task: Future | None = None
    _open: list[bool] = field(default_factory=lambda: [True])

    def claim(self) -> bool:
        """True for the first caller only: whoever ended the call, or found it late.

        One operation of the interpreter and no lock, because an exception may be on its way to the
        thread that asks.
        """
        try:
            return self._open.pop()
        except IndexError:
            return False


class CallPool:
    """Run at most ``workers`` calls at a time.

    Threads are started as they are needed, and none keeps the process alive.

    Examples:
        >>> pool = CallPool(2)
        >>> pool.submit(max, 1, 2, seconds=1.0).result()
        2
        >>> pool.submit(time.sleep, 10, seconds=0.01).result()
        Traceback (most recent call last):
        ...
        grpo.system.deadline.LateError: took longer than 0.01 s
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1")
        self.workers = workers
        self._lock = threading.RLock()
        self._ready_changed = threading.Condition(self._lock)
        self._earlier = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._waiting: defaultdict[Hashable, deque[_Call]] = defaultdict(deque)  # by share
        self._ready: deque[_Call] = deque()  # for threads
        self._running: set[_Call] = set()
        self._lost: set[threading.Thread] = set()
        self._idle = self._threads = 0
        self._loop: _Loop | None = None
        self._watcher: threading.Thread | None = None
        self._next_look = math.inf

    def submit(self, fn: Callable[..., Any], *args: Any, seconds: float,
               share: Share = _OF_ALL) -> Future:
        """Call or await ``fn(*args)`` as soon as there is a place; the deadline counts from then
        on. The future is always answered: what was returned or raised, or :class:`LateError`.

        Of calls with the same ``share``, a name and a number, no more than that run at a time.
        """
        call = _Call(fn, args, seconds, share, next(self._numbers))
        with self._lock:
            if self._watcher is None:
                self._watcher = _daemon(self._watch, "reward-deadlines")
            self._waiting[share[0]].append(call)
            self._dispatch()
        return call.future

    def _dispatch(self) -> None:
        """Start what there is a place for; under the lock."""
        while (call := self._next()) is not None:
            self._running.add(call)
            call.deadline = time.monotonic() + call.seconds
            if call.deadline < self._next_look:
                self._next_look = call.deadline
                self._earlier.notify()
            if is_async(call.fn):
                self._launch(call)
                continue
            self._ready.append(call)
            if self._idle:
                self._ready_changed.notify()
            if len(self._ready) > self._idle and self._threads < self.workers:
                self._threads += 1
                _daemon(self._serve, "rewards")

    def _next(self) -> _Call | None:
        """The call that has waited longest of those that there is a place for."""
        if len(self._running) >= self.workers:
            return None
        taken = Counter(call.share[0] for call in self._running)
        heads = [queue[0] for name, queue in self._waiting.items()
                 if queue and taken[name] < queue[0].share[1]]
        if not heads:
            return None
        return self._waiting[min(heads, key=lambda call: call.number).share[0]].popleft()

    def _finish(self, call: _Call, result: Any, error: BaseException | None) -> bool:
        """Say what became of a call, and start the next one; False if it was late."""
        if not call.claim():
            return False
        with self._lock:
            self._running.discard(call)
            self._dispatch()
        _answer(call.future, result, error)
        return True

    # -- threads -------------------------------------------------------------------------------

    def _serve(self) -> None:
        with suppress(_GiveUp):  # late, and somebody else has its place
            while self._serve_one():
                pass

    def _serve_one(self) -> bool:
        with self._lock:
            self._idle += 1
            while not self._ready:
                self._ready_changed.wait()
            self._idle -= 1
            call = self._ready.popleft()
            call.thread = threading.current_thread()
        result, failure = None, None
        try:
            result = call.fn(*call.args)
        except BaseException as error:  # raised again where somebody waits
            failure = error
        return self._finish(call, result, failure)

    # -- coroutines ----------------------------------------------------------------------------

    def _launch(self, call: _Call) -> None:
        if self._loop is None:
            self._loop = _Loop()
        call.loop = self._loop
        call.task = asyncio.run_coroutine_threadsafe(_outcome(call.fn, call.args), call.loop.loop)
        call.task.add_done_callback(lambda task: self._finish(
            call, *((None, RuntimeError("cancelled")) if task.cancelled() else task.result())))

    # -- deadlines -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._lock:
                wait = self._next_look - time.monotonic()
                if wait > 0:
                    self._earlier.wait(min(wait, _NAP))
                late = self._take_late()
            for call in late:
                self._end_coroutine(call)
                _answer(call.future, None, LateError(f"took longer than {call.seconds:g} s"))

    def _take_late(self) -> list[_Call]:
        now = time.monotonic()
        late = [call for call in self._running if call.deadline <= now and call.claim()]
        for call in late:
            self._running.discard(call)
            if call.thread is not None:
                self._threads -= 1
                self._lost.add(call.thread)
            elif call in self._ready:  # no thread came to it
                self._ready.remove(call)
        # Repeated, for functions that catch every exception and carry on.
        self._lost = {thread for thread in self._lost if thread.is_alive()}
        for thread in self._lost:
            _raise_in(thread)
        self._next_look = min((call.deadline for call in self._running), default=math.inf)
        if self._lost:
            self._next_look = min(self._next_look, now + _REPEAT)
        self._dispatch()
        return late

    def _end_coroutine(self, call: _Call) -> None:
        if call.task is None:
            return
        call.task.cancel()
        with self._lock:
            present = call.loop is self._loop
        if present and not call.loop.responds():  # something in it does not await
            with self._lock:
                self._loop = None
                self._lost.add(call.loop.thread)
                self._next_look = min(self._next_look, time.monotonic())


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = _daemon(self.loop.run_forever, "rewards-async")

    def responds(self) -> bool:
        """Whether the loop gets to its next step in time."""
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return answered.wait(_PULSE)


@functools.cache
def call_pool(workers: int) -> CallPool:
    """The process's pool of so many workers."""
    return CallPool(workers)


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether a function, or an object's ``__call__``, is declared ``async def``.

    Examples:
        >>> async def judge(completion, problem): ...
        >>> is_async(judge), is_async(max)
        (True, False)
    """
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None))  # noqa: B004


async def _outcome(fn: Callable[..., Any], args: tuple) -> tuple[Any, BaseException | None]:
    """What a coroutine returns and raises; a SystemExit would end the loop with all others."""
    try:
        return await fn(*args), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # raised again where somebody waits
        return None, error


def _daemon(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True, name=name)
    thread.start()
    return thread


def _answer(future: Future, result: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _raise_in(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident),
                                               ctypes.py_object(_GiveUp))
