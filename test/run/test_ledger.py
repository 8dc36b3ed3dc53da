"""The ledger against an optimizer and a training step that really ran; totals, advice, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo import GRPOLoss, total_loss
from grpo.policies.model_shape import LoRA, ModelShape
from grpo.run.ledger import GIB, PHASES, DoesNotFitError, Ledger, Row, Saving, check_fits
from grpo.run.memory_plan import MemoryPlan, memory_ledger
from grpo.training.optim import MasterAdamW

from .memory_probe import AllocationTracker, family, real_model

BIG = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
       "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
       "head_dim": 128, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def tiny() -> MemoryPlan:
    return MemoryPlan(shape=ModelShape.of(family("Qwen2Config")), dtype=torch.bfloat16,
                      device="cpu", tokens=4096, row_tokens=64)


@pytest.fixture(scope="module")
def large() -> MemoryPlan:
    """A 1.5 B model on a GPU, with everything that can be saved on switched on."""
    return MemoryPlan(shape=ModelShape.of(family("Qwen2Config", **BIG)), dtype=torch.bfloat16,
                      device="cuda", tokens=20_480, row_tokens=320, sharing="two_copies",
                      kv_cache_bytes=4 * GIB, generated_rows=256, prompt_tokens=64)


def sizes(ledger: Ledger) -> dict[str, int]:
    return {row.name: row.bytes for row in ledger.rows}


# -- what really ran ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_optimizer_holds_exactly_what_the_ledger_says(tiny, dtype):
    model = real_model(family("Qwen2Config"), dtype)
    optimizer = MasterAdamW(model.parameters(), lr=1e-5)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
    rows = sizes(memory_ledger(replace(tiny, dtype=dtype)))
    assert rows["weights"] == sum(param.nbytes for param in model.parameters())
    assert rows["gradients"] == sum(master.grad.nbytes for master in optimizer.masters)
    own = [master for master, param in zip(optimizer.masters, model.parameters(), strict=True)
           if master is not param]
    assert rows.get("masters", 0) == sum(master.nbytes for master in own)
    optimizer.step()
    held = [value for state in optimizer.adamw.state.values() for value in state.values()]
    assert rows["moments"] == sum(value.nbytes for value in held)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_training_step_allocates_what_the_ledger_says(make_batch, dtype, head, checkpointing):
    config = family("Qwen2Config", num_hidden_layers=4, vocab_size=512)
    model = real_model(config, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = make_batch(model, prompts=(1,) * 31 + (2,), responses=(63,) * 31 + (60,))
    loss = GRPOLoss(model, head=head, head_chunk_size=512)
    with AllocationTracker() as allocations:
        optimizer = MasterAdamW(model.parameters(), lr=1e-5)
        for _ in range(2):  # the first step makes the moments
            for _ in range(2):  # gradients of the first micro-batch are there in the second
                total_loss(loss(batch)).backward()
            optimizer.step()
    ledger = memory_ledger(MemoryPlan(
        shape=ModelShape.of(config), dtype=dtype, device="cpu", tokens=32 * 64, row_tokens=64,
        head=head, head_chunk_size=512, gradient_checkpointing=checkpointing))
    there_before = {"weights", "reserve"}
    formula = ledger.total - sum(size for name, size in sizes(ledger).items()
                                 if name in there_before)
    assert formula == pytest.approx(allocations.peak, rel=0.2)


def test_the_total_agrees_with_a_peak_measured_on_a_gpu(large):
    """One H200, 1.5 B, 256 x (64 + 256) tokens in four micro-batches, compiled layers, an engine
    with a quarter of the memory: 101 GiB allocated, with gradients in bfloat16."""
    engine = int(0.25 * 139.8 * GIB)
    ledger = memory_ledger(replace(
        large, sharing="one_copy", compiled=True,
        kv_cache_bytes=engine - sizes(memory_ledger(large))["weights"]))
    rows = sizes(ledger)
    allocated = ledger.total - rows["reserve"] - rows["gradients"] // 2
    assert allocated / GIB == pytest.approx(101, rel=0.05)


# -- totals ---------------------------------------------------------------------------------------


def test_rows_of_different_phases_do_not_add_up():
    ledger = Ledger((Row("always", 5, ""), Row("a", 2, "", ("generate",)),
                     Row("b", 3, "", ("head", "backward")), Row("c", 1, "", ("backward",))))
    assert [ledger.at(phase) for phase in PHASES] == [7, 8, 9]
    assert (ledger.total, ledger.peak) == (9, "backward")


@given(tokens=st.integers(64, 10_000), more=st.integers(1, 10_000), head=st.sampled_from(
    ["fused", "chunked", "logits"]), device=st.sampled_from(["cpu", "cuda"]))
def test_more_tokens_never_need_less(tiny, tokens, more, head, device):
    plan = replace(tiny, head=head, device=device, tokens=tokens)
    assert memory_ledger(plan).total < memory_ledger(replace(plan, tokens=tokens + more)).total


def test_only_two_copies_hold_the_weights_twice(large):
    weights = sizes(memory_ledger(large))["weights"]
    totals = {sharing: memory_ledger(replace(large, sharing=sharing)).total
              for sharing in ("one_copy", "two_copies", "apart")}
    assert totals["two_copies"] - totals["one_copy"] == weights
    assert totals["one_copy"] - totals["apart"] == 4 * GIB + GIB  # KV cache and CUDA graphs


def test_several_devices_share_weights_and_moments_and_gather_what_they_compute_with(large):
    alone, shared = (sizes(memory_ledger(replace(large, ranks=ranks))) for ranks in (1, 4))
    count = large.shape.parameters
    assert shared["weights"] == 4 * count // 4 and "masters" not in shared
    assert shared["moments"] == alone["moments"] // 4
    assert shared["engine"] == alone["engine"]  # which is on the first of them, whole
    layer = sum(ins * outs for number, _, ins, outs in large.shape.linears if number == 0)
    embedding = large.shape.vocabulary * large.shape.hidden
    assert shared["gathered"] == pytest.approx(2 * (embedding + 2 * layer), rel=1e-3)


def test_several_devices_have_slices_of_adapters_as_masters_and_of_frozen_weights_as_they_are(
        large):
    alone, shared = (sizes(memory_ledger(replace(large, ranks=ranks, lora=LoRA(rank=8))))
                     for ranks in (1, 4))
    assert shared["weights"] == alone["weights"] // 4 and "masters" not in shared
    assert shared["adapters"] == alone["masters"] // 4
    assert shared["moments"] == alone["moments"] // 4


def test_adapters_alone_have_masters_moments_and_gradients(large):
    lora = LoRA(rank=8, targets=("q_proj", "v_proj"))
    count = 28 * (8 * (1536 + 1536) + 8 * (1536 + 256))
    rows = sizes(memory_ledger(replace(large, lora=lora)))
    assert (rows["adapters"], rows["masters"], rows["gradients"]) == (2 * count, 4 * count,
                                                                      4 * count)
    assert rows["moments"] == 8 * count + 4 * 4 * 28
    assert rows["weights"] == sizes(memory_ledger(large))["weights"]


def test_a_cache_of_the_trainers_own_model_is_gone_when_training_starts(large):
    rows = {row.name: row for row in memory_ledger(replace(large, in_engine=False)).rows}
    assert rows["KV cache"].phases == ("generate",)
    assert {row.name: row for row in memory_ledger(large).rows}["KV cache"].phases == PHASES


# -- refusal --------------------------------------------------------------------------------------


def test_the_refusal_names_the_rows_and_the_changes_that_are_enough(large):
    ledger = memory_ledger(large)
    check_fits(ledger, ledger.total, advised=lambda: pytest.fail("nothing has to be saved"))
    with pytest.raises(DoesNotFitError) as error:
        check_fits(ledger, 80 * GIB, advised=lambda: [Saving("a=1", 59 * GIB), Saving("b=2", GIB)])
    lines = str(error.value).splitlines()
    assert "80.00 GiB; the greatest rows are activations 58." in lines[0]
    assert lines[1:] == ["  a=1 saves 59.00 GiB: enough", "  b=2 saves 1.00 GiB"]


def test_the_refusal_says_when_no_single_change_is_enough():
    ledger = Ledger((Row("weights", 10, ""),))
    for room, lines in ((5, 4), (7, 3)):
        with pytest.raises(DoesNotFitError) as error:
            check_fits(ledger, room, advised=lambda: [Saving("a", 2), Saving("b", 3)])
        assert len(str(error.value).splitlines()) == lines
        assert ("no single one of these is enough; combine several" in str(error.value)) == (
            room == 5)


def test_the_table_has_a_line_for_each_row_with_its_share(large):
    ledger = memory_ledger(large)
    lines = ledger.table(100 * GIB)
    assert [line.split("  ")[0] for line in lines[:-1]] == [row.name for row in ledger.rows]
    assert lines[0].split() == ["weights", "2.88", "GiB", "2.9", "%", "1,543.7", "M", "x", "2",
                                "bytes", "(bfloat16),", "the", "trainer's"]
