"""Training: the loop, the optimizer, checkpoints, and what people see."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.training.learner import Learner
    from grpo.training.optim import MasterAdamW
    from grpo.training.trainer import Trainer

_MODULE_OF = {"Learner": "learner", "MasterAdamW": "optim", "Trainer": "trainer"}
__all__ = ["Learner", "MasterAdamW", "Trainer"]


def __getattr__(name: str) -> Any:
    # On first use: what handles signals is needed before PyTorch is imported.
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"grpo.training.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
