"""Training: the loop, the optimizer, checkpoints, and what people see."""

from grpo.training.learner import Learner
from grpo.training.optim import MasterAdamW
from grpo.training.trainer import Trainer

__all__ = ["Learner", "MasterAdamW", "Trainer"]
