"""Groups that reference workers score on their way to the trainer."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from grpo import data
from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.reference import ReferenceSource
from grpo.atropos.schemas import parse_group
from grpo.collectors.reference_worker import Scored, SharedScoring

from ..collectors.asynchronous import LocalPool
from ..support import wait_until
from .environments import Groups

ROWS = {"pad_token_id": 0, "seq_len": 4, "vocab_size": 100}


class Worker:
    """Says minus a tenth of each trained token, once it may."""

    def __init__(self, may: threading.Event) -> None:
        self.may, self.scored = may, 0

    def describe(self) -> dict:
        return {}

    def score(self, group) -> Scored:
        assert self.may.wait(30)
        self.scored += len(group)
        return Scored(-group[data.TOKENS] * group[data.ASSISTANT_MASK] / 10, busy=1.0, seconds=2.0,
                      started=0.0)


def group(token: int, **entries) -> dict:
    return {"tokens": [[5, token], [5, 6, token, token, token]],
            "masks": [[-100, token], [-100, -100, token, token, token]], "scores": [1.0, 0.0],
            "inference_logprobs": [[1.0, -0.5], [1.0, 1.0, -0.5, -0.5, -0.5]], **entries}


@pytest.fixture
def may():
    return threading.Event()


@pytest.fixture
def source(may):
    pool = LocalPool(lambda number: Worker(may), count=2, kind="reference worker")
    pool.start()
    return ReferenceSource(Groups(), SharedScoring(pool), GroupConverter(**ROWS, distill_topk=0))


def collector_of(source, *, rows: int, timeout: float = 30.0) -> AtroposCollector:
    return AtroposCollector(GroupAssembler(source, GroupConverter(**ROWS), rows=rows),
                            timeout=timeout)


def test_groups_are_scored_but_those_that_bring_the_references_log_probs(source, may):
    may.set()
    brought = [[0.0, -3.0], [0.0, 0.0, -4.0, -5.0, -6.0]]
    for sent in (group(7), group(8, ref_logprobs=brought), group(9)):
        source.source.send(sent)
    collector = collector_of(source, rows=6)
    batch = collector.collect()
    assert torch.allclose(batch[data.REF_LOG_PROBS], torch.tensor([
        [0, -0.7, 0, 0], [0, 0, -0.7, -0.7], [0, -3, 0, 0], [0, 0, -4, -5],
        [0, -0.9, 0, 0], [0, 0, -0.9, -0.9]]))
    assert sum(worker.scored for worker in source.scoring.pool.actors) == 4
    # Each is idle for half of its time, but all of it if it was never given a group.
    assert collector.metrics["async/reference_idle"] in (0.5, 0.75)


def test_groups_are_scored_while_nobody_asks_for_them(source, may):
    may.set()
    groups = [parse_group(group(7)), parse_group(group(8))]
    source.begin(groups)  # as the thread does that fetches them
    wait_until(lambda: sum(worker.scored for worker in source.scoring.pool.actors) == 4)
    for one in groups:
        source.source.queue.put(one)
    batch = collector_of(source, rows=4).collect()
    sums = batch[data.REF_LOG_PROBS].sum(-1).tolist()
    assert sums == pytest.approx([-0.7, -1.4, -0.8, -1.6])
    assert sum(worker.scored for worker in source.scoring.pool.actors) == 4


def test_a_group_that_cannot_be_scored_is_left_out_as_without_reference(source, may):
    may.set()
    for sent in (group(100), group(7)):
        source.source.send(sent)
    collector = collector_of(source, rows=2)
    assert len(collector.collect()) == 2
    assert collector.metrics["atropos/groups_rejected_unknown_token"] == 1


def test_the_groups_of_a_dead_worker_go_to_another_and_it_is_replaced(source, may):
    for token in (7, 8, 9):
        source.source.send(group(token))
    pool = source.scoring.pool
    assert not source(1.0) and not source(1.0) and not source(1.0)
    pool.kill(0)
    may.set()
    batch = collector_of(source, rows=6).collect()
    assert batch[data.TOKENS][::2, 1].tolist() == [7, 8, 9]  # in the order in which they came
    assert (batch[data.REF_LOG_PROBS] < 0).any(-1).all()
    assert pool.restarts == 1


def test_a_reference_that_hangs_is_named_with_its_key(source):
    source.source.send(group(7))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"1 groups have come and wait for the reference.*2 of 2 "
                                           r"reference workers \(ref_model.num_devices\)"):
        collector_of(source, rows=2, timeout=0.3).collect()
    assert time.monotonic() - start < 5


def test_the_source_is_told_of_the_very_groups_that_it_gave(source, may):
    may.set()
    told = []
    source.source.used = told.extend
    sent = parse_group(group(7))
    source.source.queue.put(sent)
    collector_of(source, rows=2).collect()
    assert told == [sent] and told[0] is sent and not source._given
