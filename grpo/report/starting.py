"""What of a run starts, in plain lines: a start that takes a minute is no reason to look at a
silent screen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

# Seconds between two looks at whether a part is there.
_LOOK = 0.2


@dataclass
class _Part:
    since: float
    within: float | None  # seconds that it has; None: nobody ends it
    there: Callable[[], bool] | None  # None: whoever began it says so


class Starting:
    """Says when a part is there, and of what is missing that it is still awaited.

    A context manager around the start. A thread looks after the parts, so lines come while this
    process loads a model of its own.

    Args:
        say: shows a line.
        every: seconds without a line until one says what is awaited.

    Examples:
        >>> with Starting(print) as starting:
        ...     starting.begin({"worker 0": lambda: True, "worker 1": lambda: True}, within=900)
        ...     with starting.part("trainer"):
        ...         time.sleep(0.3)  # doctest: +ELLIPSIS
        starting worker 0, worker 1; each has 900 s
        worker 0: there after 0... s
        worker 1: there after 0... s
        trainer: there after 0.3 s
    """

    def __init__(self, say: Callable[[str], None], *, every: float = 10.0) -> None:
        self.say, self.every = say, every
        self._parts: dict[str, _Part] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="starting")
        self._said = time.monotonic()

    def __enter__(self) -> Starting:
        self._said = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()  # what it looks at may be gone from now on
        if error is None:
            self._look()

    def begin(self, parts: Mapping[str, Callable[[], bool]], *, within: float) -> None:
        """Parts start elsewhere; each value says whether its part is there, of the seconds
        ``within`` which it has to be."""
        if not parts:
            return
        with self._lock:
            each = "each has" if len(parts) > 1 else "it has"
            self._say(f"starting {', '.join(parts)}; {each} {within:g} s")
            now = time.monotonic()
            for name, there in parts.items():
                self._parts[name] = _Part(now, within, there)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Something that this thread does itself; what fails is there never."""
        with self._lock:
            self._parts[name] = _Part(time.monotonic(), None, None)
        try:
            yield
        except BaseException:
            with self._lock:
                del self._parts[name]
            raise
        self._there(name)

    # -- the thread's side ---------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            self._look()
            with self._lock:
                if self._parts and time.monotonic() - self._said >= self.every:
                    self._say(f"still starting: {', '.join(map(self._words, self._parts))}")

    def _look(self) -> None:
        with self._lock:
            looked_at = {name: part.there for name, part in self._parts.items() if part.there}
        for name, there in looked_at.items():
            if there():
                self._there(name)

    def _there(self, name: str) -> None:
        with self._lock:
            part = self._parts.pop(name)
            self._say(f"{name}: there after {time.monotonic() - part.since:.1f} s")

    def _words(self, name: str) -> str:
        part = self._parts[name]
        limit = "" if part.within is None else f" of {part.within:g} s"
        return f"{name} ({time.monotonic() - part.since:.0f}{limit or ' s'})"

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self.say(line)
