"""Rollout workers as Ray actors.

    pool = WorkerPool(make_actor, count=2)
    pool.start()

Every call has a deadline. A worker that dies is an :class:`EngineDied`; :meth:`WorkerPool.revive`
starts a new one in its place, which has the weights that the run began with until it is given
others. The rest goes on meanwhile: a host that is gone may not come back.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from grpo.policies.handle import EngineError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class EngineDied(EngineError):
    """A worker's process is gone."""


class WorkersLost(RuntimeError):
    """Workers die faster than it makes sense to replace them."""


def ray_available() -> bool:
    """Whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


def require_ray() -> None:
    """Raise unless Ray is installed."""
    if not ray_available():
        raise ModuleNotFoundError("workers on devices of their own need Ray: pip install "
                                  "'torchrl-grpo[ray]'")


def answer(ref: Any, *, timeout: float, who: str, what: str) -> Any:
    """The result of a Ray call, within ``timeout`` seconds.

    ``ref`` is from ``method.remote()``; messages name who was called and what was asked.

    Raises:
        EngineDied: if the actor's process, its node or the answer itself is gone.
        EngineError: if the answer does not come in time, or is an error.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(ref, timeout=timeout)
    except GetTimeoutError:
        raise EngineError(f"{who}: no answer to {what} within {timeout:g} s; see its log in Ray's "
                          "session folder") from None
    except RayTaskError as error:
        cause = error.cause  # whose text may have lines, as that of an engine that did not start
        raise EngineError(f"{who}: {what} failed: {type(cause).__name__}: {cause}") from error
    except RayError as error:  # Ray has a class for each way to go, such as out of memory
        raise EngineDied(f"{who} died during {what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What Ray says of a death; of one in the actor's constructor also what was raised there."""
    lines = _COLOURS.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    if not getattr(error, "actor_init_failed", False):
        return lines[0]
    raised: list[str] = []
    for line in reversed(lines[1:]):  # what comes after the last frame, whose lines are indented
        if line.startswith(" "):
            break
        raised.insert(0, line)
    return "\n".join([lines[0], *raised])


@dataclass(frozen=True)
class Call:
    """Something asked of a worker."""

    number: int  # of the worker
    life: int  # of its process; one that takes a dead one's place has another
    method: str
    ref: Any  # Ray's reference to the answer


@dataclass(eq=False)
class WorkerPool:
    """Actors that do the same work, such as those of
    :class:`~grpo.collectors.rollout_worker.RolloutWorker`; each has a method ``describe``.

    Args:
        make: starts the actor of a number.
        count: how many there are.
        kind: what they are called in messages.
        together: they share one model, so that all are replaced where one is; as one restart.
        max_restarts: how often, over all numbers, a dead one is replaced.
        start_timeout: seconds until one must answer, if there is no other.

    Raises:
        WorkersLost: from :meth:`revive`, when ``max_restarts`` are used up, or nobody is left.
    """

    make: Callable[[int], Any]
    _: KW_ONLY
    count: int
    kind: str = "rollout worker"
    together: bool = False
    max_restarts: int = 3
    start_timeout: float = 900.0
    actors: list[Any] = field(default_factory=list, init=False)  # Ray's handles, by number
    lives: list[int] = field(init=False)  # ids of their processes, by number
    dead: dict[int, str] = field(default_factory=dict, init=False)  # why, by number
    # By number, those that take a dead one's place and have not answered yet; on a cluster Ray may
    # have to wait for a host that has room.
    starting: dict[int, Call] = field(default_factory=dict, init=False)
    # Numbers of those that have not been given the present weights since they started.
    outdated: set[int] = field(default_factory=set, init=False)
    restarts: int = field(default=0, init=False)
    about: list[dict[str, Any]] = field(default_factory=list, init=False)  # what they have answered
    _launched: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        require_ray()
        self.lives = list(range(self.count))

    def start(self) -> None:
        """Start all; returns when each has answered."""
        self.launch()
        self.meet()

    def launch(self) -> None:
        """Start all, and wait for none; nobody is present before :meth:`meet`."""
        self.actors = [self.make(number) for number in range(self.count)]
        self.about = [{} for _ in self.actors]
        self.starting = {number: self.send(number, "describe") for number in range(self.count)}
        self._launched = time.monotonic()

    def meet(self) -> None:
        """Return when each that was launched has answered.

        Raises:
            EngineError: as soon as one has failed, or when ``start_timeout`` is over.
        """
        while self.starting:
            for call in self.wait(list(self.starting.values()), timeout=1.0):
                self.about[call.number] = self.result(call, timeout=60.0)
                del self.starting[call.number]
            if self.starting and time.monotonic() > self._launched + self.start_timeout:
                late = ", ".join(map(self.name, self.starting))
                raise EngineError(f"{late}: not started within {self.start_timeout:g} s "
                                  "(ray.start_timeout); see its log in Ray's session folder")

    def there(self, number: int) -> bool:
        """Whether a worker that was launched has answered, with more than an error."""
        call = self.starting.get(number)
        if call is None:
            return True
        try:
            return bool(self.wait([call], timeout=0) and self.result(call, timeout=60.0))
        except EngineError:
            return False

    @property
    def present(self) -> list[int]:
        """Numbers of the workers that have answered and, as far as is known, live."""
        return [number for number in range(self.count)
                if number not in self.dead and number not in self.starting]

    @property
    def usable(self) -> list[int]:
        """Numbers of the workers that live and have the present weights."""
        return [number for number in self.present if number not in self.outdated]

    @property
    def whole(self) -> bool:
        """Whether all workers are usable."""
        return len(self.usable) == self.count

    def name(self, number: int) -> str:
        return f"{self.kind} {number}"

    def send(self, number: int, method: str, *args: Any) -> Call:
        """Call a method without waiting."""
        life = self.lives[number]  # before the actor, which another thread may replace meanwhile
        return Call(number, life, method, getattr(self.actors[number], method).remote(*args))

    def result(self, call: Call, *, timeout: float) -> Any:
        """Wait for the answer to a call, see :func:`answer`; a death is noted."""
        try:
            return answer(call.ref, timeout=timeout, who=self.name(call.number), what=call.method)
        except EngineDied as error:
            self.bury(call, str(error))
            raise

    def wait(self, calls: Sequence[Call], *, timeout: float) -> list[Call]:
        """Those of some calls that are answered; waits until one is, or ``timeout`` has passed."""
        import ray

        refs = [call.ref for call in calls]
        ray.wait(refs, num_returns=1, timeout=timeout)
        # The call above names one answer at most, however many are there.
        answered = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        return [call for call in calls if call.ref in answered]

    def bury(self, call: Call, reason: str) -> None:
        """Note that a worker is of no use any more, unless another has already taken its place."""
        if self.lives[call.number] == call.life:
            self.dead.setdefault(call.number, reason)

    def lost(self, call: Call) -> bool:
        """Whether whom it was asked of is gone, also where another has taken its place since."""
        return call.number in self.dead or self.lives[call.number] != call.life

    def look(self) -> None:
        """Note which workers are gone, or live with an engine that has failed."""
        for number in self.present:
            call = self.send(number, "describe")
            try:
                about = self.result(call, timeout=30.0)
            except EngineError:  # a death is noted; one that is slow to answer is none
                continue
            if about.get("failure"):
                self.bury(call, f"{self.name(number)}: {about['failure']}")

    def put(self, value: Any) -> Any:
        """Keep a large argument where every worker finds it."""
        import ray

        return ray.put(value)

    def ask(self, number: int, method: str, *args: Any, timeout: float) -> Any:
        """Call a method and wait."""
        return self.result(self.send(number, method, *args), timeout=timeout)

    def revive(self) -> list[int]:
        """Start new workers in the place of dead ones, and wait for them only while there is no
        other; the numbers of those that are there since the last call."""
        self._replace_dead()
        come = self._come()
        deadline = time.monotonic() + self.start_timeout
        while not self.present:
            if time.monotonic() > deadline:
                raise WorkersLost(
                    f"no {self.kind} is left, and no new one answered within "
                    f"{self.start_timeout:g} s (ray.start_timeout); see `ray status` for what the "
                    "cluster has, and the workers' logs in Ray's session folder")
            self.wait(list(self.starting.values()), timeout=1.0)
            come += self._come()
            self._replace_dead()  # those that died as they started
        return come

    def _replace_dead(self) -> None:
        while self.dead:
            first = min(self.dead)
            if self.restarts >= self.max_restarts:
                raise WorkersLost(
                    f"{self.dead[first]}; {self.restarts} {self.kind}s were replaced before, which "
                    f"is all that ray.max_restarts={self.max_restarts} allows. See the log of the "
                    "worker in Ray's session folder; a killed worker is often one out of memory")
            self.restarts += 1
            for number in range(self.count) if self.together else (first,):
                self._end(self.actors[number])  # what may be left of it
                self.actors[number] = self.make(number)
                self.lives[number] = max(self.lives) + 1
                self.outdated.discard(number)
                self.starting[number] = self.send(number, "describe")
                self.dead.pop(number, None)

    def _come(self) -> list[int]:
        """Numbers of the new workers that have answered, which have no weights of the run yet."""
        come = []
        calls = list(self.starting.values())
        for call in self.wait(calls, timeout=0) if calls else ():
            try:
                self.about[call.number] = self.result(call, timeout=60.0)
                self.outdated.add(call.number)
                come.append(call.number)
            except EngineDied:  # noted, and replaced by the next call
                pass
            except EngineError as error:
                self.bury(call, str(error))
            # Last: from now on it is present, and another thread gives work to all that are usable.
            del self.starting[call.number]
        return come

    def close(self) -> None:
        """End all workers."""
        for actor in self.actors:
            self._end(actor)
        self.actors = []

    def _end(self, actor: Any) -> None:
        import ray

        ray.kill(actor)
