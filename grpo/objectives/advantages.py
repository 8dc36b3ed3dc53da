"""Advantages: how much better a completion is than its siblings, or than the whole rollout.

Source: GRPO (arXiv:2402.03300), sec. 4.1.2; without the standard deviation: Dr.GRPO
(arXiv:2503.20783); leave-one-out baseline: RLOO (arXiv:2402.14740); divided by the mean: MaxRL
(arXiv:2602.02710); statistics of all tokens of the batch: REINFORCE++ (arXiv:2501.03262).
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from grpo import data
from grpo.objectives.estimators import DEFAULT_EPS, check_estimator, own_estimator
from grpo.objectives.groups import Groups
from grpo.objectives.shaping import (
    RewardKLEstimator,
    check_rewards,
    clip_to_percentiles,
    distillation_advantages,
    informative_groups,
    kl_in_reward,
    normalised,
    overlong_penalty,
)


def group_advantages(
    rewards_B: Tensor,
    group_id_B: Tensor,
    *,
    estimator: str = "group_norm",
    eps: float | None = None,
    valid_B: Tensor | None = None,
    length_B: Tensor | None = None,
) -> Tensor:
    r"""Advantage of each completion relative to the completions of the same prompt.

    =========================  ==================================================================
    estimator                  value
    =========================  ==================================================================
    ``group_norm``             :math:`(r - \mu) / (\sigma + eps)`, unbiased :math:`\sigma`
    ``group_norm_population``  the same with the population's :math:`\sigma`
    ``group_mean``             :math:`r - \mu` (Dr.GRPO)
    ``rloo``                   :math:`r - ` mean of the **other** completions
    ``maxrl``                  :math:`(r - \mu) / (\mu + eps)`, rewards :math:`\ge 0` (MaxRL);
                               0 where :math:`\mu` is
    ``batch_norm``             :math:`(r - \mu) / (s + eps)`, :math:`s` the unbiased standard
                               deviation of :math:`r - \mu` over the batch (REINFORCE++ with
                               baseline)
    ``global_norm``            :math:`(r - \bar r) / (s + eps)`, mean and unbiased :math:`s` over
                               all **tokens** of the batch (REINFORCE++)
    =========================  ==================================================================

    Args:
        rewards_B: float ``[B]``.
        group_id_B: int64 ``[B]``; rows need not be sorted, groups may differ in size.
        estimator: see the table; the last two need the whole rollout at once. Or a function of your
            own, see :func:`~grpo.objectives.estimators.own_estimator`.
        eps: added to the denominator; keep it well below the rewards' scale. None: 1e-4 beside a
            deviation, and 0, the exact quotient, for ``maxrl``.
        valid_B: bool ``[B]``; rows without a reward are left out of all statistics and get
            advantage 0. A group with fewer than two valid rows gets 0 as well (for
            ``global_norm``: a batch).
        length_B: sampled tokens of each row, for the statistics of ``global_norm``; None: the same
            for all rows.

    Returns:
        float32 ``[B]``.

    Raises:
        ValueError: for an unknown estimator, an ``eps`` that it does not read, a valid reward that
            is NaN or infinite, or one below 0 with ``maxrl``.

    Examples:
        >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]),
        ...                  estimator="group_mean").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    check_estimator(estimator, eps)
    eps = DEFAULT_EPS.get(estimator) if eps is None else eps
    valid_B = torch.ones_like(rewards_B, dtype=torch.bool) if valid_B is None else valid_B
    check_rewards(rewards_B, valid_B)
    if ":" in estimator:
        return own_estimator(estimator)(rewards_B, group_id_B, valid_B)
    if estimator == "maxrl":
        _check_not_negative(rewards_B, valid_B)
    if estimator == "global_norm":
        tokens_B = valid_B.double() if length_B is None else valid_B.double() * length_B
        return normalised(rewards_B.double(), tokens_B * (valid_B.sum() > 1), eps=eps).float()
    groups = Groups(group_id_B, valid_B)
    # float64: the statistics must not depend on the order of the rows.
    rewards, size = rewards_B[groups.rows].double(), groups.size[groups.group].double()
    # Above their lowest, equal rewards are exactly 0: no rounding error is divided by itself.
    excess = rewards + groups.max(-rewards)
    centred = excess - groups.sum(excess) / size
    if estimator == "rloo":
        advantage = centred * size / (size - 1).clamp(min=1)
    elif estimator == "group_mean":
        advantage = centred
    elif estimator == "maxrl":
        advantage = _quotient(centred, groups.sum(rewards) / size + eps)
    elif estimator == "batch_norm":
        # Every group's mean is gone, so the batch's mean of these is zero.
        variance = centred.square().sum() / max(len(rewards) - 1, 1)
        advantage = _quotient(centred, variance.sqrt() + eps)
    else:
        freedom = size if estimator == "group_norm_population" else size - 1
        std = (groups.sum(centred.square()) / freedom.clamp(min=1)).sqrt()
        advantage = _quotient(centred, std + eps)
    return groups.scatter(torch.where(size > 1, advantage, 0.0)).float()


