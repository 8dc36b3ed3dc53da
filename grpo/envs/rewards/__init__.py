"""Reward functions: from a completion and its problem to a number."""

from grpo.envs.rewards.answers import (
    answer_tag,
    exact_match,
    gsm8k,
    negative_length,
    normalize_number,
)
from grpo.envs.rewards.batch import RewardBatch, RewardsFailed
from grpo.envs.rewards.registry import (
    RewardFn,
    RewardResult,
    batch_reward,
    get_reward,
    register_reward,
    reward_names,
)
from grpo.envs.rewards.scorer import RewardScorer

__all__ = ["RewardBatch", "RewardFn", "RewardResult", "RewardScorer", "RewardsFailed", "answer_tag",
           "batch_reward", "exact_match", "get_reward", "gsm8k", "negative_length",
           "normalize_number", "register_reward", "reward_names"]
