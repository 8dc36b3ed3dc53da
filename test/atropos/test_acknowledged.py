"""What is acknowledged was trained on or left out, whatever ends the trainer, and nothing twice."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from grpo import data
from grpo.atropos.assemble import GroupAssembler, StreamSource
from grpo.atropos.client import AtroposClient, AtroposError
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.hub_server import HubServer
from grpo.atropos.stream import BatchStream

from ..support import wait_until
from .groups import group, registration, tag_of

VOCABULARY = 40


def fill(client, *tags: int) -> None:
    """Groups of two rows; the hub makes batches of two groups."""
    for tag in tags:
        client.send(group(tag=tag, group_uid=str(tag), inference_logprobs=[[1.0, -1, -1]] * 2))


class Killed(BaseException):
    """Ends a trainer as a signal that it cannot catch does: nothing is said to the hub."""


@contextmanager
def trainer(client, *, checkpoint=None, hold=False, fetched_before=False):
    """A collector of batches of two groups, at work; ``Killed`` inside ends it and no more.

    ``fetched_before``: its first batch, as where a checkpoint takes long to load.
    """
    stream = BatchStream(AtroposClient(client.url), registration(), poll_seconds=0.01,
                         hold=hold)
    assembler = GroupAssembler(StreamSource(stream), GroupConverter(
        pad_token_id=0, vocab_size=VOCABULARY), rows=4)
    if fetched_before:
        stream.__enter__()
        wait_until(lambda: not stream._ready.empty())
    if checkpoint is not None:
        assembler.load_state_dict(checkpoint)
    if not fetched_before:
        stream.__enter__()
    try:
        yield AtroposCollector(assembler, timeout=20.0)
        stream.__exit__(None)
    except Killed:
        stream._ended.set()
        stream._thread.join()
        for batch in stream._held.values():
            client.release(batch)  # as the hub does when a lease has run out


def trained(collector) -> list[int]:
    return collector.collect()[data.TOKENS][::2, 2].tolist()


def left(client) -> list[int]:
    """Tags of what the hub hands out from now on."""
    other, found = AtroposClient(client.url), []
    while (batch := other.batch()) is not None:
        found += map(tag_of, batch.groups)
        other.acknowledge(batch)
    assert client.status()["hub"]["leases"] == 0
    return found


def test_good_groups_beside_a_bad_one_are_not_acknowledged_before_they_are_trained(client):
    fill(client, 6, VOCABULARY, 7, 8)  # the second has a token that the model does not know
    with trainer(client) as collector:
        assert trained(collector) == [6, 7]  # from two batches of the hub
        assert client.status()["hub"]["acknowledged"] == 0
        raise Killed  # before the step
    assert sorted(left(client)) == [6, 7, 8, VOCABULARY]


def test_a_batch_is_acknowledged_when_the_last_of_it_was_trained_or_left_out(client):
    fill(client, 6, VOCABULARY, 7, 8, 9, 10)
    with trainer(client) as collector:
        assert trained(collector) == [6, 7]
        assert trained(collector) == [8, 9]  # for which it asked, so the first two are trained
        assert client.status()["hub"]["acknowledged"] == 1
        raise Killed
    assert sorted(left(client)) == [7, 8, 9, 10]  # what was not, and 7 because it came with 8


@pytest.mark.parametrize("fetched_before", [False, True])
def test_what_a_checkpoint_has_trained_is_not_trained_again_after_a_kill(client, fetched_before):
    fill(client, 6, VOCABULARY, 7, 8, 9, 10)
    with trainer(client) as collector:
        assert trained(collector) == [6, 7]
        checkpoint = collector.state_dict()  # after the step
        raise Killed
    fill(client, 11, 12)
    with trainer(client, checkpoint=checkpoint, fetched_before=fetched_before) as collector:
        found = [tag for _ in range(2) for tag in trained(collector)]
        assert collector.metrics["atropos/groups_repeated"] == 3
        assert collector.metrics["atropos/groups_rejected_unknown_token"] == 1  # not once a life
    assert sorted(found + left(client)) == [8, 9, 10, 11, 12]


def test_where_there_are_checkpoints_the_hub_keeps_what_no_checkpoint_has(client):
    fill(client, *range(6, 16))
    with trainer(client, hold=True) as collector:
        in_it = trained(collector) + trained(collector)
        assert client.status()["hub"]["acknowledged"] == 0
        checkpoint = collector.state_dict()
        collector.assembler.saved()
        assert client.status()["hub"]["acknowledged"] == 2
        undone = trained(collector)
        raise Killed
    with trainer(client, hold=True, checkpoint=checkpoint) as collector:
        again = [tag for _ in range(3) for tag in trained(collector)]
    assert set(undone) <= set(again) and sorted(in_it + again) == [*range(6, 16)]
    assert client.status()["hub"]["acknowledged"] == 5 and left(client) == []


def test_what_was_trained_before_the_kill_between_checkpoint_and_word_is_left_out(client):
    fill(client, 6, 7, 8, 9)
    with trainer(client, hold=True) as collector:
        assert trained(collector) == [6, 7]
        checkpoint = collector.state_dict()
        raise Killed  # before saved()
    with trainer(client, hold=True, checkpoint=checkpoint) as collector:
        assert trained(collector) == [8, 9]
    assert left(client) == []


def test_an_end_gives_back_what_was_not_used_and_nothing_else(client):
    fill(client, 6, VOCABULARY, 7, 8, 9, 10)
    with trainer(client) as collector:
        assert trained(collector) == [6, 7]
    assert client.status()["hub"]["leases"] == 0
    assert sorted(left(client)) == [8, 9, 10]


def test_a_group_that_does_not_fit_does_not_hold_its_batch(client):
    client.send(group(size=6, inference_logprobs=[[1.0, -1, -1]] * 6))
    fill(client, 6, 7)
    with trainer(client) as collector:
        assert trained(collector) == [6, 7]
        assert collector.metrics["atropos/groups_too_large"] == 1
        assert client.status()["hub"]["acknowledged"] == 1
    assert client.status()["hub"]["acknowledged"] == 2


def test_the_rest_of_a_batch_outlives_the_hub(tmp_path):
    with HubServer(journal=tmp_path / "journal") as hub:
        client = AtroposClient(hub.url)
        client.register(registration(batch_size=6))
        fill(client, 6, 7, 8)
        batch = client.batch()
        assert client.acknowledge(batch, unused=batch.groups[:1] + batch.groups[2:])
        assert not client.acknowledge(batch)  # said again, it must not end the rest
    with HubServer(journal=tmp_path / "journal") as hub:
        client = AtroposClient(hub.url)
        batch = client.batch()
        assert list(map(tag_of, batch.groups)) == [6, 8]
        assert client.acknowledge(batch) and client.batch() is None


def test_a_place_that_no_group_has_is_refused(client):
    client.register(registration())
    fill(client, 6, 7)
    batch = client.batch()
    for wrong in (-1, 2, 2**60, "first"):
        with pytest.raises(AtroposError, match="unused") as caught:
            client.call("POST", "/ack", {"lease": batch.lease, "unused": [wrong]})
        assert caught.value.status == 422
    assert client.acknowledge(batch)
