"""Reward functions: from a completion and its problem to a number."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo.envs.rewards import code, form, judge, length, mathematics  # noqa: F401  by name
from grpo.envs.rewards.answers import (
    answer_tag,
    exact_match,
    gsm8k,
    negative_length,
    normalize_number,
)
from grpo.envs.rewards.completion import Completion
from grpo.envs.rewards.registry import (
    RewardFn,
    RewardResult,
    batch_reward,
    get_reward,
    register_reward,
    reward_names,
)

if TYPE_CHECKING:
    from grpo.envs.rewards.batch import RewardBatch, RewardsFailed
    from grpo.envs.rewards.scorer import RewardScorer

__all__ = ["Completion", "RewardBatch", "RewardFn", "RewardResult", "RewardScorer", "RewardsFailed",
           "answer_tag", "batch_reward", "exact_match", "get_reward", "gsm8k", "negative_length",
           "normalize_number", "register_reward", "reward_names"]

_WITH_TORCH = {"RewardBatch": "batch", "RewardsFailed": "batch", "RewardScorer": "scorer"}


def __getattr__(name: str) -> Any:
    # On first use: the processes in which functions are called do without PyTorch.
    if name in _WITH_TORCH:
        return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
