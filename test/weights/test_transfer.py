"""Weight transfer: over real sockets and shared memory, to workers in threads and to real vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo.weights.canary import StaleWeightsError
from grpo.weights.channel import TransferError
from grpo.weights.fingerprint import Part
from grpo.weights.layout import LayoutError
from grpo.weights.proof import WeightProof
from grpo.weights.transfer import WeightTransfer

from .faults import FAULTS, Changing, Faulty, params, updates_until_found
from .receivers import ThreadedEngine, Worker, assert_holds, vllm_like

BUCKET = 2000  # bytes; some parameters are larger, most are not


def engine_for(model, *, size: int = 1) -> ThreadedEngine:
    return ThreadedEngine([Worker(vllm_like(model, rank=rank, size=size), rank)
                           for rank in range(size)])


@pytest.fixture
def model(make_model):
    model = make_model(dtype=torch.float32, hidden_size=32, num_attention_heads=4,
                       num_key_value_heads=2, vocab_size=70)
    with torch.no_grad():
        for param in model.parameters():  # biases begin as zeros, and so does the engine
            param.add_(torch.randn_like(param))
    return model


def transfer(model, engine, **options) -> WeightTransfer:
    return WeightTransfer(model, engine, **{"backend": "gloo", "bucket_bytes": BUCKET,
                                            "timeout": 20.0, **options})


# -- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "small_bytes"),
                         [("gloo", 0), ("gloo", 700), ("gloo", 1 << 20), ("ipc", 0)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_worker_ends_with_its_own_part_of_every_parameter(
        model, size, backend, small_bytes, monkeypatch):
    """With four workers and two key-value heads, heads are repeated, too."""
    monkeypatch.setattr("grpo.weights.transports.SMALL_BYTES", small_bytes)
    engine = engine_for(model, size=size)
    weights = transfer(model, engine, backend=backend)
    addresses = [p.data_ptr() for w in engine.workers for p in w.model.parameters()]
    assert len(weights.differing()) == len(list(model.parameters()))
    assert weights.publish() == 1
    assert_holds(engine, model)
    assert weights.differing() == []
    assert weights.unshared() == []
    # In place: graphs that hold the addresses see the update.
    assert addresses == [p.data_ptr() for w in engine.workers for p in w.model.parameters()]
    weights.close()


def test_later_updates_use_the_same_connection_and_carry_the_newest_values(model):
    engine = engine_for(model)
    weights = transfer(model, engine)
    for version in (1, 2, 3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.5 * version)
        assert weights.publish() == version == engine.version
        assert_holds(engine, model)
    assert engine.log.count("transfer_connect") == 1


def test_one_changed_value_is_found_by_name(model):
    engine = engine_for(model, size=2)
    weights = transfer(model, engine)
    weights.publish()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, -1] += 1e-3  # of the second worker
        model.model.layers[0].self_attn.k_proj.bias[0] += 1e-3
    assert weights.differing() == ["model.layers.0.self_attn.k_proj.bias",
                                   "model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_values_are_rounded_to_the_engines_type(make_model, backend):
    model = make_model(dtype=torch.float64)
    engine = engine_for(model)
    for worker in engine.workers:
        worker.model.to(torch.bfloat16)
    weights = transfer(model, engine, backend=backend)
    weights.publish()
    assert_holds(engine, model)
    assert weights.differing() == []


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_parameters_that_moved_or_were_replaced_are_sent_from_where_they_are(model, backend):
    engine = engine_for(model)
    weights = transfer(model, engine, backend=backend)
    weights.publish()
    norm = model.model.norm.weight
    norm.data = norm.data.clone() + 1
    weights.publish()
    assert_holds(engine, model)
    model.model.norm.weight = torch.nn.Parameter(norm.detach() + 1)
    weights.publish()
    assert_holds(engine, model)
    assert engine.log.count("transfer_map") == (3 if backend == "ipc" else 0)
    if backend == "gloo":  # memory that is mapped has to be contiguous
        last = model.model.layers[0].self_attn.o_proj
        last.weight.data = last.weight.data.t().clone().t() + 1  # no longer as it is sent
        weights.publish()
        assert_holds(engine, model)


def test_an_update_pauses_sends_resets_counts_and_resumes_in_this_order(model):
    engine = engine_for(model)
    weights = transfer(model, engine, pause_mode="wait", version=6)
    weights.publish()
    calls = engine.log[engine.log.index("pause wait"):]
    assert calls == ["pause wait", "transfer_receive", "reset_prefix_cache", "version 7", "resume"]


@pytest.mark.parametrize("mode, told", [("wait", True), ("keep", False)])
def test_the_wait_for_what_runs_is_told_apart_from_the_update(model, mode, told, monkeypatch):
    engine = engine_for(model)
    monkeypatch.setattr(engine, "pause", lambda mode, *, timeout: time.sleep(0.05))
    weights = transfer(model, engine, pause_mode=mode)
    weights.publish()
    assert (weights.waited >= 0.05) is told


# -- the proof -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_what_is_lost_on_the_way_fails_the_proof_within_its_interval(model, backend, fault):
    engine = engine_for(model, size=2)
    weights = transfer(model, engine, backend=backend)
    workers = [params(worker.model) for worker in engine.workers]
    found = updates_until_found(Faulty(weights, workers, fault), model)
    assert found == 1 or fault == "one tensor"
    weights.close()


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_the_self_test_finds_workers_that_keep_their_weights(model, backend):
    engine, learner = engine_for(model, size=2), Changing(model)
    weights = transfer(model, engine, backend=backend)
    WeightProof(weights).self_test(learner)
    assert weights.version == engine.version == 0
    assert_holds(engine, model)
    with pytest.raises(StaleWeightsError, match="the self-test.*model.embed_tokens.weight"):
        WeightProof(Faulty(weights, [params(engine.workers[1].model)])).self_test(learner)
    weights.close()


def test_a_part_is_compared_alone(model):
    engine = engine_for(model)
    weights = transfer(model, engine)
    names = [name for name, _ in model.named_parameters()]
    assert weights.differing(Part(1, 5)) == names[1::5]
    assert weights.differing(Part(99, 100)) == []  # fewer tensors than parts


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_wrong_model_is_named_parameter_by_parameter_before_anything_is_sent(model, make_model):
    other = make_model(dtype=torch.float32, hidden_size=32, num_attention_heads=4,
                       num_key_value_heads=2, vocab_size=70, intermediate_size=24,
                       num_hidden_layers=3)
    engine = engine_for(other, size=2)
    with pytest.raises(LayoutError) as error:
        transfer(model, engine)
    assert "model.layers.0.mlp.down_proj.weight: shape (32, 16)" in str(error.value)
    assert "model.layers.2.input_layernorm.weight: 0 of the engine's 32 rows" in str(error.value)
    assert engine.log == ["transfer_describe"]


def test_workers_that_never_join_are_named_at_the_deadline(model):
    engine = engine_for(model)
    engine.intercept["transfer_connect"] = lambda *args: time.sleep(30)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"publishing weights 1: waited 1 s in all, at last for "
                                            r"the engine's 1 workers to join through .*; "
                                            r"nothing was sent"):
        transfer(model, engine, timeout=0.6).publish()
    assert time.monotonic() - started < 5
    # Nothing was sent, and the engine was not even paused.
    assert not any(call.startswith("pause") for call in engine.log)


def test_workers_that_stop_receiving_are_an_error_and_a_later_update_connects_anew(model):
    engine = engine_for(model)
    weights = transfer(model, engine, timeout=3.0)
    engine.intercept["transfer_receive"] = lambda *args: time.sleep(30)
    with pytest.raises(TransferError, match=r"waited 3 s in all.*the engine stays paused"):
        weights.publish()
    assert weights.version == 0
    assert "resume" not in engine.log
    del engine.intercept["transfer_receive"]
    weights.timeout = 20.0
    assert weights.publish() == 1
    assert_holds(engine, model)


def test_an_error_of_a_worker_ends_the_update_at_once(model):
    engine = engine_for(model)
    weights = transfer(model, engine)

    def fail(*args):
        raise ValueError("the disk of the worker is on fire")

    engine.intercept["transfer_receive"] = fail
    started = time.monotonic()
    with pytest.raises(TransferError, match="the disk of the worker is on fire"):
        weights.publish()
    assert time.monotonic() - started < 5


def test_a_trainer_that_stops_sending_is_an_error_for_the_worker(model):
    engine = engine_for(model)
    transfer(model, engine).publish()
    with pytest.raises(TransferError, match="bucket 1 of .*look at the trainer"):
        engine.workers[0].transfer_receive(0.3)


def test_a_refused_cache_reset_is_an_error(model):
    engine = engine_for(model)
    engine.cache_resets = False
    with pytest.raises(TransferError, match="refused to reset its prefix cache"):
        transfer(model, engine).publish()
    assert engine.version == 0


@pytest.mark.parametrize(("options", "message"), [
    ({"backend": "mpi"}, "backend='mpi' is unknown; choose one of nccl, gloo, ipc"),
    ({"pause_mode": "stop"}, "pause_mode='stop' is unknown"),
    ({"backend": "nccl"}, "the model is on cpu; use backend='gloo'"),
    ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ({"timeout": -1.0}, "timeout=-1.0"),
])
def test_options_that_cannot_work_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        transfer(model, engine_for(model), **options)


def test_the_rendezvous_listens_on_loopback_only(model):
    engine = engine_for(model)
    ports = []
    connect = engine.workers[0].transfer_connect

    def look(config, plan):
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports.extend(line[1] for line in listening
                     if line[3] == "0A" and int(line[1].split(":")[1], 16) == config["port"])
        wide = Path("/proc/net/tcp6").read_text()
        assert f":{config['port']:04X} 0000000000000000" not in wide
        return [connect(config, plan)]

    engine.intercept["transfer_connect"] = look
    transfer(model, engine).publish()
    assert [port.split(":")[0] for port in ports] == ["0100007F"]


# -- a trainer sharded by FSDP2 --------------------------------------------------------------------

SHARDED = """
import sys, torch, torch.distributed as dist
sys.path[:0] = [FOLDER, TESTS]
from torch.distributed.fsdp import fully_shard
from faults import FAULTS, Changing, Faulty, params
from receivers import ThreadedEngine, Worker, assert_holds, vllm_like
from transformers import Qwen2Config, Qwen2ForCausalLM
from grpo.weights.canary import StaleWeightsError
from grpo.weights.channel import TransferError
from grpo.weights.proof import WeightProof
from grpo.weights.transfer import WeightTransfer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
def make():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=70, hidden_size=32, intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True))
def nudge_shards(module):
    with torch.no_grad():
        for p in module.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.copy_(local.view(torch.int32).add(1).view(torch.float32))
