"""``ServerPolicy`` around a stand-in engine: the batch, its seeds and its versions."""

from __future__ import annotations

import threading
import time

import pytest

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.server import ServerPolicy


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


def test_server_policy_refuses_aborted_rows(client):
    policy = ServerPolicy(client, Sampling(max_tokens=900), pad_token_id=0, eos_token_ids=(1,))
    aborting = threading.Thread(target=lambda: (time.sleep(0.05), client.pause("abort")))
    aborting.start()
    with pytest.raises(RuntimeError, match="aborted 2 of 2 rows"):
        policy.generate_from_ids([[7], [8]])
    aborting.join()
