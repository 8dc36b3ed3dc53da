"""The group of a trainer and an engine's workers: who listens where."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from grpo.weights import channel
from grpo.weights.channel import Channel, Deadline, address_towards


def test_the_address_towards_this_host_is_the_loopback_interfaces():
    assert address_towards("localhost", 9001) in ("127.0.0.1", "::1")


def test_each_member_of_a_gloo_group_listens_on_its_own_host(monkeypatch):
    """The receiver is told of the trainer's address, which is none of its own elsewhere."""
    opened, create = {}, dist.ProcessGroupGloo.create_device

    def member(rank: int, store=None) -> int:
        joined = Channel(config, rank=rank, device=torch.device("cpu"), store=store)
        try:
            tensor = torch.full((3,), 7 if rank == 0 else 0)
            joined.wait(joined.broadcast([tensor]), Deadline(30, "a test", fix="look"), "it")
            return int(tensor.sum())
        finally:
            joined.close()

    def recording(hostname: str):
        opened[hostname] = opened.get(hostname, 0) + 1
        return create(hostname=hostname)

    # Linux has all of 127.0.0.0/8, so one machine can be two.
    monkeypatch.setattr(channel, "address_towards", lambda host, port: "127.0.0.2")
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", staticmethod(recording))
    config, store = Channel.host("gloo", 2, host="127.0.0.1", seconds=30)
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(member, 0, store), pool.submit(member, 1)]
        assert [future.result(60) for future in sums] == [21, 21]
    assert opened == {"127.0.0.1": 1, "127.0.0.2": 1}
