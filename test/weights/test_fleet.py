"""Adapters for all workers: what travels, when it is taken up, and what becomes of it where they
die."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from grpo.collectors.rollout_worker import RolloutWorker
from grpo.policies.driver import EngineDriver
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import WorkersLost
from grpo.weights.adapters import adapters, make_lora
from grpo.weights.canary import StaleWeightsError
from grpo.weights.fleet import FleetLoRA, FleetTransfer, ObjectStoreSync
from grpo.weights.packed import Packed
from grpo.weights.proof import WeightProof
from grpo.weights.worker.lora import flat

from ..collectors.asynchronous import LocalPool
from ..support import wait_until
from .faults import FAULTS, Changing, Faulty, params, updates_until_found
from .receivers import ThreadedEngine, vllm_like
from .receivers import Worker as TransferWorker
from .test_lora_slot import assert_slot_holds, engine, randomise  # noqa: F401

pytest.importorskip("peft")


class Worker:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple] = []

    failure: str | None = None

    def describe(self) -> dict:
        return {"failure": self.failure}

    drains = 0.0  # seconds until what it generates is finished

    def load_adapter(self, packed, version, mode, timeout) -> float:
        self.given.append((version, mode))
        self.values = packed.tensors()
        return self.drains

    def load_state(self, packed, version, timeout) -> float:
        self.given.append((version, "between jobs"))
        self.values = packed.tensors()
        return self.drains

    def differing_adapter(self, packed, timeout) -> list[str]:
        return [name for name, value in packed.tensors().items()
                if not torch.equal(value, self.values[name])]


def all_there(weights) -> bool:
    """Whether all workers have the present weights, after those that have come were given them."""
    wait_until(lambda: weights.heal() or weights.pool.whole)
    return True


@pytest.fixture
def pool():
    pool = LocalPool(lambda number: Worker(), count=2, max_restarts=1)
    pool.start()
    return pool


@pytest.fixture
def model(make_model):
    model = make_lora(make_model(dtype=torch.float32), r=4, alpha=12)
    randomise(model)
    return model


def scaled(model) -> dict[str, torch.Tensor]:
    return flat({name: {"lora_A": adapter.a, "lora_B": 3 * adapter.b}
                 for name, adapter in adapters(model).items()})


def test_workers_have_the_first_adapter_before_the_first_version(model, pool):
    weights = FleetLoRA(model, pool, pause_mode="wait")
    weights.start()
    assert [worker.given for worker in pool.actors] == [[(0, "wait")]] * 2
    assert weights.version == 0 and weights.differing() == weights.unshared() == []


def test_only_the_factors_travel_as_they_are_at_that_moment(model, pool):
    weights, seen = FleetLoRA(model, pool), []
    weights.on_publish = seen.append
    for version in (1, 2):
        randomise(model)
        sent = {name: value.clone() for name, value in scaled(model).items()}
        assert weights.publish() == version == weights.version
        randomise(model)
        for worker in pool.actors:
            assert worker.given[-1] == (version, "keep")
            assert worker.values.keys() == sent.keys()
            assert all(torch.equal(worker.values[name], value) for name, value in sent.items())
    assert seen == [1, 2]
    assert sorted(weights.differing()) == sorted(sent)


def test_a_factor_that_differs_in_one_worker_is_named(model, pool):
    weights = FleetLoRA(model, pool)
    weights.publish()
    pool.actors[1].values = {name: value.clone() for name, value in pool.actors[1].values.items()}
    name = "model.layers.1.mlp.up_proj.lora_B"
    pool.actors[1].values[name][0, 0] += 1
    assert weights.differing() == [name]


@pytest.mark.parametrize("way", [FleetLoRA, ObjectStoreSync])
def test_an_update_knows_for_how_long_it_waited_for_the_slowest_worker(model, pool, way):
    weights = way(model, pool)
    pool.actors[0].drains, pool.actors[1].drains = 0.25, 0.5
    weights.publish()
    assert weights.waited == 0.5
    pool.actors[1].load_adapter = pool.actors[1].load_state = lambda *args: 1 / 0
    with pytest.raises(EngineError):
        weights.publish()
    assert weights.waited == 0.0


def test_a_worker_that_takes_a_dead_ones_place_gets_the_present_adapter(model, pool):
    weights = FleetLoRA(model, pool)
    weights.publish()
    pool.kill(0)
    randomise(model)
    weights.publish()  # in which the death is noticed
    assert all_there(weights) and weights.version == 2 and pool.restarts == 1
    assert pool.actors[0].given == [(2, "keep")] and pool.actors[1].given[-1] == (2, "keep")
    assert weights.differing() == []


def test_a_worker_whose_engine_has_failed_is_replaced_though_its_process_lives(model, pool):
    weights = FleetLoRA(model, pool)
    weights.publish()
    broken = pool.actors[0]
    broken.failure, broken.load_adapter = "OutOfMemoryError()", lambda *args: 1 / 0
    assert weights.publish() == 2 and all_there(weights)
    assert pool.restarts == 1 and pool.actors[0] is not broken
    assert weights.differing() == []


def test_an_error_of_a_healthy_worker_is_raised(model, pool):
    weights = FleetLoRA(model, pool)
    pool.actors[0].load_adapter = lambda *args: 1 / 0
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        weights.publish()
    assert pool.restarts == 0


def test_a_death_that_is_noticed_after_an_update_does_not_make_another_version(model, pool):
    for way in (FleetLoRA, ObjectStoreSync):
        weights = way(model, pool)
        send = weights._publish

        def then_one_dies(send=send) -> None:
            send()
            pool.kill(0)
            pool.dead[0] = "killed"

        weights._publish = then_one_dies
        pool.max_restarts += 1
        assert weights.publish() == weights.version == 1 and all_there(weights)
        assert [worker.given[-1][0] for worker in pool.actors] == [1, 1]


def test_a_replaced_worker_alone_is_healed(model, pool):
    weights = FleetLoRA(model, pool)
    weights.publish()
    pool.kill(1)
    pool.dead[1] = "killed"
    assert all_there(weights)
    assert [worker.given for worker in pool.actors] == [[(1, "keep")]] * 2
    assert weights.differing() == []


def test_transformers_workers_get_what_is_trained_under_its_own_names(model, pool):
    ObjectStoreSync(model, pool).publish()
    params = dict(model.named_parameters())
    values = pool.actors[0].values
    assert set(values) == {name for name in params if ".lora_" in name}
    assert all(torch.equal(value, params[name]) for name, value in values.items())


# -- the proof -------------------------------------------------------------------------------------


@pytest.mark.parametrize("noticed", ["at the end", "before it"])
def test_a_comparison_that_a_death_interrupts_is_made_again_with_who_took_its_place(
        model, pool, noticed):
    weights = FleetLoRA(model, pool)
    weights.publish()
    killed = threading.Event()
    pool.actors[0].differing_adapter = lambda packed, timeout: killed.wait(10)
    end = weights.begin_differing()
    pool.kill(0)
    killed.set()
    if noticed == "before it":
        pool.look()
        assert all_there(weights)
    assert end() == []
    assert all_there(weights) and pool.restarts == 1


def test_workers_compare_while_the_trainer_does_something_else(model, pool):
    weights = FleetLoRA(model, pool)
    weights.publish()
    proof, asked = WeightProof(weights), []
    for worker in pool.actors:
        worker.differing_adapter = lambda packed, timeout: asked.append(1) or ["a.lora_A"]
    proof.start()
    wait_until(lambda: len(asked) == 2)
    names = set(scaled(model))
    for worker in pool.actors:
        del worker.differing_adapter
    proof.finish()  # a name that no factor has
    nudged = sorted(names)[0]
    pool.actors[1].values = {name: value.clone() for name, value in pool.actors[1].values.items()}
    pool.actors[1].values[nudged] += 1
    proof.start()
    with pytest.raises(StaleWeightsError, match="policy version 1: after an update"):
        proof.finish()
    proof.finish()  # nothing was begun since


class VLLMWorker:
    """The weights' side of a rollout worker, around an engine made of threads."""

    failure = None

    def __init__(self, model) -> None:
        self.engine = ThreadedEngine([TransferWorker(vllm_like(model))])
        self.held = params(self.engine.workers[0].model)

    def describe(self) -> dict:
        return {"failure": self.failure}

    def collective_rpc(self, method, args, timeout):
        return self.engine.collective_rpc(method, *args, timeout=timeout)

    def pause(self, mode, timeout) -> None:
        self.engine.pause(mode, timeout=timeout)

    def resume(self, timeout) -> None:
        self.engine.resume(timeout=timeout)

    def reset_prefix_cache(self, timeout) -> bool:
        return self.engine.reset_prefix_cache(timeout)

    def set_version(self, version) -> None:
        self.engine.set_version(version)

    def go_on(self, version, timeout) -> bool:
        return self.engine.go_on(version, timeout=timeout)