def _quotient(centred: Tensor, scale: Tensor) -> Tensor:
    """``centred / scale``; where the scale is 0 all values are, and so is the result."""
    return centred / torch.where(scale == 0, 1.0, scale)


class GroupAdvantage(TensorDictModuleBase):
    """Write ``"advantage"`` from rewards and group ids, float32 ``[B, 1]`` or ``[B, T]``.

    Call it on the whole rollout, **before** the batch is split: a group cut in two would have two
    baselines. In this order it

    1. shapes the reward (``overlong_*``, ``kl_in_reward_*``) into ``("next", "shaped_reward")``,
       float32 ``[B, 1]``; ``("next", "reward")`` stays as it is;
    2. estimates one advantage a row and clips it (``clip_percentile``); with ``global_norm`` and
       ``kl_in_reward_*`` one a token, from what is earned from it on: the reward minus the KL of
       this token and those after it;
    3. adds the teacher's opinion of each token (``reverse_kl_coeff``), which makes it ``[B, T]``;
    4. writes ``"row_mask"``, bool ``[B, 1]``, if an option takes rows out of the loss; rows that
       were out before stay out.

    Rows marked in ``("next", "reward_error")`` are left out everywhere. With ``reverse_kl_coeff`` a
    batch may have no rewards at all; then only the teacher teaches.

    Args:
        estimator: see :func:`group_advantages`.
        eps: see :func:`group_advantages`.
        clip_percentile: clip advantages to the percentiles ``[p, 100 - p]`` of the rollout's rows
            (of its tokens, where each has its own), 0 < p < 50. Keep it small: where fewer than
            p % of the values lie on one side of zero, clipping moves them to the other side.
        zero_variance_filter: take groups out of the loss whose rewards are all equal, those with
            the punishment of ``overlong_buffer`` but without the KL, which never is equal.
        mask_truncated: take completions cut by the length limit out of the loss; their rewards
            still count in their group (overlong filtering of DAPO, arXiv:2503.14476).
        overlong_buffer: punish responses over their last so many tokens, see
            :func:`~grpo.objectives.shaping.overlong_penalty`. A conversation is as long as its
            turns and the messages between them.
        max_response_tokens: where the punishment is complete; needed with ``overlong_buffer``.
        overlong_factor: the complete punishment, 1.0 unless given.
        kl_in_reward_coeff: subtract so many times the KL to the reference from the reward.
        kl_in_reward_estimator: ``"k1"`` unless given, ``"k2"`` or ``"k3"``.
        reverse_kl_coeff: subtract so many times the log-prob's excess over the teacher's from each
            token's advantage, see :func:`~grpo.objectives.shaping.distillation_advantages`.

    Raises:
        ValueError: for an option out of range, or one that the others leave without effect.

    Examples:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...                  "group_id": torch.zeros(2, dtype=torch.int64)}, [2])
        >>> GroupAdvantage(estimator="group_mean")(td)["advantage"].tolist()
        [[0.5], [-0.5]]
    """

    def __init__(
        self,
        *,
        estimator: str = "group_norm",
        eps: float | None = None,
        clip_percentile: float | None = None,
        zero_variance_filter: bool = False,
        mask_truncated: bool = False,
        overlong_buffer: int | None = None,
        max_response_tokens: int | None = None,
        overlong_factor: float | None = None,
        kl_in_reward_coeff: float | None = None,
        kl_in_reward_estimator: RewardKLEstimator | None = None,
        reverse_kl_coeff: float | None = None,
    ) -> None:
        super().__init__()
        check_estimator(estimator, eps)
        if clip_percentile is not None and not 0 < clip_percentile < 50:
            raise ValueError(f"clip_percentile={clip_percentile!r} must lie between 0 and 50, both "
                             f"excluded; leave it at None not to clip")
        _check_overlong(overlong_buffer, max_response_tokens, overlong_factor)
        _check_kl_in_reward(kl_in_reward_coeff, kl_in_reward_estimator)
        _check_positive("reverse_kl_coeff", reverse_kl_coeff)
        self.estimator, self.eps = estimator, eps
        self.clip_percentile = clip_percentile
        self.zero_variance_filter, self.mask_truncated = zero_variance_filter, mask_truncated
        self.overlong_buffer, self.max_response_tokens = overlong_buffer, max_response_tokens
        self.overlong_factor = 1.0 if overlong_factor is None else overlong_factor
        self.kl_in_reward_coeff = kl_in_reward_coeff
        self.kl_in_reward_estimator = kl_in_reward_estimator or "k1"
        self.reverse_kl_coeff = reverse_kl_coeff
        self.in_keys, self.out_keys = self._keys()

    def _keys(self) -> tuple[list, list]:
        """Keys that every call reads, and keys that it writes."""
        # A teacher can teach without rewards, so they are not required then.
        reads = [data.REWARD, data.GROUP_ID] if self.reverse_kl_coeff is None else []
        if self.overlong_buffer is not None:
            reads += [data.ASSISTANT_MASK, data.ATTENTION_MASK]
        if self.estimator == "global_norm":
            reads += [data.ASSISTANT_MASK]
        if self.kl_in_reward_coeff is not None:
            reads += [data.ASSISTANT_MASK, data.LOG_PROBS, data.REF_LOG_PROBS]
        if self.reverse_kl_coeff is not None:
            reads += [data.ASSISTANT_MASK, data.LOG_PROBS, data.TEACHER_LOG_PROBS]
        if self.mask_truncated:
            reads += [data.TRUNCATED]
        shaped = [data.SHAPED_REWARD] if self._shapes_rewards else []
        masked = [data.ROW_MASK] if self._masks_rows else []
        return list(dict.fromkeys(reads)), [*shaped, data.ADVANTAGE, *masked]

    @property
    def _shapes_rewards(self) -> bool:
        return self.overlong_buffer is not None or self.kl_in_reward_coeff is not None

    @property
    def _masks_rows(self) -> bool:
        return self.zero_variance_filter or self.mask_truncated

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        kl_BT = self._kl(tensordict)
        earned_B = self._earned(tensordict)
        rewards_B = self._shaped(tensordict, earned_B, kl_BT)
        valid_B = _valid_rows(tensordict)
        if rewards_B is None:
            advantage = torch.zeros(len(valid_B), 1, device=valid_B.device)
        else:
            advantage, valid = self._estimate(tensordict, rewards_B, kl_BT, valid_B)
            if self.clip_percentile is not None:
                advantage = clip_to_percentiles(advantage, self.clip_percentile, valid=valid)
        tensordict[data.ADVANTAGE] = advantage
        if self.reverse_kl_coeff is not None:
            tensordict[data.ADVANTAGE] = distillation_advantages(
                advantage, tensordict[data.LOG_PROBS],
                _read(tensordict, data.TEACHER_LOG_PROBS, "score it with the teacher first"),
                tensordict[data.ASSISTANT_MASK] & valid_B[:, None], coeff=self.reverse_kl_coeff)
        if self._masks_rows:
            tensordict[data.ROW_MASK] = self._row_mask(tensordict, earned_B, valid_B)[:, None]
        return tensordict

    def _estimate(
        self, tensordict: TensorDictBase, rewards_B: Tensor, kl_BT: Tensor | None, valid_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages ``[B, 1]`` or ``[B, T]``, and the mask of those that count."""
        by_token = self.estimator == "global_norm"
        mask_BT = tensordict[data.ASSISTANT_MASK] & valid_B[:, None] if by_token else None
        if kl_BT is None or not by_token:
            advantage_B = group_advantages(
                rewards_B, tensordict[data.GROUP_ID].flatten(), estimator=self.estimator,
                eps=self.eps, valid_B=valid_B, length_B=mask_BT.sum(-1) if by_token else None)
            return advantage_B[:, None], valid_B[:, None]
        check_rewards(rewards_B, valid_B)
        # The reward has paid for all tokens; those before a token are not its fault.
        before_BT = kl_BT.cumsum(-1) - kl_BT
        returns_BT = rewards_B.double()[:, None] + self.kl_in_reward_coeff * before_BT
        eps = DEFAULT_EPS[self.estimator] if self.eps is None else self.eps
        tokens_BT = mask_BT.double() * (valid_B.sum() > 1)
        return normalised(returns_BT, tokens_BT, eps=eps).float(), mask_BT

    def _kl(self, tensordict: TensorDictBase) -> Tensor | None:
        """KL to the reference of each token that is taken off the reward, ``[B, T]``."""
        if self.kl_in_reward_coeff is None or data.REWARD not in tensordict.keys(True):
            return None
        reference = _read(tensordict, data.REF_LOG_PROBS, "score it with the reference first")
        return kl_in_reward(tensordict[data.LOG_PROBS], reference, tensordict[data.ASSISTANT_MASK],
                            estimator=self.kl_in_reward_estimator)

    def _earned(self, tensordict: TensorDictBase) -> Tensor | None:
        """The rewards without the KL, ``[B]``; None where only a teacher teaches."""
        rewards = tensordict.get(data.REWARD, None)
        if rewards is None:
            self._check_teacher_suffices()
            return None
        if self.overlong_buffer is None:
            return rewards.flatten()
        # From the first sampled token to the end: in a conversation, messages share the limit.
        mask_BT = _read(tensordict, data.ASSISTANT_MASK, "it says which tokens were sampled")
        attention_BT = _read(tensordict, data.ATTENTION_MASK, "overlong_buffer needs it")
        length_B = attention_BT.sum(-1) - data.first_scored(mask_BT, attention_BT)
        return rewards.flatten().double() + self.overlong_factor * overlong_penalty(
            length_B, max_response_tokens=self.max_response_tokens, buffer=self.overlong_buffer)

    def _shaped(
        self, tensordict: TensorDictBase, earned_B: Tensor | None, kl_BT: Tensor | None
    ) -> Tensor | None:
        """The rewards that advantages are made of, ``[B]``."""
        if earned_B is None or not self._shapes_rewards:
            return earned_B
        shaped_B = earned_B.double()
        if kl_BT is not None:
            shaped_B = shaped_B - self.kl_in_reward_coeff * kl_BT.sum(-1)
        tensordict[data.SHAPED_REWARD] = shaped_B.float()[:, None]
        return tensordict[data.SHAPED_REWARD].flatten()

    def _row_mask(
        self, tensordict: TensorDictBase, earned_B: Tensor | None, valid_B: Tensor
    ) -> Tensor:
        """True on rows that enter the loss, bool ``[B]``."""
        earlier = tensordict.get(data.ROW_MASK, None)
        keep_B = valid_B if earlier is None else valid_B & earlier.flatten()
        if self.zero_variance_filter:
            keep_B = keep_B & informative_groups(
                earned_B, tensordict[data.GROUP_ID].flatten(), valid_B)
        if self.mask_truncated:
            hint = "mask_truncated needs to know which completions the length limit cut"
            keep_B = keep_B & ~_read(tensordict, data.TRUNCATED, hint).flatten()
        return keep_B

    def _check_teacher_suffices(self) -> None:
        if self.reverse_kl_coeff is None:
            raise KeyError(f"the batch has no {data.REWARD}: write the rewards first")
        ignored = [name for name in ("overlong_buffer", "kl_in_reward_coeff", "clip_percentile")
                   if getattr(self, name) is not None]
        ignored += ["zero_variance_filter"] if self.zero_variance_filter else []
        if ignored:
            raise ValueError(f"{', '.join(ignored)} would be ignored: the batch has no "
                             f"{data.REWARD}; leave them out when only a teacher teaches")


def _valid_rows(tensordict: TensorDictBase) -> Tensor:
    error = tensordict.get(data.REWARD_ERROR, None)
    if error is not None:
        return ~error.flatten()
    # Some tensor of the batch tells the device; the batch itself need not have one.
    known = data.REWARD if data.REWARD in tensordict.keys(True) else data.ASSISTANT_MASK
    return torch.ones(len(tensordict), dtype=torch.bool, device=tensordict[known].device)


def _read(tensordict: TensorDictBase, key: tuple[str, ...], hint: str) -> Tensor:
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"the batch has no {key}: {hint}")
    return value


def _check_not_negative(rewards_B: Tensor, valid_B: Tensor) -> None:
    bad_B = valid_B & (rewards_B < 0)
    if bad_B.any():
        raise ValueError(
            f"reward of rows {bad_B.nonzero()[:, 0].tolist()} is negative "
            f"({rewards_B[bad_B].tolist()}), but advantage_estimator='maxrl' divides by the mean "
            f"reward; use rewards >= 0, without penalties, or another estimator")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be finite and above 0; leave it out otherwise")


def _check_overlong(buffer: int | None, limit: int | None, factor: float | None) -> None:
    if buffer is None:
        for name, value in (("max_response_tokens", limit), ("overlong_factor", factor)):
            if value is not None:
                raise ValueError(f"{name}={value!r} would be ignored: give overlong_buffer as well")
        return
    if limit is None:
        raise ValueError(f"overlong_buffer={buffer!r} needs max_response_tokens, the length where "
                         f"the punishment is complete")
    if not 0 < buffer < limit:
        raise ValueError(f"overlong_buffer={buffer!r} must be above 0 and below "
                         f"max_response_tokens={limit!r}")
    _check_positive("overlong_factor", factor)


def _check_kl_in_reward(coeff: float | None, estimator: str | None) -> None:
    _check_positive("kl_in_reward_coeff", coeff)
    if estimator is None:
        return
    if estimator not in get_args(RewardKLEstimator):
        raise ValueError(f"kl_in_reward_estimator={estimator!r} is unknown; use one of "
                         f"{get_args(RewardKLEstimator)}")
    if coeff is None:
        raise ValueError(f"kl_in_reward_estimator={estimator!r} would be ignored: give "
                         f"kl_in_reward_coeff as well")
