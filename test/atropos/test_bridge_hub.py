"""Bridge and hub: environments ask the one, score, and send to the other."""

from __future__ import annotations

import pytest

from grpo import data
from grpo.atropos.assemble import GroupAssembler, StreamSource
from grpo.atropos.bridge_driver import BridgeDriver
from grpo.atropos.client import AtroposClient
from grpo.atropos.collector import AtroposCollector
from grpo.atropos.convert import GroupConverter
from grpo.atropos.hub_server import HubServer
from grpo.atropos.schemas import Registration
from grpo.atropos.stream import BatchStream
from grpo.policies.driver import TransformersSampler

from .environments import DicePolicy, Environment, playing, serving


class ToHub:
    """Where an environment sends its groups: the hub, over HTTP."""

    def __init__(self, url):
        self.client = AtroposClient(url)

    def send(self, group):
        self.client.send(group)


def registration(rows):
    return Registration(wandb_group="g", wandb_project="p", batch_size=rows, max_token_len=512,
                        checkpoint_dir="", save_checkpoint_interval=0, starting_step=0,
                        num_steps=10)


@pytest.mark.parametrize("group_size", [2, 3])
def test_groups_go_through_the_hub_and_come_back_with_what_was_sampled(tokenizer, group_size):
    with serving(tokenizer) as (bridge, url), HubServer() as hub:
        policy, client = DicePolicy(), AtroposClient(hub.url)
        with BatchStream(client, registration(6), poll_seconds=0.01) as stream:
            assembler = GroupAssembler(
                StreamSource(stream), GroupConverter(pad_token_id=0, temperature=1.0), rows=6,
                records=bridge.records)
            collector = AtroposCollector(
                assembler, driver=BridgeDriver(bridge, TransformersSampler(policy)), timeout=30.0)
            environments = [Environment(url, ToHub(hub.url), seed=seed, group_size=group_size)
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
    assert sum(map(len, batches)) + assembler.waiting_rows == bridge.records.counts["rows_matched"]
    assert not any(batch[data.LOG_PROBS].isnan().any() for batch in batches)
