"""Whole runs of tiny mixtures of experts with real vLLM: in process, in two processes, on Ray."""

from __future__ import annotations

import pytest
import torch

from .conftest import ASYNC
from .test_arrangements import LORA, PROCESS, check_run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RUN = ("env.num_envs=4", "env.repeats=4", "train.max_steps=3", "train.eval_frequency=0",
       "train.checkpoint_frequency=0", "inference_model.backend=vllm",
       "env.reward=negative_length", "optimizer.lr=1e-3", "optimizer.schedule=constant",
       "inference_model.max_tokens=8", "hydra.run.dir=outputs/run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A random Qwen3-MoE that reads the byte vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("experts")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "qwen3_moe", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96,
        moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, initializer_range=0.1, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=None)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", [(), (PROCESS,), (PROCESS, *LORA)],
                         ids=["in process", "process", "process, adapters"])
def test_each_update_of_the_experts_reaches_the_engine(runner, folder, way):
    runner.run(*RUN, f"model.name={folder}", *way)
    check_run(runner, "run")


def test_experts_reach_the_workers_of_an_asynchronous_run(runner, folder):
    runner.run(*RUN, f"model.name={folder}", "train.staleness=0", script=ASYNC)
    check_run(runner, "run")
