"""The client and the stream: what they refuse, repeat, give back, and outlive."""

from __future__ import annotations

import time

import pytest

from grpo.atropos.client import (
    AtroposClient,
    AtroposError,
    AtroposTimeoutError,
    AtroposUnreachableError,
    NotRegisteredError,
)
from grpo.atropos.hub_server import HubServer
from grpo.atropos.schemas import parse_group
from grpo.atropos.stream import BatchStream
from grpo.system.lifeline import bind

from ..support import wait_until
from .groups import group, registration, tag_of
from .inference import JsonHandler, running


def stream(client, **options):
    return BatchStream(client, registration(), **{"timeout": 5.0, "poll_seconds": 0.01, **options})


def fill(client, count, *, first=0):
    client.send(*[group(tag=tag) for tag in range(first, first + count)])


def tags(batch):
    return [tag_of(one) for one in batch.groups]


class RunApi(JsonHandler):
    """What run-api answers, without leases."""

    def do_GET(self):
        assert self.path.startswith("/batch")
        self.reply({"batch": [group(tag=1), group() | {"scores": [0.0]}]})

    def do_POST(self):
        self.body()
        self.reply({"detail": [{"msg": "Field required"}]}, status=422)


@pytest.fixture
def run_api():
    with running(RunApi) as url:
        yield AtroposClient(url)


def test_run_api_has_no_leases(run_api):
    batch = run_api.batch()
    assert batch.lease is None and tags(batch) == [1]
    assert run_api.acknowledge(batch) and run_api.release(batch)
    assert tags(run_api.batch()) == [1]  # equal groups are not taken for repeats there
    with pytest.raises(AtroposError, match="Field required") as caught:
        run_api.send({})
    assert caught.value.status == 422


def test_groups_that_cannot_be_trained_on_are_counted_and_named(run_api, client):
    batch = run_api.batch()
    assert batch.rejected == {"bad_length": 1}
    assert "scores has 1 entries" in batch.messages["bad_length"]
    client.register(registration())
    client.send(group(tag=1), group(tag=2) | {"masks": [[1, 1, 1]] * 2})
    assert client.batch().rejected == {"bad_mask": 1}


def test_what_fails_as_groups_are_fetched_is_raised_where_they_are_awaited(client):
    def fail(groups) -> None:
        raise ValueError("temperature 'hot' is no number")

    fill(client, 2)
    with stream(client) as batches:
        batches.on_fetched = fail
        with pytest.raises(ValueError, match="'hot' is no number"):
            batches.take()


def test_a_group_that_was_used_is_not_used_again(client):
    client.register(registration())
    fill(client, 4)
    batch = client.batch(lease_seconds=0.05)
    time.sleep(0.1)
    other = AtroposClient(client.url)
    again = other.batch()  # it was given to another, who fails
    assert tags(again) == tags(batch) and not client.acknowledge(batch)
    other.release(again)
    repeated = client.batch()
    assert (repeated.repeated, repeated.groups) == (2, [])
    assert client.acknowledge(repeated) and tags(client.batch()) == [2, 3]


def test_parsed_groups_can_be_sent(client):
    parsed = parse_group(group(group_uid="mine"))
    client.send(parsed)
    assert parse_group(client.latest_example()) == parsed


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:8000", "http://127.0.0.1",
                                 "http://127.0.0.1:1/path"])
def test_addresses_are_checked(url):
    with pytest.raises(ValueError, match="http://host:port"):
        AtroposClient(url)


def test_no_api_and_a_silent_one():
    with bind("127.0.0.1", 0) as sock:
        client = AtroposClient(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=0.2)
        with pytest.raises(AtroposUnreachableError, match="is the Atropos API running"):
            client.status()
        assert not client.alive()
        sock.listen()
        with pytest.raises(AtroposTimeoutError, match="no answer in 0.2 s"):
            client.status()
        with pytest.raises(AtroposTimeoutError, match="waited 0.3 s"):
            client.wait_ready(timeout=0.3)


def test_an_unregistered_trainer_is_told_so(client):
    with pytest.raises(NotRegisteredError, match="Call /register first"):
        client.batch()


def test_a_stream_yields_in_order_and_acknowledges_what_was_used(client):
    fill(client, 6)
    with stream(client) as batches:
        assert tags(next(batches)) == [0, 1]
        assert client.status()["hub"]["acknowledged"] == 0
        assert tags(next(batches)) == [2, 3]
        assert client.status()["hub"]["acknowledged"] == 1
        batches.acknowledge()
        assert client.status()["hub"]["acknowledged"] == 2


def test_a_stream_fetches_no_further_than_told(client):
    fill(client, 20)
    with stream(client, depth=2) as batches:
        next(batches)
        wait_until(lambda: client.status()["hub"]["leases"] == 3)
        time.sleep(0.1)
        assert client.status()["hub"]["leases"] == 3


