"""A Ray cluster of three hosts and one that comes later: grpo-async.py on separate networks."""

from __future__ import annotations

import sys

import pytest

from ..support import REPO, wait_until
from .hosts import available, hosts, rows_of

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not available(), reason="needs root and Linux network namespaces"), pytest.mark.timeout(900)]
SCRIPT = REPO / "sota-implementations/grpo/grpo-async.py"
BATCH = 4 * 4  # rows of an iteration


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_survives_a_host_that_vanishes_and_uses_one_that_joins(
        tmp_path, model_folder, backend):
    """The trainer is on host 1, engines are on 2 and 3, of which one is cut off; 4 joins."""
    if backend == "vllm":
        pytest.importorskip("vllm")
    with hosts(tmp_path, 4) as cluster:
        cluster.start_ray(1, head=True)
        for number in (2, 3):
            cluster.start_ray(number)
        run = cluster.start(
            1, sys.executable, str(SCRIPT), f"ray.address={cluster.address(1)}:6379",
            "hydra.run.dir=run", f"model.name={model_folder}", "device=cpu",
            f"inference_model.backend={backend}", "inference_model.num_devices=2",
            "inference_model.max_tokens=8", "env.reward=negative_length", "env.num_envs=4",
            "env.repeats=4", f"train.total_dialog_turns={4000 * BATCH}", "train.eval_frequency=0",
            "train.checkpoint_frequency=0")
        folder = cluster.home(1) / "run"

        def reached(condition, seconds: float) -> None:
            wait_until(condition, seconds=seconds, every=0.5, alive=run,
                       said=lambda: cluster.log(1).read_text()[-3000:])

        def has(workers: int) -> bool:
            rows = rows_of(folder)
            return bool(rows) and rows[-1].get("async/workers") == workers

        def step() -> int:
            return rows_of(folder)[-1]["step"]

        reached(lambda: has(2), 300)
        before = step()
        reached(lambda: step() > before + 2, 100)
        cluster.cut_off(3)
        reached(lambda: has(1), 200)
        gone = step()
        reached(lambda: step() > gone + 3, 100)
        cluster.start_ray(4)
        reached(lambda: has(2), 200)
        back = step()
        reached(lambda: step() > back + 3, 100)
        run.terminate()
        assert run.wait(120) == 143, cluster.log(1).read_text()[-3000:]
    last = rows_of(folder)[-1]
    assert last["async/restarts"] == 1
    # What was in hand on the host that vanished has been sampled anew; no group was given up.
    assert last["async/groups_lost"] > 0 and last["async/groups_dropped"] == 0
    print(f"lost and sampled anew: {last['async/groups_lost']:.0f} groups; steps {before}, {gone}, "
          f"{back}")
