"""Ways to bring new weights to an engine in another process, on one real engine for all of them.

Tests run from top to bottom: the last of its own kills the engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo import data
from grpo.objectives import TokenScorer
from grpo.policies.handle import EngineError
from grpo.training.optim import MasterAdamW
from grpo.weights.canary import Canary, StaleWeightsError
from grpo.weights.handover import Handover
from grpo.weights.layout import LayoutError, view
from grpo.weights.proof import WeightProof
from grpo.weights.reload import CheckpointReload
from grpo.weights.shared import SharedCopy
from grpo.weights.transfer import WeightTransfer

from ..support import REPO, environment, runs, wait_until
from .faults import Changing, nudge
from .steps import (
    PROMPTS,
    assert_only_its_own_model_is_shared,
    assert_updates_arrive,
    gap,
    load,
    policy_of,
    running_engine,
    train_once,
)
from .traces import Traces, killed_while_it_waits

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

MAX_RANK = 8


@pytest.fixture(scope="module")
def served(model_folder):
    """The engine, and what of it must be gone after the last test."""
    traces = Traces()
    with running_engine(model_folder, separate_process=True, max_lora_rank=MAX_RANK) as engine:
        yield engine, traces


@pytest.fixture
def handle(served, model_folder):
    """The engine with the weights of the folder, whatever the test before has left."""
    served[0].collective_rpc("load_checkpoint", str(model_folder), timeout=30)
    assert served[0].reset_prefix_cache(timeout=10)
    return served[0]


def test_one_memory_in_two_processes_follows_every_update(handle, model_folder):
    model = load(model_folder)
    weights = SharedCopy(model, handle, timeout=20.0)
    policy = policy_of(handle.llm, weights)
    inode = handle.collective_rpc("export_weights", timeout=10)[0]["storages"][0]["handle"]["inode"]
    for pid in (os.getpid(), handle.workers[0].proc.pid):  # the very same file is mapped by both
        assert f" {inode} " in Path(f"/proc/{pid}/maps").read_text()
    assert gap(model, policy) < 1e-4
    assert_updates_arrive(model, weights, policy)
    assert handle.version == 3


def test_a_run_that_goes_on_draws_what_an_uninterrupted_one_does(handle):
    """The engine's own random numbers are those of a process that has just started."""
    whole, resumed = (policy_of(handle.llm, seeded=True) for _ in range(2))
    first, second = (whole.generate_from_ids(PROMPTS)[data.TOKENS] for _ in range(2))
    resumed.calls = 1
    assert torch.equal(resumed.generate_from_ids(PROMPTS)[data.TOKENS], second)
    assert not torch.equal(first, second)
    alike = resumed.generate_from_ids([PROMPTS[0]] * 8)[data.RESPONSE_TOKENS]
    assert len(alike.unique(dim=0)) > 1  # rows have numbers of their own


def test_a_reloaded_checkpoint_reaches_the_engine_at_every_update(
        handle, model_folder, tokenizer, tmp_path):
    model = load(model_folder)
    weights = CheckpointReload(model, tokenizer, handle, tmp_path, timeout=60.0)
    policy = policy_of(handle.llm, weights)
    optimizer = MasterAdamW(model.parameters(), lr=1e-2)
    for version in (1, 2):
        assert train_once(model, policy, optimizer) > 1e-3
        assert gap(model, policy) > 1e-2, "the engine should have the older weights still"
        assert weights.publish() == version == handle.version
        assert gap(model, policy) < 1e-4
        assert weights.differing() == []


@pytest.mark.parametrize("how", ["write", "load"])
def test_adapters_in_memory_reach_the_engine_at_every_update(handle, model_folder, how):
    pytest.importorskip("peft")
    from grpo.weights.adapters import adapters_disabled, make_lora
    from grpo.weights.lora import LoRASync

    model = make_lora(load(model_folder), r=4, alpha=12)
    weights = LoRASync(model, handle, how=how, timeout=20.0)
    policy = policy_of(handle.llm, weights, lora_request=weights.lora_request)
    assert_updates_arrive(model, weights, policy, lr=3e-2)
    assert handle.version == 3
    with adapters_disabled(model):
        assert gap(model, policy_of(handle.llm)) < 1e-4
        assert gap(model, policy) > 1e-3, "the adapter changed nothing"
    weights.close()


