"""``grpo.py`` on several devices, on a CPU processes: the updates are those of one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ..support import wait_until
from ..training.runs import timeless
from .test_arrangements import LORA, PROCESS, TINY, TWO, check_run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# At a constant learning rate a run that is made longer is the same run.
RUN = (*TINY, PROCESS, "train.checkpoint_frequency=1", "optimizer.schedule=constant")
TRANSFER = ("inference_model.weight_sync=transfer",)


@pytest.mark.parametrize("way", [TRANSFER, LORA], ids=["weights", "adapters"])
def test_two_ranks_make_the_updates_of_one_and_each_goes_on_from_the_others_checkpoint(runner, way):
    run, short = (*RUN, *way), "train.total_dialog_turns=64"
    runner.run(*run, short, "hydra.run.dir=outputs/one")
    runner.run(*run, short, TWO, "hydra.run.dir=outputs/two")
    one, two = (timeless(check_run(runner, name, iterations=2)) for name in ("one", "two"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    runner.run(*run, TWO, "resume=outputs/one")  # the third iteration, by another number
    runner.run(*run, "resume=outputs/two")
    one, two = (timeless(check_run(runner, name)) for name in ("one", "two"))
    assert two[-1] == pytest.approx(one[-1], abs=1e-4)
    assert runner.left_behind() == []


def test_a_rank_that_is_killed_ends_the_run_which_can_go_on(runner):
    process = runner.start(*RUN, *TRANSFER, TWO, "train.total_dialog_turns=32000",
                           "hydra.run.dir=outputs/run")
    run_dir = runner.folder / "outputs" / "run"
    wait_until((run_dir / "checkpoints" / "step_000002").is_dir, seconds=120.0, alive=process)
    (rank,) = (pid for pid in children(process.pid) if is_rank(pid))
    os.kill(rank, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 of the trainer ended with signal SIGKILL" in output
    assert "resume=auto" in output and "Traceback" not in output
    assert runner.left_behind() == []
    last = max((run_dir / "checkpoints").iterdir()).name
    turns = 32 * (int(last.removeprefix("step_")) + 1)
    assert f"resumed at iteration {int(last.removeprefix('step_'))}" in runner.run(
        *RUN, *TRANSFER, TWO, f"train.total_dialog_turns={turns}", "resume=auto")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_rank(pid: int) -> bool:
    return "grpo.run.rank_worker" in Path(f"/proc/{pid}/cmdline").read_text()
