"""The trainer's other ranks as child processes: their end is noticed, and nothing is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from grpo.training import local_ranks
from grpo.training.local_ranks import LocalRanks, RankDied

DIES = "import sys\nsys.exit('out of memory, say')\n"
LIVES = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def team(tmp_path):
    """Ranks that run some source in the place of a trainer's rank."""

    def make(*sources: str, **options) -> LocalRanks:
        # One module for all: each rank does what its order says.
        (tmp_path / "made_up_rank.py").write_text(
            "import json, sys\nexec(json.loads(sys.argv[1])['source'])\n")
        return LocalRanks([{"source": source} for source in sources], folder=tmp_path / "logs",
                          environments=[{"PYTHONPATH": str(tmp_path)}] * len(sources),
                          module="made_up_rank", **{"settle": 0.0, **options})

    return make


def wait_until(condition, *, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


def test_a_rank_that_ends_before_it_has_joined_is_not_waited_for(team, tmp_path):
    started = time.monotonic()
    with pytest.raises(RankDied, match="out of memory"), team(DIES) as ranks:
        ranks.meet(device_type="cpu", count=2, timeout=3.0, address=f"file://{tmp_path}/meet")
    assert time.monotonic() - started < 2.5


def test_a_rank_that_does_not_come_is_not_waited_for(team, tmp_path):
    with pytest.raises(RankDied, match=r"did not meet within 0\.5 s.*\| here"), team(
            LIVES) as ranks:
        ranks.meet(start_timeout=0.5, device_type="cpu", count=2, timeout=1.0,
                   address=f"file://{tmp_path}/meet")


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
