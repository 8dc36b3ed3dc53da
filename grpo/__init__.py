"""GRPO for language models on TorchRL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.atropos.env import AtroposEnv
    from grpo.objectives import GroupAdvantage, GRPOLoss, total_loss
    from grpo.run.api import train

__version__ = "0.1.0"
_MODULES = {"AtroposEnv": "grpo.atropos.env", "GRPOLoss": "grpo.objectives",
            "GroupAdvantage": "grpo.objectives", "total_loss": "grpo.objectives",
            "train": "grpo.run.api"}
__all__ = ["AtroposEnv", "GRPOLoss", "GroupAdvantage", "total_loss", "train"]


def __getattr__(name: str) -> Any:
    # On first use: an engine's worker imports this package for its extension and nothing else.
    if name in __all__:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
