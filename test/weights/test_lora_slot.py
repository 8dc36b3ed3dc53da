"""Slots without vLLM: buffers laid out as it lays them out, behind the same few attributes."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from grpo.weights.adapters import adapters, engine_factors, make_lora
from grpo.weights.canary import StaleWeightsError
from grpo.weights.lora import LoRASync
from grpo.weights.lora_slot import differing_factors, shapes_of
from grpo.weights.proof import WeightProof
from grpo.weights.worker import lora as lora_worker
from grpo.weights.worker.lora import LoRAMethods

from .faults import FAULTS, Changing, Faulty, updates_until_found

pytest.importorskip("peft")
SLOTS, MAX_RANK = 3, 8
WIDTH, KEY_VALUE = 16, 8  # of the tiny model


def stacked(inputs, *outputs):
    """A fused layer's buffers: a pair of factors for each part."""
    return SimpleNamespace(
        tp_size=1, lora_a_stacked=tuple(torch.zeros(SLOTS, 1, MAX_RANK, inputs) for _ in outputs),
        lora_b_stacked=tuple(torch.zeros(SLOTS, 1, n, MAX_RANK) for n in outputs))


class Registry:
    """What :mod:`grpo.weights.worker.lora` reads of vLLM's ``LoRAModelManager``."""

    def __init__(self):
        self.lora_config = SimpleNamespace(max_lora_rank=MAX_RANK)
        self.lora_index_to_id, self.waiting = [None] * SLOTS, []
        self.modules, self.packed_modules = {}, {}
        for layer in ("model.layers.0.", "model.layers.1."):
            attention, mlp = layer + "self_attn.", layer + "mlp."
            self.modules[attention + "qkv_proj"] = stacked(WIDTH, WIDTH, KEY_VALUE, KEY_VALUE)
            self.packed_modules[attention + "qkv_proj"] = [attention + p + "_proj" for p in "qkv"]
            self.modules[attention + "o_proj"] = stacked(WIDTH, WIDTH)
            self.modules[mlp + "gate_up_proj"] = stacked(WIDTH, WIDTH, WIDTH)
            self.packed_modules[mlp + "gate_up_proj"] = [mlp + "gate_proj", mlp + "up_proj"]
            self.modules[mlp + "down_proj"] = stacked(WIDTH, WIDTH)
        # An embedding's factors are tensors, not tuples.
        self.modules["model.embed_tokens"] = SimpleNamespace(lora_a_stacked=torch.zeros(1, 1, 1))

    def list_adapters(self):
        return [adapter_id for adapter_id in [*self.lora_index_to_id, *self.waiting] if adapter_id]

    def activate_adapter(self, adapter_id):
        self.lora_index_to_id[0] = adapter_id

    def remove_adapter(self, adapter_id):
        known = adapter_id in self.lora_index_to_id
        self.lora_index_to_id = [None if i == adapter_id else i for i in self.lora_index_to_id]
        return known

    def install(self, adapter_id, tensors, slot=None):
        self.remove_adapter(adapter_id)
        slot = self.lora_index_to_id.index(None) if slot is None else slot
        self.lora_index_to_id[slot] = adapter_id
        for name, factors in lora_worker.slot_factors(self, adapter_id).items():
            for part, buffer in factors.items():
                buffer.zero_()
                if name in tensors:
                    value = tensors[name][part]
                    lora_worker.narrow(buffer, part, value.shape).copy_(value)
        return slot


class Engine:
    """A handle whose one worker has our methods; everything it is sent goes through JSON."""

    def __init__(self):
        self.registry, self.idle, self.version = Registry(), True, 0
        self.worker = LoRAMethods()
        self.worker._adapter_registry = lambda: self.registry

    def collective_rpc(self, method, *args, timeout):
        args = json.loads(json.dumps(args))
        return [json.loads(json.dumps(getattr(self.worker, method)(*args)))]

    def reset_prefix_cache(self, timeout):
        return self.idle

    def set_version(self, version):
        self.version = version


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(lora_worker, "_install", Registry.install)
    return Engine()


def make(make_model, engine, r, alpha, how="auto", **options):
    model = make_lora(make_model(dtype=torch.float32), r=r, alpha=alpha, **options)
    randomise(model)
    return model, LoRASync(model, engine, how=how, adapter_id=5)


def randomise(model) -> None:
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.a.normal_()
            adapter.b.normal_()


