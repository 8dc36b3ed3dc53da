"""How new weights reach the engine, and the proof that they did."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.weights.canary import Canary, StaleWeightsError
    from grpo.weights.layout import LayoutError
    from grpo.weights.proof import WeightProof
    from grpo.weights.shared import SameModule, SharedCopy, SingleCopy, WeightSync
    from grpo.weights.tolerance import CanaryReport

_MODULE_OF = {
    "Canary": "canary", "CanaryReport": "tolerance", "StaleWeightsError": "canary",
    "LayoutError": "layout", "WeightProof": "proof",
    "SameModule": "shared", "SharedCopy": "shared", "SingleCopy": "shared", "WeightSync": "shared",
}
__all__ = ["Canary", "CanaryReport", "LayoutError", "SameModule", "SharedCopy", "SingleCopy",
           "StaleWeightsError", "WeightProof", "WeightSync"]


def __getattr__(name: str) -> Any:
    # On first use: an engine's worker needs a few light modules of this package and no loss.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"grpo.weights.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
