"""Reward functions: from a completion and its problem to a number."""

from grpo.rewards.answers import answer_tag, exact_match, gsm8k, negative_length, normalize_number
from grpo.rewards.registry import (
    RewardBatch,
    RewardFn,
    RewardResult,
    compute_rewards,
    get_reward,
    register_reward,
    reward_names,
)

__all__ = [
    "RewardBatch",
    "RewardFn",
    "RewardResult",
    "answer_tag",
    "compute_rewards",
    "exact_match",
    "get_reward",
    "gsm8k",
    "negative_length",
    "normalize_number",
    "register_reward",
    "reward_names",
]