@pytest.fixture(params=["one memory", "reload", "gloo", "ipc", "adapters written",
                        "adapters loaded"])
def way(request, handle, model_folder, tokenizer, tmp_path):
    """The trainer's model, how its weights travel, and what makes an update lose them."""
    model = load(model_folder)
    if request.param == "one memory":
        weights = SharedCopy(model, handle, timeout=20.0)

        def lose(monkeypatch):  # a mapping of memory that the engine does not use any more
            weights.tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            for name, param in model.named_parameters():
                param.data = view(weights.places[name], weights.tensors)
            assert weights.unshared() == []
    elif request.param == "reload":
        weights = CheckpointReload(model, tokenizer, handle, tmp_path, timeout=60.0)

        def lose(monkeypatch):
            monkeypatch.setattr("grpo.weights.reload.write_checkpoint",
                                lambda *args: weights.folder / "version_000004")
    elif request.param.startswith("adapters"):
        pytest.importorskip("peft")
        from grpo.weights.adapters import make_lora
        from grpo.weights.lora import LoRASync

        model = make_lora(model, r=4, alpha=12)
        how = {"adapters written": "write", "adapters loaded": "load"}[request.param]
        weights = LoRASync(model, handle, how=how, timeout=20.0)
        request.addfinalizer(weights.close)

        def lose(monkeypatch):
            monkeypatch.setattr(weights.target, "write", lambda values: None)
    else:
        weights = WeightTransfer(model, handle, backend=request.param, timeout=60.0)
        request.addfinalizer(weights.close)

        def lose(monkeypatch):
            monkeypatch.setattr(weights._path, "send", lambda tensors, deadline: list(tensors))
    return model, weights, lose


def test_updates_that_are_lost_fail_the_proof_where_no_canary_sees_them(
        way, handle, model_folder, monkeypatch):
    model, weights, lose = way
    policy = policy_of(handle.llm, weights, lora_request=getattr(weights, "lora_request", None))
    proof = WeightProof(weights)
    proof.self_test(Changing(model))
    assert weights.version == handle.version == 0
    for _ in range(4):
        nudge(model)
        weights.publish()
        proof.check()
    lose(monkeypatch)
    nudge(model)
    weights.publish()
    assert gap(model, policy) < 1e-4
    with pytest.raises(StaleWeightsError, match="policy version 5: after an update the engine"):
        proof.check()


def test_another_model_or_type_on_the_other_side_is_refused_by_name(
        handle, model_folder, make_model, tokenizer, tmp_path):
    narrower = make_model(dtype=torch.float32, vocab_size=len(tokenizer))
    for refused in (lambda: CheckpointReload(narrower, tokenizer, handle, tmp_path),
                    lambda: WeightTransfer(narrower, handle, backend="gloo")):
        with pytest.raises(LayoutError,
                           match=r"self_attn\.q_proj\.weight: shape \(16, 16\) does not"):
            refused()
    assert list(tmp_path.iterdir()) == []
    assert_only_its_own_model_is_shared(lambda model: SharedCopy(model, handle), model_folder,
                                        narrower)
    assert handle.alive()


def test_a_busy_prefix_cache_is_an_error_at_the_deadline_and_no_update(handle, model_folder):
    from vllm import SamplingParams

    weights = SharedCopy(load(model_folder), handle, timeout=0.5)
    core = handle.llm.llm_engine
    core.add_request("busy", {"prompt_token_ids": PROMPTS[0]},
                     SamplingParams(max_tokens=20, ignore_eos=True))
    core.step()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="waited 0.5 s for vLLM engine .* still running"):
        weights.publish()
    assert 0.5 <= time.monotonic() - begin < 3 and weights.version == 0
    with pytest.raises(EngineError, match="only generate"):
        handle.pause("wait", timeout=5)
    handle.pause("keep", timeout=5)  # kept requests are computed again
    assert weights.publish() == 1
    handle.resume(timeout=5)
    handle.pause("abort", timeout=5)
    assert not core.has_unfinished_requests() and weights.publish() == 2


