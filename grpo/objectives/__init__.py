"""The arithmetic of GRPO: advantages, surrogates, KL, aggregation and the log-prob head."""

from grpo.objectives.advantages import GroupAdvantage, group_advantages
from grpo.objectives.grpo import GRPOLoss, total_loss
from grpo.objectives.head import TokenScorer
from grpo.objectives.kl import kl_estimate
from grpo.objectives.surrogates import register_surrogate

__all__ = ["GRPOLoss", "GroupAdvantage", "TokenScorer", "group_advantages", "kl_estimate",
           "register_surrogate", "total_loss"]
