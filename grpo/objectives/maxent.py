r"""Listwise maximum-entropy weights: which share of a group each of its completions deserves.

For the ``K`` completions of one prompt, a target :math:`q = \mathrm{softmax}(u / T_q)` is made
from their utilities and smoothed to :math:`(1 - \epsilon) q + \epsilon / K`. The weights are

.. math:: w = \mathrm{softmax}\big[(\log q + \beta\, \ell_{ref}) / (\tau + \beta)\big],

the maximiser over the simplex of :math:`\sum_i w_i (\log q_i + \beta \ell_{ref,i}) +
(\tau + \beta) H(w)`; :math:`\ell_{ref}` is a completion's log-prob under the reference policy.
With :math:`\beta = 0`, :math:`w = q` at :math:`\tau = 1`; a larger :math:`\tau` flattens it to
``1/K``, a smaller one concentrates it on the best completions.

The policy learns ``w`` through its own scores of the completions, see
:mod:`grpo.objectives.listwise`.
"""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from grpo import data
from grpo.objectives.controllers import Controller
from grpo.objectives.groups import Groups


def _check_options(tau: float, beta: float, q_temperature: float, q_epsilon: float) -> None:
    if not (tau >= 0 and beta >= 0 and tau + beta > 0):
        raise ValueError(f"tau={tau} and beta={beta} must not be negative and their sum must be "
                         "positive: it is the temperature of the weights; raise tau")
    if not q_temperature > 0:
        raise ValueError(f"q_temperature={q_temperature} must be positive: it divides utilities")
    if not 0 <= q_epsilon < 1:
        raise ValueError(f"q_epsilon={q_epsilon} must be in [0, 1): at 1 utilities do not count")


def _check_finite(name: str, values_B: Tensor, groups: Groups) -> None:
    bad = groups.rows[~values_B[groups.rows].isfinite()]
    if len(bad):
        raise ValueError(f"{name} of rows {bad.tolist()} is not finite ({values_B[bad].tolist()}); "
                         "mark such rows in 'reward_error' (valid_B=False) or repair the value")


def listwise_weights(
    utility_B: Tensor, ref_score_B: Tensor | None, group_id_B: Tensor, *,
    tau: float, beta: float = 0.0, q_temperature: float = 1.0, q_epsilon: float = 0.0,
    valid_B: Tensor | None = None,
) -> Tensor:
    """Share of each completion in its group, by the formula at the top of this module.

    Args:
        utility_B: float ``[B]``, higher is better; usually the reward.
        ref_score_B: float ``[B]``, log-prob of each completion under the reference, in nats
            (a sum or a mean over its tokens); may be None where ``beta`` is 0.
        group_id_B: int64 ``[B]``; rows need not be sorted, groups may differ in size.
        tau: weight of the entropy; ``inf`` gives ``1/K``.
        beta: pull towards the reference.
        q_temperature, q_epsilon: temperature of the target ``q``, and the uniform share in it.
        valid_B: bool ``[B]``; other rows get weight 0 and do not count in their group.

    Returns:
        float32 ``[B]``; the weights of a group sum to 1 (of one without valid rows, to 0).

    Raises:
        ValueError: for an option out of range, ``beta > 0`` without ``ref_score_B``, or a valid
            row whose utility or reference score is NaN or infinite.

    Examples:
        >>> reward, group = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64)
        >>> [round(w, 3) for w in listwise_weights(reward, None, group, tau=1.0).tolist()]
        [0.576, 0.212, 0.212]
    """
    _check_options(tau, beta, q_temperature, q_epsilon)
    groups = Groups(group_id_B, valid_B)
    _check_finite("utility", utility_B, groups)
    log_q = groups.log_softmax(utility_B[groups.rows].double() / q_temperature)
    if q_epsilon:
        log_uniform = -groups.size.double().log()[groups.group]
        log_q = torch.logaddexp(log_q + math.log1p(-q_epsilon), log_uniform + math.log(q_epsilon))
    if beta:
        if ref_score_B is None:
            raise ValueError(f"beta={beta} needs ref_score_B, the log-probs under the reference; "
                             "pass them or set beta=0")
        _check_finite("ref_score", ref_score_B, groups)
        log_q = log_q + beta * ref_score_B[groups.rows].double()
    return groups.scatter(groups.log_softmax(log_q / (tau + beta)).exp()).float()


