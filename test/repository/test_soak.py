"""benchmarks/soak.py: growth is found in the process that grows, and real runs do not grow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ..support import benchmark

LEAKY = """
import time
kept = []
for _ in range(600):
    kept.append(bytes([1]) * (1 << 20))
    time.sleep(0.1)
"""
MIDDLE = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {LEAKY!r}], stdin=subprocess.DEVNULL)
sys.stdin.read()
"""
# A process with a child whose child grows; the child in the middle ends when a line comes.
FIRST = f"""
import subprocess, sys
middle = subprocess.Popen([sys.executable, "-c", {MIDDLE!r}], stdin=subprocess.PIPE)
sys.stdin.readline()
middle.communicate()
sys.stdin.read()
"""


@pytest.fixture
def soak():
    return benchmark("soak")


def test_what_grows_is_found_by_process_also_without_its_parent(soak):
    process = subprocess.Popen([sys.executable, "-c", FIRST], stdin=subprocess.PIPE)
    family, began = soak.Family(process.pid), time.monotonic()

    def look_until(condition) -> float:
        while not condition():
            now = time.monotonic() - began
            assert now < 60
            family.look(now)
            time.sleep(0.1)
        return time.monotonic() - began

    try:
        look_until(lambda: len(family.known) == 3)
        # Two that are seen at the same time are in the order of their numbers, which begin anew.
        found = {pid: watched for (pid, _), watched in family.known.items()}
        parents = soak.parents()
        (middle_pid,) = (pid for pid in found if parents[pid][0] == process.pid)
        first, middle = found.pop(process.pid), found.pop(middle_pid)
        (leaky,) = found.values()
        process.stdin.write(b"\n")
        process.stdin.flush()
        alone = look_until(lambda: time.monotonic() - began > middle.seen[-1][0] + 1)
        look_until(lambda: sum(at > alone for at, _ in leaky.seen) >= 20)
        assert abs(first.slope(after=alone)) < 1 < 10 < leaky.slope(after=alone)
        assert middle.slope(after=alone) is None
    finally:
        process.communicate()
        for pid, start in family.known:
            if soak.parents().get(pid, (0, 0))[1] == start:
                os.kill(pid, signal.SIGKILL)


def test_the_line_begins_after_the_first_minutes(soak):
    watched = soak.Watched("one", [(float(at), min(at, 300.0)) for at in range(600)])
    assert watched.slope(after=0.0) > 20 and watched.slope(after=300.0) == pytest.approx(0.0)
    found = {"run": {"processes": {"a": {"mib_per_minute": 1.0}, "b": {"mib_per_minute": 0.99}}}}
    assert soak.growing(found, 1.0) == ["run: a"]
    assert soak.by_minute([(0.0, 1.0), (30.0, 3.0), (61.0, 5.0)]) == [2.0, 5.0]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_no_process_of_a_real_run_grows(soak, python, tmp_path):
    """Short, so the bound is wider than the one of half an hour."""
    pytest.importorskip("vllm")
    out = tmp_path / "result.json"
    with pytest.raises(SystemExit) as ended:
        soak.main(["--minutes", "2", "--settle", "0.7", "--interval", "1", "--bound", "8",
                   "--atropos-python", str(python), "--work", str(tmp_path / "runs"),
                   "--out", str(out)])
    result = json.loads(out.read_text())
    assert (ended.value.code, result["growing"], result["complete"]) == (0, [], True)
    names = {run: " ".join(found["processes"]) for run, found in result["runs"].items()}
    assert all(name in names["async"] for name in (
        "grpo-async.py", "ray::RolloutWorker", "gcs_server", "raylet"))
    assert all(name in names["atropos"] for name in (
        "grpo.run.cli.launch", "grpo.atropos.hub_server", "grpo.server.serve",
        "arithmetic_env.py"))
    assert all(found["steps"] > 10 and found["ending"] for found in result["runs"].values())
