"""Checkpoints carry weights to an engine: written whole, read in place, or restarted.

A real engine process is for what becomes of a transfer that does not get to its end; that each
way brings the weights to one is shown in ``test_separate_engine.py``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.weights.canary import StaleWeightsError
from grpo.weights.channel import TransferError
from grpo.weights.proof import WeightProof
from grpo.weights.reload import CheckpointReload, EngineRestart, write_checkpoint
from grpo.weights.transfer import WeightTransfer

from .faults import FAULTS, Changing, Faulty, nudge, params, updates_until_found
from .receivers import ThreadedEngine, Worker, vllm_like
from .steps import load, running_engine
from .traces import killed_while_it_waits


def change(model, seed: int = 1) -> None:
    """Another model of the same shape."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))


def same(model, other) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


# -- a real engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(model_folder):
    """vLLM in a process of its own, with our methods in its worker."""
    with running_engine(model_folder, separate_process=True) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.vllm
def test_a_sender_that_stalls_leaves_vllm_alive_and_a_later_update_reaches_it(
        served, model_folder, monkeypatch):
    from grpo.weights import channel

    model = load(model_folder)
    change(model, seed=99)
    weights = WeightTransfer(model, served, backend="gloo", timeout=60.0)
    weights.publish()
    change(model, seed=100)
    # The trainer's bytes never leave; the worker gives up first.
    monkeypatch.setattr(channel.Channel, "broadcast", lambda self, tensors: list(tensors) and [])
    weights.timeout = 3.0
    with pytest.raises(TransferError, match="the engine's workers to store the weights failed.*"
                                            "look at the trainer, which stopped sending"):
        weights.publish()
    monkeypatch.undo()
    assert served.alive()
    weights.timeout = 60.0
    assert weights.publish() == 2
    assert weights.differing() == []


@pytest.mark.slow
@pytest.mark.vllm
def test_a_kill_during_a_transfer_is_an_error_at_once_and_leaves_the_trainer_intact(
        served, model_folder):
    """The last test of this engine."""
    model = load(model_folder)
    weights = WeightTransfer(model, served, backend="gloo", timeout=60.0)
    weights.publish()
    change(model, seed=101)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    begin = time.monotonic()
    with killed_while_it_waits(served.workers[0].proc.pid), pytest.raises(
            TransferError, match="weights 2: .* failed: .*restart it from a checkpoint"):
        weights.publish()
    assert time.monotonic() - begin < 15
    assert weights.version == 1
    with pytest.raises(RuntimeError, match="its worker process ended.*; restart it"):
        weights.publish()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


# -- the checkpoint --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_the_model_and_holds_a_tied_head_once(
        make_model, tokenizer, tmp_path, tied):
    from safetensors import safe_open

    model = make_model(dtype=torch.float32, vocab_size=len(tokenizer), tie_word_embeddings=tied)
    path = write_checkpoint(model, tokenizer, tmp_path, 7)
    assert path == tmp_path / "version_000007"
    assert same(load(path), model)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is tied


def test_a_process_killed_while_writing_leaves_the_older_checkpoint(
        byte_model, tokenizer, tmp_path, monkeypatch):
    older = write_checkpoint(byte_model, tokenizer, tmp_path, 1)
    before = {name: tensor.clone() for name, tensor in byte_model.state_dict().items()}
    change(byte_model)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer), "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(byte_model, tokenizer, tmp_path, 2)
    monkeypatch.undo()
    assert not (tmp_path / "version_000002").exists()
    held = load(older).state_dict()
    assert all(torch.equal(held[name], before[name]) for name in before)
    # The next one finds its way past what was left.
    assert same(load(write_checkpoint(byte_model, tokenizer, tmp_path, 2)), byte_model)
    assert not list(tmp_path.glob("*.unfinished"))


# -- order and refusals ----------------------------------------------------------------------------


@pytest.fixture
def threaded(byte_model):
    """Workers in threads that load checkpoints as vLLM does: in place, by Hugging Face names."""
    engine = ThreadedEngine([Worker(vllm_like(byte_model))])
    engine.read = []
    engine.intercept["load_checkpoint"] = lambda folder: engine.read.append(
        Path(folder).name) or [1]
    return engine


def test_reloading_pauses_reads_resets_counts_resumes_and_keeps_the_newest(
        byte_model, tokenizer, threaded, tmp_path):
    weights = CheckpointReload(byte_model, tokenizer, threaded, tmp_path, pause_mode="abort",
                               version=4)
    weights.publish()
    weights.publish()
    calls = threaded.log[threaded.log.index("pause abort"):]
    assert calls[:5] == ["pause abort", "load_checkpoint", "reset_prefix_cache", "version 5",
                         "resume"]
    assert threaded.read == ["version_000005", "version_000006"]
    assert [path.name for path in tmp_path.iterdir()] == ["version_000006"]
    assert weights.unshared() == []


