"""Mixtures of experts: where experts lie in an engine, and that every way of the weights brings
them there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo.policies import unpacked
from grpo.weights.layout import LayoutError, engine_layout
from grpo.weights.proof import WeightProof
from grpo.weights.reload import CheckpointReload
from grpo.weights.shared import SharedCopy, SingleCopy
from grpo.weights.transfer import WeightTransfer
from grpo.weights.worker.receiver import _segments, part_of, pieces_of

from .families import load_family, make_family, save_family
from .faults import Changing, nudge
from .receivers import submodule
from .steps import gap, policy_of, running_engine

LAYER = "model.layers.0."
EXPERTS, INNER, WIDTH = 4, 3, 5


def trainer_params() -> dict[str, torch.Tensor]:
    return {LAYER + "mlp.gate.weight": torch.zeros(EXPERTS, WIDTH),
            LAYER + "mlp.experts.gate_up_proj": torch.zeros(EXPERTS, 2 * INNER, WIDTH),
            LAYER + "mlp.experts.down_proj": torch.zeros(EXPERTS, WIDTH, INNER)}


def engine_params(feed_forward: str, holder: str, *, padding: int = 0) -> dict[str, torch.Tensor]:
    layer, inner = LAYER + feed_forward, INNER + padding
    return {layer + "gate.weight": torch.zeros(EXPERTS, WIDTH),
            layer + holder + "w13_weight": torch.zeros(EXPERTS, 2 * inner, WIDTH),
            layer + holder + "w2_weight": torch.zeros(EXPERTS, WIDTH, inner)}


@pytest.mark.parametrize("feed_forward", ["mlp.", "block_sparse_moe."])
@pytest.mark.parametrize("holder", ["experts.", "experts.routed_experts."])
def test_experts_and_router_have_their_places_whatever_vllm_calls_them(feed_forward, holder):
    theirs = engine_params(feed_forward, holder)
    places = engine_layout(trainer_params(), theirs)
    assert [(place.name, place.start, place.stop) for place in places.values()] == [
        (name, 0, EXPERTS) for name in theirs]


def test_experts_that_the_engine_has_padded_are_refused_with_the_reason():
    with pytest.raises(LayoutError) as error:
        engine_layout(trainer_params(), engine_params("mlp.", "experts.", padding=1))
    assert all(part in str(error.value) for part in (
        "mlp.experts.gate_up_proj: shape (4, 6, 5) does not fit", "w13_weight (4, 8, 5)",
        "not supported for mixture-of-experts models", "moe_backend=triton"))


def test_experts_that_the_engine_has_shuffled_are_told_from_other_weights():
    class Engine:
        def __init__(self, module):
            runner = SimpleNamespace(get_model=lambda: module)
            worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
            self.llm_engine = SimpleNamespace(
                model_executor=SimpleNamespace(driver_worker=worker))

    def module(params):
        root = nn.Module()
        for name, value in params.items():
            path, _, last = name.rpartition(".")
            submodule(root, path).register_parameter(last, nn.Parameter(value.clone()))
        return root

    ours = {name: torch.randn_like(value) for name, value in trainer_params().items()}
    theirs = dict(zip(engine_params("mlp.", "experts."), ours.values(), strict=True))
    SingleCopy(module(ours), Engine(module(theirs)))
    name = LAYER + "mlp.experts.w13_weight"
    swapped = theirs | {name: torch.cat(theirs[name].chunk(2, dim=1)[::-1], dim=1)}
    with pytest.raises(ValueError, match="differ in .*gate_up_proj. As these are experts alone: "
                                         ".*not supported for mixture-of-experts .*triton"):
        SingleCopy(module(ours), Engine(module(swapped)))


def worker_layer(w13: torch.Tensor, w2: torch.Tensor, rank: int, size: int, experts: int = EXPERTS
                 ) -> nn.Module:
    """The experts that one of several workers of an engine has."""
    layer = nn.Module()
    inner = INNER * 2 // size
    gate, up = w13.chunk(2, dim=1)
    mine = slice(rank * inner, (rank + 1) * inner)
    layer.w13_weight = nn.Parameter(torch.cat([gate[:, mine], up[:, mine]], dim=1))
    layer.w2_weight = nn.Parameter(w2[:, :, mine].clone())
    layer.moe_config = SimpleNamespace(num_experts=experts, moe_parallel_config=SimpleNamespace(
        tp_rank=rank, tp_size=size))
    return layer


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_worker_holds_its_share_of_every_expert(size):
    w13 = torch.randn(EXPERTS, 4 * INNER, WIDTH)
    w2 = torch.randn(EXPERTS, WIDTH, 2 * INNER)
    for rank in range(size):
        layer = worker_layer(w13, w2, rank, size)
        for held, whole in ((layer.w13_weight, w13), (layer.w2_weight, w2)):
            dim, length, segments = _segments(layer, held)
            assert length == whole.shape[dim]
            pieces = pieces_of({"dim": dim, "segments": segments},
                               {"start": 0, "shape": list(whole.shape)})
            assert sum(piece.length for piece in pieces) == held.shape[dim]
            for piece in pieces:
                assert torch.equal(held.narrow(piece.dim, piece.local, piece.length),
                                   part_of(whole, piece))


def test_experts_that_are_divided_among_workers_are_refused():
    layer = worker_layer(torch.zeros(EXPERTS, 4 * INNER, WIDTH),
                         torch.zeros(EXPERTS, WIDTH, 2 * INNER), 0, 1, experts=2 * EXPERTS)
    with pytest.raises(ValueError, match="weight_sync is not supported for mixture-of-experts "
                                         r"models whose experts .* \(expert parallelism\)"):
        _segments(layer, layer.w13_weight)


def test_only_an_engine_with_experts_on_a_gpu_is_told_which_kernel_to_take(tmp_path):
    pytest.importorskip("vllm")
    sparse, dense = tmp_path / "sparse", tmp_path / "dense"
    make_family("mixtral").config.save_pretrained(sparse)
    make_family("llama").config.save_pretrained(dense)
    options = unpacked.plain_expert_options
    assert options(str(sparse), device_type="cuda") == {"moe_backend": "triton"}
    assert options(str(sparse), device_type="cpu", adapters=True) == {
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    assert options(str(sparse), device_type="cpu") == options(str(dense), device_type="cuda") == {}


@pytest.mark.parametrize("weighted_input", [False, True])
def test_the_plain_kernel_is_what_transformers_computes(weighted_input):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    experts = make_family("qwen3-moe").model.layers[0].mlp.experts
    torch.manual_seed(0)
    hidden_TH, ids_TK = torch.randn(7, 128), torch.randint(8, (7, 2))
    ids_TK[:, 1] = (ids_TK[:, 0] + 1 + ids_TK[:, 1] % 7) % 8  # never twice the same
    weights_TK = torch.rand(7, 2)
    expected = experts(hidden_TH, ids_TK, torch.ones(7, 2) if weighted_input else weights_TK)
    output = torch.full_like(hidden_TH, torch.nan)
    unpacked._apply_experts(
        SimpleNamespace(w1_bias=None, w2_bias=None), output, hidden_TH, experts.gate_up_proj,
        experts.down_proj, weights_TK, ids_TK, MoEActivation.SILU, 8, None,
        apply_router_weight_on_input=weighted_input)
    assert torch.allclose(output, expected, atol=1e-5)


def test_adapters_sit_on_attention_alone():
    pytest.importorskip("peft")
    from grpo.weights.adapters import adapters, make_lora

    with pytest.raises(ValueError, match=r"lora\.target_modules=\['up_proj'\] is not supported for "
                                         "mixture-of-experts models: .*; use .*'o_proj'"):
        make_lora(make_family("qwen2-moe"), r=2, target_modules=["q_proj", "up_proj"])
    names = adapters(make_lora(make_family("qwen2-moe"), r=2))
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


# -- a real engine in a process of its own ---------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def served(request, tmp_path_factory):
    """An engine with experts, and its folder."""
    folder = save_family("qwen3-moe", tmp_path_factory.mktemp("experts"))
    with running_engine(folder, separate_process=True,
                        tensor_parallel_size=request.param) as engine:
        yield engine, folder


def way_of(name: str, model, handle, tokenizer, folder):
    if name == "reload":
        return CheckpointReload(model, tokenizer, handle, folder, timeout=60.0)
    if name == "one memory":
        return SharedCopy(model, handle, timeout=20.0)
    return WeightTransfer(model, handle, backend=name, timeout=60.0)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", ["one memory", "ipc", "gloo", "reload"])
def test_every_way_brings_experts_and_the_proof_names_one_that_stayed_behind(
        served, name, tokenizer, tmp_path):
    from grpo.weights.canary import StaleWeightsError

    handle, folder = served
    if name == "one memory" and len(handle.workers) > 1:
        pytest.skip("several workers cannot share one copy")
    handle.collective_rpc("load_checkpoint", str(folder), timeout=30)
    assert handle.reset_prefix_cache(timeout=10)
    model = load_family(folder)
    weights = way_of(name, model, handle, tokenizer, tmp_path)
    policy = policy_of(handle.llm, weights)
    proof = WeightProof(weights)
    proof.self_test(Changing(model))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.97).add_(0.02 * torch.randn_like(param))
    weights.publish()
    proof.check(whole=True)
    assert gap(model, policy) < 1e-4
    nudge(model)
    weights.publish()
    with torch.no_grad():  # one value of one expert, of which the engine does not hear
        expert = model.model.layers[0].mlp.experts.down_proj
        expert.data = expert.data.clone()
        expert[5, 0, 0] += 1e-3
    with pytest.raises(StaleWeightsError, match=r"mlp\.experts\.down_proj"):
        proof.check(whole=True)
    getattr(weights, "close", lambda: None)()


def test_experts_in_a_process_that_has_had_a_dense_engine_are_refused(tmp_path, monkeypatch):
    parallel_state = pytest.importorskip("vllm.distributed.parallel_state")
    for group in ("_TP", "_PP"):
        monkeypatch.setattr(parallel_state, group, object())
    monkeypatch.setattr(parallel_state, "_EP", None)
    unpacked.refuse_experts_after_dense(str(save_family("llama", tmp_path / "dense")))
    experts = save_family("qwen3-moe", tmp_path / "experts")
    with pytest.raises(ValueError, match="mixture of experts.*use inference_model.engine=process"):
        unpacked.refuse_experts_after_dense(str(experts))
    monkeypatch.setattr(parallel_state, "_EP", object())
    unpacked.refuse_experts_after_dense(str(experts))
