"""The arithmetic of GRPO: advantages, objectives, KL, aggregation and the log-prob head."""

from grpo.objectives import listwise, surrogates  # noqa: F401  these fill the registry
from grpo.objectives.advantages import GroupAdvantage, group_advantages
from grpo.objectives.aggregate import Normalizer
from grpo.objectives.grpo import GRPOLoss, total_loss
from grpo.objectives.head import fused_loss, linear_log_probs
from grpo.objectives.kl import kl_estimate
from grpo.objectives.maxent import MaxEntWeights
from grpo.objectives.registry import get_objective, register_surrogate
from grpo.objectives.scorer import TokenScorer
from grpo.objectives.tokens import LossTokens

__all__ = ["GRPOLoss", "GroupAdvantage", "LossTokens", "MaxEntWeights", "Normalizer",
           "TokenScorer", "fused_loss", "get_objective", "group_advantages", "kl_estimate",
           "linear_log_probs", "register_surrogate", "total_loss"]
