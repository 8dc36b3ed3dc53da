"""Coefficients that follow what is measured: a controller, its metric and what it sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.objectives.controllers import Controller


@dataclass(frozen=True)
class Adaptation:
    """A controller in the loop."""

    name: str  # of its entry in metrics and checkpoints
    controller: Controller  # from a measurement to a value
    metric: str  # name of the measurement in the metrics of an iteration
    apply: Callable[[float], None]  # uses the value from the next iteration on

    def start(self) -> None:
        """Use the controller's value, at the start of a run and after loading its state."""
        self.apply(self.controller.value)

    def update(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt to an iteration's metrics; returns the value that was used in it."""
        used = self.controller.value
        # Without a valid token there is nothing measured, and the controller skips NaN.
        self.apply(self.controller.update(metrics.get(self.metric, math.nan)))
        return {f"control/{self.name}": used}

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state)
        self.start()
