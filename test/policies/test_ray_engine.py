"""Answers of Ray's actors: what counts as a death, what it says of it, and how many are taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, EngineDied, WorkerPool, answer

ray = pytest.importorskip("ray")

START_FAILURE = """The actor died because of an error raised in its creation task, \
\x1b[36mray::W\x1b[0m
  File "worker.py", line 3, in __init__
    raise ValueError("too small:\\ntake more")
ValueError: too small:
take more"""


class StartFailure(ray.exceptions.RayError):
    actor_init_failed = True


def answered_by(monkeypatch, error: Exception) -> None:
    def get(ref, timeout):
        raise error

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.parametrize("name", [
    "OutOfMemoryError", "NodeDiedError", "WorkerCrashedError", "LocalRayletDiedError"])
def test_whatever_ends_a_worker_is_a_death(monkeypatch, name):
    kind = getattr(ray.exceptions, name)
    error = kind.__new__(kind)
    Exception.__init__(error, "gone")
    error.message = "gone"  # what those have that print it
    answered_by(monkeypatch, error)
    with pytest.raises(EngineDied, match="rollout worker 0 died during finished: "):
        answer("ref", timeout=1.0, who="rollout worker 0", what="finished")


def test_an_answer_that_is_late_is_no_death(monkeypatch):
    answered_by(monkeypatch, ray.exceptions.GetTimeoutError("late"))
    with pytest.raises(EngineError, match="no answer to finished within 1 s") as raised:
        answer("ref", timeout=1.0, who="rollout worker 0", what="finished")
    assert not isinstance(raised.value, EngineDied)


def test_an_error_of_several_lines_keeps_them(monkeypatch):
    cause = ValueError("too small:\ntake more")
    answered_by(monkeypatch, ray.exceptions.RayTaskError("describe", "traceback", cause))
    with pytest.raises(EngineError) as raised:
        answer("ref", timeout=1.0, who="rollout worker 0", what="describe")
    assert str(raised.value).splitlines() == [
        "rollout worker 0: describe failed: ValueError: too small:", "take more"]


def test_a_worker_that_could_not_start_says_why(monkeypatch):
    answered_by(monkeypatch, StartFailure(START_FAILURE))
    with pytest.raises(EngineDied) as raised:
        answer("ref", timeout=1.0, who="rollout worker 0", what="describe")
    assert str(raised.value).splitlines() == [
        "rollout worker 0 died during describe: The actor died because of an error raised in its "
        "creation task, ray::W", "ValueError: too small:", "take more"]


def test_all_answers_that_are_there_are_taken_at_once(monkeypatch):
    there = {"a", "c"}

    def wait(refs, *, num_returns, timeout):
        ready = [ref for ref in refs if ref in there][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    monkeypatch.setattr(ray, "wait", wait)
    calls = [Call(0, 0, "score", ref) for ref in "abc"]
    pool = WorkerPool(lambda number: None, count=1)
    assert pool.wait(calls, timeout=1.0) == [calls[0], calls[2]]


def test_a_call_of_a_worker_that_is_replaced_as_it_is_sent_does_not_bury_the_new_one():
    class Old:
        def remote(self) -> str:  # while the arguments are packed, another thread heals
            pool.dead[0] = "gone"
            pool.revive()
            return "of the old one"

    new = SimpleNamespace(describe=SimpleNamespace(remote=lambda: "of the new one"))
    pool = WorkerPool(lambda number: new, count=1)
    pool.actors, pool.about = [SimpleNamespace(score=Old())], [{}]
    pool._end = lambda actor: None
    pool.wait = lambda calls, *, timeout: calls
    pool.result = lambda call, *, timeout: {}
    call = pool.send(0, "score")
    assert pool.lives == [1] and pool.lost(call)
    pool.bury(call, "it died")
    assert not pool.dead
