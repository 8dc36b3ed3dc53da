"""Replaces advantages made from scores by those that an environment sent."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from grpo import data
from grpo.atropos.convert import GIVEN_ADVANTAGE, GIVEN_TOKEN_ADVANTAGE, ZERO_ADVANTAGE


class GivenAdvantage(TensorDictModuleBase):
    """Estimate advantages, then replace those for which the groups brought their own.

    Writes ``"advantage"``, ``[B, 1]``, or ``[B, T]`` if any row brought one a token. A row with
    ``set_advantage_to_zero`` gets 0, though its score counts in the statistics of its group. Rows
    that the converter left out of the loss stay out; those that brought their own are not left out
    for equal scores, but as cut ones.

    Args:
        estimator: for the other rows, usually
            :class:`~grpo.objectives.advantages.GroupAdvantage`.

    Examples:
        >>> from grpo.objectives.advantages import GroupAdvantage
        >>> from grpo.atropos.convert import groups_to_batch
        >>> from grpo.atropos.schemas import ScoredGroup
        >>> group = ScoredGroup(tokens=[[5, 6], [5, 7]], masks=[[-100, 6], [-100, 7]],
        ...                     scores=[1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}])
        >>> batch = groups_to_batch([group], pad_token_id=0)
        >>> GivenAdvantage(GroupAdvantage(estimator="group_mean"))(batch)["advantage"].tolist()
        [[0.0], [-0.5]]
    """

    def __init__(self, estimator: TensorDictModuleBase) -> None:
        super().__init__()
        self.estimator = estimator
        self.in_keys = [*estimator.in_keys, GIVEN_ADVANTAGE, GIVEN_TOKEN_ADVANTAGE, ZERO_ADVANTAGE]
        self.out_keys = list(estimator.out_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        in_loss = tensordict.get(data.ROW_MASK, None)
        self.estimator(tensordict)
        if in_loss is not None:
            tensordict[data.ROW_MASK] = in_loss & (
                tensordict[data.ROW_MASK] | self._brought(tensordict))
        advantage = tensordict[data.ADVANTAGE]
        for key in (GIVEN_ADVANTAGE, GIVEN_TOKEN_ADVANTAGE):
            given = tensordict[key]
            if not given.isnan().all():
                advantage = torch.where(given.isnan(), advantage, given)
        advantage = advantage.masked_fill(tensordict[ZERO_ADVANTAGE], 0.0)
        if advantage.shape[-1] > 1:
            advantage = advantage * tensordict[data.ASSISTANT_MASK]
        tensordict[data.ADVANTAGE] = advantage
        return tensordict

    def _brought(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Rows with an advantage of their own, ``[B, 1]``: equal scores say nothing of them."""
        own = torch.cat([tensordict[GIVEN_ADVANTAGE], tensordict[GIVEN_TOKEN_ADVANTAGE]], dim=-1)
        own = ~own.isnan().all(-1, keepdim=True)
        cut_leaves = getattr(self.estimator, "mask_truncated", False)
        return own & ~tensordict[data.TRUNCATED] if cut_leaves else own
