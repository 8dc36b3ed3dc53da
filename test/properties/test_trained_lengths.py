"""An asynchronous run trains on what it generates, whatever the lengths, engines and staleness."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.collectors.schedule import RolloutSchedule

from ..support import benchmark

simulation = benchmark("async_lengths")

works = st.builds(
    simulation.Work, steps=st.just(12), groups=st.integers(1, 6), engines=st.integers(1, 3),
    slots=st.integers(1, 8), knee=st.sampled_from([2.0, 1e6]),
    sigma=st.sampled_from([0.3, 0.6, 2.0]), training=st.sampled_from([0.1, 0.5, 2.0]),
    seed=st.integers(0, 2**16))


@settings(max_examples=300)
@given(work=works, staleness=st.integers(0, 4), in_flight=st.booleans())
def test_every_group_is_trained_once_and_in_time(work, staleness, in_flight):
    """So the lengths that are trained are those that are generated."""
    run = simulation.simulate(RolloutSchedule, work, staleness=staleness, in_flight=in_flight)
    trained = [group.index for group, _ in run.trained]
    assert len(trained) == len(set(trained)) == work.steps * work.groups
    assert max(age for _, age in run.trained) <= staleness
    # Those whose last batch has not come yet may be running still.
    due = {index for index, (_, version) in run.started.items()
           if version + staleness < work.steps}
    assert due <= set(trained)
    assert len(run.started) - len(trained) <= (1 + staleness) * work.groups
    assert run.schedule.counts["too_old"] == run.schedule.counts["dropped"] == 0
    assert run.outcome()["in_vain"] < 1e-9


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_the_longest_have_their_share(staleness):
    outcome = simulation.simulate(RolloutSchedule, simulation.Work(steps=60), staleness=staleness,
                                  in_flight=True).outcome()
    assert outcome["longest"] == pytest.approx(0.05, abs=0.005)
    assert outcome["in_vain"] < 1e-9
