"""vLLM's own transfer engine: its messages and the order of its calls, without a GPU."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from grpo.weights.channel import Deadline, TransferError
from grpo.weights.layout import LayoutError
from grpo.weights.transfer import make_plan

from .receivers import ThreadedEngine, Worker, vllm_like

pytestmark = [pytest.mark.slow, pytest.mark.vllm]  # importing vLLM takes seconds

BUCKET = 1 << 20


@pytest.fixture(scope="module")
def vllm_nccl():
    """vLLM's modules, whatever its version is."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

    return nccl_common, nccl_engine, packed_tensor


@dataclasses.dataclass
class OldInit:
    """Fields of vLLM 0.25.1's initial message."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclasses.dataclass
class OldUpdate:
    """Fields of vLLM 0.25.1's update message."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


@pytest.fixture(params=["installed", "0.25.1"])
def classes(request, vllm_nccl, monkeypatch):
    common, engine, _ = vllm_nccl
    if request.param == "0.25.1":
        monkeypatch.setattr(common, "NCCLWeightTransferInitInfo", OldInit)
        monkeypatch.setattr(engine, "NCCLWeightTransferUpdateInfo", OldUpdate)
    return common.NCCLWeightTransferInitInfo, engine.NCCLWeightTransferUpdateInfo


@pytest.fixture
def sender(model_and_engine, classes, vllm_nccl, monkeypatch):
    """The sender without NCCL: what would be broadcast is collected."""
    from grpo.weights.vllm_transfer import VLLMTransfer

    common, _, packed = vllm_nccl
    model, engine = model_and_engine
    sent: list[torch.Tensor] = []

    def producer(iterator, *, group, src, post_iter_func, buffer_size_bytes):
        assert (group, src, buffer_size_bytes) == ("group", 0, BUCKET)
        sent.extend(post_iter_func(item).clone() for item in iterator)

    monkeypatch.setattr(common, "trainer_init", lambda address: "group")
    monkeypatch.setattr(packed, "packed_nccl_broadcast_producer", producer)
    monkeypatch.setattr(VLLMTransfer, "_on_device", lambda self, function, *args, **kwargs:
                        function(*args, **kwargs))
    received = {}
    for method in ("init_weight_transfer_engine", "start_weight_update", "update_weights",
                   "finish_weight_update"):
        engine.intercept[method] = lambda *args, method=method: [received.update({method: args})]

    def make(seconds: float = 20.0) -> VLLMTransfer:
        return VLLMTransfer(engine, plan_of(model, engine), device=torch.device("cpu"),
                            host="127.0.0.1", workers=1, bucket_bytes=BUCKET,
                            deadline=Deadline(seconds, "publishing", fix="look at the log"))

    return make, received, sent


@pytest.fixture
def model_and_engine(make_model):
    model = make_model(dtype=torch.float32, vocab_size=64)
    return model, ThreadedEngine([Worker(vllm_like(model))])


def plan_of(model, engine):
    workers = engine.collective_rpc("transfer_describe", timeout=1.0)
    return make_plan(dict(model.named_parameters()), workers, loader="vllm")


def test_the_messages_are_vllms_own_and_say_how_parameters_are_packed(
        sender, classes, model_and_engine):
    make, received, sent = sender
    model, engine = model_and_engine
    make().send((param.detach() for param in model.parameters()),
                Deadline(20.0, "publishing", fix="look at the log"))
    init = classes[0](**received["init_weight_transfer_engine"][0])
    update = classes[1](**received["update_weights"][0])
    assert (init.rank_offset, init.world_size, init.master_address) == (1, 2, "127.0.0.1")
    carrier = init if hasattr(init, "packed") else update
    assert (carrier.packed, carrier.packed_buffer_size_bytes) == (True, BUCKET)
    assert update.names == [name for name, _ in model.named_parameters()]
    assert update.dtype_names == ["float32"] * len(sent)
    for shape, tensor, param in zip(update.shapes, sent, model.parameters(), strict=True):
        assert list(tensor.shape) == shape
        assert torch.equal(tensor, param)
    calls = [call for call in engine.log if "weight" in call]
    assert calls == ["init_weight_transfer_engine", "start_weight_update", "update_weights",
                     "finish_weight_update"]


def test_a_worker_that_cannot_load_is_an_error_at_once(sender, model_and_engine):
    make, _, _ = sender
    model, engine = model_and_engine
    transfer = make()

    def fail(*args):
        raise ValueError("no such parameter")

    engine.intercept["update_weights"] = fail
    started = time.monotonic()
    with pytest.raises(TransferError, match="load the weights failed: no such parameter"):
        transfer.send(iter([p.detach() for p in model.parameters()]),
                      Deadline(20.0, "publishing", fix="look at the log"))
    assert time.monotonic() - started < 5
    assert "finish_weight_update" not in engine.log


def test_workers_that_never_join_are_an_error_at_the_deadline(sender, model_and_engine):
    make, _, _ = sender
    model_and_engine[1].intercept["init_weight_transfer_engine"] = lambda *args: time.sleep(20)
    with pytest.raises(TransferError, match="the engine's 1 workers to join; look at the log"):
        make(0.5)


def test_models_of_another_size_are_refused_without_a_rule_for_the_layout(
        model_and_engine, make_model):
    _, engine = model_and_engine
    other = make_model(dtype=torch.float32, vocab_size=64, intermediate_size=24)
    with pytest.raises(LayoutError, match="mlp.down_proj.weight: shape .* in the engine"):
        plan_of(other, engine)
