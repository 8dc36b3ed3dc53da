"""Controllers that adapt a loss coefficient to what was measured after each optimizer step.

All of them hold one ``value``, the coefficient to use now. A measurement that is not finite
changes nothing but the counter ``skipped``, so one bad batch cannot destroy a coefficient.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, get_args

KLControllerKind = Literal["horizon", "band"]


class Controller(ABC):
    """What the trainer needs of a controller.

    Attributes:
        value: the coefficient to use now, at least 0.
        skipped: measurements that were not finite, so far.
        minimum, maximum: bounds of the coefficient.
    """

    value: float
    skipped: int = 0
    minimum: float
    maximum: float

    def update(self, measured: float) -> float:
        """Adapt to a measurement in nats; returns the new ``value``."""
        measured = float(measured)
        if math.isfinite(measured):
            self._adapt(measured)
        else:
            self.skipped += 1
        return self.value

    @abstractmethod
    def _adapt(self, measured: float) -> None:
        """Move by a measurement that is finite."""

    def state_dict(self) -> dict[str, Any]:
        """What changes during a run, of JSON types."""
        return {"value": self.value, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, within the bounds of this controller.

        Raises:
            ValueError: if it is not one of this class, or its coefficient is impossible.
        """
        self._check_keys(state)
        _check_number("value", state["value"], above=0)
        self.value, self.skipped = self._bounded(float(state["value"])), int(state["skipped"])

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        wanted = self.state_dict().keys()
        if state.keys() != wanted:
            raise ValueError(f"state of {type(self).__name__} must have the keys {sorted(wanted)}, "
                             f"not {sorted(state)}; was it saved by another controller?")

    def _bounded(self, coefficient: float) -> float:
        return min(max(coefficient, self.minimum), self.maximum)


class _MultiplicativeKL(Controller):
    """A coefficient that each measurement multiplies with :meth:`_factor`."""

    # The floats that multiplication can leave again: neither 0 nor infinite.
    minimum, maximum = sys.float_info.min, sys.float_info.max

    def __init__(self, init: float, *, target: float) -> None:
        _check_number("init", init)
        if init == 0:
            raise ValueError(f"{type(self).__name__}: init=0 can never move, because the "
                             "controller multiplies it; use a small positive coefficient")
        _check_number("target", target, above=0)
        self.value = float(init)
        self.target = float(target)

    @abstractmethod
    def _factor(self, measured: float) -> float:
        """What a measurement multiplies the coefficient with."""

    def _adapt(self, measured: float) -> None:
        self.value = self._bounded(self.value * self._factor(measured))


class HorizonKL(_MultiplicativeKL):
    r"""Proportional control of the KL coefficient over a horizon.

    .. math:: \beta \leftarrow \beta \, (1 + \mathrm{clip}(KL / target - 1, \pm step) / horizon)

    A constant error beyond ``step`` changes :math:`\beta` by about a factor
    :math:`e^{\pm step}` in ``horizon`` updates. Form: D. Ziegler et al., arXiv:1909.08593.

    Args:
        init, target: as for every KL controller: the first coefficient, and the wanted KL in nats,
            of the same kind (token or sequence) as measured; both above 0.
        horizon: updates, above ``step``.
        step: largest relative error that counts, above 0.

    Raises:
        ValueError: for an option out of its range.

    Examples:
        >>> controller = HorizonKL(0.1, target=0.5, horizon=10, step=0.2)
        >>> round(controller.update(5.0), 6)  # ten times too far: the step limits the change
        0.102
    """

    def __init__(self, init: float, *, target: float, horizon: float, step: float = 0.2) -> None:
        super().__init__(init, target=target)
        _check_number("horizon", horizon, above=0)
        _check_number("step", step, above=0)
        if step >= horizon:
            raise ValueError(f"step={step!r} must be below horizon={horizon!r}, or one update "
                             "could take the coefficient to 0, where it would stay")
        self.horizon, self.step = float(horizon), float(step)

    def _factor(self, measured: float) -> float:
        error = min(max(measured / self.target - 1, -self.step), self.step)
        return 1 + error / self.horizon


