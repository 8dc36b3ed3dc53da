"""Weights reach an engine whose layers are compiled.

Collected by ``test_compiled_engine.py``, each engine in a process apart: whether a process compiles
is decided when it first imports vLLM, and what it has compiled it keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo.policies.handle import InProcessEngine
from grpo.policies.inprocess import start_engine, stop_engine
from grpo.training.optim import MasterAdamW
from grpo.weights.adapters import make_lora
from grpo.weights.lora import LoRASync
from grpo.weights.shared import SharedCopy, SingleCopy

from .steps import gap, load, policy_of, train_once

MAX_RANK = 8
# Whether in a process of its own, and whether it takes adapters.
ENGINES = {
    "plain": (False, False), "adapted": (False, True), "separate": (True, True)}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, model_folder) -> Iterator[InProcessEngine]:
    separate_process, lora = ENGINES[request.param]
    llm = start_engine(str(model_folder), device=torch.device("cpu"), dtype=torch.float32,
                       max_model_len=256, max_num_seqs=64, enforce_eager=False,
                       separate_process=separate_process, max_lora_rank=MAX_RANK if lora else None)
    policy_of(llm).generate_from_ids([[5, 6, 7]])
    assert list(Path(os.environ["VLLM_CACHE_ROOT"]).rglob("*.cpp")), "nothing was compiled"
    yield InProcessEngine(llm)
    stop_engine(llm)


def test_a_compiled_engine_follows_every_update_of_one_copy(engine, model_folder):
    model = load(model_folder)
    weights = SharedCopy(model, engine) if engine.workers else SingleCopy(model, engine.llm)
    policy = policy_of(engine.llm, weights)
    optimizer = MasterAdamW(model.parameters(), lr=1e-2)
    assert gap(model, policy) < 1e-4
    for version in (1, 2, 3):
        assert train_once(model, policy, optimizer) > 1e-3
        assert weights.publish() == version
        assert gap(model, policy) < 1e-4
    assert weights.unshared() == weights.differing() == []


@pytest.mark.parametrize("how", ["views", "write"])
def test_a_compiled_engine_follows_every_update_of_adapters(engine, model_folder, how):
    if engine.llm.llm_engine.vllm_config.lora_config is None:
        pytest.skip("this engine takes no adapters")
    if how == "views" and engine.workers:
        pytest.skip("views need the engine's memory")
    engine.collective_rpc("load_checkpoint", str(model_folder), timeout=30)
    model = make_lora(load(model_folder), r=MAX_RANK, alpha=MAX_RANK)
    weights = LoRASync(model, engine, how=how)
    policy = policy_of(engine.llm, weights, lora_request=weights.lora_request)
    optimizer = MasterAdamW(model.parameters(), lr=3e-2)
    for version in (1, 2):
        assert train_once(model, policy, optimizer) > 1e-3
        assert weights.publish() == version
        assert gap(model, policy) < 1e-4
    weights.close()
