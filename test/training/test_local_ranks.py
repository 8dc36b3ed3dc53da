"""The trainer's other ranks as child processes: their end is noticed, and nothing is left."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from grpo.training import local_ranks
from grpo.training.local_ranks import LocalRanks, RankDied

from ..support import REPO, wait_until

# Each rank does what is written for it.
RANK = """
import json, sys
ready, order = sys.argv[1:]
join = json.loads(order)["join"]
exec(json.loads(order)["sources"][join["rank"] - 1])
"""
DIES = "import sys\nsys.exit('out of memory, say')\n"
LIVES = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def team(tmp_path):
    """Ranks that run some source in the place of a trainer's rank."""

    def make(*sources: str, **options) -> LocalRanks:
        (tmp_path / "made_up_rank.py").write_text(RANK)
        return LocalRanks("made_up_rank", {"sources": sources}, count=1 + len(sources),
                          device_type="cpu", folder=tmp_path / "logs",
                          environments=[{"PYTHONPATH": f"{tmp_path}:{REPO}"}] * len(sources),
                          **{"settle": 0.0, **options})

    return make


def raises(check) -> bool:
    try:
        check()
    except RankDied:
        return True
    return False


def test_a_rank_that_ends_is_named_with_its_last_words(team):
    with team(LIVES, DIES) as ranks:
        wait_until(lambda: raises(ranks.check))
        with pytest.raises(RankDied, match=r"rank 2 of the trainer ended with exit code 1.*"
                                           r"trainer_rank_2\.log:\n  \| out of memory, say"):
            ranks.check()


def test_ranks_that_live_are_no_error_and_end_with_the_run(team):
    with team(LIVES, LIVES) as ranks:
        ranks.check()
        pids = ranks.pids
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_error_here_is_explained_by_the_death_that_caused_it(team):
    lost = RuntimeError("connection closed by peer")
    with pytest.raises(RankDied, match="out of memory") as caught, team(DIES, settle=10.0):
        raise lost  # before the process is gone
    assert caught.value.__cause__ is lost


@pytest.mark.parametrize("error", [RuntimeError("no reward"), ValueError("a mistake")])
def test_an_error_of_the_runs_own_stays_what_it_is(team, error):
    with pytest.raises(type(error), match=str(error)), team(LIVES):
        raise error


def test_a_rank_that_ends_before_it_was_ready_is_not_waited_for(team):
    with pytest.raises(RankDied, match="(?s)rank 2 of the trainer ended.*out of memory"), team(
            LIVES, DIES) as ranks:
        ranks.meet(device_index=None)


def test_a_rank_that_is_never_ready_is_not_waited_for(team):
    with pytest.raises(RankDied, match=r"(?s)rank 1 .* was not ready within 0\.5 s.*\| here"), team(
            LIVES) as ranks:
        ranks.meet(device_index=None, start_timeout=0.5)


@pytest.mark.slow
def test_the_ranks_meet_and_one_that_is_killed_ends_the_run_with_the_reason(team):
    joins = ("from grpo.training.ranks import Ranks\nimport pathlib, torch\n"
             "pathlib.Path(ready).touch()\nranks = Ranks.join(**join)\n"
             "ranks.sum(torch.ones(1))\nranks.sum(torch.ones(1))\nimport os; os.abort()\n")
    with ExitStack() as at_end, pytest.raises(RankDied, match="rank 1 .* signal SIGABRT"):
        with team(joins, settle=10.0) as others:
            ranks = others.meet(device_index=None)
            at_end.callback(ranks.leave)
            ones = torch.ones(1)
            assert [ranks.sum(ones).item(), ranks.sum(ones).item()] == [2, 2]
            ranks.sum(ones)  # fails when the connection is closed


def test_a_run_that_hears_no_error_is_ended(team, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(local_ranks.os, "_exit", lambda code: ended.set())
    with team(DIES, patience=0.1):
        assert ended.wait(10.0)  # while this thread waits in a GPU's queue
    assert "rank 1 of the trainer ended with exit code 1" in capsys.readouterr().err


def test_a_rank_that_lives_lets_the_run_go_on(team, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(local_ranks.os, "_exit", lambda code: ended.set())
    with team(LIVES, patience=0.0):
        assert not ended.wait(0.6)
