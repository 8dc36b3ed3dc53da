"""GRPO for language models on TorchRL."""

from grpo.objectives import GroupAdvantage, GRPOLoss, total_loss

__version__ = "0.1.0"
__all__ = ["GRPOLoss", "GroupAdvantage", "total_loss"]
