"""One memory in two processes with a real vLLM engine, which owns it.

Two engines are started in all. Tests of the first run from top to bottom: the last kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo import data
from grpo.objectives import TokenScorer
from grpo.policies.handle import EngineError, InProcessEngine
from grpo.policies.inprocess import start_engine, stop_engine
from grpo.training.optim import MasterAdamW
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.handover import Handover, StaleHandoverError, process_start
from grpo.weights.shared import SharedCopy

from .steps import PROMPTS, load, policy_of, train_once
from .traces import Traces

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

REPO = Path(__file__).resolve().parents[2]
OPTIONS = {"device": torch.device("cpu"), "dtype": torch.float32, "max_model_len": 256,
           "max_num_seqs": 64, "separate_process": True}


class Run:
    """An engine in another process, its policy, and everything that must be gone afterwards."""

    def __init__(self, folder) -> None:
        self.traces = Traces()
        self.llm = start_engine(str(folder), **OPTIONS)
        self.engine = InProcessEngine(self.llm)
        self.policy = policy_of(self.llm, self.engine)
        self.worker = self.engine.workers[0].proc.pid
        self.traces.watch(self.worker)

    def share(self, model) -> None:
        self.model = model
        self.weights = SharedCopy(model, self.engine, timeout=20.0)
        # The longest alone: it cuts all to the length of the shortest, which fills no block of a
        # cache.
        self.canary = Canary(self.policy, TokenScorer(model), self.weights, prompts=PROMPTS[-1:])

    def train(self, optimizer) -> None:
        assert train_once(self.model, self.policy, optimizer) > 1e-4

    def check_nothing_is_left(self) -> None:
        stop_engine(self.llm)
        self.traces.check_nothing_is_left()


@pytest.fixture(scope="module")
def run(model_folder):
    run = Run(model_folder)
    run.share(load(model_folder))
    yield run
    stop_engine(run.llm)


def test_both_processes_have_the_same_values_and_every_parameter_is_shared(run):
    assert run.weights.unshared() == run.weights.differing() == []
    assert run.worker != os.getpid()
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    storages = {t.untyped_storage().data_ptr() for t in run.weights.tensors.values()}
    assert {p.untyped_storage().data_ptr() for p in run.model.parameters()} == storages
    inode = run.engine.collective_rpc("export_weights", timeout=10)[0]["storages"][0]["handle"][
        "inode"]
    for pid in (os.getpid(), run.worker):  # the very same file is mapped by both
        assert f" {inode} " in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("make", [
    lambda params: MasterAdamW(params, lr=1e-2), lambda params: torch.optim.SGD(params, lr=0.5)],
    ids=["AdamW", "SGD"])
def test_the_engine_follows_every_update(run, make):
    optimizer = make(run.model.parameters())
    for _ in range(3):
        version = run.weights.version
        theirs = run.engine.collective_rpc("fingerprints", timeout=10)[0]
        run.train(optimizer)
        assert run.weights.publish() == version + 1
        assert run.canary.check().max_abs_diff < 1e-4
        now = run.engine.collective_rpc("fingerprints", timeout=10)[0]
        assert all(now[name] != theirs[name] for name in now)  # hashed by the engine's process
        assert run.weights.differing() == []
    assert run.policy.generate_from_ids(PROMPTS)[data.POLICY_VERSION].tolist() == [version + 1] * 4


def test_a_rebound_parameter_is_named(run):
    layer = run.model.model.layers[1].mlp.down_proj
    shared = layer.weight.data
    layer.weight.data = shared.clone()
    name = "model.layers.1.mlp.down_proj.weight"
    assert run.weights.unshared() == [name]
    assert run.weights.differing() == []  # the values still agree
    with pytest.raises(StaleWeightsError, match=rf"{name} no longer lies in the engine's memory"):
        run.canary.check()
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert run.weights.differing() == [name]
    layer.weight.data = shared
    assert run.weights.unshared() == run.weights.differing() == []


def test_a_forgotten_prefix_cache_is_noticed(run):
    run.canary.check()
    run.train(MasterAdamW(run.model.parameters(), lr=1e-2))
    with pytest.raises(StaleWeightsError, match="a stale prefix cache"):
        run.canary.check()
    run.weights.publish()
    run.canary.check()


def test_other_weights_are_refused(run, model_folder):
    model = load(model_folder)
    model.load_state_dict(run.model.state_dict())  # the engine has been trained since it started
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    with pytest.raises(ValueError, match=r"different weights.*model\.norm\.weight"):
        SharedCopy(model, run.engine)


def test_what_the_worker_refuses_is_passed_on(run, tmp_path):
    for method, argument, complaint in (
            ("fingerprints", ["nonsense"], "no tensors called nonsense"),
            ("load_checkpoint", str(tmp_path), r"has no \*\.safetensors file")):
        with pytest.raises(EngineError, match=f"{method} failed.*{complaint}"):
            run.engine.collective_rpc(method, argument, timeout=10)
    assert run.engine.alive()


def test_a_checkpoint_is_loaded_in_place(run, model_folder):
    before = {name: tensor.clone() for name, tensor in run.weights.tensors.items()}
    fresh = dict(load(model_folder).named_parameters())
    written, = run.engine.collective_rpc("load_checkpoint", str(model_folder), timeout=30)
    assert written == len(before)
    # The trainer sees what the engine loaded: it is one memory.
    assert all(torch.equal(p, fresh[name]) for name, p in run.model.named_parameters())
    run.weights.publish()
    assert run.canary.check().max_abs_diff < 1e-4
    assert run.weights.unshared() == []


def test_publish_waits_for_requests_only_until_its_deadline(run):
    from vllm import SamplingParams

    core = run.llm.llm_engine
    core.add_request("busy", {"prompt_token_ids": PROMPTS[0]},
                     SamplingParams(max_tokens=20, ignore_eos=True))
    core.step()
    version, run.weights.timeout = run.weights.version, 0.5
    try:
        with pytest.raises(EngineError, match="only generate"):
            run.engine.pause("wait", timeout=5)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="waited 0.5 s for vLLM engine .* still running"):
            run.weights.publish()
        assert 0.5 <= time.monotonic() - start < 3
        assert run.weights.version == version
        run.engine.pause("keep", timeout=5)  # kept requests are computed again
        run.weights.publish()
        run.engine.resume(timeout=5)
        run.engine.pause("abort", timeout=5)
        assert not core.has_unfinished_requests()
    finally:
        run.weights.timeout = 20.0
    run.weights.publish()
    assert run.canary.check().max_abs_diff < 1e-4


def test_the_engine_goes_on_when_a_trainer_dies_while_sharing(run, tmp_path):
    """Another trainer maps the memory by the file, writes into it, and is killed."""
    handover = Handover.from_dict(run.engine.collective_rpc("export_weights", timeout=10)[0])
    script = """
