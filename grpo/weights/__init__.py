"""How new weights reach the engine, and the proof that they did."""

from grpo.weights.canary import Canary, CanaryReport, StaleWeightsError
from grpo.weights.layout import LayoutError
from grpo.weights.shared import SameModule, SingleCopy, WeightSync

__all__ = ["Canary", "CanaryReport", "LayoutError", "SameModule", "SingleCopy",
           "StaleWeightsError", "WeightSync"]
