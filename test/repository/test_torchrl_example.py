"""examples/torchrl_loop.py: TorchRL's collectors around this package's loss and weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

REPO = Path(__file__).resolve().parents[2]


def rewards(*arguments: str) -> list[float]:
    """Mean reward of each batch; the versions of their weights are counted on the way."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", REPO / "examples/torchrl_loop.py", *arguments],
        capture_output=True, text=True, timeout=300,
        # TorchRL would take a Ray that something else on this machine has started.
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"})
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^version (\d+): reward (-?[\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(version) for version, _ in found] == list(range(len(found)))
    return [float(reward) for _, reward in found]


@pytest.mark.slow
def test_the_policy_learns_and_a_ray_actor_collects_the_same_batches():
    here = rewards()
    assert len(here) == 20 and fmean(here[-5:]) > fmean(here[:5]) + 2
    pytest.importorskip("ray")
    assert rewards("--ray", "--iterations", "3") == pytest.approx(here[:3], abs=0.2)