def test_an_engine_with_adapters_is_refused_because_reloading_would_drop_them(
        byte_model, tokenizer, threaded, tmp_path):
    weights = CheckpointReload(byte_model, tokenizer, threaded, tmp_path)
    threaded.workers[0].model.lora_manager = SimpleNamespace(list_adapters=lambda: {3: None})
    with pytest.raises(TransferError, match=r"LoRA adapters \[3\].*use EngineRestart"):
        weights.publish()
    assert threaded.read == []
    assert "pause keep" not in threaded.log
    assert weights.version == 0


def test_a_worker_that_cannot_read_is_an_error_and_the_older_checkpoint_stays(
        byte_model, tokenizer, threaded, tmp_path):
    weights = CheckpointReload(byte_model, tokenizer, threaded, tmp_path)
    weights.publish()

    def fail(folder):
        raise OSError("no such file")

    threaded.intercept["load_checkpoint"] = fail
    with pytest.raises(TransferError, match="read .*version_000002 failed: no such file"):
        weights.publish()
    assert weights.version == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000001", "version_000002"]


class Restarts:
    """Engines of threads that are started and stopped."""

    def __init__(self, model) -> None:
        self.model, self.log, self.running = model, [], None

    def stop(self) -> None:
        self.log.append("stop")
        self.running = None

    def start(self, folder: Path) -> ThreadedEngine:
        assert self.running is None, "two engines would share the GPU"
        self.log.append(f"start {folder.name}")
        started = vllm_like(self.model)
        held = load(folder)
        fresh = ThreadedEngine([Worker(started)])
        WeightTransfer(held, fresh, backend="gloo", timeout=20.0).publish()
        self.running = fresh
        return fresh


def test_a_restarted_engine_has_the_weights_of_the_newest_checkpoint(
        byte_model, tokenizer, tmp_path):
    engines = Restarts(byte_model)
    weights = EngineRestart(byte_model, tokenizer, tmp_path, stop=engines.stop,
                            start=engines.start, timeout=60.0)
    with pytest.raises(TransferError, match="no engine runs"):
        weights.differing()
    for version in (1, 2):
        change(byte_model, seed=version)
        assert weights.publish() == version == engines.running.version
        assert weights.differing() == []
    assert engines.log == ["stop", "start version_000001", "stop", "start version_000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["version_000002"]
    change(byte_model, seed=3)
    assert weights.differing()


def test_an_engine_that_starts_from_an_older_checkpoint_fails_the_proof_at_once(
        byte_model, tokenizer, tmp_path):
    engines, older = Restarts(byte_model), tmp_path / "older"
    weights = EngineRestart(
        byte_model, tokenizer, tmp_path / "newest", stop=engines.stop, start=engines.start,
        engine=engines.start(write_checkpoint(byte_model, tokenizer, older, 0)), timeout=60.0)
    proof = WeightProof(weights, interval=100)
    proof.self_test(Changing(byte_model))
    assert engines.log == ["start version_000000"]  # it would cost two engines
    for _ in range(5):
        nudge(byte_model)
        weights.publish()
        proof.check()
    write_checkpoint(byte_model, tokenizer, older, 5)
    weights.start = lambda path: engines.start(older / "version_000005")
    nudge(byte_model)
    weights.publish()
    with pytest.raises(StaleWeightsError, match=f"{len(list(byte_model.parameters()))} of the ten"):
        proof.check()


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_a_checkpoint_that_is_not_read_fails_the_proof(
        byte_model, tokenizer, threaded, tmp_path, fault):
    threaded.intercept["load_checkpoint"] = lambda folder: [WeightTransfer(
        load(folder), ThreadedEngine(threaded.workers), backend="gloo").publish()]
    weights = CheckpointReload(byte_model, tokenizer, threaded, tmp_path)
    WeightProof(weights).self_test(Changing(byte_model))
    assert weights.version == threaded.version == 0
    faulty = Faulty(weights, [params(threaded.workers[0].model)], fault)
    assert updates_until_found(faulty, byte_model) == 1 or fault == FAULTS[1]


def test_an_engine_that_does_not_start_is_an_error_that_names_the_checkpoint(
        byte_model, tokenizer, tmp_path):
    def start(folder):
        raise RuntimeError("out of memory")

    weights = EngineRestart(byte_model, tokenizer, tmp_path, stop=lambda: None, start=start)
    with pytest.raises(TransferError, match="start from .*version_000001 failed: out of memory"):
        weights.publish()
    assert weights.version == 0
    assert (tmp_path / "version_000001").exists()
