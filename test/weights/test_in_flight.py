"""Updates of an engine that serves others, and updates that only sometimes reach it."""

from __future__ import annotations

import pytest

from grpo.weights.fingerprint import ALL, Part
from grpo.weights.in_flight import PausedUpdates, PeriodicUpdates


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self, mode, *, timeout) -> None:
        self.calls.append(f"pause {mode}")

    def resume(self, *, timeout) -> None:
        self.calls.append("resume")


class Weights:
    """Weights that say when they were published."""

    def __init__(self, calls: list[str], *, fails: bool = False) -> None:
        self.calls, self.fails, self.version = calls, fails, 0

    def publish(self, *, now: bool = False) -> int:
        if self.fails:
            raise RuntimeError("the engine is gone")
        self.calls.append("publish")
        self.version += 1
        return self.version

    def differing(self, part=ALL):
        return part.choose("ab")

    def unshared(self):
        return ["b"]


def test_an_engine_is_paused_from_the_first_write_until_it_has_the_weights():
    engine = Engine()
    weights = PausedUpdates(Weights(engine.calls), engine)
    weights.begin()
    engine.calls.append("write")
    weights.begin()  # a second optimizer step on the same batch
    engine.calls.append("write")
    assert weights.publish() == 1
    assert engine.calls == ["pause keep", "write", "write", "publish", "resume"]
    weights.publish()
    assert engine.calls[5:] == ["pause keep", "publish", "resume"]


def test_an_update_that_fails_leaves_the_engine_paused_until_it_is_let_go():
    engine = Engine()
    weights = PausedUpdates(Weights(engine.calls, fails=True), engine)
    with pytest.raises(RuntimeError, match="gone"):
        weights.publish()
    assert weights.paused and engine.calls == ["pause keep"]
    weights.end()
    weights.end()
    assert engine.calls == ["pause keep", "resume"]


@pytest.mark.parametrize("make", [lambda w: PausedUpdates(w, Engine()),
                                  lambda w: PeriodicUpdates(w, interval=2)])
def test_everything_else_is_that_of_the_weights(make):
    inner = Weights([])
    weights = make(inner)
    weights.version = 7  # a run that goes on
    assert (inner.version, weights.version) == (7, 7)
    assert (weights.differing(Part(0, 2)), weights.unshared()) == (["a"], ["b"])


def test_what_is_pending_can_be_published_early_and_the_interval_begins_anew():
    calls: list[str] = []
    weights = PeriodicUpdates(Weights(calls), interval=3)
    assert (weights.publish(), calls, weights.pending) == (0, [], 1)
    assert (weights.publish(now=True), weights.pending) == (1, 0)
    assert [weights.publish() for _ in range(3)] == [1, 1, 2]


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="interval=0 must be at least 1"):
        PeriodicUpdates(Weights([]), interval=0)
