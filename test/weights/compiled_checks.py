"""Weights reach an engine whose layers are compiled.

Collected by ``test_compiled_engine.py``, each engine in a process apart: whether a process compiles
is decided when it first imports vLLM, and what it has compiled it keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.policies.handle import InProcessEngine
from grpo.weights.adapters import make_lora
from grpo.weights.lora import LoRASync
from grpo.weights.shared import SharedCopy, SingleCopy

from .steps import assert_updates_arrive, gap, load, policy_of, running_engine

MAX_RANK = 8
# Whether in a process of its own, and whether it takes adapters.
ENGINES = {
    "plain": (False, False), "adapted": (False, True), "separate": (True, True)}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, model_folder) -> Iterator[InProcessEngine]:
    separate_process, lora = ENGINES[request.param]
    with running_engine(model_folder, enforce_eager=False, separate_process=separate_process,
                        max_lora_rank=MAX_RANK if lora else None) as engine:
        policy_of(engine.llm).generate_from_ids([[5, 6, 7]])
        assert list(Path(os.environ["VLLM_CACHE_ROOT"]).rglob("*.cpp")), "nothing was compiled"
        yield engine


def test_a_compiled_engine_follows_every_update_of_one_copy(engine, model_folder):
    model = load(model_folder)
    weights = SharedCopy(model, engine) if engine.workers else SingleCopy(model, engine.llm)
    policy = policy_of(engine.llm, weights)
    assert gap(model, policy) < 1e-4
    assert_updates_arrive(model, weights, policy)


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
    assert_updates_arrive(model, weights, policy, updates=2, lr=3e-2)
    weights.close()
