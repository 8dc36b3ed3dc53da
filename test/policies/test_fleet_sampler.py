"""``FleetSampler``: jobs that come one by one are answered by workers, of which some die."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from grpo.policies.base import Completions, Sampling
from grpo.policies.driver import Job
from grpo.policies.fleet import FleetSampler
from grpo.policies.handle import EngineError

from ..collectors.asynchronous import LocalPool
from ..support import wait_until

SAMPLING = Sampling(max_tokens=4)


class Worker:
    """Answers each row with its prompt, as version ``version``, once ``gate`` is open."""

    def __init__(self) -> None:
        self.asked, self.gate, self.version, self.failure = [], threading.Event(), 0, None
        self.gate.set()

    def describe(self) -> dict:
        return {"failure": self.failure}

    def generate(self, job: Job, timeout: float) -> Completions:
        self.asked.append(len(job.prompts))
        assert self.gate.wait(20.0)
        if [13] in job.prompts:
            raise ValueError("an unlucky number")
        if self.failure:
            raise EngineError("the engine failed")
        count = len(job.prompts)
        return Completions(job.prompts, [[-0.5]] * count, [False] * count,
                           [[(self.version, 1)]] * count)


@pytest.fixture
def pool():
    pool = LocalPool(lambda number: Worker(), count=2)
    pool.start()
    return pool


@pytest.fixture
def make(pool):
    def make(*, together: bool = False, heals: bool = False) -> FleetSampler:
        policy = SimpleNamespace(pool=pool, timeout=30.0, version=lambda: 7,
                                 heal=lambda: pool.revive() and pool.outdated.clear())
        return FleetSampler(policy, together=together, heals=heals)

    return make


def job(token: int, *, call: int = 0) -> Job:
    return Job([[token]], SAMPLING, call=call)


def finish(sampler: FleetSampler, before: list[tuple[Job, object]] = ()) -> dict[Job, object]:
    """All answers, with those that came ``before``."""
    done = dict(before)
    wait_until(lambda: done.update(sampler.step()) or sampler.idle, seconds=20.0)
    return done


def test_each_job_gets_its_own_answer_and_the_rows_are_shared(make, pool):
    sampler, jobs = make(), [job(token) for token in range(6)]
    for worker in pool.actors:
        worker.gate.clear()
    for one in jobs:
        sampler.add(one)
    sampler.step()
    for worker in pool.actors:
        worker.gate.set()
    done = finish(sampler)
    assert {one: answer.tokens for one, answer in done.items()} == {
        one: one.prompts for one in jobs}
    assert [worker.asked for worker in pool.actors] == [[1, 1, 1], [1, 1, 1]]
    assert sampler.tokens == 6


def test_jobs_of_a_call_travel_together_where_workers_answer_several_at_once(make, pool):
    sampler, jobs = make(together=True), [job(token) for token in range(5)]
    for one in [*jobs, job(9, call=1)]:
        sampler.add(one)
    done = finish(sampler)
    assert [done[one].tokens for one in jobs] == [one.prompts for one in jobs]
    assert sorted(pool.actors[0].asked + pool.actors[1].asked) == [1, 2, 3]


def test_versions_are_those_that_the_workers_give(make, pool):
    pool.actors[0].version, pool.actors[1].version = 3, 4
    sampler = make()
    assert sampler.version == 7  # the trainer's, so that nobody tells it another
    for token in (1, 2):
        sampler.add(job(token))
    assert sorted(answer.versions[0][0][0] for answer in finish(sampler).values()) == [3, 4]


def test_what_a_worker_had_in_hand_when_it_died_is_answered_by_another(make, pool):
    sampler, jobs = make(), [job(token) for token in range(4)]
    pool.actors[0].gate.clear()
    for one in jobs:
        sampler.add(one)
    before = sampler.step()
    pool.kill(0)
    pool.actors[0].gate.set()
    done = finish(sampler, before)
    assert {one: answer.tokens for one, answer in done.items()} == {
        one: one.prompts for one in jobs}
    assert pool.dead and sum(pool.actors[1].asked) == 4


def test_where_the_weights_stay_a_dead_worker_is_replaced_at_once(make, pool):
    sampler = make(heals=True)
    for number in (0, 1):
        pool.kill(number)
    sampler.add(job(1))
    assert len(finish(sampler)) == 1
    assert pool.restarts == 2


def test_one_whose_engine_has_failed_is_of_no_use_either(make, pool):
    pool.actors[0].failure = "out of memory"
    sampler, jobs = make(), [job(1), job(2)]
    for one in jobs:
        sampler.add(one)
    assert all(isinstance(answer, Completions) for answer in finish(sampler).values())
    assert set(pool.dead) == {0}


def test_a_job_that_is_refused_has_an_error_and_the_others_their_answers(make):
    sampler, unlucky, fine = make(), job(13), job(1)
    for one in (unlucky, fine):
        sampler.add(one)
    done = finish(sampler)
    assert isinstance(done[unlucky], EngineError) and "unlucky" in str(done[unlucky])
    assert done[fine].tokens == [[1]]


def test_while_nobody_is_there_jobs_wait(make, pool):
    sampler = make()
    pool.outdated.update({0, 1})
    sampler.add(job(1))
    assert sampler.step() == [] and not sampler.idle
    pool.outdated.clear()
    assert len(finish(sampler)) == 1


def test_what_nobody_waits_for_any_more_is_not_reported(make, pool):
    sampler, jobs = make(), [job(token) for token in range(3)]
    pool.actors[0].gate.clear()
    for one in jobs[:2]:
        sampler.add(one)
    sampler.step()
    sampler.add(jobs[2])
    for one in jobs:
        sampler.drop(one)
    pool.actors[0].gate.set()
    assert finish(sampler) == {}
