"""Signals while all ranks are at an order: it is finished, so that the others can be told more."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from grpo.training import team
from grpo.training.stopping import Stopped, StopRequests
from grpo.weights import gather
from grpo.weights.adapters import make_lora
from grpo.weights.channel import TransferError
from grpo.weights.fleet import FleetLoRA, ObjectStoreSync
from grpo.weights.gather import TrainerRanks
from grpo.weights.lora import HTTPLoRASync
from grpo.weights.stock import StockLoRA
from grpo.weights.transfer import WeightTransfer

from ..collectors.asynchronous import LocalPool
from ..weights.receivers import ThreadedEngine, Worker, vllm_like

SIGTERM, SECOND_CTRL_C = [signal.SIGTERM], [signal.SIGINT] * 2


@pytest.fixture
def leader(monkeypatch):
    """One whose orders are remembered in place of being sent."""
    sent: list[str] = []
    monkeypatch.setattr(team.dist, "broadcast_object_list",
                        lambda box, **_: sent.append(box[0][0]))
    leader = team.Leader(SimpleNamespace(share=lambda batch: batch,
                                         leave=lambda: sent.append("left")))
    leader.sent = sent
    return leader


def come(signals: list[int]) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


def led_optimizer(leader) -> team._LedOptimizer:
    """The first that is told when a run is saved."""
    return team._LedOptimizer(SimpleNamespace(state_dict=dict), leader)


def scorer(leader, signals: list[int], finished: list) -> team.LedScorer:
    """One that signals strike while all ranks score."""

    def score(*_):
        come(signals)
        finished.append("scored")

    return team.LedScorer(SimpleNamespace(scorer=score, actor_network=torch.nn.Linear(1, 1)),
                          leader)


def test_a_run_that_is_stopped_while_all_ranks_score_can_be_saved(leader):
    """As where the log-probs of an environment are unknown."""
    finished, rows = [], torch.ones(1, 2, dtype=torch.long)
    with StopRequests() as requests:
        with pytest.raises(Stopped), requests.at_once():
            scorer(leader, SIGTERM, finished)(rows, rows, rows)
            pytest.fail("what is dropped was used")
        assert finished == ["scored"]
        led_optimizer(leader).state_dict()
    assert leader.interrupted is None and leader.sent == ["score", "optimizer"]


def test_a_second_ctrl_c_ends_what_all_ranks_are_at(leader):
    finished, rows = [], torch.ones(1, 2, dtype=torch.long)
    with StopRequests() as requests:
        with pytest.raises(Stopped), requests.at_once():
            scorer(leader, SECOND_CTRL_C, finished)(rows, rows, rows)
        assert not finished and leader.interrupted == "score"
        with pytest.raises(RuntimeError, match="in the middle of 'score'"):
            led_optimizer(leader).state_dict()
    assert leader.sent == ["score"]


class PoolWorker:
    """Takes anything."""

    def describe(self) -> dict:
        return {"failure": None}

    def load_state(self, *_) -> float:
        return 0.0

    load_adapter = load_state

    def fingerprints(self, names, timeout) -> dict:
        return dict.fromkeys(names)


@pytest.fixture
def of_a_fleet(make_model):
    def make(way, leader):
        pool = LocalPool(lambda number: PoolWorker(), count=1, max_restarts=1)
        pool.start()
        return way(make_lora(make_model(dtype=torch.float32), r=2), pool, tell=leader.together)

    return make


@pytest.fixture
def transfer(make_model, leader) -> WeightTransfer:
    model = make_model(dtype=torch.float32)
    return WeightTransfer(model, ThreadedEngine([Worker(vllm_like(model))]), backend="ipc",
                          tell=leader.together)


@pytest.fixture
def ways(make_model, of_a_fleet, transfer, tmp_path, leader):
    """What reaches engines, by name; made when it is called."""
    pytest.importorskip("peft")

    def lora():
        return make_lora(make_model(dtype=torch.float32), r=2)

    return {
        "transfer": lambda: transfer,
        "fleet": lambda: of_a_fleet(ObjectStoreSync, leader),
        "fleet's adapters": lambda: of_a_fleet(FleetLoRA, leader),
        "server's adapters": lambda: HTTPLoRASync(Mock(), lora(), folder=tmp_path,
                                                  tell=leader.together),
        "stock server's adapters": lambda: StockLoRA(lora(), Mock(), tmp_path,
                                                     tell=leader.together)}


@pytest.fixture
def strike(monkeypatch):
    """Let signals come while parameters are gathered; returns whether all of them were."""

    def begin(signals: list[int]) -> list[bool]:
        gathered, whole = [], TrainerRanks.whole

        def interrupted(self, named):
            for number, entry in enumerate(whole(self, named)):
                if number == 1:
                    come(signals)
                yield entry
            gathered.append(True)

        monkeypatch.setattr(gather.TrainerRanks, "whole", interrupted)
        return gathered

    return begin


ORDERS = [("transfer", "differing", "differing"),
          ("fleet", "publish", "gather"), ("fleet", "differing", "gather"),
          ("fleet's adapters", "publish", "adapters"),
          ("fleet's adapters", "differing", "adapters"),
          ("server's adapters", "publish", "adapters"),
          ("server's adapters", "differing", "adapters"),
          ("stock server's adapters", "publish", "adapters"),
          ("stock server's adapters", "differing", "adapters")]


@pytest.mark.parametrize(("way", "does", "order"), ORDERS)
@pytest.mark.parametrize("signals", [SIGTERM, SECOND_CTRL_C], ids=["once", "insisted"])
def test_parameters_of_which_some_are_gathered_all_are_unless_somebody_insists(
        leader, ways, strike, way, does, order, signals):
    """Otherwise the next order would go into the middle of the gathering, and be waited for."""
    weights = ways[way]()
    gathered = strike(signals)
    with StopRequests() as requests:
        with pytest.raises(Stopped), requests.at_once():
            getattr(weights, does)()
            pytest.fail("what is dropped was used")
        if signals is SECOND_CTRL_C:
            assert not gathered and leader.interrupted == order
            with pytest.raises(RuntimeError, match=f"in the middle of '{order}'"):
                led_optimizer(leader).state_dict()
            assert leader.sent == [order]
        else:
            led_optimizer(leader).state_dict()
            assert gathered and leader.sent == [order, "optimizer"]


def test_an_update_that_has_begun_is_finished_unless_somebody_insists(leader, transfer):
    transfer.engine.pause = lambda *_, **__: come(SIGTERM)
    with StopRequests() as requests:
        with pytest.raises(Stopped), requests.at_once():
            transfer.publish()
            pytest.fail("what is dropped was used")
        led_optimizer(leader).state_dict()
    assert transfer.version == transfer.engine.version == 1
    assert leader.sent == ["publish", "optimizer"]
    transfer.engine.pause = lambda *_, **__: come(SECOND_CTRL_C)
    with StopRequests() as requests, pytest.raises(Stopped), requests.at_once():
        transfer.publish()
    assert transfer.engine.version == 1 and leader.interrupted == "publish"


def test_after_an_update_that_failed_on_all_ranks_they_are_told_more(leader, transfer):
    transfer.engine.pause = Mock(side_effect=TransferError("the engine is gone"))
    with pytest.raises(TransferError, match="the engine is gone"):
        transfer.publish()
    led_optimizer(leader).state_dict()
    assert leader.sent == ["publish", "optimizer"]


def test_after_an_adapter_that_could_not_be_written_all_ranks_are_told_more(
        leader, ways, monkeypatch):
    weights = ways["server's adapters"]()
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=OSError("quota exceeded")))
    with pytest.raises(OSError, match="quota exceeded"):
        weights.publish()
    led_optimizer(leader).state_dict()
    assert leader.sent == ["adapters", "optimizer"]


@pytest.mark.parametrize(("error", "told"), [(TransferError("the engine is gone"), True),
                                             (Stopped(signal.SIGINT), False)])
def test_ranks_are_told_of_a_failure_but_not_waited_for_by_one_that_is_ended(
        monkeypatch, error, told):
    ranks, sent = TrainerRanks(torch.nn.Linear(1, 1)), []
    ranks.count = 2
    monkeypatch.setattr(gather.dist, "broadcast", lambda failed, source: sent.append(bool(failed)))
    with pytest.raises(type(error)), ranks.agreed():
        raise error
    assert sent == [True] * told


def test_ranks_leave_together_though_a_signal_comes(leader, monkeypatch):
    leave = leader.ranks.leave
    leader.ranks.leave = lambda: (come(SIGTERM), leave())
    with StopRequests() as requests, pytest.raises(Stopped), requests.at_once(), leader:
        pass
    assert leader.sent == ["stop", "left"]
