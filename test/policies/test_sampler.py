"""Rows that join, leave and outlive updates are the same, however their tokens are collected."""

from __future__ import annotations

import pytest

from grpo.policies import samplers
from grpo.policies.base import Sampling
from grpo.policies.driver import Job
from grpo.policies.handle import InProcessEngine
from grpo.policies.samplers import VLLMSampler
from grpo.policies.vllm import VLLMPolicy

pytestmark = pytest.mark.vllm
PROMPTS = [[5 + (7 * row + at) % 200 for at in range(1 + 5 * row % 37)] for row in range(40)]


@pytest.fixture
def policy(engine) -> VLLMPolicy:
    """With end tokens enough that some rows are over soon, and others see two updates."""
    return VLLMPolicy(engine, Sampling(24, seed=3), pad_token_id=0,
                      eos_token_ids=tuple(range(2, 10)))


@pytest.fixture
def in_the_ordinary_way(monkeypatch):
    return lambda: monkeypatch.setattr(samplers, "responses_alone", lambda *_: False)


def update(sampler: VLLMSampler, version: int) -> None:
    """What new weights do to an engine that generates, without the weights."""
    handle = InProcessEngine(sampler.policy.engine)
    handle.pause("keep", timeout=10)
    assert handle.reset_prefix_cache(timeout=10)
    sampler.set_version(version)
    handle.resume(timeout=10)


def outcome(policy: VLLMPolicy, *, params=None) -> tuple[dict[int, tuple], int]:
    """Rows by the number of their job, and how many tokens were sampled: jobs come and go, weights
    change twice, and with ``params`` one job in the middle wants more than the others."""
    sampler = VLLMSampler(policy, seeded=True)
    jobs = [Job(PROMPTS[start : start + 8], policy.sampling, call=start,
                params=params if start == 16 else None) for start in range(0, 40, 8)]
    found = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for job, rows in sampler.step():
                found[jobs.index(job)] = (rows.tokens, rows.truncated, rows.versions, [
                    [pytest.approx(value, abs=1e-5) for value in numbers(row)]
                    for row in rows.log_probs])

    sampler.add(jobs[0])
    steps(5)
    sampler.add(jobs[1])
    sampler.add(jobs[2])
    steps(7)
    update(sampler, 1)
    sampler.drop(jobs[1])
    steps(3)
    sampler.add(jobs[3])
    steps(8)
    sampler.add(jobs[4])
    update(sampler, 2)
    while not sampler.idle:
        steps(1)
    sampler.add(jobs[1])  # once more, after a pause
    while not sampler.idle:
        steps(1)
    front_end = policy.engine.llm_engine.output_processor
    assert not front_end.request_states and "process_outputs" not in vars(front_end)
    return found, sampler.tokens


def numbers(row) -> list[float]:
    """The log-probs of sampled tokens, of one alone a position or of several."""
    return row if isinstance(row, list) else [
        row.logprobs[start] for start in row.start_indices]


def test_rows_versions_and_log_probs_are_the_same(policy, in_the_ordinary_way):
    collected = outcome(policy)
    assert collected[0].keys() == {0, 1, 2, 3, 4}
    assert any(len(spans) > 1 for _, _, rows, _ in collected[0].values() for spans in rows)
    in_the_ordinary_way()
    assert outcome(policy) == collected


def test_a_row_that_wants_more_log_probs_has_them_and_changes_no_other(policy, in_the_ordinary_way):
    params = policy.sampling_params(policy.sampling, seed=5, final_only=True)
    params.logprobs = 3
    collected = outcome(policy, params=params)
    in_the_ordinary_way()
    assert outcome(policy, params=params) == collected


def test_of_collected_rows_the_front_end_hears_when_they_are_finished(policy, monkeypatch):
    heard = []
    front_end = type(policy.engine.llm_engine.output_processor)
    ordinary = front_end.process_outputs
    monkeypatch.setattr(front_end, "process_outputs", lambda self, outputs, *args, **kwargs: (
        heard.extend(outputs), ordinary(self, outputs, *args, **kwargs))[1])
    outcome(policy)
    assert heard and all(output.finish_reason is not None for output in heard)


def test_rows_with_seeds_are_read_whole_however_many_prompts_come_at_once(policy):
    # vLLM turns back the random numbers of a row that it has read in part, and those of a CPU
    # cannot be turned back.
    prompts = [[5 + (row + 3 * at) % 200 for at in range(240)] for row in range(40)]
    sampler = VLLMSampler(policy, seeded=True)
    sampler.add(Job(prompts, Sampling(4, seed=3)))
    done = []
    while not sampler.idle:
        done += sampler.step()
    assert len(done[0][1].tokens) == 40


def test_a_job_with_seeds_draws_by_them_where_others_draw_at_will(policy):
    def sampled(*, sampler: bool, job: bool) -> list[list[int]]:
        driven = VLLMSampler(policy, seeded=sampler)
        driven.add(Job(PROMPTS[:4], Sampling(6, seed=3), call=7, seeded=job))
        done = []
        while not driven.idle:
            done += driven.step()
        return done[0][1].tokens

    assert sampled(sampler=False, job=True) == sampled(sampler=True, job=False)
