"""The simulated run of a plan: it is driven by the scheduler of a real one, so its rules hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.run.plan.simulate import Engine, Group, Phases, Simulation, Work

WORK = Work(groups=4, rows=2, prompt_tokens=10, max_tokens=200, mean_tokens=50, sigma=0.0)
PHASES = Phases(decode=lambda rows: 0.01, prefill=0.0, train=lambda tokens: 1.0, publish=0.0)


def simulated(work: Work = WORK, phases: Phases = PHASES, **options) -> Simulation:
    simulation = Simulation(work, phases, **{"engines": 1, "staleness": 1} | options)
    simulation.outcome = simulation.go()
    return simulation


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 6), rows=st.integers(1, 3), engines=st.integers(1, 4),
       staleness=st.integers(0, 3), sigma=st.sampled_from([0.0, 0.6, 1.5]), in_flight=st.booleans(),
       references=st.integers(0, 2), limit=st.integers(1, 12), publish=st.sampled_from([0.0, 0.7]),
       train=st.sampled_from([0.01, 1.0]), seed=st.integers(0, 3))
def test_no_group_is_lost_or_too_old(groups, rows, engines, staleness, sigma, in_flight, references,
                                     limit, publish, train, seed):
    work = Work(groups=groups, rows=rows, prompt_tokens=4, max_tokens=400, mean_tokens=60,
                sigma=sigma, seed=seed)
    phases = Phases(decode=lambda rows: 0.01 + 0.001 * rows, prefill=0.02,
                    train=lambda tokens: train, publish=publish, canary=0.01, driver=0.02,
                    score=(lambda tokens: 0.3) if references else None)
    run = simulated(work, phases, engines=engines, staleness=staleness, in_flight=in_flight,
                    references=references, limit=limit, steps=8, skipped=2)
    trained = [group.index for group, _ in run.trained]
    assert len(set(trained)) == len(trained) >= 8 * groups  # each once
    left = run.schedule.state_dict()
    waiting = {index for index, *_ in left["unfinished"]} | {entry[0] for entry in left["ready"]}
    assert set(trained) | waiting == run.started == set(range(len(run.started)))
    ages = [version - group.version for group, version in run.trained]
    assert 0 <= min(ages) and max(ages) <= staleness
    # The oldest groups are taken first, so none waits for ever.
    assert max(run.started) - min(waiting, default=max(run.started)) <= (2 + staleness) * groups
    assert {name for name, count in run.schedule.counts.items() if count} <= {"finished", "awaited"}
    outcome = run.outcome
    assert outcome.step >= outcome.train + 0.02 + publish + 0.01 - 1e-9
    assert outcome.wait >= 0 and 0 <= outcome.engine_idle <= 1


def test_a_synchronous_step_is_the_sum_of_its_phases():
    """Except for the canary, which workers answer while they generate."""
    run = simulated(staleness=0, phases=replace(PHASES, publish=0.25, canary=0.3, driver=0.125))
    assert run.outcome.step == pytest.approx(50 * 0.01 + 1 + 0.25 + 0.125)
    assert run.outcome.wait == pytest.approx(0.2)


@pytest.mark.parametrize(("train", "engines", "step"), [(1.0, 1, 1.0), (0.1, 1, 0.5),
                                                        (0.1, 2, 0.25)])
def test_an_asynchronous_step_is_the_longer_of_its_phases(train, engines, step):
    """An engine has one batch in hand at most; two generate two batches at once, here where rows
    cost nothing, because both are started before the first is trained."""
    run = simulated(phases=replace(PHASES, train=lambda tokens: train), engines=engines)
    assert run.outcome.step == pytest.approx(step, abs=0.06)


def test_long_rows_are_waited_for_and_staleness_shortens_the_wait():
    work = replace(WORK, groups=16, sigma=0.9)
    phases = replace(PHASES, train=lambda tokens: 0.5)
    waits = [simulated(work, phases, staleness=staleness, steps=30).outcome.wait
             for staleness in (0, 1, 4)]
    assert waits[0] > waits[1] > waits[2]


def test_an_update_at_group_borders_waits_for_what_runs():
    work = replace(WORK, groups=16, sigma=0.9)
    phases = replace(PHASES, train=lambda tokens: 0.5)
    steps = [simulated(work, phases, staleness=4, in_flight=in_flight, steps=30).outcome.step
             for in_flight in (True, False)]
    assert steps[1] > 1.2 * steps[0]


def test_one_reference_holds_up_and_two_do_not():
    phases = replace(PHASES, score=lambda tokens: 0.4, train=lambda tokens: 0.9)
    one, two = (simulated(phases=phases, references=count).outcome for count in (1, 2))
    assert one.step == pytest.approx(4 * 0.4, rel=0.02) and one.reference_idle < 0.02
    # What waits for its score is still in an engine's hands.
    assert 0.9 < two.step < 1.2
    assert two.reference_idle == pytest.approx(1 - 4 * 0.4 / 2 / two.step, abs=0.05)


def test_rollouts_of_one_batch_follow_each_other():
    """A group that is finished makes no room for one of the next rollout."""
    work = replace(WORK, sigma=0.9)
    apart = simulated(work, staleness=0, limit=4, rollout=2).outcome
    pooled = simulated(work, staleness=0, limit=4).outcome
    assert apart.generate > pooled.generate
    even = simulated(staleness=0, limit=8, rollout=1).outcome
    assert even.generate == pytest.approx(4 * 50 * 0.01)


def test_an_engine_takes_as_many_rows_as_it_may():
    """The others follow when one is finished; a decode step costs by the rows in hand."""
    engine = Engine(decode=lambda rows: 1.0 * rows, limit=2)
    group = Group(0, None, 0, 9.0, 3)
    engine.add(group, [2.0, 3.0, 4.0], 0.5)
    assert engine.next_look() == pytest.approx(0.5 + 2 * 2.0)
    assert engine.advance(4.5) == [] and len(engine.rows) == 2 and group.left == 2
    # The second row has one token left, the third four: two steps of two rows, then of one.
    assert engine.next_look() == pytest.approx(4.5 + 2.0)
    engine.advance(6.5)
    assert engine.next_look() == pytest.approx(6.5 + 3 * 1.0)
    assert engine.advance(9.5) == [group] and engine.next_look() is None
    assert engine.busy == pytest.approx(9.5)


def test_what_cannot_go_on_says_so():
    run = Simulation(WORK, replace(PHASES, score=lambda tokens: 1.0), engines=1, staleness=1)
    with pytest.raises(RuntimeError, match="stuck after 0 batches"):
        run.go()  # groups wait for a reference, and there is none
