"""Controllers move towards their target, within their bounds, and continue where they stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo.objectives.controllers import BandKL, EntropyController, HorizonKL, make_kl_controller
from grpo.objectives.maxent import TauController

REPO = Path(__file__).parents[2]


def horizon(init=0.1, **options):
    return HorizonKL(init, **{"target": 0.5, "horizon": 10, **options})


def band(init=0.1, **options):
    return BandKL(init, **{"target": 0.5, **options})


def entropy(init=0.02, **options):
    return EntropyController(
        init, **{"target": 0.3, "step": 0.01, "minimum": 0.005, "maximum": 0.05, **options})


def tau(init=1.0, **options):
    return TauController(init, **{"target": 1.2, "step": 0.5, "minimum": 0.05, "maximum": 50.0,
                                  "group_size": 8, **options})


ALL = [horizon, band, entropy, tau]


@pytest.mark.parametrize(("measured", "error"), [
    (0.5, 0.0), (0.55, 0.1), (0.45, -0.1), (0.6, 0.2), (50.0, 0.2), (0.0, -0.2), (-3.0, -0.2)])
def test_horizon_follows_its_formula_and_never_exceeds_its_step(measured, error):
    assert horizon().update(measured) == pytest.approx(0.1 * (1 + error / 10), rel=1e-12)


@given(measured=st.floats(-1e6, 1e6), step=st.floats(0.01, 0.9), updates=st.integers(1, 20))
def test_horizon_step_bounds_every_change(measured, step, updates):
    controller = horizon(step=step, horizon=1)
    for _ in range(updates):
        before = controller.value
        after = controller.update(measured)
        assert abs(after / before - 1) <= step * (1 + 1e-9)
        assert (after - before) * (measured - 0.5) >= 0


@pytest.mark.parametrize(("measured", "expected"), [
    (0.5, 0.1), (0.7, 0.1), (0.75, 0.1), (0.76, 0.2), (90.0, 0.2), (0.34, 0.1), (0.33, 0.05),
    (-1.0, 0.05)])
def test_band_moves_only_outside_its_band(measured, expected):
    assert band().update(measured) == pytest.approx(expected, rel=1e-12)


def test_band_reads_its_options():
    controller = band(band=1.1, factor=3.0)
    assert controller.update(0.56) == pytest.approx(0.3)
    assert controller.update(0.54) == pytest.approx(0.3)
    assert controller.update(0.45) == pytest.approx(0.1)


@pytest.mark.parametrize("page", [
    "config/kl_controller/default.yaml", "config/offline_grpo.yaml", "docs/offline.md",
    "docs/objectives.md"])
def test_pages_say_what_a_horizon_at_twice_the_target_does(page):
    """The error that counts is cut at the step, so the coefficient is far from doubled."""
    controller, updates = horizon(horizon=50), 50
    for _ in range(updates):
        controller.update(1.0)
    factor = f"{controller.value / 0.1:.2f}"
    text = " ".join((REPO / page).read_text().replace("#", " ").split())
    assert f"{factor} in as many iterations" in text and "doubles the coefficient" not in text


@pytest.mark.parametrize("init", [1e-3, 10.0])
@pytest.mark.parametrize(("make", "tolerance"), [(horizon, 0.01), (band, 0.5)])
def test_kl_converges_where_a_larger_coefficient_lowers_it(make, tolerance, init):
    controller = make(init)

    def kl():
        return 0.2 / (controller.value + 0.1)  # the target 0.5 is met at 0.3

    assert abs(kl() / 0.5 - 1) > 0.9
    for _ in range(1000):
        controller.update(kl())
    assert abs(kl() / 0.5 - 1) <= tolerance
    if make is horizon:
        assert controller.value == pytest.approx(0.3, rel=0.02)


@pytest.mark.parametrize("make", [horizon, band])
@pytest.mark.parametrize("extreme", [0.0, 1e300])
def test_kl_coefficient_stays_positive_and_finite_and_can_come_back(make, extreme):
    controller = make(horizon=1) if make is horizon else make()
    for _ in range(5000):
        controller.update(extreme)
    stuck = controller.value
    assert 0 < stuck < math.inf
    controller.update(1e300 - extreme)
    assert (controller.value > stuck) is (extreme == 0)
    assert controller.value != stuck


def test_entropy_coefficient_moves_by_its_step_within_its_bounds():
    controller = entropy()
    assert [controller.update(0.2) for _ in range(5)] == pytest.approx(
        [0.03, 0.04, 0.05, 0.05, 0.05])
    assert controller.update(0.3) == pytest.approx(0.04)  # at the target: down, and applied
    for expected in (0.03, 0.02, 0.01, 0.005, 0.005):
        assert controller.update(0.4) == 0.0
        assert controller.coefficient == pytest.approx(expected)
    assert controller.update(0.1) == pytest.approx(0.015)


def test_tau_rises_when_the_entropy_is_too_low_and_falls_when_it_is_too_high():
    assert tau().update(0.2) == pytest.approx(math.exp(0.5))
    assert tau().update(2.0) == pytest.approx(math.exp(-0.4))
    assert tau().update(1.2) == 1.0


def test_tau_stays_within_its_bounds():
    for step in (100.0, 1e6):  # exp of the second overflows
        assert tau(step=step).update(0.0) == 50.0
    assert tau(step=100.0).update(2.0) == 0.05


def test_entropy_is_held_where_it_would_collapse():
    def run(controller):
        level = 1.0
        for _ in range(500):
            # Training takes 0.01 nats a step; the bonus gives back its coefficient.
            level = max(level - 0.01 + (controller.update(level) if controller else 0.0), 0.0)
        return level

    assert run(None) == 0.0
    held = run(EntropyController(0.0, target=0.3, step=0.002, maximum=0.05))
    assert held == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
def test_a_measurement_that_is_not_finite_changes_nothing_but_the_count(make, measured):
    controller = make()
    controller.update(0.9)
    before = controller.state_dict()
    value = controller.value
    assert controller.update(measured) == value == controller.value
    assert controller.state_dict() == {**before, "skipped": 1}


@pytest.mark.parametrize("make", ALL)
@given(measured=st.lists(st.floats(-1, 2) | st.just(math.nan), max_size=12),
       rest=st.lists(st.floats(-1, 2), min_size=1, max_size=5))
def test_a_restored_controller_continues_exactly(make, measured, rest):
    first = make()
    for value in measured:
        first.update(value)
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value and second.skipped == first.skipped
    assert [second.update(value) for value in rest] == [first.update(value) for value in rest]
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("make", ALL)
@given(measured=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_the_value_is_never_negative_nor_infinite(make, measured):
    controller = make()
    for value in measured:
        assert 0 <= controller.update(value) < math.inf


def test_a_state_of_another_controller_is_an_error():
    for controller, state in (
        (horizon(), entropy().state_dict()), (entropy(), band().state_dict()), (band(), {}),
        (tau(), entropy().state_dict()), (tau(), {"value": 1.0})):
        with pytest.raises(ValueError, match="must have the keys.*saved by another"):
            controller.load_state_dict(state)


@pytest.mark.parametrize("make", [horizon, tau])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "0.1"])
def test_a_state_with_an_impossible_coefficient_is_an_error(make, value):
    with pytest.raises(ValueError, match="value=.*must be a finite number above 0"):
        make().load_state_dict({"value": value, "skipped": 0})


def test_a_restored_coefficient_obeys_the_new_bounds():
    controller = entropy(maximum=0.03)
    controller.load_state_dict({"coefficient": 0.05, "applied": True, "skipped": 0})
    assert controller.value == 0.03
    controller = tau(maximum=3.0)
    controller.load_state_dict({"value": 9.0, "skipped": 0})
    assert controller.value == 3.0


@pytest.mark.parametrize(("make", "options", "message"), [
    (horizon, {"init": 0}, "init=0 can never move"),
    (band, {"init": 0.0}, "init=0 can never move"),
    (horizon, {"init": -1.0}, "init=-1.0.*at least 0"),
    (horizon, {"init": math.nan}, "init=nan.*finite"),
    (horizon, {"target": 0.0}, "target=0.0.*above 0"),
    (horizon, {"horizon": 0}, "horizon=0.*above 0"),
    (horizon, {"step": 0.0}, "step=0.0.*above 0"),
    (horizon, {"step": 2.0, "horizon": 1}, "step=2.0 must be below horizon=1"),
    (band, {"target": math.inf}, "target=inf.*finite"),
    (band, {"band": 0.9}, "band=0.9.*at least 1"),
    (band, {"factor": 1.0}, "factor=1.0.*above 1"),
    (entropy, {"target": 0}, "target=0.*above 0"),
    (entropy, {"step": -0.1}, "step=-0.1.*above 0"),
    (entropy, {"minimum": -0.1}, "minimum=-0.1.*at least 0"),
    (entropy, {"maximum": 0.005}, "maximum=0.005.*above 0.005"),
    (entropy, {"init": 0.001}, "init=0.001.*at least 0.005"),
    (entropy, {"init": 0.06}, "init=0.06 must not be above maximum=0.05"),
    (entropy, {"target": True}, "target=True.*finite number"),
    *((tau, {"target": target}, rf"target={target} .*log\(group_size\)=2\.0794")
      for target in (math.log(8), 2.5, 0.0, -1.0, math.nan)),
    (tau, {"group_size": 1}, "group_size=1 must be at least 2"),
    (tau, {"step": 0.0}, "step=0.0 must be positive"),
    (tau, {"minimum": 0.0}, "minimum=0.0"),
    (tau, {"init": 60.0}, "init=60.0 and maximum=50.0"),
    (tau, {"maximum": math.inf}, "maximum=inf"),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_option_out_of_its_range_is_an_error(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_kl_controllers_by_name():
    made = make_kl_controller("horizon", 0.1, target=0.5, horizon=10, step=0.1)
    assert isinstance(made, HorizonKL)
    assert made.update(50.0) == pytest.approx(0.101)
    made = make_kl_controller("band", 0.1, target=0.5, factor=4.0)
    assert isinstance(made, BandKL)
    assert made.update(50.0) == pytest.approx(0.4)


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("pid", {"target": 1.0}, "kind='pid' is unknown.*horizon"),
    ("band", {"target": 1.0, "horizon": 10}, "'band' does not read horizon=10; remove it"),
    ("horizon", {"target": 1.0}, "'horizon' needs horizon"),
    ("band", {}, "'band' needs target"),
])
def test_a_kl_controller_takes_exactly_its_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_kl_controller(kind, 0.1, **options)