@pytest.fixture
def engines(make_model):
    """A model, two engines, and what brings them weights by one broadcast."""
    model = make_model(dtype=torch.float32, num_key_value_heads=2, hidden_size=32)
    pool = LocalPool(lambda number: VLLMWorker(model), count=2, max_restarts=1)
    pool.start()
    weights = FleetTransfer(model, pool, backend="gloo", timeout=20.0)
    yield model, pool, weights
    weights.transfer.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_broadcast_does_not_bring_to_each_engine_fails_the_proof(engines, fault):
    model, pool, weights = engines
    WeightProof(weights).self_test(Changing(model))
    assert [worker.engine.version for worker in pool.actors] == [0, 0]
    faulty = Faulty(weights, [worker.held for worker in pool.actors], fault)
    assert updates_until_found(faulty, model) == 1 or fault == FAULTS[1]
    with pytest.raises(StaleWeightsError, match="the self-test changed a few values"):
        WeightProof(faulty).self_test(Changing(model))


def test_an_engine_that_dies_while_it_is_compared_is_replaced_and_compared_again(engines):
    model, pool, weights = engines
    weights.publish()
    pool.kill(1)
    WeightProof(weights).check()
    assert all_there(weights) and pool.restarts == 1 and weights.version == 1
    assert pool.actors[1].engine.version == 1


