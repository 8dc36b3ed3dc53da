"""Policy surrogates: from ratio and advantage to one loss term a token.

Each surrogate is one function ``(log_ratio_BT, advantage_BT, *, clip_epsilon) -> loss_BT``,
registered by name. Add your own with :func:`register_surrogate`; ``GRPOLoss(objective=...)`` finds
it by that name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Surrogate = Callable[..., Tensor]
DEFAULT_CLIP_EPSILON = (0.2, 0.2)
_SURROGATES: dict[str, Surrogate] = {}
_CLIPPING: set[str] = set()


def register_surrogate(
    name: str, *, clips: bool = True
) -> Callable[[Surrogate], Surrogate]:
    """Register a surrogate under ``name``.

    Args:
        name: what ``GRPOLoss(objective=...)`` will call it.
        clips: whether it reads ``clip_epsilon``; one that does not is called with None.

    Raises:
        ValueError: if the name is taken.

    Examples:
        >>> @register_surrogate("doc_example")
        ... def half_ppo(log_ratio_BT, advantage_BT, *, clip_epsilon):
        ...     return 0.5 * ppo_clip(log_ratio_BT, advantage_BT, clip_epsilon=clip_epsilon)
        >>> get_surrogate("doc_example") is half_ppo
        True
    """

    def register(function: Surrogate) -> Surrogate:
        known = _SURROGATES.get(name, function)
        # The same function again, from a reloaded module or a repeated notebook cell, is fine.
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"objective {name!r} is already registered; choose another name")
        _SURROGATES[name] = function
        (_CLIPPING.add if clips else _CLIPPING.discard)(name)
        return function

    return register


def get_surrogate(name: str) -> Surrogate:
    """Look a surrogate up by name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in _SURROGATES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(sorted(_SURROGATES))}")
    return _SURROGATES[name]


def check_clip_epsilon(
    objective: str, clip_epsilon: float | tuple[float, float] | None
) -> tuple[float, float] | None:
    """The ``(low, high)`` an objective is called with; None where it has no clip.

    Raises:
        ValueError: if the bounds are missing or out of range, or would not be read: an objective
            without a clip accepts None and, because it says nothing, the default.

    Examples:
        >>> check_clip_epsilon("ppo_clip", 0.2), check_clip_epsilon("reinforce", None)
        ((0.2, 0.2), None)
    """
    if objective not in _CLIPPING:
        if clip_epsilon is not None and clip_epsilon != DEFAULT_CLIP_EPSILON:
            raise ValueError(f"objective={objective!r} does not clip and would ignore "
                             f"clip_epsilon={clip_epsilon!r}; remove it")
        return None
    if clip_epsilon is None:
        raise ValueError(f"objective={objective!r} needs clip_epsilon, for example (0.2, 0.2)")
    pair = (clip_epsilon,) * 2 if isinstance(clip_epsilon, (int, float)) else tuple(clip_epsilon)
    if len(pair) != 2 or not 0 <= pair[0] <= 1 or pair[1] < 0:
        raise ValueError(f"clip_epsilon={clip_epsilon!r} must be one number or a pair with "
                         "0 <= low <= 1 and high >= 0")
    return float(pair[0]), float(pair[1])


@register_surrogate("ppo_clip")
def ppo_clip(
    log_ratio_BT: Tensor, advantage_BT: Tensor, *, clip_epsilon: tuple[float, float]
) -> Tensor:
    r"""Clipped surrogate of PPO, with separate lower and upper bounds.

    .. math:: L = -\min\big(r A,\ \mathrm{clip}(r, 1-\epsilon_{low}, 1+\epsilon_{high})\, A\big)

    The minimum is taken for both signs of the advantage: a token leaves the gradient when its
    ratio is above the range and ``A > 0``, or below it and ``A < 0``.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; separate bounds: DAPO
    (arXiv:2503.14476), eq. 10.

    Args:
        log_ratio_BT: current minus sampling log-prob.
        advantage_BT: broadcastable to ``log_ratio_BT``.
        clip_epsilon: ``(low, high)``.

    Returns:
        Loss of each token, the shape of ``log_ratio_BT``.

    Examples:
        >>> ratio = torch.tensor([0.5, 2.0])
        >>> ppo_clip(ratio.log(), torch.tensor(-1.0), clip_epsilon=(0.2, 0.2)).tolist()
        [0.800000011920929, 2.0]
    """
    low, high = clip_epsilon
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - low, 1.0 + high)
    return -torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)


@register_surrogate("reinforce", clips=False)
def reinforce(
    log_ratio_BT: Tensor, advantage_BT: Tensor, *, clip_epsilon: None = None
) -> Tensor:
    r"""Importance-weighted policy gradient without any clipping, :math:`L = -r A`.

    On-policy (:math:`r = 1`) its gradient is REINFORCE's, :math:`-A \nabla \log \pi`.

    Source: Williams 1992; the importance weight as in Degris et al. 2012 (arXiv:1205.4839).

    Examples:
        >>> reinforce(torch.zeros(2), torch.tensor([1.0, -2.0])).tolist()
        [-1.0, 2.0]
    """
    return -log_ratio_BT.exp() * advantage_BT
