"""The comparison to the bit: what is found, when at the latest, and the test of the way at start.

Weights change by one step of their float type, far below what a canary could see.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from grpo.weights.canary import StaleWeightsError
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.in_flight import PausedUpdates, PeriodicUpdates
from grpo.weights.proof import FIRST_UPDATES, Perturbation, WeightProof
from grpo.weights.shared import SameModule

from .faults import FAULTS, Changing, Faulty, nudge, params, updates_until_found


class Copying(SameModule):
    """An engine with a module of its own, into which updates are copied."""

    def __init__(self, model: nn.Module) -> None:
        self.held = copy.deepcopy(model)
        super().__init__(model, used=lambda: self.held)
        self.compared: list[Part] = []

    def differing(self, part: Part = ALL) -> list[str]:
        self.compared.append(part)
        return super().differing(part)

    def publish(self, *, now: bool = False) -> int:
        self.held.load_state_dict(self.model.state_dict())
        return super().publish()


def equal(state, before) -> bool:
    return all(torch.equal(value, before[name]) for name, value in state.items())


@pytest.fixture
def model(make_model):
    return make_model(dtype=torch.bfloat16)


# -- when ------------------------------------------------------------------------------------------


def test_all_are_compared_at_first_and_when_asked_and_parts_in_turn_otherwise(model):
    weights = Copying(model)
    proof = WeightProof(weights, interval=4)
    for update in range(9):
        weights.publish()
        proof.check(whole=update == 6)
    turns = [Part(number % 4, 4) for number in range(9)]
    assert weights.compared == [ALL] * FIRST_UPDATES + turns[FIRST_UPDATES:6] + [ALL] + turns[7:]


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_a_tensor_that_stays_behind_is_found_within_the_interval_whenever_it_begins(
        model, interval):
    names = [name for name, _ in model.named_parameters()]
    for number, name in enumerate(names):
        weights = Copying(copy.deepcopy(model))
        faulty = Faulty(weights, [params(weights.held)], "one tensor", name)
        updates_until_found(faulty, weights.model, sound=number % 7, interval=interval)


def test_an_update_that_sent_nothing_is_found_right_after_it(model):
    weights = Copying(model)
    proof, faulty = WeightProof(weights), Faulty(weights, [params(weights.held)])
    for update in range(12):
        faulty.active = update == 11
        nudge(model)
        faulty.publish()
        if faulty.active:
            with pytest.raises(StaleWeightsError, match=r"policy version 12: after an update.*"
                                                        r"differ to the bit: model\.layers.*"
                                                        r"the run names the checkpoint"):
                proof.check()
        else:
            proof.check()


def test_nothing_is_compared_while_updates_wait_and_new_engines_as_a_whole(model):
    inner = Copying(model)
    weights = PeriodicUpdates(inner, interval=2)
    proof = WeightProof(weights, interval=10)
    proof.self_test(Changing(model))
    assert inner.compared == [ALL] and inner.version == 0  # each update would cost an engine
    for _ in range(12):
        nudge(model)
        weights.publish()
        proof.check()
    assert inner.compared == [ALL] * 7


def test_it_cannot_be_switched_off(model):
    with pytest.raises(ValueError, match="interval=0 must be at least 1; the comparison cannot be"):
        WeightProof(SameModule(model), interval=0)


# -- the test at the start -------------------------------------------------------------------------


def test_the_self_test_leaves_version_and_weights_as_they_were(model):
    weights, before = Copying(model), copy.deepcopy(model.state_dict())
    seen = []
    weights.publish = lambda publish=weights.publish: (publish(), seen.append(
        copy.deepcopy(weights.held.state_dict())))
    weights.version = 7
    WeightProof(weights).self_test(Changing(model))
    assert weights.version == 7 and weights.compared == [ALL, ALL]
    assert equal(model.state_dict(), before)
    changed, restored = seen
    assert equal(restored, before)
    assert not any(torch.equal(value, before[name]) for name, value in changed.items())


def test_an_engine_that_starts_from_other_weights_is_found_before_any_step(model):
    inner = Copying(model)
    nudge(model)
    with pytest.raises(StaleWeightsError, match="the engine does not have the weights that the "):
        WeightProof(PeriodicUpdates(inner, interval=2)).self_test(Changing(model))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_way_that_never_arrives_is_found_before_any_step(model, fault):
    weights, before = Copying(model), copy.deepcopy(model.state_dict())
    faulty = Faulty(weights, [params(weights.held)], fault)
    proof = WeightProof(faulty)
    with pytest.raises(StaleWeightsError, match="the self-test changed a few values and"):
        proof.self_test(Changing(model))
    assert weights.version == 0
    assert equal(model.state_dict(), before)


def test_values_are_put_back_where_the_first_update_has_moved_them(model):
    """As on a CPU where the engine copies out of the trainer's memory."""
    weights, before = Copying(model), copy.deepcopy(model.state_dict())

    def moving() -> int:
        for param in model.parameters():
            param.data = param.data.clone()
        return Copying.publish(weights)

    weights.publish = moving
    WeightProof(weights).self_test(Changing(model))
    assert equal(model.state_dict(), before) and equal(weights.held.state_dict(), before)


def test_an_update_that_fails_in_the_self_test_leaves_the_trainers_weights(model):
    weights, before = Copying(model), copy.deepcopy(model.state_dict())

    def fail() -> None:
        raise RuntimeError("the engine is gone")

    weights.publish = fail
    with pytest.raises(RuntimeError, match="the engine is gone"):
        WeightProof(weights).self_test(Changing(model))
    assert weights.version == 0
    assert equal(model.state_dict(), before)


def test_shared_weights_change_only_while_the_engine_that_serves_others_is_paused(model):
    events = []

    class Engine:
        def pause(self, mode, *, timeout):
            events.append("pause")

        def resume(self, *, timeout):
            events.append("resume")

    class Noting(Changing):
        def perturb(self):
            events.append("write")

        restore = perturb

    weights = PausedUpdates(Copying(model), Engine())
    WeightProof(weights).self_test(Noting(model), begin=weights.begin)
    assert events == ["pause", "write", "resume"] * 2


# -- what is changed for it ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7,), (96, 130), (64, 4096), (3, 5, 2)])
def test_changes_reach_every_worker_survive_rounding_and_go_without_a_trace(dtype, shape):
    param = nn.Parameter(torch.randn(shape).to(dtype))
    zeros = nn.Parameter(torch.zeros(shape, dtype=dtype))
    strided = nn.Parameter(torch.randn(*shape, 2).to(dtype)[..., 0])
    before = [p.detach().clone() for p in (param, zeros, strided)]
    change = Perturbation([param, zeros, strided])
    for now, then in zip((param, zeros, strided), before, strict=True):
        rounded = (now.to(torch.bfloat16) * 0.25).eq(then.to(torch.bfloat16) * 0.25)
        for dim in range(now.dim()):
            for shard in rounded.chunk(min(8, now.shape[dim]), dim):
                assert not shard.all()
        assert (now - then).abs().max() < 0.2
    change.undo()
    assert all(torch.equal(now, then) for now, then in zip((param, zeros, strided), before,
                                                           strict=True))