def without_room(pool) -> threading.Event:
    """New workers of a pool answer once the event is set: a cluster has room for them again."""
    room, make = threading.Event(), pool.make

    def later(number: int):
        worker = make(number)
        describe = worker.describe
        worker.describe = lambda: room.wait(30) and describe()
        return worker

    pool.make = later
    return room


@pytest.mark.parametrize("way", [FleetLoRA, ObjectStoreSync])
def test_updates_reach_the_others_while_there_is_no_room_for_a_new_worker(model, pool, way):
    weights, room = way(model, pool), without_room(pool)
    pool.kill(1)
    for version in (1, 2):
        assert weights.publish() == version
        assert pool.present == pool.usable == [0] and list(pool.starting) == [1]
    weights.heal()
    assert {given[0] for given in pool.actors[0].given} == {1, 2} and not pool.actors[1].given
    room.set()
    assert all_there(weights)
    assert [given[0] for given in pool.actors[1].given] == [2] and pool.restarts == 1


def test_nobody_is_given_work_before_it_has_the_present_weights(pool):
    usable, result = [], pool.result
    pool.result = lambda call, **options: usable.append(pool.usable) or result(call, **options)
    pool.dead[0] = "killed"
    assert wait_until(pool.revive) == [0]
    assert usable == [[1]] and pool.usable == [1] and pool.present == [0, 1]


def test_a_broadcast_reaches_the_engines_that_are_there(engines):
    model, pool, weights = engines
    weights.publish()
    room = without_room(pool)
    pool.kill(0)
    for version in (2, 3):
        with torch.no_grad():
            for param in model.parameters():
                param += 0.01
        assert weights.publish() == version and weights.differing() == []
        assert pool.usable == [1] and pool.actors[1].engine.version == version
    room.set()
    assert all_there(weights) and weights.differing() == []
    assert [worker.engine.version for worker in pool.actors] == [3, 3]


def test_where_nobody_is_left_the_wait_for_a_new_worker_has_an_end(model, pool):
    weights, pool.start_timeout, pool.max_restarts = FleetLoRA(model, pool), 0.2, 2
    without_room(pool)
    for number in range(2):
        pool.kill(number)
    with pytest.raises(WorkersLost, match=r"no rollout worker is left.*within 0.2 s \(ray.start_"):
        weights.publish()
    assert weights.version == 1  # what is saved then


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_come_to_each_engine_fails_the_proof(model, pool, fault):
    weights = FleetLoRA(model, pool)
    weights.start()
    WeightProof(weights).self_test(Changing(model))
    assert [worker.given[-1][0] for worker in pool.actors] == [0, 0]
    faulty = Faulty(weights, [{"model.norm.weight": torch.zeros(1)}], fault)  # is switched alone

    def lossy(worker, load):
        def load_adapter(packed, *rest):
            before = getattr(worker, "values", {})
            waited = load(packed, *rest)
            if faulty.active:
                worker.values |= before if fault != FAULTS[1] else {name: before[name]}
            return waited

        worker.load_adapter = load_adapter

    name = "model.layers.1.mlp.up_proj.lora_B"
    for worker in pool.actors[fault == FAULTS[2]:]:
        lossy(worker, worker.load_adapter)
    assert updates_until_found(faulty, model) == 1 or fault == FAULTS[1]


