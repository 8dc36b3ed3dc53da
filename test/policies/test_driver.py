"""One thread owns an engine: requests, calls and versions between its steps."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from grpo.policies.base import Completions, Sampling
from grpo.policies.driver import EngineDriver, Job
from grpo.policies.handle import EngineError
from grpo.policies.samplers import VLLMSampler
from test.support import wait_until


class CountingEngine:
    """Like vLLM's ``LLMEngine``: one token a step for each request, token ``n`` is ``n``."""

    def __init__(self) -> None:
        self.requests: dict[str, list] = {}
        self.output_processor = SimpleNamespace(request_states={})
        self.log: list[str] = []

    def add_request(self, id, prompt, params, lora_request=None):
        if not prompt["prompt_token_ids"]:
            raise ValueError("the prompt is empty")
        self.requests[id] = [[], params]
        self.output_processor.request_states[id] = SimpleNamespace(
            request_id=id, detokenizer=SimpleNamespace(
                num_output_tokens=lambda: len(self.requests[id][0])))

    def abort_request(self, ids):
        for id in ids:
            del self.requests[id], self.output_processor.request_states[id]

    def step(self):
        outputs = []
        for id, (tokens, params) in list(self.requests.items()):
            tokens.append(len(tokens))
            if len(tokens) == params.max_tokens:
                part = SimpleNamespace(token_ids=tokens, finish_reason="length",
                                       logprobs=SimpleNamespace(logprobs=[-0.5] * len(tokens)))
                outputs.append(SimpleNamespace(request_id=id, finished=True, outputs=[part]))
                self.abort_request([id])
        return outputs


class FakePolicy:
    lora_request = None

    def __init__(self) -> None:
        self.engine, self.closed = SimpleNamespace(llm_engine=CountingEngine()), False

    def sampling_params(self, sampling, *, seed, final_only):
        assert final_only
        return SimpleNamespace(max_tokens=sampling.max_tokens, seed=seed)

    def close(self):
        self.closed = True


@pytest.fixture
def sampler():
    return VLLMSampler(FakePolicy(), seeded=True)


@pytest.fixture
def driver(sampler):
    driver = EngineDriver(sampler)
    yield driver
    driver.close()
    assert sampler.policy.closed


def job(rows: int = 2, tokens: int = 4, **place) -> Job:
    return Job([[7, 8]] * rows, Sampling(max_tokens=tokens, seed=3), **place)


class TestVersions:
    def test_tokens_are_dated_by_the_weights_that_sampled_them(self, sampler):
        sampler.add(job(rows=1, tokens=5))
        sampler.step()
        sampler.step()
        sampler.set_version(4)
        sampler.step()
        sampler.add(job(rows=1, tokens=2))
        sampler.set_version(6)
        done = sampler.step() + sampler.step()
        assert [completions.versions for _, completions in done] == [
            [[(0, 2), (4, 1), (6, 2)]], [[(6, 2)]]]

    def test_an_update_without_tokens_in_between_leaves_no_trace(self, sampler):
        sampler.add(job(rows=1, tokens=1))
        sampler.set_version(1)
        sampler.set_version(2)
        (_, completions), = sampler.step()
        assert completions.versions == [[(2, 1)]]


class TestSeeds:
    def test_rows_of_a_divided_call_have_the_seeds_of_the_whole(self, sampler):
        def seeds() -> list[int]:
            return [params.seed for _, params in sampler.engine.requests.values()]

        sampler.add(job(rows=4, call=5))
        whole = seeds()
        sampler.engine.requests.clear()
        sampler.add(job(rows=2, call=5, first=0, of=4))
        sampler.add(job(rows=2, call=5, first=2, of=4))
        assert seeds() == whole and len(set(whole)) == 4
        sampler.engine.requests.clear()
        sampler.add(job(rows=4, call=6))
        assert not set(seeds()) & set(whole)