def test_a_stream_gives_back_what_it_fetched_ahead(client):
    fill(client, 6)
    with pytest.raises(InterruptedError), stream(client, depth=2) as batches:
        next(batches)
        wait_until(lambda: client.status()["hub"]["leases"] == 3)
        raise InterruptedError
    assert client.status()["hub"]["leases"] == 1  # the one in use may be half used
    assert {tuple(tags(client.batch())) for _ in range(2)} == {(2, 3), (4, 5)}


def test_the_last_batch_of_a_stream_that_ends_well_was_used(client):
    fill(client, 2)
    with stream(client) as batches:
        next(batches)
    hub = client.status()["hub"]
    assert (hub["leases"], hub["acknowledged"]) == (0, 1)


def test_a_batch_without_a_usable_group_is_passed_over(client):
    client.send(*[group() | {"masks": [[1, 1, 1]] * 2}] * 2)
    fill(client, 2)
    with stream(client) as batches:
        assert tags(next(batches)) == [0, 1]
        assert batches.rejected == {"bad_mask": 2} and "masks[0]" in batches.messages["bad_mask"]


def test_waiting_has_an_end_and_says_what_for(client):
    with stream(client, timeout=0.2) as batches:
        with pytest.raises(AtroposTimeoutError, match="it has too few groups; are environments"):
            next(batches)


def test_the_api_may_come_later_and_go_and_come_back():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    client = AtroposClient(f"http://127.0.0.1:{port}")
    with stream(client, timeout=20.0) as batches:
        with HubServer(port=port):
            fill(client, 4)
            assert tags(next(batches)) == [0, 1]
            wait_until(lambda: client.status()["hub"]["leases"] == 2)
        with HubServer(port=port):  # which remembers nothing
            fill(client, 4, first=10)
            assert {tags(next(batches))[0] for _ in range(2)} == {2, 10}
            assert batches.lost_leases == 2
            wait_until(lambda: client.info()["batch_size"] == 4)


def test_what_was_used_while_the_api_was_away_is_acknowledged_later(tmp_path):
    journal = tmp_path / "journal"
    hub = HubServer(journal=journal)
    client = AtroposClient(hub.url)
    with stream(client, depth=2, timeout=20.0) as batches:
        with hub:
            fill(client, 6)
            next(batches)
            wait_until(lambda: client.status()["hub"]["leases"] == 3)
        next(batches), next(batches)  # which nobody hears
        with HubServer(port=hub.port, journal=journal):
            assert client.status()["hub"]["acknowledged"] == 0
            batches.acknowledge()
            assert client.status()["hub"]["acknowledged"] == 3 and not batches.lost_leases


def test_leases_last_as_long_as_their_trainer(client):
    fill(client, 4)
    with pytest.raises(InterruptedError), stream(client, lease_seconds=0.4) as batches:
        next(batches)
        wait_until(lambda: client.status()["hub"]["leases"] == 2)
        time.sleep(1.0)
        hub = client.status()["hub"]
        assert (hub["leases"], hub["to_hand_out_again"]) == (2, 0)
        raise InterruptedError
    wait_until(lambda: client.status()["hub"]["leases"] == 0)
    assert client.status()["hub"]["to_hand_out_again"] == 2


def test_a_wrong_token_ends_the_stream():
    with HubServer(token="secret") as hub:
        with stream(AtroposClient(hub.url, token="wrong")) as batches:
            with pytest.raises(AtroposError, match="401"):
                next(batches)


@pytest.mark.parametrize(("path", "answer", "said"), [
    ("/register", {}, "KeyError: 'uuid'"), ("/batch", {"batches": 3}, "KeyError: 'batch'"),
    ("/batch", [], "AttributeError")])
def test_an_answer_that_cannot_be_used_ends_the_stream_at_once(path, answer, said):
    class OtherApi(AtroposClient):
        def call(self, method, asked, *args, **options):
            known = {"/register": {"uuid": 1}} | {path: answer}
            return known[asked.partition("?")[0]]

    with stream(OtherApi("http://127.0.0.1:1"), timeout=20.0) as batches:
        with pytest.raises(AtroposError, match=f"answer that cannot be used, {said}") as caught:
            next(batches)
    assert not isinstance(caught.value, TimeoutError) and caught.value.__cause__ is not None


def test_two_trainers_share_the_groups(client):
    fill(client, 20)
    with stream(client) as one, stream(AtroposClient(client.url)) as two:
        found = [tags(next(batches)) for _ in range(4) for batches in (one, two)]
    assert len({tag for batch in found for tag in batch}) == 16


@pytest.mark.parametrize("name", ["depth", "timeout", "lease_seconds", "poll_seconds"])
def test_options_of_the_stream_are_checked(client, name):
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
        BatchStream(client, registration(), **{name: 0})