def test_a_worker_that_never_had_an_adapter_differs_in_all(model, worker):
    some = {name: value for name, value in scaled(model).items() if ".layers.1." in name}
    assert worker.differing_adapter(Packed.of(some), 5.0) == [
        name for name, *_ in Packed.of(some).layout]


# -- a worker's side -------------------------------------------------------------------------------


class Sampler:
    """An engine without jobs; counts versions."""

    idle, tokens = True, 0

    def __init__(self, events: list) -> None:
        self.events = events

    def set_version(self, version: int) -> None:
        self.events.append(("version", version))

    def close(self) -> None:
        """Holds nothing."""


@pytest.fixture
def worker(engine):  # noqa: F811
    """One whose engine notes what is asked of it."""
    events = []
    engine.pause = lambda mode, timeout: events.append("pause")
    engine.resume = lambda timeout: events.append("resume")
    engine.reset_prefix_cache = lambda timeout: events.append("forget") or engine.idle
    engine.worker.lora_slot = lambda adapter_id, look=engine.worker.lora_slot: (
        events.append("slot") or look(adapter_id))
    worker = RolloutWorker.__new__(RolloutWorker)
    worker.engine, worker._slot, worker.events = engine, None, events
    worker.setup = SimpleNamespace(device="cpu", tensor_parallel_size=1)
    worker.driver = EngineDriver(Sampler(events))
    yield worker
    worker.driver.close()


def test_an_adapter_is_written_between_two_steps_and_what_was_computed_before_is_forgotten(
        model, worker):
    for version in (0, 1, 2):
        randomise(model)
        worker.events.clear()
        worker.load_adapter(Packed.of(scaled(model)), version, "keep", 5.0)
        after = worker.events.index("forget")
        assert worker.events[0] == "pause" and set(worker.events[1:after]) == {"slot"}
        assert worker.events[after:] == ["forget", ("version", version), "resume"]
        assert_slot_holds(worker.engine, model, adapter_id=1)
        assert worker.differing_adapter(Packed.of(scaled(model)), 5.0) == []
    randomise(model)
    assert len(worker.differing_adapter(Packed.of(scaled(model)), 5.0)) == 28


@pytest.mark.parametrize("mode, waits", [("wait", True), ("keep", False)])
def test_a_worker_says_how_long_it_finished_requests_before_it_took_an_adapter(
        model, worker, mode, waits):
    worker._jobs, drain = {}, worker.driver.drain
    worker.driver.drain = lambda **options: time.sleep(0.5) or drain(**options)
    waited = worker.load_adapter(Packed.of(scaled(model)), 1, mode, 5.0)
    assert (waited >= 0.5) is waits and (waits or waited == 0.0)


@pytest.mark.parametrize("dialogs", [False, True])
def test_a_transformers_worker_says_how_long_it_finished_groups_before_it_took_weights(
        make_model, worker, dialogs):
    worker.policy, worker.engine = SimpleNamespace(model=make_model(dtype=torch.float32)), None
    worker._jobs, worker._holds_dialogs = {}, dialogs
    values = Packed.of(dict(worker.policy.model.named_parameters()))
    with ThreadPoolExecutor() as callers:
        running = callers.submit(worker.driver.call, lambda: time.sleep(0.5), timeout=5.0)
        wait_until(running.running)
        time.sleep(0.1)
        assert 0.2 < worker.load_state(values, 1, 5.0) < 2.0


def test_an_engine_that_keeps_old_keys_stays_paused_and_says_so(model, worker):
    worker.engine.idle = False
    with pytest.raises(EngineError, match="the adapter of version 3 is there, but the engine ref"):
        worker.load_adapter(Packed.of(scaled(model)), 3, "keep", 5.0)
    assert "resume" not in worker.events and worker.driver._paused