class BandKL(_MultiplicativeKL):
    r"""Multiply the KL coefficient when the KL leaves a band (PPO, arXiv:1707.06347, section 4).

    :math:`\beta \leftarrow \beta \cdot factor` above ``band * target``,
    :math:`\beta / factor` below ``target / band``, unchanged between.

    Args:
        init, target: see :class:`HorizonKL`.
        band: half-width of the band as a factor, at least 1.
        factor: above 1.

    Raises:
        ValueError: for an option out of its range.

    Examples:
        >>> controller = BandKL(0.1, target=1.0)
        >>> [controller.update(kl) for kl in (1.4, 1.6, 0.6)]
        [0.1, 0.2, 0.1]
    """

    def __init__(self, init: float, *, target: float, band: float = 1.5, factor: float = 2.0
                 ) -> None:
        super().__init__(init, target=target)
        _check_number("band", band, at_least=1)
        _check_number("factor", factor, above=1)
        self.band, self.factor = float(band), float(factor)

    def _factor(self, measured: float) -> float:
        if measured > self.band * self.target:
            return self.factor
        return 1 / self.factor if measured < self.target / self.band else 1.0


class EntropyController(Controller):
    """Entropy bonus that holds the policy's entropy up (Skywork-OR1, arXiv:2505.22312).

    The coefficient grows by ``step`` when the entropy is below ``target``, else shrinks by
    ``step``, and is kept in ``[minimum, maximum]``. It is applied only while the last measured
    entropy is not above the target: otherwise ``value`` is 0.

    Args:
        init: first coefficient, in ``[minimum, maximum]``.
        target: wanted entropy, in nats a token, above 0.
        step: above 0.
        minimum: at least 0.
        maximum: above ``minimum``.

    Attributes:
        coefficient: what adapts, also while it is not applied.
        applied: whether ``value`` is ``coefficient`` or 0.

    Raises:
        ValueError: for an option out of its range.

    Examples:
        >>> controller = EntropyController(0.0, target=0.3, step=0.01, maximum=0.1)
        >>> [controller.update(entropy) for entropy in (0.2, 0.2, 0.5)], controller.coefficient
        ([0.01, 0.02, 0.0], 0.01)
    """

    def __init__(self, init: float, *, target: float, step: float, minimum: float = 0.0,
                 maximum: float) -> None:
        _check_number("target", target, above=0)
        _check_number("step", step, above=0)
        _check_number("minimum", minimum)
        _check_number("maximum", maximum, above=minimum)
        _check_number("init", init, at_least=minimum)
        if init > maximum:
            raise ValueError(f"init={init!r} must not be above maximum={maximum!r}")
        self.coefficient = float(init)
        self.applied = True
        self.target, self.step = float(target), float(step)
        self.minimum, self.maximum = float(minimum), float(maximum)

    @property
    def value(self) -> float:
        return self.coefficient if self.applied else 0.0

    def _adapt(self, measured: float) -> None:
        step = self.step if measured < self.target else -self.step
        self.coefficient = self._bounded(self.coefficient + step)
        self.applied = measured <= self.target

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "applied": self.applied, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_keys(state)
        _check_number("coefficient", state["coefficient"])
        self.coefficient = self._bounded(float(state["coefficient"]))
        self.applied, self.skipped = bool(state["applied"]), int(state["skipped"])


_KL_CONTROLLERS = {"horizon": HorizonKL, "band": BandKL}


def make_kl_controller(kind: KLControllerKind, init: float, **options: float) -> Controller:
    """Build :class:`HorizonKL` (``"horizon"``) or :class:`BandKL` (``"band"``).

    Raises:
        ValueError: for an unknown kind, an option that the kind does not read, a missing one, or
            one out of its range.

    Examples:
        >>> make_kl_controller("band", 0.05, target=0.1).value
        0.05
    """
    if kind not in _KL_CONTROLLERS:
        raise ValueError(f"KL controller kind={kind!r} is unknown; "
                         f"use one of {get_args(KLControllerKind)}")
    cls = _KL_CONTROLLERS[kind]
    known = {name: parameter for name, parameter in inspect.signature(cls).parameters.items()
             if parameter.kind is parameter.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            raise ValueError(f"KL controller {kind!r} does not read {name}={options[name]!r}; "
                             f"remove it (options: {', '.join(known)})")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"KL controller {kind!r} needs {name}; add it")
    return cls(init, **options)


def _check_number(name: str, value: float, *, above: float | None = None, at_least: float = 0
                  ) -> None:
    """ValueError unless ``value`` is a finite number in its range."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = number and math.isfinite(value) and (
        value >= at_least if above is None else value > above)
    if not inside:
        wanted = f"at least {at_least}" if above is None else f"above {above}"
        raise ValueError(f"{name}={value!r} must be a finite number {wanted}")