def assert_slot_holds(engine, model, adapter_id=5) -> None:
    held = lora_worker.slot_factors(engine.registry, adapter_id)
    for name, adapter in adapters(model).items():
        full_a, full_b = held[name]["lora_A"], held[name]["lora_B"]
        torch.testing.assert_close(full_b @ full_a, adapter.scaling * adapter.b @ adapter.a)


def test_views_need_no_write_and_other_slots_are_left_alone(make_model, engine):
    engine.registry.lora_index_to_id[0] = 9
    model, sync = make(make_model, engine, MAX_RANK, MAX_RANK)
    assert (sync.how, sync.target.slot) == ("views", 1)
    randomise(model)
    assert_slot_holds(engine, model)
    for module in engine.registry.modules.values():
        if isinstance(module.lora_a_stacked, tuple):
            for buffer in (*module.lora_a_stacked, *module.lora_b_stacked):
                assert not buffer[[0, 2]].any()


def test_a_parameter_that_left_the_slot_is_named(make_model, engine):
    model, sync = make(make_model, engine, MAX_RANK, MAX_RANK)
    param = adapters(model)["model.layers.1.mlp.up_proj"].a
    param.data = param.data.clone()
    assert sync.unshared() == ["model.layers.1.mlp.up_proj.lora_A"]
    assert sync.differing() == []
    param.data += 1
    assert sync.differing() == ["model.layers.1.mlp.up_proj.lora_A"]


def test_another_dtype_is_written_rounded(make_model, engine):
    model = make_lora(make_model(dtype=torch.bfloat16), r=MAX_RANK, alpha=MAX_RANK)
    sync = LoRASync(model, engine, adapter_id=5)
    assert sync.how == "write"
    assert sync.differing() == []


def test_shards_of_several_workers_are_loaded(make_model, engine):
    once = engine.collective_rpc
    engine.collective_rpc = lambda *args, timeout: 2 * once(*args, timeout=timeout)
    model, sync = make(make_model, engine, 8, 8)
    assert sync.how == "load"
    assert sync.differing() == []
    with pytest.raises(ValueError, match="how='write' is impossible: the engine has 2 workers"):
        LoRASync(model, engine, how="write", adapter_id=5)


def test_a_moved_adapter_and_a_busy_engine_do_not_count_as_published(make_model, engine):
    model, sync = make(make_model, engine, 4, 8)
    engine.idle = False
    with pytest.raises(RuntimeError, match="requests are still running"):
        sync.publish()
    engine.idle = True
    engine.registry.remove_adapter(5)
    with pytest.raises(RuntimeError, match="moved adapter 'policy' from slot 0 to None"):
        sync.publish()
    assert len(sync.differing()) == 28
    assert sync.version == engine.version == 0


def test_every_module_that_does_not_fit_is_named(make_model, engine):
    del engine.registry.modules["model.layers.0.self_attn.o_proj"]
    engine.registry.modules["model.layers.1.mlp.down_proj"] = stacked(5, 7)
    with pytest.raises(ValueError) as error:
        make(make_model, engine, 4, 8)
    assert str(error.value).splitlines()[1:] == [
        "  model.layers.0.self_attn.o_proj: the engine has no adapter slot for this module",
        "  model.layers.1.mlp.down_proj: 16 inputs and 16 outputs here, 5 and 7 in the engine"]
    with pytest.raises(ValueError, match="q_proj: rank 16 is above the engine's max_lora_rank=8"):
        make(make_model, engine, 16, 16)


def test_a_closed_sync_leaves_the_parameters_their_values(make_model, engine):
    model, sync = make(make_model, engine, MAX_RANK, MAX_RANK)
    values = [adapter.b.detach().clone() for adapter in adapters(model).values()]
    sync.close()
    assert engine.registry.lora_index_to_id == [None] * SLOTS
    engine.registry.install(6, {})  # the slot is somebody else's
    assert all(torch.equal(adapter.b, value)
               for adapter, value in zip(adapters(model).values(), values, strict=True))


@pytest.mark.parametrize(("options", "message"), [
    ({"how": "copy"}, "how='copy' is unknown"), ({"adapter_id": 0}, "adapter_id=0 must be")])
def test_options_are_checked(make_model, engine, options, message):
    with pytest.raises(ValueError, match=message):
        LoRASync(make_lora(make_model(), r=2), engine, **options)


