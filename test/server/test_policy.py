"""``ServerPolicy`` around a stand-in engine: the batch, its seeds and its versions."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.client import EngineCallError, EngineTimeoutError
from grpo.policies.server import ServerPolicy

from .fake_engine import MAKE, sampling_params
from .serving import server


def test_server_policy_writes_the_dense_batch(client, engine):
    policy = ServerPolicy(client, Sampling(max_tokens=3, seed=5), pad_token_id=0,
                          eos_token_ids=(1,))
    batch = policy.generate_from_ids([[7, 8], [9]])
    version = client.version
    assert policy.max_model_len == 1000
    assert set(policy.out_keys) <= set(batch.keys(True))
    assert batch["policy_version"].tolist() == [version, version]
    assert batch["log_probs", "full"][0].tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert batch["tokens", "full"][1, 0] == 9
    first = [request.params.seed for request in engine.seen[-2:]]
    policy.generate_from_ids([[7, 8], [9]])
    second = [request.params.seed for request in engine.seen[-2:]]
    assert len({*first, *second}) == 4
    assert engine.seen[-1].params.stop_token_ids == [1]
    assert not engine.seen[-1].params.detokenize


def test_server_policy_dates_a_row_by_its_oldest_token(client, engine):
    policy = ServerPolicy(client, Sampling(max_tokens=200), pad_token_id=0, eos_token_ids=(1,))
    old = client.version
    with_update = threading.Thread(target=lambda: (time.sleep(0.05), client.pause(),
                                                   client.set_version(old + 1), client.resume()))
    with_update.start()
    batch = policy.generate_from_ids([[7]])
    with_update.join()
    assert client.version == old + 1
    assert batch["policy_version"].tolist() == [old]
    versions = batch["policy_versions", "full"][0, 1:].tolist()
    assert versions[0] == old and versions[-1] == old + 1 and versions == sorted(versions)
    assert data.staleness(batch, client.version)["policy/age_max"] == 1


def test_a_batch_that_takes_too_long_says_how_it_gets_more_time(client):
    policy = ServerPolicy(client, Sampling(max_tokens=3), pad_token_id=0, eos_token_ids=(1,),
                          timeout=0.2)
    client.pause()
    try:
        with pytest.raises(EngineTimeoutError, match="in 0.2 s.* give timeout=SECONDS"):
            policy.generate_from_ids([[7]])
    finally:
        client.resume()


def sized(*sizes):
    """A server whose rows have these lengths, in their order."""
    left = iter(sizes)
    return server(make=replace(MAKE, sampling_params=lambda **fields: sampling_params(
        **fields | {"max_tokens": next(left)})))


def listening(client):
    policy = ServerPolicy(client, Sampling(max_tokens=700), pad_token_id=0, eos_token_ids=(1,))
    prompts, told = policy.pad_prompts([[7], [8]]), []
    return told, lambda: policy.stream(prompts, lambda *row: told.append(row))


def test_rows_are_told_while_others_are_sampled():
    with sized(300, 3) as (engine, client):
        told, call = listening(client)
        with ThreadPoolExecutor() as pool:
            batch = pool.submit(call)
            while not told:
                time.sleep(0.001)
            assert [row for row, _ in told] == [1] and engine.running
        rows = batch.result()[data.RESPONSE_TOKENS]
        assert [(row, len(tokens)) for row, tokens in told] == [(1, 3), (0, 300)]
        assert all(rows[row, :len(tokens)].tolist() == tokens for row, tokens in told)


def test_an_accident_after_the_first_row_is_the_calls_error():
    with sized(3, 667) as (_, client):
        told, call = listening(client)
        with pytest.raises(EngineCallError, match="POST .*/generate: .*accident"):
            call()
        assert [row for row, _ in told] in ([], [0])


def test_a_refused_call_is_refused_as_without_a_listener():
    with sized(3, 666) as (_, client):
        told, call = listening(client)
        with pytest.raises(EngineCallError, match="refused by the engine"):
            call()
        with pytest.raises(EngineCallError, match="prompt.* has the token id 5000") as refusal:
            client.generate([[5000]], on_answer=lambda *row: told.append(row), max_tokens=3)
        assert refusal.value.status == 400 and not told


def test_server_policy_refuses_aborted_rows(client):
    policy = ServerPolicy(client, Sampling(max_tokens=900), pad_token_id=0, eos_token_ids=(1,))
    aborting = threading.Thread(target=lambda: (time.sleep(0.05), client.pause("abort")))
    aborting.start()
    with pytest.raises(RuntimeError, match="aborted 2 of 2 rows"):
        policy.stream(policy.pad_prompts([[7], [8]]), lambda *row: pytest.fail("no sample"))
    aborting.join()
