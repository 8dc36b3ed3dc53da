"""What the leader of several ranks tells the others, and what they make of it."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from grpo.training import checkpoint, team
from grpo.training.checkpoint_files import NotSavedError
from grpo.training.team import LedLearner, obey
from grpo.weights.fingerprint import ALL, Part
from grpo.weights.transfer import WeightTransfer

from ..weights.receivers import ThreadedEngine, Worker, vllm_like


class Leader:
    """Remembers what it has told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.ranks = SimpleNamespace(share=lambda batch: batch, rank=1)

    @contextmanager
    def together(self, *order):
        self.told.append(order)
        yield


class Learner:
    """As much of a learner as is told to update."""

    def __init__(self, **coefficients) -> None:
        terms = SimpleNamespace(**{"kl_to_ref_coeff": 0.1, "entropy_coeff": None, **coefficients})
        self.loss = SimpleNamespace(terms=terms, actor_network=torch.nn.Linear(1, 1))
        self.optimizer, self.ranks = None, Leader().ranks
        self.updates: list[tuple] = []

    def update(self, rollout, *, iteration):
        self.updates.append((iteration, self.loss.terms.kl_to_ref_coeff,
                             self.loss.terms.entropy_coeff))
        return {}

    def perturb(self):
        self.updates.append("perturb")

    def restore(self):
        self.updates.append("restore")


@pytest.fixture
def follow(monkeypatch):
    """Let a rank do what a leader has told."""

    def run(leader: Leader, learner, weights=None) -> None:
        orders = iter([*leader.told, ("stop",)])
        monkeypatch.setattr(team.dist, "broadcast_object_list",
                            lambda box, **_: box.__setitem__(0, next(orders)))
        obey(learner, weights)

    return run


def test_all_ranks_train_with_the_coefficients_that_controllers_set_on_the_first(follow):
    leader, first, other = Leader(), Learner(), Learner()
    led = LedLearner(first, leader)
    led.update(None, iteration=0)
    first.loss.terms.kl_to_ref_coeff, first.loss.terms.entropy_coeff = 0.7, 0.01
    led.update(None, iteration=1)
    # Of the checkpoint or the run before, which the first no longer has.
    other.loss.terms.kl_to_ref_coeff = 0.3
    other.ranks.share = lambda batch: batch
    follow(leader, other)
    assert other.updates == first.updates == [(0, 0.1, None), (1, 0.7, 0.01)]


class RealLeader(team.Leader):
    """One whose orders are remembered in place of being sent."""

    def __init__(self) -> None:
        self.told: list[str] = []
        super().__init__(SimpleNamespace(leave=lambda: self.told.append("left")))

    @contextmanager
    def together(self, *order):
        self.told.append(order[0])
        yield


def test_ranks_that_may_be_in_the_middle_of_something_are_told_nothing():
    leader = RealLeader()
    with pytest.raises(KeyboardInterrupt), leader:
        raise KeyboardInterrupt
    assert leader.told == []


@pytest.mark.parametrize(("error", "told"), [
    (torch.OutOfMemoryError("no memory left on this GPU"), False),
    (KeyboardInterrupt(), False),
    (FloatingPointError("the gradient norm is nan"), True)])  # by all ranks, at the same place
def test_nothing_is_told_after_an_error_of_the_leader_alone(monkeypatch, error, told):
    sent = []
    monkeypatch.setattr(team.dist, "broadcast_object_list",
                        lambda box, **_: sent.append(box[0][0]))
    leader = team.Leader(SimpleNamespace(share=lambda batch: batch))
    learner = Learner()
    learner.update = Mock(side_effect=error)
    learner.optimizer = SimpleNamespace(state_dict=dict)
    led = LedLearner(learner, leader)
    with pytest.raises(type(error)):
        led.update(None, iteration=0)
    if told:
        led.optimizer.state_dict()
        assert sent == ["update", "optimizer"]
        return
    for call in (led.gathering().__enter__, led.optimizer.state_dict,
                 leader.together("publish", 1).__enter__):
        with pytest.raises(RuntimeError, match="in the middle of 'update', in which rank 0 failed"):
            call()
    assert sent == ["update"]


@pytest.mark.parametrize(("broken", "told"), [
    ((checkpoint, "gather_trained"), ["save"]),  # in which the others are still
    ((checkpoint, "save_trained"), ["save", "optimizer"]),
    ((Path, "mkdir"), ["optimizer"])])
def test_after_a_save_that_failed_the_others_are_told_more_unless_they_are_in_its_middle(
        monkeypatch, tmp_path, make_model, broken, told):
    sent = []
    monkeypatch.setattr(team.dist, "broadcast_object_list",
                        lambda box, **_: sent.append(box[0][0]))
    monkeypatch.setattr(*broken, Mock(side_effect=OSError(122, "quota exceeded")))
    leader, learner, model = team.Leader(None), Learner(), make_model(dtype=torch.float32)
    learner.optimizer = SimpleNamespace(state_dict=dict)
    led = LedLearner(learner, leader)
    with pytest.raises(NotSavedError, match="quota exceeded"):
        checkpoint.save_checkpoint(tmp_path, 1, model=model, tokenizer=Mock(), state={},
                                   config={}, gathering=led.gathering)
    if "optimizer" in told:
        led.optimizer.state_dict()
    else:
        assert leader.interrupted == "save"
        with pytest.raises(RuntimeError, match="in the middle of 'save', in which rank 0 failed"):
            led.optimizer.state_dict()
    assert sent == told


class Transfer:
    """Counts what a rank takes part in."""

    def __init__(self) -> None:
        self.version, self.calls = 0, []

    def publish(self) -> int:
        self.calls.append(("publish", self.version))
        self.version += 1
        return self.version

    def differing(self, part=ALL) -> list[str]:
        self.calls.append(("differing", part))
        return []


def test_all_ranks_take_part_in_an_update_and_a_comparison_with_one_version(follow, make_model):
    leader, other, model = Leader(), Transfer(), make_model(dtype=torch.float32)
    engine = ThreadedEngine([Worker(vllm_like(model))])
    led = WeightTransfer(model, engine, backend="ipc", tell=leader.together)
    led.version = 6  # of a checkpoint
    assert (led.publish(), led.version) == (7, 7)
    assert led.publish() == 8 and led.differing(Part(1, 2)) == led.unshared() == []
    led.close()
    follow(leader, Learner(), other)
    assert other.calls == [("publish", 6), ("publish", 7), ("differing", Part(1, 2))]


def test_all_ranks_change_their_slices_for_the_self_test_and_put_them_back(follow):
    leader, first, other = Leader(), Learner(), Learner()
    led = LedLearner(first, leader)
    led.perturb()
    led.restore()
    follow(leader, other)
    assert other.updates == first.updates == ["perturb", "restore"]
