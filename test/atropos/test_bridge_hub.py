"""Bridge and hub: environments ask the one, score, and send to the other."""

from __future__ import annotations

import pytest

from grpo import data
from grpo.atropos.assemble import StreamSource
from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer
from grpo.atropos.stream import BatchStream

from .environments import DicePolicy, Environment, make_collector, playing, serving
from .groups import registration


@pytest.mark.parametrize("group_size", [2, 3])
def test_groups_go_through_the_hub_and_come_back_with_what_was_sampled(tokenizer, group_size):
    with serving(tokenizer) as (bridge, url), HubServer() as hub:
        policy, client = DicePolicy(), AtroposClient(hub.url)
        with BatchStream(client, registration(batch_size=6), poll_seconds=0.01) as stream:
            collector = make_collector(bridge, StreamSource(stream), policy, rows=6)
            environments = [Environment(url, client, seed=seed, group_size=group_size)
                            for seed in range(3)]
            with playing(environments):
                batches = [collector.collect() for _ in range(4)]
                client.send({"tokens": [[5]] * 6, "masks": [[-100]] * 6, "scores": [0.0] * 6})
                for _ in range(20):
                    batches.append(collector.collect())
                    if "atropos/groups_rejected_nothing_trained" in collector.metrics:
                        break
    assert collector.metrics["atropos/groups_rejected_nothing_trained"] == 1
    numbers = [number for batch in batches for number in batch[data.GROUP_ID].tolist()]
    assert len(set(numbers)) * group_size == len(numbers)
    # A bad group may have come in a batch with others, whose rows then wait for the next one's.
    waiting = collector.assembler.waiting_rows
    assert sum(map(len, batches)) + waiting == bridge.records.counts["rows_matched"]
    assert not any(batch[data.LOG_PROBS].isnan().any() for batch in batches)
