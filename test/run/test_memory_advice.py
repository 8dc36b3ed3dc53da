"""What is advised to a run that does not fit: changes that are allowed, and what they save."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config
from grpo.run.assemble import _advised
from grpo.run.build_engine import Setup
from grpo.run.device_memory import role_ledgers, run_ledger
from grpo.run.ledger import GIB
from grpo.run.placement import DevicePlan
from grpo.run.start import Start

from ..config.configs import small

CUDA = torch.device("cuda", 0)
ROWS = 320


@pytest.fixture
def advised(big_folder, monkeypatch):
    """What is advised on GPUs of 80 GiB, in keys with their remarks, and what each saves."""
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    shared = {"model_path": big_folder, "device": CUDA, "dtype": torch.bfloat16, "backend": "vllm",
              "max_model_len": ROWS}

    def advise(schema: type[Config] = Config, role: str | None = None, **sections):
        sections = {"env": {"num_envs": 16, "repeats": 16}, **sections}
        sections["train"] = {"total_dialog_turns": 256, "max_tokens_per_micro_batch": 20_480,
                             **sections.get("train", {})}
        sections["train"] = {k: v for k, v in sections["train"].items() if v is not None}
        sections["inference_model"] = {"backend": "vllm", **sections.get("inference_model", {})}
        config = load_config(small(model={"name": "some/model"}, **sections), schema)
        ledger_of = partial(run_ledger, **shared)
        if role is not None:
            places = DevicePlan("cuda", (0,), (), ((1,),))
            ledger_of = lambda config: role_ledgers(config, places, **shared)[role]  # noqa: E731
        setup = Setup(config=config, path=big_folder, tokenizer=None, device=CUDA,
                      dtype=torch.bfloat16, max_model_len=ROWS, folder=Path("here"))
        start = Start(setup, "vllm", None, None, None, {}, None)
        ledger = ledger_of(config)
        found = _advised(start, ledger_of, ledger, 80 * GIB, role)
        assert all(saving.bytes > 0 for saving in found)
        assert found == sorted(found, key=lambda saving: saving.bytes, reverse=True)
        return {saving.change: saving.bytes for saving in found}

    return advise


COPIED = {"weight_sync": "reload", "kv_cache_memory_bytes": 4 * GIB}


def test_everything_that_can_be_saved_on_is_advised_with_key_and_value(advised):
    assert set(advised(inference_model=COPIED)) == {
        "train_model.gradient_checkpointing=true", "train.max_tokens_per_micro_batch=10240",
        "train_model.compile=true", "train_model.head_chunk_size=1024",
        f"inference_model.kv_cache_memory_bytes={2 * GIB} (rows then wait for each other)",
        "inference_model.weight_sync=auto (one copy of the weights for trainer and engine)",
        "train_model.lora.enabled=true inference_model.weight_sync=auto (adapters of rank 16 "
        "instead of all weights)"}


def test_a_cache_saves_its_half_and_one_copy_a_copy(advised):
    found = advised(inference_model=COPIED)
    assert found[f"inference_model.kv_cache_memory_bytes={2 * GIB} "
                 "(rows then wait for each other)"] == 2 * GIB
    assert found["inference_model.weight_sync=auto (one copy of the weights for trainer and "
                 "engine)"] == pytest.approx(1.5437e9 * 2, rel=1e-3)


def test_a_cache_that_is_a_share_of_the_gpu_is_made_smaller_by_that_key(advised):
    changes = advised(inference_model={"gpu_memory_utilization": 0.5})
    assert any(change.startswith("inference_model.gpu_memory_utilization=0.2")
               for change in changes)


def test_what_is_already_so_is_not_advised(advised):
    assert not advised(
        train_model={"gradient_checkpointing": True, "compile": True, "head_chunk_size": 1024,
                     "lora": {"enabled": True}},
        train={"max_tokens_per_micro_batch": ROWS},
        inference_model={"kv_cache_memory_bytes": 8 << 20})


def test_pieces_are_advised_where_the_configuration_counts_pieces(advised):
    changes = advised(train={"max_tokens_per_micro_batch": None, "gradient_accumulation_steps": 4})
    assert "train.gradient_accumulation_steps=8" in changes
    assert not any("max_tokens_per_micro_batch" in change for change in changes)


def test_several_ranks_cannot_have_one_copy(advised):
    changes = advised(train_model={"num_devices": 4}, inference_model={"engine": "process"})
    assert changes and not any("one copy" in change for change in changes)


def test_each_role_is_advised_for_its_own_device(advised):
    engine = advised(AsyncConfig, "engine")
    assert "inference_model.tensor_parallel_size=2 (of as many more devices)" in engine
    assert any("rows then wait" in change for change in engine) and len(engine) == 2
    assert "train_model.gradient_checkpointing=true" in advised(AsyncConfig, "train")