def test_an_engine_without_lora_says_what_to_start_it_with():
    with pytest.raises(RuntimeError, match="enable_lora=True and a max_lora_rank"):
        lora_worker.adapter_registry(torch.nn.Linear(1, 1))


# -- the proof -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS[:2])
@pytest.mark.parametrize("how", ["write", "load"])
def test_factors_that_are_lost_on_the_way_fail_the_proof(make_model, engine, how, fault):
    model, sync = make(make_model, engine, 4, 12, how)
    WeightProof(sync).self_test(Changing(model))
    assert sync.version == engine.version == 0
    name = "model.layers.1.mlp.up_proj.lora_B"
    held = lora_worker.flat(lora_worker.slot_factors(engine.registry, 5))
    faulty = Faulty(sync, [held], fault, name)
    with pytest.raises(StaleWeightsError, match="the self-test changed a few values"):
        WeightProof(faulty).self_test(Changing(model))
    assert updates_until_found(faulty, model) == 1 or fault == FAULTS[1]


def test_views_of_a_slot_that_the_engine_no_longer_uses_fail_the_proof(make_model, engine):
    model, sync = make(make_model, engine, MAX_RANK, MAX_RANK)
    assert sync.how == "views"
    proof = WeightProof(sync)
    proof.self_test(Changing(model))
    proof.check()
    registry = engine.registry
    registry.lora_index_to_id = registry.lora_index_to_id[1:] + [5]
    with pytest.raises(StaleWeightsError, match="lora_A"):
        proof.check()


def test_an_adapter_that_waits_for_a_slot_is_compared_and_one_that_is_gone_differs(
        make_model, engine):
    model, _ = make(make_model, engine, 4, 12, "load")
    registry, shapes = engine.registry, shapes_of(engine_factors(model))
    found = lora_worker.slot_fingerprints(registry, 5, shapes)
    registry.lora_index_to_id, registry.waiting = [7, 8, 9], [5]
    assert lora_worker.slot_fingerprints(registry, 5, shapes) == found
    registry.lora_index_to_id, registry.waiting = [7, 8, 9], []
    assert lora_worker.slot_fingerprints(registry, 5, shapes) == {}


def test_each_worker_is_asked_for_its_own_rows_and_columns(make_model, engine):
    """Two workers: B of q, k and v is cut by rows, A of the output projection by columns."""
    model, _ = make(make_model, engine, 4, 12, "load")
    values = engine_factors(model)
    workers = [halved(rank) for rank in range(2)]
    for registry in workers:
        for name, factors in lora_worker.nested(values).items():
            place = lora_worker._places(registry)[name]
            for part, value in factors.items():
                shard = place.shard(part, value)
                buffer = place.buffers()[part][0, 0]
                lora_worker.narrow(buffer, part, shard.shape).copy_(shard)

    def held():
        return [lora_worker.slot_fingerprints(registry, 5, shapes_of(values))
                for registry in workers]

    assert held()[1]["model.layers.0.self_attn.q_proj.lora_B"][:5] == ["float32", 8, 8, 0, 4]
    assert held()[1]["model.layers.0.self_attn.o_proj.lora_A"][:5] == ["float32", 0, 4, 8, 8]
    assert differing_factors(held(), values) == []
    workers[1].modules["model.layers.1.self_attn.o_proj"].lora_a_stacked[0].add_(1e-6)
    assert differing_factors(held(), values) == ["model.layers.1.self_attn.o_proj.lora_A"]


def halved(rank):
    """A registry with one of two shards of each module, cut as vLLM's layers cut."""
    registry = Registry()
    registry.lora_index_to_id[0] = 5
    for name, module in registry.modules.items():
        if not isinstance(module.lora_a_stacked, tuple):
            continue
        by_columns, module.tp_size = name.endswith(("o_proj", "down_proj")), 2
        for factor, dim in (("a", 1), ("b", 0)):
            cut = partial(shard, rank=rank, dim=dim if by_columns == (factor == "a") else None)
            buffers = getattr(module, f"lora_{factor}_stacked")
            setattr(module, f"lora_{factor}_stacked", tuple(
                cut(buffer[0, 0]).expand(SLOTS, 1, -1, -1).clone() for buffer in buffers))
            setattr(module, f"slice_lora_{factor}", cut if len(buffers) == 1 else
                    lambda parts, cut=cut: [None if p is None else cut(p) for p in parts])
    return registry


def shard(tensor, *, rank, dim):
    return tensor if dim is None else tensor.chunk(2, dim)[rank]