whole, model = make(), make()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
workers = [Worker(vllm_like(whole, rank=number, size=2), number) for number in range(2)]
engine = ThreadedEngine(workers) if rank == 0 else None
weights = WeightTransfer(model, engine, backend=sys.argv[3], bucket_bytes=2000, timeout=60.0)
assert weights.publish() == 1
assert weights.differing() == []
proof, changing = WeightProof(weights, interval=3), Changing(model)
proof.self_test(changing)
assert weights.version == 1
if rank == 0:
    assert_holds(engine, whole)
# What is compared is the trainer's own, not what was sent: the last of two workers is behind.
held = [params(worker.model) for worker in workers]
for fault in FAULTS:
    faulty = Faulty(weights, held if rank == 0 else [params(whole)], fault)
    proof = WeightProof(faulty, interval=2)
    missed = None
    for update in range(1, 3 + 1 + 2):
        faulty.active = rank == 0 and update > 3
        nudge_shards(model), nudge_shards(whole)
        faulty.publish()
        try:
            proof.check()
        except StaleWeightsError as error:
            assert rank == 0 and update > 3, error
            missed = missed or update - 3
    assert bool(missed) == (rank == 0) and (missed in (None, 1) or fault == "one tensor")
weights.version = 1
with torch.no_grad():
    for p, q in zip(model.parameters(), whole.parameters()):
        p.mul_(3), q.mul_(3)
changed = weights.differing()
assert bool(changed) == (rank == 0)
assert weights.publish() == 2
if rank == 0:
    assert_holds(engine, whole)
    engine.cache_resets = False
try:
    weights.publish()
except TransferError as error:
    assert rank == 0 and "prefix cache" in str(error)
except RuntimeError as error:
    assert rank == 1 and "rank 0 could not" in str(error)
else:
    raise AssertionError("a failed update went unnoticed")
assert weights.version == 2
print("all is well")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_a_sharded_trainer_reaches_every_worker_and_fails_on_all_ranks(tmp_path, backend):
    here = Path(__file__).resolve()
    script = tmp_path / "trainer.py"
    script.write_text(SHARDED.replace("FOLDER, TESTS", f"{str(here.parents[2])!r}, "
                                                       f"{str(here.parent)!r}"))
    ranks = [subprocess.Popen([sys.executable, script, str(rank), tmp_path / "rendezvous", backend],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}) for rank in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in ranks]
    assert all("all is well" in output for output in outputs), "\n".join(outputs)
