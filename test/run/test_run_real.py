"""``atropos-grpo-run`` as its users start it, in every mode: hub, real vLLM, an unmodified
environment of atroposlib in its own interpreter (``make atropos-env``), and the trainer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grpo.report.loggers import read_jsonl
from grpo.server.engine_process import EngineProcess, server_command
from grpo.weights.handover_file import FILE_NAME

from ..support import REPO, environment, free_ports, runs, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 6
MODES = {
    "shared_vllm": ["--learning-rate", "1e-4"],
    "lora_only": ["--learning-rate", "5e-4", "--lora-dropout", "0"],
    "lora_restart": ["--learning-rate", "5e-4", "--vllm-restart-interval", "3"],
    "none": ["--learning-rate", "1e-4", "--vllm-restart-interval", "3"],
    "none, in place": ["--learning-rate", "1e-4", "--vllm-restart-interval", "0"],
    "bridge": ["--learning-rate", "1e-4", "--max-staleness", "2"],
}


@pytest.fixture
def call(tmp_path, cache, python):
    pytest.importorskip("vllm")

    def start(*argv: str, steps: int = STEPS, wait: bool = True):
        engine, hub = free_ports(2)
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo.run.cli.launch", "--model-name", "embedded", "--env",
             str(REPO / "examples/atropos/arithmetic_env.py"), "--env-python", str(python),
             "--atropos-url", f"http://127.0.0.1:{hub}", "--vllm-port", str(engine),
             "--training-steps", str(steps), "--batch-size", "8", "--gradient-accumulation-steps",
             "8", "--max-model-len", "64", "--eval-task", "arithmetic", "--eval-max-tokens", "4",
             *argv], cwd=tmp_path, env=environment(cache, COLUMNS="100"), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        if not wait:
            return process
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output[-4000:]
        return output

    return start


@pytest.mark.parametrize("name", MODES)
def test_every_mode_trains_and_proves_its_updates(name, call, tmp_path):
    call("--weight-bridge-mode", name.partition(",")[0], *MODES[name])
    folder = tmp_path / "trained_model_checkpoints"
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    proven = [row["canary/max_abs_diff"] for row in rows]
    assert sum(value is not None for value in proven) == (2 if "--vllm-restart-interval" in
                                                          MODES[name] and "3" in MODES[name]
                                                          else STEPS)
    assert all(value < 1e-4 for value in proven if value is not None)
    assert rows[0]["policy/log_prob_diff_abs_max"] < 1e-3
    assert all(row.get("atropos/recomputed_tokens", 0) == 0 for row in rows)
    names = {path.name for path in folder.iterdir()}
    kind = "adapter" if name.startswith("lora") else "model"
    assert {f"final_{kind}", f"{'adapter_' * (kind == 'adapter')}step_3"} <= names


def test_held_out_accuracy_rises(call, tmp_path):
    call("--learning-rate", "1e-4", steps=16)
    rows = read_jsonl(tmp_path / "trained_model_checkpoints" / "metrics.jsonl")
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracy[-1] > accuracy[0] + 0.2


def test_what_was_started_ends_with_the_run_however_that_ends(call, tmp_path):
    process = call(wait=False, steps=10_000)
    metrics = tmp_path / "trained_model_checkpoints" / "metrics.jsonl"
    wait_until(lambda: len(read_jsonl(metrics)) >= 2,  # before training and after a step
               seconds=200.0, alive=process)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)],
                              capture_output=True, text=True).stdout.split()
    assert len(children) >= 3  # hub, engine, environment
    process.kill()
    process.communicate(timeout=10)
    wait_until(lambda: not any(runs(int(pid)) for pid in children), seconds=40.0)


def test_an_engine_that_is_named_is_used_and_left_running(call, tmp_path, cache):
    from grpo.envs.embedded import EmbeddedSpec, embedded_model
    from grpo.envs.tasks import make_task

    model = str(embedded_model(make_task("arithmetic"), EmbeddedSpec(),
                               cache_dir=cache / "torchrl-grpo"))
    logs = tmp_path / "engine"
    command = server_command(model, served_model_name="tiny", dtype="float32", max_model_len=64,
                             shared_weights=True, log_dir=str(logs))
    with EngineProcess(command, log_path=logs / "log") as server:
        call("--model-name", model, "--vllm-port", str(server.port), "--vllm-config-path",
             str(logs), "--env-flag", "openai.model_name=tiny", steps=3)
        assert server.client().alive()
        assert server.client().version == 3


def test_the_file_of_an_engine_is_found_and_a_stale_one_is_told_of(call, tmp_path, cache):
    from grpo.envs.embedded import EmbeddedSpec, embedded_model
    from grpo.envs.tasks import make_task

    model = str(embedded_model(make_task("arithmetic"), EmbeddedSpec(),
                               cache_dir=cache / "torchrl-grpo"))
    command = server_command(model, served_model_name="tiny", dtype="float32", max_model_len=64,
                             shared_weights=True, log_dir=str(tmp_path))
    (stale := tmp_path / "logs" / FILE_NAME).parent.mkdir()
    with EngineProcess(command, log_path=tmp_path / "engine.log") as server:
        found = json.loads((tmp_path / FILE_NAME).read_text())
        stale.write_text(json.dumps({**found, "pid": 2**22 + 1}))  # above any process
        told = call("--model-name", model, "--vllm-port", str(server.port), "--env-flag",
                    "openai.model_name=tiny", steps=2)
        assert server.client().version == 2
    told = " ".join(told.split())
    assert f"not used: {stale}: process 4194305, the engine that owns" in told
    assert f"{tmp_path / FILE_NAME} is of the engine at http://127.0.0.1:{server.port}" in told
