"""Which engine, weights and checks each mode of ``atropos-grpo`` gets; stand-ins, no vLLM."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from grpo.config.schema import ConfigError
from grpo.run import build, build_engine, build_team, engine_attach, start_atropos
from grpo.run.cli import atropos
from grpo.run.cli.flags import to_config
from grpo.run.engine_attach import engine_environment, find_engine
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.training.checkpoint import Checkpoint
from grpo.weights.handover import export_shared_memory
from grpo.weights.handover_file import FILE_NAME, HandoverError
from grpo.weights.in_flight import PeriodicUpdates

from .atropos_trainer import atropos_trainer

CPU = torch.device("cpu")


@pytest.fixture
def config_of(model_folder, tmp_path):
    def make(*argv: str):
        return to_config(atropos.parser().parse_intermixed_args([
            "--model", str(model_folder), "--save-path", str(tmp_path / "run"), "--log-dir",
            str(tmp_path / "logs"), "--max-model-len", "64", *argv]))
    return make


@pytest.fixture
def started(monkeypatch):
    """What would be started: the set-up and the server of the last run."""
    seen = SimpleNamespace(setup=None, server=None)

    def build_actor(setup, *, backend, server=None):
        seen.setup, seen.server = setup, server
        actor = build_engine._one_module(setup)
        actor.policy.client = MagicMock()
        return actor

    monkeypatch.setattr(build, "vllm_available", lambda: True)
    monkeypatch.setattr(build_team, "build_actor", build_actor)
    monkeypatch.setattr(engine_attach, "EngineClient", lambda url, **_: SimpleNamespace(
        alive=lambda: False))
    return seen


def test_what_environments_and_hub_are_told(config_of, started, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    config = config_of("--batch-size", "3", "--gradient-accumulation-steps", "5", "--seq-len", "40",
                       "--training-steps", "7", "--group-timeout", "9", "--distill-enabled",
                       "--temperature", "0.5", "distill.topk=4")
    with atropos_trainer(config) as trainer:
        collector = trainer.collector
        converter = collector.assembler.converter
        stream = collector.assembler.source.stream
        assert stream.client.token == started.server.token == "secret"
        registration = stream.registration
        assert (registration.batch_size, registration.max_token_len, registration.num_steps) == (
            15, 40, 7)
        assert (collector.timeout, collector.assembler.rows) == (9.0, 15)
        assert (converter.seq_len, converter.temperature, converter.distill_topk) == (40, 0.5, 4)
        assert converter.vocab_size == trainer.model.config.vocab_size
        assert trainer.learner.loss.distill_coeff == 1.0
        assert trainer.frozen["teacher"] is not None


def test_an_engine_that_runs_is_used_and_left_alone(config_of, started, monkeypatch):
    monkeypatch.setattr(start_atropos, "find_engine", lambda config, **_: "http://127.0.0.1:9001")
    with atropos_trainer(config_of("--weight-bridge-mode", "none")) as trainer:
        assert started.server is None
        inference = started.setup.config.inference_model
        assert (inference.url, inference.weight_sync) == ("http://127.0.0.1:9001", "reload")
        assert inference.max_num_seqs is None
        assert not isinstance(trainer.weights, PeriodicUpdates)


@pytest.mark.parametrize("argv", [["--vllm-port", "9123"], ["--vllm-config-path", "here.json"]])
def test_an_engine_at_a_url_is_not_looked_for_elsewhere(argv, config_of, started):
    config = config_of(*argv, "inference_model.url=http://127.0.0.1:9009")
    with pytest.raises(ConfigError, match="is not read because inference_model.url=http://127.0.0.1"
                                          ":9009 says where"), atropos_trainer(config):
        pass


def test_longer_problems_are_not_evaluated_with(config_of, started):
    options = ["--eval-task", "arithmetic", "--eval-max-tokens", "4",
               "env.task={num_train: 9, num_test: 30, max_operand: 20}"]
    with atropos_trainer(config_of(*options)) as trainer:
        assert len(trainer.evaluator.own.greedy.env.stream.prompts) == 30
    with (pytest.raises(ValueError, match="30 of 30 prompts are longer than env.max_prom"),
          atropos_trainer(config_of(*options, "env.max_prompt_tokens=5"))):
        pass


def test_an_engine_that_runs_does_not_take_options_of_starting_one(config_of, started, monkeypatch):
    monkeypatch.setattr(start_atropos, "find_engine", lambda config, **_: "http://127.0.0.1:9001")
    with pytest.raises(ValueError, match="kv_cache_memory_bytes=77 is not read because the server"):
        with atropos_trainer(config_of("--kv-cache-memory-bytes", "77")):
            pass


@pytest.mark.parametrize(("argv", "message"), [
    (["--vllm-gpu", "0"], "vllm_gpu=0 is not read because the engine at .*another "
                          "atropos.vllm_port, .*or remove vllm_gpu"),
    (["--vllm-gpu", "0", "inference_model.url=http://127.0.0.1:9001"], "vllm_gpu=0 is not read"),
    (["--weight-bridge-mode", "lora_restart"], "cannot be restarted from here with each adapter; "
                                               "use another atropos.vllm_port, .*lora_only"),
])
def test_an_engine_that_runs_refuses_what_only_an_own_one_would_read(
        argv, message, config_of, started, monkeypatch):
    monkeypatch.setattr(start_atropos, "find_engine", lambda config, **_: "http://127.0.0.1:9001")
    with pytest.raises(ConfigError, match=message), atropos_trainer(config_of(*argv)):
        pass


@pytest.mark.parametrize(("argv", "message"), [
    (["--gpu-memory-utilization", "0.4"], "is not read on a CPU"),
    (["--optimizer", "adamw_cpu"], "the run is on the CPU already"),
    (["--vllm-gpu", "1"], "vllm_gpu=1 is not read on a CPU"),
    (["--max-model-len", "4096"], "more than the model's context of 2048"),
    (["--train-layer-indices", "5"], r"\[5\] are not among the model's layers 0 to 1"),
    (["--eval-task", "nothing"], "nothing"),
])
def test_what_cannot_work_here_is_refused(argv, message, config_of, started):
    with pytest.raises(ValueError, match=message), atropos_trainer(config_of(*argv)):
        pass


def test_without_vllm_only_the_bridge_is_possible(config_of, started, monkeypatch):
    monkeypatch.setattr(build, "vllm_available", lambda: False)
    with pytest.raises(ConfigError, match="needs vLLM"), atropos_trainer(config_of()):
        pass


# -- which engine ----------------------------------------------------------------------------------


class Server:
    """An engine server as :func:`find_engine` sees it."""

    def __init__(self, handover, *, after: int = 0) -> None:
        self.handover, self.after, self.url = handover, after, "http://127.0.0.1:9001"

    def alive(self) -> bool:
        self.after -= 1
        return self.after < 0

    def call(self, method: str, path: str):
        return {"handover": self.handover and self.handover.to_dict()}


@pytest.fixture
def serve(monkeypatch):
    def make(*args, **options):
        server = Server(*args, **options)
        monkeypatch.setattr(engine_attach, "EngineClient", lambda url, **_: server)
        return server
    return make


@pytest.fixture
def handover():
    return export_shared_memory({"w": torch.ones(2)}, model="m", owner="engine")


def test_what_answers_at_the_port_is_taken(config_of, serve):
    serve(None)
    assert find_engine(config_of("--vllm-port", "9007")) == "http://127.0.0.1:9007"
    serve(None, after=1)
    assert find_engine(config_of()) is None


def test_a_named_engine_is_waited_for_and_checked(config_of, serve, handover, tmp_path):
    file = handover.write(tmp_path)
    config = config_of("--vllm-config-path", str(file))
    serve(handover, after=2)
    assert find_engine(config) == "http://127.0.0.1:9001"
    serve(handover, after=99)
    with pytest.raises(TimeoutError, match="--shared-weights"):
        find_engine(config, timeout=0.3)
    serve(None)
    with pytest.raises(HandoverError, match="shares no weights"):
        find_engine(config)
    other = SimpleNamespace(to_dict=lambda: {**handover.to_dict(), "pid": os.getppid()})
    serve(other)
    with pytest.raises(HandoverError, match="is not of the engine server"):
        find_engine(config)
    serve(replace(handover, model="another"))
    with pytest.raises(HandoverError, match="shares other tensors than it lists"):
        find_engine(config)


@pytest.fixture
def lying_about(handover, tmp_path, monkeypatch):
    """Folders for files, and what is said of them; the current folder is ``here``."""
    for name in ("logs", "here", "named"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    gone = replace(handover, pid=2**22 + 1)  # above the greatest process number
    return {"gone": gone, "another": replace(handover, model="another")}


@pytest.mark.parametrize("logs, here, said", [
    ("own", "own", ["logs/F is of the engine at U"]),
    (None, "own", ["here/F is of the engine at U"]),
    ("gone", "own", ["not used: .*logs/F: process 4194305, .* has ended", "here/F is of the eng"]),
    ("another", "gone", ["not used: .*logs/F is not of the engine server at U", "used: .*here/F"]),
    (None, None, [])])
def test_the_file_is_looked_for_in_the_log_folder_and_here_and_a_stale_one_is_not_taken(
        config_of, serve, handover, lying_about, tmp_path, logs, here, said):
    for folder, which in (("logs", logs), ("here", here)):
        if which is not None:
            lying_about.get(which, handover).write(tmp_path / folder)
    lines, url = [], "http://127.0.0.1:9001"
    serve(handover)
    config = config_of("--log-dir", str(tmp_path / "logs"))
    assert find_engine(config, say=lines.append) == url
    for line, pattern in zip(lines, said, strict=True):
        assert re.search(pattern.replace("F", FILE_NAME).replace("U", url), line), line


def test_a_file_that_is_named_is_the_only_one_that_is_looked_at(
        config_of, serve, handover, lying_about, tmp_path):
    handover.write(tmp_path / "logs")
    named = lying_about["gone"].write(tmp_path / "named")
    serve(handover)
    config = config_of("--log-dir", str(tmp_path / "logs"), "--vllm-config-path", str(named))
    with pytest.raises(HandoverError, match="has ended"):
        find_engine(config)


def test_where_nothing_answers_a_file_starts_no_waiting_and_is_told_of(
        config_of, serve, handover, lying_about, tmp_path):
    handover.write(tmp_path / "logs")
    lying_about["gone"].write(tmp_path / "here")
    serve(handover, after=99)
    lines = []
    config = config_of("--log-dir", str(tmp_path / "logs"))
    assert find_engine(config, say=lines.append) is None
    assert "but nothing answers at http://127.0.0.1:9001; give its engine's port" in lines[0]
    assert "has ended" in lines[1]
    other = config_of("--log-dir", str(tmp_path / "logs"), "--weight-bridge-mode", "none")
    assert find_engine(other, say=lines.append) is None and len(lines) == 2


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere/vllm_bridge_config.json"])
def test_a_file_that_cannot_come_is_refused_before_any_engine_is_waited_for(config_of, serve,
                                                                            handover, path):
    serve(handover, after=99)
    with pytest.raises(HandoverError, match="is not there"):
        find_engine(config_of("--vllm-config-path", path), timeout=60.0)


@pytest.mark.parametrize("url", ["https://127.0.0.1:8000", "127.0.0.1:8000", "http://hub", "",
                                 "http://hub:port"])
def test_an_address_that_is_none_is_refused_first(config_of, url):
    with pytest.raises(ValueError, match="must have the form http://host:port"):
        config_of("--atropos-url", url)


def test_a_gpu_is_given_as_this_process_counts_it(config_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    cuda = torch.device("cuda")
    assert engine_environment(config_of(), cuda) == {"CUDA_VISIBLE_DEVICES": "6"}
    for mode, ways in (("shared_vllm", "restart or reload"), ("lora_only", "restart")):
        with pytest.raises(ConfigError, match="one copy of the weights lies on one GPU; .*"
                                              f"weight_sync={ways}$"):
            engine_environment(config_of("--weight-bridge-mode", mode, "--vllm-gpu", "2"), cuda)
    apart = config_of("--weight-bridge-mode", "none", "--vllm-gpu", "2", "--debug-loading")
    assert engine_environment(apart, cuda) == {"CUDA_VISIBLE_DEVICES": "7",
                                               "VLLM_LOGGING_LEVEL": "INFO"}
    with pytest.raises(ConfigError, match="sees 3 GPUs"):
        engine_environment(config_of("--weight-bridge-mode", "none", "--vllm-gpu", "3"), cuda)


def test_a_checkpoints_files_stay_when_it_is_dropped(tmp_path):
    from grpo.atropos.trainer import export_step

    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step_000003", 3)
    checkpoint.model_folder.mkdir(parents=True)
    weights = checkpoint.model_folder / "model.safetensors"
    weights.write_text("weights")
    target = export_step(checkpoint, tmp_path)
    assert target == tmp_path / "step_3"
    assert weights.samefile(target / weights.name)  # no space is taken twice
    weights.unlink()
    assert (target / weights.name).read_text() == "weights"


def test_the_references_log_probs_of_groups_are_used_where_there_are_some():
    from tensordict import TensorDict

    from grpo.atropos.trainer import GivenReference

    asked = []
    reference = GivenReference(lambda batch: asked.append(batch) or batch)
    given = TensorDict({"next": {"ref_log_probs": {"full": torch.zeros(1, 2)}}}, [1])
    reference(given)
    assert not asked
    reference(TensorDict({}, [1]))
    assert len(asked) == 1
