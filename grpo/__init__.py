"""GRPO for language models on TorchRL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.objectives import GroupAdvantage, GRPOLoss, total_loss

__version__ = "0.1.0"
__all__ = ["GRPOLoss", "GroupAdvantage", "total_loss"]


def __getattr__(name: str) -> Any:
    # On first use: an engine's worker imports this package for its extension and nothing else.
    if name in __all__:
        from grpo import objectives

        return getattr(objectives, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
