"""Updates while an engine serves others, and updates that only every so many steps reach it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpo.weights.canary import Canary
from grpo.weights.shared import WeightSync, WrappedSync
from grpo.weights.tolerance import CanaryReport

if TYPE_CHECKING:
    from grpo.policies.handle import EngineHandle


class PausedUpdates(WrappedSync):
    """Write shared weights while nothing is sampled with them.

    An optimizer step on weights that an engine shares changes them under the requests that run.
    Here the engine is paused before it (:meth:`begin`) and goes on after :meth:`publish`: running
    requests keep their tokens, and their keys and values are computed anew.

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

    def publish(self) -> int:
        self.begin()
        version = super().publish()
        self.end()
        return version

    def end(self) -> None:
        """Let the engine go on, if it was paused here; also after an update that failed."""
        if self.paused:
            self.paused = False
            self.engine.resume(timeout=self.timeout)


class PeriodicUpdates(WrappedSync):
    """Publish at every ``interval``-th call only, where each update costs a new engine.

    In between the engine samples with older weights, and the version stays. What must be asked of
    the present weights, such as an evaluation, calls :meth:`catch_up` before; the next interval
    begins there.

    Args:
        weights: how an update is made.
        interval: calls of :meth:`publish` for one update.

    Attributes:
        pending: calls since the last update.

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

    def publish(self) -> int:
        self.pending += 1
        if self.pending == self.interval:
            self.catch_up()
        return self.version

    def catch_up(self) -> int:
        """Make the update that is pending now, if one is; returns the version."""
        if self.pending:
            super().publish()
            self.pending = 0
        return self.version


class PeriodicCanary:
    """A canary that has nothing to say while the engine is behind on purpose.

    Args:
        canary: asked after each update.
        weights: that say whether there was one.
    """

    def __init__(self, canary: Canary, weights: PeriodicUpdates) -> None:
        self.canary, self.weights = canary, weights

    @property
    def policy(self):
        return self.canary.policy

    def check(self) -> CanaryReport:
        """As :meth:`Canary.check`; NaN where the engine has older weights."""
        if self.weights.pending:
            return CanaryReport(math.nan, math.nan)
        return self.canary.check()