import sys, time
from grpo.weights.handover import Handover, map_tensors
tensors = map_tensors(Handover.read(sys.argv[1]))
tensors["model.norm.weight"].mul_(1.25)
print("written", flush=True)
time.sleep(600)
"""
    path = handover.write(tmp_path)
    norm = run.model.model.norm.weight.detach().clone()
    trainer = subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=REPO,
                               stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "written\n"
    trainer.kill()
    trainer.wait()
    assert torch.equal(run.model.model.norm.weight, norm * 1.25)
    run.weights.publish()
    assert run.canary.check().max_abs_diff < 1e-4
    assert run.weights.differing() == []


def test_the_trainer_keeps_its_weights_when_the_engine_is_killed(run, tmp_path):
    handover = Handover.from_dict(run.engine.collective_rpc("export_weights", timeout=10)[0])
    path = handover.write(tmp_path)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    version = run.weights.version
    os.kill(run.worker, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match=rf"vLLM engine of .*\[{run.worker}\].*worker process "
                                          "ended.*restart it"):
        run.weights.publish()
    assert time.monotonic() - start < run.weights.timeout
    assert run.weights.version == version and not run.engine.alive()
    with torch.no_grad():
        for name, param in run.model.named_parameters():
            assert torch.equal(param, before[name])
            param.add_(1.0)  # still writable
            assert torch.equal(param, before[name] + 1.0)
    with pytest.raises(StaleHandoverError, match=f"process {run.worker}"):
        Handover.read(path)
    run.check_nothing_is_left()


TRAINER = """
import sys, torch
from transformers import AutoModelForCausalLM
from grpo.policies.handle import InProcessEngine
from grpo.policies.inprocess import start_engine
from grpo.weights.shared import SharedCopy
folder = sys.argv[1]
if __name__ == "__main__":  # the worker imports this file again
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm = start_engine(folder, device=torch.device("cpu"), dtype=torch.float32, max_model_len=64,
                       separate_process=True)
    engine = InProcessEngine(llm)
    weights = SharedCopy(model, engine)
    print("worker", engine.workers[0].proc.pid, flush=True)
    while True:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.001)
        weights.publish()
        print("published", flush=True)
"""


def test_nothing_is_left_when_a_trainer_is_killed_between_its_updates(model_folder, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    traces = Traces()
    trainer = subprocess.Popen([sys.executable, str(script), str(model_folder)],
                               stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": str(REPO)})
    worker = int(trainer.stdout.readline().split()[1])
    assert [trainer.stdout.readline() for _ in range(3)] == ["published\n"] * 3
    traces.watch(worker, trainer.pid)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 20
    while process_start(worker) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process_start(worker) is None, "the engine outlived its trainer"
    traces.check_nothing_is_left()
