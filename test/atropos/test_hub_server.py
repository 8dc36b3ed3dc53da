"""The hub behind HTTP: run-api's answers, refusals, held senders, restarts, its command."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import socket
import subprocess
import sys
import threading
import time

import orjson
import pytest

from grpo.atropos.client import AtroposClient, AtroposError
from grpo.atropos.hub import Limits
from grpo.atropos.hub_server import HubServer, main
from grpo.server.engine_process import EngineProcess

from ..support import wait_until
from .groups import env_registration, group, registration, tag_of

MIB = 1 << 20
_HEAD = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def shared():
    with HubServer(max_body_bytes=MIB) as hub:
        yield hub


def raw(client, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(client.host, client.port, timeout=10)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def plain_batch(client):
    """As a trainer asks that knows of no leases."""
    return client.call("GET", "/batch")


def test_answers_before_anybody_registers(client):
    assert client.call("GET", "/") == {"message": "AtroposLib API"}
    assert client.info() == {"batch_size": -1, "max_token_len": -1}
    assert client.wandb_info() == {"group": None, "project": None}
    assert client.status()["current_step"] == client.status()["queue_size"] == 0
    assert client.latest_example()["tokens"] == []
    assert plain_batch(client) == {
        "status": "error", "batch": [], "message": "Trainer not registered. Call /register first."}
    assert client.register_env(env_registration()) == {"status": "wait for trainer to start"}


def test_from_registration_to_a_batch(client):
    assert isinstance(client.register(registration(starting_step=2)), int)
    assert client.info() == {"batch_size": 4, "max_token_len": 32}
    assert client.wandb_info() == {"group": "g", "project": "p"}
    assert plain_batch(client) == {"batch": None}
    assert client.register_env(env_registration()) == {
        "status": "success", "env_id": 0, "wandb_name": "add_0", "checkpoint_dir": "checkpoints",
        "starting_step": 2, "checkpoint_interval": 5, "num_steps": 100}
    assert client.send(group(tag=1, env_id=0)) == {"status": "received"}
    assert client.send(group(tag=2), group(tag=3)) == {"status": "received", "groups_processed": 2}
    assert client.status_env(0) == {
        "current_step": 2, "queue_size": 3, "unallocated_fraction": 1.0, "self_queue_size": 1,
        "max_group_size": 2, "env_weight": 1.0}
    answer = plain_batch(client)
    assert answer.keys() == {"batch"} and [tag_of(one) for one in answer["batch"]] == [1, 2]
    assert tag_of(client.latest_example()) == 3
    assert client.status()["current_step"] == 3
    assert client.disconnect_env(0) == {"status": "success"}
    assert client.disconnect_env(1)["status"] == "failure"


def test_a_group_has_all_fields_and_what_was_sent(client):
    client.register(registration(batch_size=2))
    sent = group(messages=[[{"role": "dog", "content": "é🚀\n"}]] * 2, colour="red")
    sent["scores"] = [1, 0.5]
    client.send(sent)
    (received,) = plain_batch(client)["batch"]
    assert {name: received[name] for name in sent} == sent
    absent = {"advantages", "ref_logprobs", "generation_params", "inference_logprobs", "overrides",
              "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"}
    assert received.keys() == sent.keys() | absent | {"group_uid"}
    assert all(received[name] is None for name in absent)


def test_values_are_stored_as_their_types_say(client):
    client.send(group() | {"scores": [True, "0.5"], "colour": "red"})
    latest = client.latest_example()
    assert latest["scores"] == [1.0, 0.5] and latest["colour"] == "red"


@pytest.mark.parametrize("path", ["/register", "/register-env", "/scored_data", "/scored_data_list",
                                  "/disconnect-env", "/ack"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"scores":[NaN]}', b"3"])
def test_requests_that_make_no_sense_are_refused(client, path, body):
    if (path, body) == ("/scored_data_list", b"[]"):
        return  # a list without groups is fine
    answer, content = raw(client, "POST", path, body)
    assert answer.status == 422 and orjson.loads(content)["error"]["message"]


def test_one_nan_costs_one_group_and_is_counted(client):
    client.register(registration())
    bad = group() | {"scores": [0.0, float("nan")]}
    answer, content = raw(client, "POST", "/scored_data", json.dumps(bad))
    assert answer.status == 422 and b"scores[1]=nan" in content
    body = json.dumps([group(tag=1), bad, group(tag=2)])
    answer, content = raw(client, "POST", "/scored_data_list", body)
    assert answer.status == 200
    assert {**orjson.loads(content), "errors": None} == {
        "status": "received", "groups_processed": 3, "rejected": 1, "errors": None}
    hub = client.status()["hub"]
    assert hub["rejected"] == {"not_finite": 2}
    assert "scores[1]" in hub["last_rejected"]["not_finite"]
    assert [tag_of(one) for one in plain_batch(client)["batch"]] == [1, 2]


def test_nan_in_a_field_of_no_type_does_not_break_the_batch(client):
    bad = group(generation_params={"top_p": float("inf")})
    answer, content = raw(client, "POST", "/scored_data", json.dumps(bad))
    assert answer.status == 422 and b"not_finite" in content


def test_half_a_surrogate_pair_does_not_break_the_batch(client):
    text = group(messages=[[{"role": "user", "content": "a\ud83d"}]] * 2)
    answer, _ = raw(client, "POST", "/scored_data", json.dumps(text))
    assert answer.status == 200
    assert client.latest_example()["messages"][0][0]["content"] == "a?"


def test_bodies_may_be_packed(client):
    body = json.dumps(group()).encode()
    packed = {"Content-Encoding": "gzip"}
    for content in (gzip.compress(body), gzip.compress(body[:9]) + gzip.compress(body[9:])):
        assert raw(client, "POST", "/scored_data", content, packed)[0].status == 200
    for content in (b"no gzip", gzip.compress(body)[:-4]):
        answer, text = raw(client, "POST", "/scored_data", content, packed)
        assert answer.status == 400 and b"Invalid gzip payload" in text
    assert client.status()["queue_size"] == 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_body_of_50_mb_is_refused_and_the_hub_goes_on(client, pack):
    headers = {"Content-Encoding": "gzip"} if pack is gzip.compress else {}
    answer, content = raw(client, "POST", "/scored_data", pack(b" " * (50 * MIB)),
                          {**headers, "Content-Type": "application/json"})
    assert answer.status == 413 and b"greater --max-body-mib" in content
    assert client.send(group()) == {"status": "received"}


def test_leases(client):
    client.register(registration())
    client.send(*[group(tag=tag) for tag in range(1, 7)])
    first, second = client.batch(), client.batch()
    assert [tag_of(one) for one in second.groups] == [3, 4] and first.lease != second.lease
    assert client.acknowledge(first) and not client.acknowledge(first)
    assert client.renew(second) and not client.renew(first)
    assert client.release(second) and not client.renew(second)
    assert [tag_of(one) for one in client.batch().groups] == [3, 4]
    with pytest.raises(AtroposError, match="lease=.* is not known") as caught:
        client.call("POST", "/ack", {"lease": "x"})
    assert caught.value.status == 409
    for seconds in ("0", "x", "nan", "1e9"):
        assert raw(client, "GET", f"/batch?lease_seconds={seconds}")[0].status == 422


def send_and_leave(client, body: bytes) -> None:
    """Send a group and hang up before the answer."""
    with socket.create_connection((client.host, client.port)) as connection:
        connection.sendall(_HEAD % len(body) + body)


def test_a_retry_after_a_lost_answer_is_one_group(tmp_path):
    with HubServer(limits=Limits(queue_bytes=1), wait_for_room=10.0) as hub:
        client = AtroposClient(hub.url)
        client.register(registration(batch_size=2))
        client.send(group(tag=1))
        body = json.dumps(group(tag=2)).encode()
        # The queue is full, so it is held, and its sender loses patience and tries again.
        send_and_leave(client, body)
        retry = threading.Thread(target=raw, args=(client, "POST", "/scored_data", body))
        retry.start()
        time.sleep(0.3)
        plain_batch(client)
        retry.join(10)
        assert not retry.is_alive()
        wait_until(lambda: client.status()["hub"]["duplicates"] == 1)
        assert client.status()["hub"]["received"] == 2


def test_a_sender_that_ends_in_the_middle_costs_nothing(client, caplog):
    with socket.create_connection((client.host, client.port)) as connection:
        connection.sendall(_HEAD % 999 + b"{")
    for _ in range(5):
        assert client.status()["queue_size"] == 0
    assert not caplog.records and not client.status()["hub"]["rejected"]


def test_equal_groups_whose_senders_were_answered_are_several(client):
    for _ in range(3):
        client.send(group())
    assert client.status()["queue_size"] == 3


def test_groups_of_one_name_are_one_also_after_a_restart(tmp_path):
    for first in (True, False):
        with HubServer(journal=tmp_path / "journal") as hub:
            client = AtroposClient(hub.url)
            for number in range(2):
                client.send(group(group_uid="a", env_id=number))
                client.send(group(group_uid="b"), group(group_uid="c"))
            status = client.status()["hub"]
            assert (status["received"], status["duplicates"]) == (3, 3 if first else 6)


def test_senders_are_held_while_the_queue_is_full():
    with HubServer(limits=Limits(queue_bytes=1), wait_for_room=20.0) as hub:
        client = AtroposClient(hub.url)
        client.register(registration(batch_size=2))
        client.send(group(tag=0))
        senders = [threading.Thread(target=client.send, args=(group(tag=tag),)) for tag in (1, 2)]
        for sender in senders:
            sender.start()
        time.sleep(0.2)
        assert client.status()["queue_size"] == 1
        found = []

        def fetched():
            found.extend(tag_of(one) for one in plain_batch(client)["batch"] or [])
            return len(found) == 3

        wait_until(fetched)
        assert sorted(found) == [0, 1, 2]
        for sender in senders:
            sender.join(10)
            assert not sender.is_alive()


def test_a_sender_is_not_held_for_ever():
    with HubServer(limits=Limits(queue_bytes=1), wait_for_room=0.1) as hub:
        client = AtroposClient(hub.url)
        client.register(registration(batch_size=2))
        client.send(group())
        with pytest.raises(AtroposError, match="slower than its environments") as caught:
            client.send(group())
        assert caught.value.status == 503 and client.status()["queue_size"] == 1


def test_the_token():
    with HubServer(token="secret") as hub:
        for token in (None, "wrong"):
            with pytest.raises(AtroposError, match="Authorization: Bearer") as caught:
                AtroposClient(hub.url, token=token).status()
            assert caught.value.status == 401
        client = AtroposClient(hub.url, token="secret")
        assert client.status()["current_step"] == 0
        # What clients make of http://:secret@host:port.
        for user_and_password, status in ((b":secret", 200), (b"a:secret", 200), (b":wrong", 401)):
            basic = {"Authorization": "Basic " + base64.b64encode(user_and_password).decode()}
            assert raw(client, "GET", "/status", headers=basic)[0].status == status
        assert raw(client, "GET", "/status", headers={"Authorization": "Basic x"})[0].status == 401


def test_other_sites_are_not_told_that_they_may_read(client):
    answer, _ = raw(client, "GET", "/status", headers={"Origin": "http://example.com"})
    assert answer.status == 403
    assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-")]


def test_an_open_address_wants_a_token():
    with pytest.raises(ValueError, match="opens the hub to other machines"):
        HubServer(host="0.0.0.0")


def test_a_restart_in_the_middle(tmp_path):
    path = tmp_path / "journal"
    with HubServer(journal=path) as hub:
        client = AtroposClient(hub.url)
        client.register(registration())
        client.send(*[group(tag=tag) for tag in range(1, 7)])
        used, lost = client.batch(), client.batch()
        client.acknowledge(used)
        port = hub.port
    with HubServer(journal=path, port=port) as hub:
        assert client.info()["batch_size"] == 4
        assert client.status()["current_step"] == 2
        assert [tag_of(one) for one in client.batch().groups] == [5, 6]
        assert client.release(lost)
        assert [tag_of(one) for one in client.batch().groups] == [3, 4]


def test_a_journal_in_use_is_named(tmp_path):
    with HubServer(journal=tmp_path / "journal"):
        with pytest.raises(BlockingIOError, match="in use by another hub"):
            HubServer(journal=tmp_path / "journal")


def test_a_port_in_use_is_named(shared, capsys):
    with pytest.raises(OSError, match=f"port {shared.port}"):
        HubServer(port=shared.port)
    with pytest.raises(SystemExit):
        main(["--port", str(shared.port)])
    assert f"port {shared.port}" in capsys.readouterr().err


def test_stopping_does_not_wait_for_held_senders():
    hub = HubServer(limits=Limits(queue_bytes=1))
    hub.start()
    client = AtroposClient(hub.url)
    client.send(group())
    sender = threading.Thread(target=lambda: pytest.raises(AtroposError, client.send, group()))
    sender.start()
    time.sleep(0.2)
    started = time.monotonic()
    hub.stop()
    sender.join(10)
    assert time.monotonic() - started < 5 and not sender.is_alive()


def test_a_hub_says_whether_it_is_one_runs_alone(client):
    assert client.status()["hub"]["private"] is False
    with HubServer(private=True) as hub:
        assert AtroposClient(hub.url).status()["hub"]["private"] is True


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [sys.executable, "-m", "grpo.atropos.hub_server",
               "--journal", str(tmp_path / "journal")]
    with EngineProcess([*command, "--private"], start_timeout=60, token="secret") as process:
        client = AtroposClient(process.url, token="secret")
        assert client.status()["hub"]["private"] is True
        client.send(group())
        with pytest.raises(AtroposError, match="401"):
            AtroposClient(process.url).status()
        # Not asked to end, but killed: nothing is flushed.
        subprocess.run(["kill", "-9", str(process.pid)], check=True)
        wait_until(lambda: not process.alive())
    with EngineProcess(command, start_timeout=60) as process:
        status = AtroposClient(process.url).status()
        assert status["queue_size"] == 1 and status["hub"]["private"] is False
