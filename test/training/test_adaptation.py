"""Adaptation: a measurement in, the value of the next iteration applied, the used one reported."""

from __future__ import annotations

import math

import pytest

from grpo.objectives.controllers import BandKL, EntropyController, HorizonKL
from grpo.objectives.maxent import TauController
from grpo.training.adaptation import Adaptation


def make(controller=None) -> tuple[Adaptation, list[float]]:
    applied: list[float] = []
    controller = controller or BandKL(0.1, target=1.0)
    return Adaptation("coeff", controller, "policy/kl", applied.append), applied


def test_it_starts_with_the_first_value():
    adaptation, applied = make()
    adaptation.start()
    assert applied == [0.1]


def test_an_iteration_reports_the_value_it_used_and_the_next_one_is_applied():
    adaptation, applied = make()
    assert adaptation.update({"policy/kl": 2.0, "reward/mean": 9.0}) == {"control/coeff": 0.1}
    assert adaptation.update({"policy/kl": 0.1}) == {"control/coeff": 0.2}
    assert adaptation.update({"policy/kl": 1.0}) == {"control/coeff": 0.1}
    assert applied == [0.2, 0.1, 0.1]


def test_a_bonus_that_is_switched_off_is_reported_as_the_zero_that_was_used():
    adaptation, applied = make(EntropyController(0.5, target=0.3, step=0.1, maximum=1.0))
    reported = [adaptation.update({"policy/kl": entropy}) for entropy in (0.9, 0.9, 0.1)]
    assert reported == [{"control/coeff": value} for value in (0.5, 0.0, 0.0)]
    assert applied == [0.0, 0.0, pytest.approx(0.4)]


@pytest.mark.parametrize("metrics", [{}, {"policy/kl": math.nan}], ids=["missing", "NaN"])
def test_without_a_measurement_the_value_stays(metrics):
    adaptation, applied = make()
    assert adaptation.update(metrics) == {"control/coeff": 0.1}
    assert applied == [0.1]
    assert adaptation.controller.skipped == 1


@pytest.mark.parametrize("make_controller", [
    lambda: HorizonKL(0.1, target=0.5, horizon=5),
    lambda: BandKL(0.1, target=0.5),
    lambda: EntropyController(0.1, target=0.5, step=0.05, maximum=1.0),
    lambda: TauController(0.1, target=0.5, step=0.3, minimum=0.01, maximum=9.0, group_size=4),
], ids=["horizon", "band", "entropy", "tau"])
def test_a_restored_one_applies_and_continues_where_it_was(make_controller):
    whole, expected = make(make_controller())
    for value in (0.9, 0.9, 0.1):
        whole.update({"policy/kl": value})
    state = whole.state_dict()
    resumed, applied = make(make_controller())
    resumed.start()
    resumed.load_state_dict(state)
    assert applied[-1] == expected[-1] != applied[0]
    for value in (0.9, 0.2, 0.2):
        assert resumed.update({"policy/kl": value}) == whole.update({"policy/kl": value})
    assert applied[-3:] == expected[-3:]
