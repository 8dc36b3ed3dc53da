"""A worker that imports first and learns later what it is."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from grpo.collectors import rollout_worker
from grpo.collectors.rollout_worker import RolloutWorker
from grpo.collectors.worker_actor import CALLS, WorkerActor, _handed_on


def test_every_call_of_a_worker_is_handed_on():
    """But its end, which is that of the process."""
    public = {name for name, member in vars(RolloutWorker).items()
              if callable(member) and not name.startswith("_")}
    assert CALLS.keys() == public - {"close"}


def test_a_call_waits_until_the_worker_is_built(monkeypatch):
    prepared = []
    monkeypatch.setattr(rollout_worker, "RolloutWorker", lambda *args: SimpleNamespace(
        submit=lambda leases: [args, leases]))
    actor, answers = WorkerActor(lambda: prepared.append(True)), []
    asking = threading.Thread(
        target=lambda: answers.append(_handed_on("submit")(actor, [1])), daemon=True)
    asking.start()
    time.sleep(0.05)
    assert prepared == [True] and answers == []
    actor.build("build", "setup", 0, [])
    asking.join(timeout=10.0)
    assert answers == [[("build", "setup", 0, []), [1]]]


def test_what_fails_in_building_is_raised_by_each_call_and_logged(monkeypatch, capsys):
    def fail(*args):
        raise ValueError("no memory\nis left")

    monkeypatch.setattr(rollout_worker, "RolloutWorker", fail)
    actor = WorkerActor(lambda: None)
    actor.build()
    for _ in range(2):
        with pytest.raises(ValueError, match="no memory"):
            _handed_on("describe")(actor)
    assert "no memory" in capsys.readouterr().err