def weight_entropy(
    w_B: Tensor, group_id_B: Tensor, *, valid_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Entropy of the weights of each group that has valid rows, in nats, and how many it has.

    Float64 and int64 ``[G]``, in the order of the groups' ids.
    """
    groups = Groups(group_id_B, valid_B)
    nats = torch.special.entr(w_B[groups.rows].double())
    return nats.new_zeros(len(groups.size)).index_add(0, groups.group, nats), groups.size


class MaxEntWeights(TensorDictModuleBase):
    """Write ``"listwise_weight"`` and ``"advantage"`` (``w - 1/K``), float32 ``[B, 1]``.

    Call it on the whole rollout, **before** the batch is split. ``K`` is the number of rows of the
    group that have a reward; a row under ``reward_error`` gets 0 for both.

    Args:
        tau, q_temperature, q_epsilon: see :func:`listwise_weights`; ``tau`` may be set between
            rollouts (:class:`TauController`).
        beta: see :func:`listwise_weights`. Above 0, ``("next", "ref_log_probs", "full")`` and the
            assistant mask are read as well.
        length_normalize_ref: score under the reference by the mean over the completion's tokens
            instead of their sum.

    Attributes:
        entropy: mean weight entropy of the last rollout, nats, over the groups with at least two
            valid rows (a single row has nothing to share); NaN where there is none.

    Raises:
        ValueError: for an option out of range, or one that ``beta=0`` would ignore.

    Examples:
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"next": {"reward": torch.tensor([[1.0], [0.0]])},
        ...                  "group_id": torch.zeros(2, dtype=torch.int64)}, [2])
        >>> weights = MaxEntWeights(tau=1.0)
        >>> [round(a, 3) for a in weights(td)["advantage"].flatten().tolist()]
        [0.231, -0.231]
        >>> round(weights.entropy, 3)
        0.582
    """

    def __init__(
        self, *, tau: float, beta: float = 0.0, q_temperature: float = 1.0, q_epsilon: float = 0.0,
        length_normalize_ref: bool = True,
    ) -> None:
        super().__init__()
        _check_options(tau, beta, q_temperature, q_epsilon)
        if not length_normalize_ref and not beta:
            raise ValueError("length_normalize_ref=False would be ignored at beta=0, where the "
                             "reference is not read; remove it or set beta > 0")
        self.tau, self.beta = tau, beta
        self.q_temperature, self.q_epsilon = q_temperature, q_epsilon
        self.length_normalize_ref = length_normalize_ref
        self.entropy = math.nan
        self.in_keys = [data.REWARD, data.GROUP_ID]
        self.in_keys += [data.REF_LOG_PROBS, data.ASSISTANT_MASK] if beta else []
        self.out_keys = [data.LISTWISE_WEIGHT, data.ADVANTAGE]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        group_id_B = tensordict[data.GROUP_ID].flatten()
        error = tensordict.get(data.REWARD_ERROR, None)
        valid_B = None if error is None else ~error.flatten()
        weight_B = listwise_weights(
            tensordict[data.REWARD].flatten(), self._ref_score(tensordict) if self.beta else None,
            group_id_B, tau=self.tau, beta=self.beta, q_temperature=self.q_temperature,
            q_epsilon=self.q_epsilon, valid_B=valid_B)
        entropy_G, size_G = weight_entropy(weight_B, group_id_B, valid_B=valid_B)
        self.entropy = entropy_G[size_G > 1].mean().item()
        groups = Groups(group_id_B, valid_B)
        uniform_B = groups.scatter(groups.size.double().reciprocal()[groups.group])
        tensordict[data.LISTWISE_WEIGHT] = weight_B[:, None]
        tensordict[data.ADVANTAGE] = (weight_B - uniform_B).float()[:, None]
        return tensordict

    def _ref_score(self, tensordict: TensorDictBase) -> Tensor:
        mask_BT = tensordict[data.ASSISTANT_MASK]
        score_B = tensordict[data.REF_LOG_PROBS].double().where(mask_BT, 0.0).sum(-1)
        return score_B / mask_BT.sum(-1).clamp(min=1) if self.length_normalize_ref else score_B


class TauController(Controller):
    r"""Move ``tau`` until the weights have a wanted entropy.

    :math:`\tau \leftarrow \mathrm{clip}(\tau\, e^{step\,(target - measured)}, minimum, maximum)`,
    a gradient step on :math:`\log \tau` as soft actor-critic takes on its temperature
    (arXiv:1812.05905, sec. 5): the entropy grows with ``tau``.

    Args:
        init: first ``tau``.
        target: wanted mean entropy of the weights of a group, in nats.
        step: size of the step on ``log(tau)``, per nat of error.
        minimum, maximum: bounds of ``tau``.
        group_size: completions a prompt, ``K``. Weights over ``K`` rows have at most ``log(K)``
            nats, and have them only when uniform.

    Raises:
        ValueError: for an option out of range, above all a ``target`` that no ``tau`` reaches.

    Examples:
        >>> controller = TauController(1.0, target=1.5, step=0.5, minimum=0.01, maximum=10.0,
        ...                            group_size=8)
        >>> round(controller.update(0.5), 4)
        1.6487
    """

    def __init__(
        self, init: float, *, target: float, step: float, minimum: float, maximum: float,
        group_size: int,
    ) -> None:
        if group_size < 2:
            raise ValueError(f"group_size={group_size} must be at least 2: a single completion has "
                             "weight 1, and no entropy to control")
        if not 0 < target < math.log(group_size):
            raise ValueError(f"target={target} nats cannot be reached: the weights of group_size="
                             f"{group_size} completions have an entropy between 0 and "
                             f"log(group_size)={math.log(group_size):.4f}; choose one in between")
        if not 0 < step < math.inf:
            raise ValueError(f"step={step} must be positive and finite, for example 0.1")
        if not 0 < minimum <= init <= maximum < math.inf:
            raise ValueError(f"minimum={minimum}, init={init} and maximum={maximum} must be "
                             "positive, finite and in this order")
        self.target, self.step, self.minimum, self.maximum = target, step, minimum, maximum
        self.value = float(init)

    def _adapt(self, measured: float) -> None:
        # A large step may ask for more than exp can give; the maximum is far below that.
        exponent = min(self.step * (self.target - measured), 700.0)
        self.value = self._bounded(self.value * math.exp(exponent))
