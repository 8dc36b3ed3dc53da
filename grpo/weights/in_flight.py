"""Updates while an engine serves others, and updates that only every so many steps reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo.weights.shared import WeightSync, WrappedSync

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle


class PausedUpdates(WrappedSync):
    """Write shared weights while nothing is sampled with them.

    The engine is paused before an optimizer step (:meth:`begin`) and goes on after :meth:`publish`:
    running requests keep their tokens, and their keys and values are computed anew.

    Args:
        weights: that lie in the engine's memory.
        engine: that serves others meanwhile.
        timeout: seconds for a pause to begin, and to end.
    """

    def __init__(
        self, weights: WeightSync, engine: EngineHandle, *, timeout: float = 60.0
    ) -> None:
        super().__init__(weights)
        self.engine, self.timeout = engine, timeout
        self.paused = False

    def begin(self) -> None:
        """Pause the engine, unless it is; call it before anything is written."""
        if not self.paused:
            self.engine.pause("keep", timeout=self.timeout)
            self.paused = True

    def publish(self, *, now: bool = False) -> int:
        self.begin()
        version = super().publish(now=now)
        self.end()
        return version

    def end(self) -> None:
        """Let the engine go on, if it was paused here; also after an update that failed."""
        if self.paused:
            self.paused = False
            self.engine.resume(timeout=self.timeout)


class PeriodicUpdates(WrappedSync):
    """Publish at every ``interval``-th call only, where each update costs a new engine.

    In between the engine samples with older weights, and the version stays. What is asked of the
    present weights, such as an evaluation, needs ``publish(now=True)`` before; the next interval
    begins there.

    Args:
        weights: how an update is made.
        interval: calls of :meth:`publish` for one update.

    Examples:
        >>> from torch import nn
        >>> from grpo.weights.shared import SameModule
        >>> weights = PeriodicUpdates(SameModule(nn.Linear(1, 1)), interval=3)
        >>> [weights.publish() for _ in range(7)]
        [0, 0, 1, 1, 1, 2, 2]
    """

    starts_engines = True

    def __init__(self, weights: WeightSync, *, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"interval={interval} must be at least 1")
        super().__init__(weights)
        self.interval, self.pending = interval, 0

    def publish(self, *, now: bool = False) -> int:
        self.pending += 1
        if now or self.pending == self.interval:
            super().publish(now=now)
            self.pending = 0
        return self.version
