"""benchmarks/load.py: what it finds, and that nothing is lost or used twice under kills."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ..support import benchmark


@pytest.fixture
def load():
    return benchmark("load")


def settings(folder: Path, groups: int) -> argparse.Namespace:
    return argparse.Namespace(folder=folder, groups=groups, seed=0)


def test_what_is_lost_used_twice_or_undone_is_found(load, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "kind_of", lambda number, seed: (number == 5, 0.5))
    monkeypatch.setattr(load, "acknowledged", lambda journal: load.Counter([0, 1, 2, 3, 4, 5, 1]))
    (tmp_path / "accepted").write_text("".join(f"{number}\n" for number in range(7)))
    rows = [{"begin": 0}, {"step": 1, "groups": [0, 1]}, {"step": 2, "groups": [2, 3]},
            {"begin": 1}, {"step": 2, "groups": [3, 1]}]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load.compare(settings(tmp_path, 8)) == {
        "accepted": 7, "acknowledged": 6, "acknowledged_twice": 1, "trained": 4, "left_out": 1,
        "trained_though_bad": 0, "lost": 3, "trained_twice": 1, "undone": 1,
        "in_steps_that_stay": 3}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_used_twice_under_kills_of_hub_and_trainer(load, tmp_path):
    groups = 2000
    found = load.main(["--groups", str(groups), "--kills", "4", "0", "4", "--engine-share", "0",
                       "--folder", str(tmp_path / "site"), "--out", str(tmp_path / "result.json")])
    assert found["accepted"] == found["acknowledged"] == groups
    assert found["trained"] + found["left_out"] == groups and found["left_out"] > 20
    assert found["lost"] == found["acknowledged_twice"] == found["trained_twice"] == 0
    assert found["trained_though_bad"] == found["undone"] == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["kills"]) == 8 and result["complete"]
