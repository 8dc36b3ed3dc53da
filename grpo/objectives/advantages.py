"""Group-relative advantages: how much better a completion is than its siblings.

Source: GRPO (arXiv:2402.03300), sec. 4.1.2; without the standard deviation: Dr.GRPO
(arXiv:2503.20783); leave-one-out baseline: RLOO (arXiv:2402.14740).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from grpo.data import ADVANTAGE, GROUP_ID, REWARD, REWARD_ERROR

AdvantageEstimator = Literal["group_norm", "group_norm_population", "group_mean", "rloo"]


def check_estimator(estimator: str) -> None:
    """Validate the name once, when a module is built.

    Raises:
        ValueError: for an unknown estimator.
    """
    if estimator not in get_args(AdvantageEstimator):
        raise ValueError(f"advantage_estimator={estimator!r} is unknown; use one of "
                         f"{get_args(AdvantageEstimator)}")


def group_advantages(
    rewards_B: Tensor,
    group_id_B: Tensor,
    *,
    estimator: AdvantageEstimator = "group_norm",
    eps: float = 1e-4,
    valid_B: Tensor | None = None,
) -> Tensor:
    r"""Advantage of each completion relative to the completions of the same prompt.

    =========================  ==================================================================
    estimator                  value
    =========================  ==================================================================
    ``group_norm``             :math:`(r - \mu) / (\sigma + eps)`, unbiased :math:`\sigma`
    ``group_norm_population``  the same with the population's :math:`\sigma`
    ``group_mean``             :math:`r - \mu` (Dr.GRPO)
    ``rloo``                   :math:`r - ` mean of the **other** completions
    =========================  ==================================================================

    Args:
        rewards_B: float ``[B]``.
        group_id_B: int64 ``[B]``; rows need not be sorted, groups may differ in size.
        estimator: see the table.
        eps: added to the standard deviation; keep it well below the rewards' scale.
        valid_B: bool ``[B]``; rows without a reward are left out of their group's statistics and
            get advantage 0. A group with fewer than two valid rows gets 0 as well.

    Returns:
        float32 ``[B]``.

    Raises:
        ValueError: for an unknown estimator, or a valid reward that is NaN or infinite.

    Examples:
        >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]),
        ...                  estimator="group_mean").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    check_estimator(estimator)
    valid_B = torch.ones_like(rewards_B, dtype=torch.bool) if valid_B is None else valid_B
    bad = valid_B & ~rewards_B.isfinite()
    if bad.any():
        raise ValueError(
            f"reward of rows {bad.nonzero()[:, 0].tolist()} is not finite "
            f"({rewards_B[bad].tolist()}); mark such rows in 'reward_error' or repair the reward"
        )
    # float64: the statistics must not depend on the order of the rows.
    rewards = torch.where(valid_B, rewards_B, 0.0).double()
    weights = valid_B.double()
    _, group = group_id_B.unique(return_inverse=True)

    def group_sum(values: Tensor) -> Tensor:
        return values.new_zeros(int(group.max()) + 1).index_add(0, group, values)[group]

    size = group_sum(weights)
    centred = (rewards - group_sum(rewards) / size.clamp(min=1)) * weights
    if estimator == "rloo":
        advantage = centred * size / (size - 1).clamp(min=1)
    elif estimator == "group_mean":
        advantage = centred
    else:
        freedom = size - 1 if estimator == "group_norm" else size
        std = (group_sum(centred.square()) / freedom.clamp(min=1)).sqrt()
        advantage = centred / (std + eps)
    return torch.where(valid_B & (size > 1), advantage, 0.0).float()


class GroupAdvantage(TensorDictModuleBase):
    """Write ``"advantage"`` float32 ``[B, 1]`` from rewards and group ids.

    Call it on the whole rollout, **before** the batch is split: a group cut in two would have two
    baselines.

    Args:
        estimator: see :func:`group_advantages`.
        eps: see :func:`group_advantages`.

    Examples:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...                  "group_id": torch.zeros(2, dtype=torch.int64)}, [2])
        >>> GroupAdvantage(estimator="group_mean")(td)["advantage"].tolist()
        [[0.5], [-0.5]]
    """

    in_keys = [REWARD, GROUP_ID]
    out_keys = [ADVANTAGE]

    def __init__(self, *, estimator: AdvantageEstimator = "group_norm", eps: float = 1e-4) -> None:
        super().__init__()
        check_estimator(estimator)
        self.estimator, self.eps = estimator, eps

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        error = tensordict.get(REWARD_ERROR, None)
        tensordict[ADVANTAGE] = group_advantages(
            tensordict[REWARD].flatten(),
            tensordict[GROUP_ID].flatten(),
            estimator=self.estimator,
            eps=self.eps,
            valid_B=None if error is None else ~error.flatten(),
        )[:, None]
        return tensordict
