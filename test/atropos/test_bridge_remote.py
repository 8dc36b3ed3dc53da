"""``ServerDriver``: a bridge whose calls an engine server answers, updates in flight included."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.atropos.bridge_remote import ServerDriver
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.policies import Sampling, ServerPolicy
from grpo.policies.client import EngineCallError, EngineClient

from ..server.fake_engine import FIRST
from ..server.serving import server
from .environments import EOS, serving


@pytest.fixture
def driven(tokenizer):
    with server() as (engine, behind), serving(
            tokenizer, temperature_only=False, max_model_len=900) as (bridge, url):
        policy = ServerPolicy(behind, Sampling(max_tokens=8), pad_token_id=0, eos_token_ids=(EOS,))
        driver = ServerDriver(bridge, policy)
        yield driver, engine, EngineClient(url, timeout=20)
        behind.resume()
        driver.close()


def drive(driver, condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        driver.advance(0.01)


def send(pool, client, **body):
    return pool.submit(client.call, "POST", "/generate", {"prompt_token_ids": [7, 8], **body})


def test_calls_are_passed_on_with_their_options(driven):
    driver, engine, client = driven
    with ThreadPoolExecutor(8) as pool:
        futures = [send(pool, client, max_tokens=3 + i, temperature=0.5, top_p=0.9, n=2, seed=10,
                        logprobs=0) for i in range(8)]
        drive(driver, lambda: all(future.done() for future in futures))
    for i, future in enumerate(futures):
        out = future.result()
        assert out["token_ids"] == [[FIRST] * (3 + i)] * 2
        assert out["logprobs"] == [[[{str(FIRST): -0.5}]] * (3 + i)] * 2
        assert out["policy_version"] == [[[0, 3 + i]]] * 2
    params = [request.params for request in engine.seen]
    assert {(one.temperature, one.top_p, one.n) for one in params} == {(0.5, 0.9, 1)}
    assert {one.seed for one in params} == {10, 11}
    assert all(one.stop_token_ids == [EOS] for one in params)
    assert driver.running == 0 and driver.bridge.records.counts["recorded"] == 16
    row = [7, 8] + [FIRST] * 3
    group = ScoredGroup(tokens=[row], masks=[[IGNORED] * 2 + row[2:]], scores=[0.0])
    (temperature,) = driver.bridge.records.restore(group).temperatures
    assert math.isnan(temperature)  # of a cut distribution: a trainer could not score it


def test_an_update_in_flight_dates_the_tokens_of_both_weights(driven):
    driver, engine, client = driven
    behind = driver.policy.client

    def update():
        time.sleep(0.1)
        behind.pause()
        engine.weights = 1
        behind.set_version(1)
        behind.resume()

    with ThreadPoolExecutor(1) as pool:
        future = send(pool, client, max_tokens=150)
        drive(driver, lambda: driver.running == 1)
        updating = threading.Thread(target=update)
        updating.start()
        drive(driver, future.done)
        updating.join()
    (tokens,), (spans,) = future.result()["token_ids"], future.result()["policy_version"]
    assert [version for version, _ in spans] == [0, 1]
    assert tokens == [FIRST] * spans[0][1] + [FIRST + 1] * spans[1][1]


def test_what_an_update_aborts_is_sampled_again(driven):
    driver, _, client = driven
    behind = driver.policy.client
    with ThreadPoolExecutor(1) as pool:
        future = send(pool, client, max_tokens=100)
        drive(driver, lambda: driver.running == 1)
        time.sleep(0.05)
        behind.pause("abort")
        behind.resume()
        drive(driver, future.done)
    assert len(future.result()["token_ids"][0]) == 100


def test_draining_has_a_deadline_and_sends_nothing_new(driven):
    driver, _, client = driven
    with ThreadPoolExecutor(2) as pool:
        running = send(pool, client, max_tokens=30)
        drive(driver, lambda: driver.running == 1)
        driver.policy.client.pause()
        with pytest.raises(RuntimeError, match="still works on 1 calls after 0.1 s; is it paused"):
            driver.drain(timeout=0.1)
        waiting = send(pool, client, max_tokens=3)
        driver.policy.client.resume()
        driver.drain()
        assert len(running.result(10)["token_ids"][0]) == 30
        assert driver.running == 0 and not waiting.done()
        drive(driver, waiting.done)


def test_a_server_that_is_gone_is_an_error_and_its_calls_wait_again(driven):
    driver, _, client = driven
    answering, driver.policy.client = driver.policy.client, EngineClient("http://127.0.0.1:9")
    with ThreadPoolExecutor(1) as pool:
        future = send(pool, client, max_tokens=3)
        with pytest.raises(EngineCallError):
            drive(driver, future.done)
        assert driver.bridge.waiting == 1
        driver.policy.client = answering
        drive(driver, future.done)
        assert future.result()["token_ids"] == [[FIRST] * 3]


def test_what_the_server_refuses_is_an_error_of_that_request_alone(driven):
    driver, _, client = driven
    with ThreadPoolExecutor(2) as pool:
        bad, good = send(pool, client, max_tokens=666), send(pool, client, max_tokens=3)
        drive(driver, lambda: bad.done() and good.done())
    with pytest.raises(EngineCallError, match="refused by the engine"):
        bad.result()
    assert good.result()["token_ids"] == [[FIRST] * 3]


def test_at_least_one_call_may_run(driven):
    with pytest.raises(ValueError, match="max_running=0"):
        ServerDriver(driven[0].bridge, driven[0].policy, max_running=0)
