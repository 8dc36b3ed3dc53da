"""Several engines as one handle: one transfer reaches all workers of all of them."""

from __future__ import annotations

import pytest
import torch

from grpo.policies.engine_fleet import EngineFleet
from grpo.policies.handle import EngineError
from grpo.weights.transfer import WeightTransfer

from ..weights.receivers import ThreadedEngine, Worker, assert_holds, vllm_like


@pytest.fixture
def model(make_model):
    return make_model(dtype=torch.float32, vocab_size=64, num_attention_heads=4,
                      num_key_value_heads=2)


@pytest.mark.parametrize("engines, size", [(2, 1), (3, 1), (2, 2)])
def test_one_broadcast_reaches_all_workers_of_all_engines(model, engines, size):
    handles = [ThreadedEngine([Worker(vllm_like(model, rank=rank, size=size), rank)
                               for rank in range(size)]) for _ in range(engines)]
    fleet = EngineFleet(handles, tensor_parallel_size=size)
    weights = WeightTransfer(model, fleet, backend="gloo", timeout=30.0)
    for version in (1, 2):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param))
        assert weights.publish() == version
        for engine in handles:
            assert_holds(engine, model)
            assert engine.version == version
    assert weights.differing() == []
    # Into one engine of the fleet, something else.
    with torch.no_grad():
        next(handles[-1].workers[0].model.parameters()).add_(1.0)
    assert weights.differing() != []
    weights.close()


def test_the_error_of_one_engine_is_raised_at_once():
    good, bad = ThreadedEngine([]), ThreadedEngine([])
    good.intercept["transfer_describe"] = lambda: [{}]

    def fail(*args):
        raise EngineError("engine 1 is gone")

    bad.intercept["transfer_describe"] = fail
    with pytest.raises(EngineError, match="engine 1 is gone"):
        EngineFleet([good, bad]).collective_rpc("transfer_describe", timeout=5.0)


def test_the_cache_is_reset_only_if_all_engines_say_so():
    engines = [ThreadedEngine([]), ThreadedEngine([])]
    fleet = EngineFleet(engines)
    assert fleet.reset_prefix_cache(5.0)
    engines[1].cache_resets = False
    assert not fleet.reset_prefix_cache(5.0)
