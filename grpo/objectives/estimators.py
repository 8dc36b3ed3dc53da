"""Advantage estimators: the names of the built-in ones, and functions of the user."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageEstimator = Literal["group_norm", "group_norm_population", "group_mean", "rloo", "maxrl",
                             "batch_norm", "global_norm"]

#: What is added to the denominator by default; estimators that are not here do not divide.
DEFAULT_EPS = {"group_norm": 1e-4, "group_norm_population": 1e-4, "maxrl": 0.0,
               "batch_norm": 1e-4, "global_norm": 1e-4}


def check_estimator(estimator: str, eps: float | None = None) -> None:
    """ValueError for an unknown estimator, or an ``eps`` below 0 or that it does not read."""
    if ":" in estimator:
        own_estimator(estimator)
    elif estimator not in get_args(AdvantageEstimator):
        raise ValueError(f"advantage_estimator={estimator!r} is unknown; use one of "
                         f"{get_args(AdvantageEstimator)}, or your own as module:function")
    if eps is not None and not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps!r} must be finite and at least 0; leave it out otherwise")
    if eps is not None and estimator not in DEFAULT_EPS:
        why = "is given none" if ":" in estimator else "divides by nothing"
        raise ValueError(f"eps={eps!r} would be ignored: advantage_estimator={estimator!r} {why}; "
                         "leave it out")


def own_estimator(path: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The estimator at ``module:function``, with its results checked.

    The function is called as ``function(rewards_B, group_id_B, valid_B)`` with float32, int64 and
    bool tensors of one shape ``[B]`` and returns the advantages ``[B]``. Where ``valid_B`` is False
    there is no reward (it reads 0), and the advantage becomes 0.

    Raises:
        ValueError: if it cannot be imported; when called, if what it returns is no tensor of that
            shape, or not finite.

    Examples:
        >>> rewards, valid = torch.tensor([1.0, 0.5]), torch.tensor([True, False])
        >>> own_estimator("grpo.objectives.estimators:reward_itself")(
        ...     rewards, torch.tensor([0, 0]), valid).tolist()
        [1.0, 0.0]
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"advantage_estimator={path!r} cannot be imported: {error}; give "
                         "module:function of a module on the Python path") from error
    if not callable(function):
        raise ValueError(f"advantage_estimator={path!r} is no function; give module:function")

    def checked(rewards_B: Tensor, group_id_B: Tensor, valid_B: Tensor) -> Tensor:
        rewards_B = torch.where(valid_B, rewards_B, 0.0).float()
        advantage_B = function(rewards_B, group_id_B, valid_B)
        shape = getattr(advantage_B, "shape", None)
        if shape != rewards_B.shape:
            raise ValueError(f"advantage_estimator={path!r} returned "
                             f"{type(advantage_B).__name__} of shape {shape and tuple(shape)}; "
                             f"return a tensor of shape {tuple(rewards_B.shape)}, one a row")
        advantage_B = torch.where(valid_B, advantage_B, 0.0).float()
        if not advantage_B.isfinite().all():
            rows = (~advantage_B.isfinite()).nonzero().flatten().tolist()
            raise ValueError(f"advantage_estimator={path!r} returned values that are not finite "
                             f"for rows {rows[:8]}")
        return advantage_B

    return checked


def reward_itself(rewards_B: Tensor, group_id_B: Tensor, valid_B: Tensor) -> Tensor:
    """REINFORCE without a baseline: the smallest estimator of one's own."""
    return rewards_B
