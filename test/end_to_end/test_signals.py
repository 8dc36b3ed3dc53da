"""SIGTERM and Ctrl-C to whole runs: code, report, and a checkpoint that ``resume=auto`` finds."""

from __future__ import annotations

import signal

import pytest

from .conftest import ASYNC, SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = ("model.warm_start_steps=20", "env.num_envs=8", "env.repeats=4", "train.eval_frequency=0",
       "train.checkpoint_frequency=0", "optimizer.schedule=constant", "optimizer.lr=1e-3",
       "train.total_dialog_turns=320000")
HERE, VLLM = "inference_model.backend=transformers", "inference_model.backend=vllm"
PROCESS = "inference_model.engine=process"

KINDS = {
    "sync": (SCRIPT, (HERE,)),
    "vllm": (SCRIPT, (VLLM,)),
    "process": (SCRIPT, (VLLM, PROCESS)),
    "ranks": (SCRIPT, (VLLM, PROCESS, "inference_model.weight_sync=transfer",
                       "train_model.num_devices=2")),
    "async": (ASYNC, (HERE, "inference_model.num_devices=2", "train.staleness=1")),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.vllm] if VLLM in options else [])
    for kind, (_, options) in KINDS.items()])
def test_a_signal_ends_a_run_with_its_code_and_resume_auto_goes_on(runner, kind, number):
    script, options = KINDS[kind]
    if script == ASYNC:
        pytest.importorskip("ray")
    process = runner.start(*RUN, *options, "hydra.run.dir=outputs/run", script=script)
    run_dir = runner.folder / "outputs" / "run"
    runner.wait_for_rows(process, run_dir, 4)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output[-4000:]
    assert f"stopped by {number.name}" in output and "resume=auto" in output
    assert "Traceback" not in output and (run_dir / "report.html").exists()
    reached = runner.metrics(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / f"step_{reached:06d}" / "info.json").exists()
    assert runner.left_behind() == []
    output = runner.run(*RUN, *options, f"train.total_dialog_turns={32 * (reached + 2)}",
                        "resume=auto", script=script)
    assert f"resumed at iteration {reached}" in output
    assert [row["step"] for row in runner.metrics(run_dir)][1:] == list(range(1, reached + 3))