def test_a_parameter_that_was_rebound_is_named_before_and_after_its_values_differ(
        handle, model_folder):
    model = load(model_folder)
    weights = SharedCopy(model, handle)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight.data = layer.weight.data.clone()
    name = "model.layers.1.mlp.down_proj.weight"
    assert (weights.unshared(), weights.differing()) == ([name], [])
    canary = Canary(policy_of(handle.llm, weights), TokenScorer(model), weights, prompts=PROMPTS)
    with pytest.raises(StaleWeightsError, match=rf"{name} no longer lies in the engine's memory"):
        canary.check()
    with torch.no_grad():
        layer.weight.mul_(1.5)
    assert weights.differing() == [name]


def test_rows_are_told_as_they_finish(handle, model_folder):
    policy = policy_of(handle.llm, SharedCopy(load(model_folder), handle))
    policy.eos_token_ids = tuple(range(2, 60))
    told = []
    batch = policy.stream(policy.pad_prompts(PROMPTS), lambda *row: told.append(row))
    assert sorted(row for row, _ in told) == [*range(len(PROMPTS))]
    for row, tokens in told:
        assert batch[data.RESPONSE_TOKENS][row, :len(tokens)].tolist() == tokens


def test_what_the_worker_refuses_is_passed_on(handle, tmp_path):
    for method, argument, complaint in (
            ("fingerprints", ["nonsense"], "no tensors called nonsense"),
            ("load_checkpoint", str(tmp_path), r"has no \*\.safetensors file")):
        with pytest.raises(EngineError, match=f"{method} failed.*{complaint}"):
            handle.collective_rpc(method, argument, timeout=10)
    assert handle.alive()


MAPPING = """
import sys, time
from grpo.weights.handover import Handover, map_tensors
tensors = map_tensors(Handover.read(sys.argv[1]))
tensors["model.norm.weight"].mul_(1.25)
print("written", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_engine_goes_on_when_a_trainer_dies_while_sharing(handle, model_folder, tmp_path):
    """Another trainer maps the memory by the file, writes into it, and is killed."""
    model = load(model_folder)
    weights = SharedCopy(model, handle)
    exported = handle.collective_rpc("export_weights", timeout=10)[0]
    path = Handover.from_dict(exported).write(tmp_path)
    norm = model.model.norm.weight.detach().clone()
    trainer = subprocess.Popen([sys.executable, "-c", MAPPING, str(path)], cwd=REPO,
                               stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "written\n"
    trainer.kill()
    trainer.wait()
    assert torch.equal(model.model.norm.weight, norm * 1.25)
    weights.publish()
    assert gap(model, policy_of(handle.llm, weights)) < 1e-4
    assert weights.differing() == []


def test_a_kill_during_an_update_leaves_the_trainer_and_other_engines_and_nothing_else(
        served, engine, handle, model_folder):
    """``engine`` is the session's, in this process: it must outlive the other one's end."""
    from grpo.policies.inprocess import stop_engine

    model = load(model_folder)
    weights = SharedCopy(model, handle, timeout=30.0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    served[1].watch(handle.workers[0].proc.pid)
    # An exception that is on its way, as of a signal, may hold it to the end of the process.
    held = handle.llm.llm_engine.model_executor.rpc_broadcast_mq.buffer
    begin = time.monotonic()
    with killed_while_it_waits(handle.workers[0].proc.pid), pytest.raises(
            EngineError, match="its worker process ended during synchronize.*weights are intact"):
        weights.publish()
    assert time.monotonic() - begin < 10
    assert weights.version == 0 and not handle.alive()
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name])
            param.add_(1.0)  # still writable
    stop_engine(handle.llm)
    served[1].check_nothing_is_left()
    held.__del__()  # removes nothing a second time, which would be a traceback on the screen
    assert torch.distributed.is_initialized()
    assert gap(load(model_folder), policy_of(engine)) < 1e-4


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


@pytest.mark.slow
def test_nothing_is_left_when_a_trainer_is_killed_between_its_updates(model_folder, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    traces = Traces()
    trainer = subprocess.Popen([sys.executable, str(script), str(model_folder)],
                               stdout=subprocess.PIPE, text=True, env=environment())
    worker = int(trainer.stdout.readline().split()[1])
    assert [trainer.stdout.readline() for _ in range(3)] == ["published\n"] * 3
    traces.watch(worker, trainer.pid)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not runs(worker), seconds=20.0, every=0.1)
    traces.check_nothing_is_left()
