"""What is chosen for a GPU where the configuration leaves it open; no GPU is needed to choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo.config.schema import load_config
from grpo.policies.model_shape import ModelShape
from grpo.run.fast_defaults import BUDGETS, choose
from grpo.run.ledger import GIB, Ledger, Row

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROW = 320


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    from transformers import Qwen2Config

    return ModelShape.of(Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True))


def by_tokens(config) -> Ledger:
    """A stand-in for the run's ledger: 20 GiB, and 2 MiB a token of a micro-batch."""
    tokens = config.train.max_tokens_per_micro_batch
    return Ledger((Row("run", 20 * GIB + 2 * 2**20 * tokens, ""),))


def chosen(shape, *, device=CUDA, backend="vllm", dtype=torch.bfloat16, room=139 * GIB,
           **sections):
    config = load_config({"model": {"name": "some/model"},
                          "env": {"dataset": "gsm8k", "num_envs": 32, "repeats": 8}} | sections)
    return choose(config, shape, by_tokens, device=device, dtype=dtype, backend=backend,
                  row_tokens=ROW, room=room)


def test_a_long_run_on_a_gpu_compiles_and_takes_the_largest_budget(shape):
    config, said = chosen(shape)
    assert config.train_model.compile is True
    assert config.train.max_tokens_per_micro_batch == BUDGETS[0]
    assert [line.partition("=")[0] for line in said] == [
        "train_model.compile", "train.packing", "train.max_tokens_per_micro_batch"]


def test_a_short_run_is_not_worth_compiling(shape):
    config, [line, *_] = chosen(shape, train={"total_dialog_turns": 12 * 256})
    assert config.train_model.compile is False and "compiling pays from" in line


def test_what_was_not_measured_is_compiled_only_when_asked_to(shape):
    other = replace(shape, architecture="falcon_h1")
    assert chosen(other)[0].train_model.compile is False
    assert chosen(other, train_model={"compile": True})[0].train_model.compile is True


@pytest.mark.parametrize(("room", "budget"), [(80, 20_480), (64, 16_384), (45, 8192), (1, 1024)])
def test_the_budget_follows_the_memory(shape, room, budget):
    config, [*_, line] = chosen(shape, room=room * GIB)
    assert config.train.max_tokens_per_micro_batch == budget
    assert f"of {room}.00 GiB" in line


def test_a_budget_is_not_smaller_than_a_row_needs(shape):
    config = load_config({"model": {"name": "some/model"}, "env": {"dataset": "gsm8k"}})
    config, _ = choose(config, shape, by_tokens, device=CUDA, dtype=torch.bfloat16, backend="vllm",
                       row_tokens=5000, room=GIB)
    assert config.train.max_tokens_per_micro_batch == 4096  # a row of its own each


def test_what_is_set_stays(shape):
    config, said = chosen(shape, train={"max_tokens_per_micro_batch": 999, "packing": False},
                          train_model={"compile": False})
    assert (config.train.max_tokens_per_micro_batch, config.train_model.compile,
            config.train.packing) == (999, False, False)
    assert not said
    config, said = chosen(shape, train={"gradient_accumulation_steps": 4})
    assert config.train.max_tokens_per_micro_batch is None and len(said) == 2


@pytest.fixture
def kernel(monkeypatch):
    """As if PyTorch had the kernel, whichever is installed here."""
    from grpo.objectives import packed_attention

    monkeypatch.setattr(packed_attention, "_OPTIONS", frozenset({"scale", "window_size"}))


def test_rows_are_packed_where_that_was_measured(shape, kernel):
    config, said = chosen(shape)
    assert config.train.packing is True
    assert said[1] == "train.packing=true: no padding, and the rows of a group share their prompt"


@pytest.mark.parametrize(("change", "options", "reason"), [
    ({"architecture": "falcon_h1"}, {}, "falcon_h1 has not been measured"),
    ({"head_dim": 512}, {}, "no kernel for torch.bfloat16 and heads of 512"),
    ({}, {"dtype": torch.float32}, "no kernel for torch.float32"),
    ({}, {"train_model": {"attn_implementation": "eager"}}, "attn_implementation=eager"),
    ({}, {"train_model": {"num_devices": 2}, "inference_model": {"engine": "process"}},
     "not been measured on several devices"),
], ids=["architecture", "heads", "dtype", "attention", "devices"])
def test_rows_are_padded_elsewhere(shape, kernel, change, options, reason):
    config, said = chosen(replace(shape, **change), **options)
    assert config.train.packing is False
    assert "train.packing=false: " in said[1] and reason in said[1]


def test_a_pytorch_without_the_kernel_pads(shape, monkeypatch):
    from grpo.objectives import packed_attention

    monkeypatch.setattr(packed_attention, "_OPTIONS", frozenset({"is_causal"}))
    assert chosen(shape)[0].train.packing is False


def test_nothing_is_compiled_on_a_cpu_or_for_transformers(shape):
    config, said = chosen(shape, device=CPU)
    assert (config.train_model.compile, config.train.max_tokens_per_micro_batch) == (False, 8192)
    assert config.train.packing is False
    assert not said  # everybody's default there
    assert chosen(shape, backend="transformers")[0].train_model.compile is False