class TestDriver:
    def test_a_job_is_answered_whole_and_in_its_order(self, driver):
        answer = driver.submit(job(rows=3, tokens=4)).result(timeout=5)
        assert isinstance(answer, Completions)
        assert answer.tokens == [[0, 1, 2, 3]] * 3 and answer.truncated == [True] * 3
        assert driver.sampler.tokens == 12

    def test_a_refused_request_is_its_own_error(self, driver):
        refused = driver.submit(Job([[]], Sampling(max_tokens=1)))
        with pytest.raises(ValueError, match="the prompt is empty"):
            refused.result(timeout=5)
        assert driver.submit(job()).result(timeout=5)

    def test_of_a_job_with_a_refused_row_nothing_stays(self, driver):
        refused = driver.submit(Job([[7], []], Sampling(max_tokens=2)))
        with pytest.raises(ValueError, match="the prompt is empty"):
            refused.result(timeout=5)
        assert driver.submit(job(rows=2, tokens=4)).result(timeout=5)
        assert driver.sampler.tokens == 2 * 4

    def test_calls_run_in_the_engines_thread_and_errors_come_back(self, driver):
        names = {driver.call(lambda: threading.current_thread().name, timeout=5) for _ in range(3)}
        assert names == {"engine-driver"}
        with pytest.raises(ZeroDivisionError):
            driver.call(lambda: 1 / 0, timeout=5)

    def test_nothing_is_sampled_while_paused(self, driver):
        driver.pause(timeout=5)
        future = driver.submit(job())
        time.sleep(0.05)
        assert not future.done() and driver.sampler.tokens == 0
        driver.resume(timeout=5)
        assert future.result(timeout=5)

    def test_a_cancelled_job_leaves_the_engine(self, driver):
        driver.pause(timeout=5)
        doomed = job(tokens=10**9)
        future = driver.submit(doomed)
        driver.cancel(doomed)
        driver.resume(timeout=5)
        assert driver.submit(job()).result(timeout=5)
        assert future.cancelled() and driver.sampler.idle

    def test_abort_ends_all_jobs(self, driver):
        futures = [driver.submit(job(tokens=10**9)) for _ in range(2)]
        driver.abort(timeout=5)
        assert all(future.cancelled() for future in futures) and driver.sampler.idle

    def test_drain_waits_for_what_runs_but_not_for_ever_and_the_engine_works_on(self, driver):
        future = driver.submit(job(tokens=50))
        driver.drain(timeout=5)
        assert future.done()
        driver.resume(timeout=5)
        driver.submit(job(tokens=10**9))
        with pytest.raises(EngineError, match="did not finish its requests within 0.1 s"):
            driver.drain(timeout=0.1)
        assert driver.submit(job()).result(timeout=5)
        driver.abort(timeout=5)

    def test_what_comes_while_the_engine_drains_waits_until_it_goes_on(self, driver):
        first = driver.submit(job(tokens=2000))
        draining = threading.Thread(target=driver.drain, kwargs={"timeout": 10})
        draining.start()
        time.sleep(0.02)
        second, doomed = driver.submit(job()), job()
        third = driver.submit(doomed)
        driver.cancel(doomed)
        draining.join()
        assert first.done() and not second.done() and driver.sampler.idle
        driver.pause(timeout=5)
        driver.resume(timeout=5)
        assert second.result(timeout=5) and third.cancelled()

    def test_what_is_not_finished_when_the_engine_is_closed_is_cancelled(self, driver):
        running = driver.submit(job(tokens=10**9))
        with pytest.raises(EngineError, match="did not finish"):
            driver.drain(timeout=0.05)
        driver.call(driver._hold, timeout=5)
        held = driver.submit(job())
        driver.call(lambda: None, timeout=5)
        driver.close()
        assert running.cancelled() and held.cancelled()

    def test_a_conversation_that_has_begun_goes_on_while_the_engine_drains(self, driver):
        first, later = job(), job(goes_on=True)
        talking = [first]
        driver.submit(first)
        draining = threading.Thread(target=driver.drain, kwargs={
            "timeout": 10, "over": lambda held: all(one in held for one in talking)})
        draining.start()
        time.sleep(0.1)  # between two turns it has no request
        assert draining.is_alive() and driver.sampler.idle
        new = driver.submit(job())
        talking[:] = [later]
        assert driver.submit(later).result(timeout=5) and not new.done()
        talking.clear()
        draining.join()
        driver.resume(timeout=5)
        assert new.result(timeout=5)

    def test_a_call_that_the_engine_does_not_get_to_has_a_deadline(self, driver):
        release = threading.Event()
        driver.sampler.step = lambda: release.wait(5) and []
        driver.submit(job())
        time.sleep(0.05)
        with pytest.raises(EngineError, match="did not get to pause within 0.1 s"):
            driver.pause(timeout=0.1)
        release.set()
        driver.abort(timeout=5)

    def test_a_step_that_fails_is_the_error_of_all_that_wait_and_of_everything_after(self, driver):
        began, fails = threading.Event(), threading.Event()
        driver.sampler.step = lambda: began.set() or fails.wait(5) and 1 / 0
        running = driver.submit(job())
        assert began.wait(5)
        waiting = driver.submit(job())
        with ThreadPoolExecutor() as callers:
            call = callers.submit(driver.pause, timeout=10)
            wait_until(lambda: driver._inbox.qsize() == 2)
            fails.set()
            for future in (running, waiting, call):
                with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError"):
                    future.result(timeout=5)
        assert not driver.alive()
        with pytest.raises(EngineError, match="the engine is dead: ZeroDivisionError"):
            driver.submit(job())

    def test_what_waits_during_the_last_step_of_a_closed_engine_is_answered(self, driver):
        began, ends = threading.Event(), threading.Event()
        driver.sampler.step = lambda: began.set() or ends.wait(5) and []
        driver.submit(job())
        assert began.wait(5)
        waiting = driver.submit(job())
        with ThreadPoolExecutor() as callers:
            call = callers.submit(driver.pause, timeout=10)
            wait_until(lambda: driver._inbox.qsize() == 2)
            callers.submit(driver.close)
            wait_until(lambda: not driver.alive())
            ends.set()
            with pytest.raises(EngineError, match="the engine was closed"):
                call.result(timeout=5)
        assert waiting.cancelled()

    def test_no_caller_is_left_waiting_whenever_the_engine_fails(self, sampler):
        def ask(driver: EngineDriver) -> None:
            while True:
                driver.submit(job()).result(timeout=5)
                driver.call(lambda: None, timeout=5)

        for _ in range(30):
            driver = EngineDriver(sampler)
            with ThreadPoolExecutor() as callers:
                asking = [callers.submit(ask, driver) for _ in range(4)]
                sampler.step = lambda: 1 / 0
                for future in asking:
                    with pytest.raises(EngineError, match="ZeroDivisionError"):
                        future.result(timeout=8)
            del sampler.step
            sampler.engine.requests.clear()
            driver.close()
