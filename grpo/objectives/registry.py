"""The registry of objectives: names, options with defaults, and what a loss must know of them.

An objective is one function ``(tokens: LossTokens, *, option=default, ...) -> term_N``, with
``term_N`` (``[N]``) to be minimised. ``GRPOLoss(objective=...)`` finds it by the name under which
:func:`register_surrogate` has it. The library's own are in :mod:`grpo.objectives.surrogates` and
:mod:`grpo.objectives.listwise`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

Surrogate = Callable[..., Tensor]
ClipEpsilon = float | tuple[float, float] | None
Options = Mapping[str, Any] | None
Scope = Literal["token", "sequence", "group"]
_OBJECTIVES: dict[str, Objective] = {}


@dataclass(frozen=True)
class Objective:
    """A registered surrogate and what a loss has to know about it.

    Attributes:
        name: its name in the registry.
        function: ``(tokens, *, option=default, ...) -> term_N``.
        scope: ``"sequence"`` if it needs all tokens of a sequence at once, ``"group"`` all
            sequences of a prompt.
        token_advantages: False if it is undefined where advantages differ inside a sequence.
        options: default of every option of the function, ``clip_epsilon`` included.
        check: called with all options as keywords, raises ValueError for bad ones; an option
            ``clip_epsilon`` is checked before and arrives as ``(low, high)``.
        reads_listwise_weight: whether it reads the shares of
            :class:`~grpo.objectives.maxent.MaxEntWeights` instead of other advantages.
    """

    name: str
    function: Surrogate
    scope: Scope = "token"
    token_advantages: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[..., None] | None = None
    reads_listwise_weight: bool = False

    def resolve(self, clip_epsilon: ClipEpsilon = None, options: Options = None) -> dict[str, Any]:
        """Every option the function will be called with, checked; ``clip_epsilon`` as two floats.

        Args:
            clip_epsilon: ``(low, high)`` for the range ``1 - low`` to ``1 + high``; one number
                means both sides, None the function's own default.
            options: the others by name; those left out keep their defaults.

        Raises:
            ValueError: for an option the function does not have or a value out of range.

        Examples:
            >>> get_objective("ppo_clip").resolve(0.1, {"delta": 3.0})
            {'clip_epsilon': (0.1, 0.1), 'delta': 3.0}
        """
        given = dict(options or {})
        require("clip_epsilon" not in given, "options", given,
            "without clip_epsilon, which is an argument of its own")
        if clip_epsilon is not None:
            given["clip_epsilon"] = clip_epsilon
        for name, value in given.items():
            if name not in self.options:
                where = "" if name == "clip_epsilon" else " in objective_options"
                raise ValueError(f"objective {self.name!r} would ignore {name}={value!r}"
                                 f"{_did_you_mean(name, self.options)}{where}; its options: "
                                 f"{', '.join(self.options) or 'none'}")
        resolved = {**self.options, **given}
        if "clip_epsilon" in resolved:
            resolved["clip_epsilon"] = _clip_pair(resolved["clip_epsilon"])
        if self.check is not None:
            self.check(**resolved)
        return resolved

    def bind(self, clip_epsilon: ClipEpsilon = None, options: Options = None) -> Surrogate:
        """``(tokens) -> term_N``: the function with the options of :meth:`resolve` filled in."""
        return functools.partial(self.function, **self.resolve(clip_epsilon, options))


def register_surrogate(
    name: str, *, scope: Scope = "token", token_advantages: bool = True,
    check: Callable[..., None] | None = None, reads_listwise_weight: bool = False,
) -> Callable[[Surrogate], Surrogate]:
    """Register ``(tokens: LossTokens, *, option=default, ...) -> term_N`` under ``name``.

    Args:
        name: what ``GRPOLoss(objective=...)`` will call it.
        scope: ``"sequence"`` if it calls the row functions of :class:`LossTokens`, ``"group"`` if
            it compares rows.
        token_advantages, check, reads_listwise_weight: see :class:`Objective`.

    Raises:
        ValueError: for a name that is taken, an unknown ``scope``, an option without a default
            or not keyword-only, or defaults that do not pass their own check.

    Examples:
        >>> @register_surrogate("scaled_reinforce")
        ... def scaled_reinforce(tokens, *, scale=0.5):
        ...     return -scale * tokens.ratio_N * tokens.advantage_N
        >>> get_objective("scaled_reinforce").resolve(options={"scale": 2.0})
        {'scale': 2.0}
    """
    require(scope in get_args(Scope), "scope", scope, f"one of {get_args(Scope)}")

    def register(function: Surrogate) -> Surrogate:
        known = _OBJECTIVES[name].function if name in _OBJECTIVES else function
        # The same function again, from a reloaded module or a repeated notebook cell, is fine.
        if (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(f"objective {name!r} is already registered; choose another name")
        objective = Objective(name, function, scope, token_advantages,
                              _default_options(name, function), check, reads_listwise_weight)
        objective.resolve()
        _OBJECTIVES[name] = objective
        return function

    return register


def get_objective(name: str) -> Objective:
    """The objective of this name, or at ``"module:function"``.

    Raises:
        ValueError: for an unknown name, or something that cannot be imported.

    Examples:
        >>> get_objective("gspo").scope
        'sequence'
    """
    if ":" in name:
        return _imported(name)
    if name not in _OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}{_did_you_mean(name, _OBJECTIVES)}; known: "
                         f"{', '.join(sorted(_OBJECTIVES))}")
    return _OBJECTIVES[name]


def _imported(path: str) -> Objective:
    """The objective at ``module:function``; one without a name of its own is called by its path."""
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"objective {path!r} cannot be imported: {error}; give module:function of "
                         "a module on the Python path") from error
    for objective in _OBJECTIVES.values():
        if objective.function is function:
            return objective
    register_surrogate(path)(function)
    return _OBJECTIVES[path]


def _default_options(name: str, function: Surrogate) -> dict[str, Any]:
    options = list(inspect.signature(function).parameters.values())[1:]
    for option in options:
        if option.kind is not option.KEYWORD_ONLY or option.default is option.empty:
            raise ValueError(f"option {option.name!r} of objective {name!r} must be keyword-only "
                             f"with a default: def function(tokens, *, {option.name}=...)")
    return {option.name: option.default for option in options}


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """ValueError ``name=value must be rule`` unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}={value!r} must be {rule}")


def is_number(value: object) -> bool:
    """Whether a value is a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _clip_pair(value: object) -> tuple[float, float]:
    pair = (value, value) if is_number(value) else value
    in_range = (isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_number, pair))
                and 0 <= pair[0] <= 1 and pair[1] >= 0)
    require(in_range, "clip_epsilon", value,
            "one number or a pair (low, high) with 0 <= low <= 1 and high >= 0")
    return float(pair[0]), float(pair[1])
