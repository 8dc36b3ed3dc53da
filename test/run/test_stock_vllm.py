"""vLLM's own server trains: over HTTP, with all that a run does, and weights that arrive."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.envs.embedded import EmbeddedSpec, small_qwen2
from grpo.policies.stock_server import StockServer
from grpo.report.loggers import read_jsonl

from ..policies.real_stock import vllm_server
from ..support import REPO, environment, finished

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
SCRIPTS = REPO / "sota-implementations" / "grpo"


#: A reward that every model can raise at once.
LETTERS = """
def letters(completion, problem):
    return sum(character.isascii() and character.isalpha() for character in completion) / 8
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """Untied: vLLM for CPUs packs a tied head and then keeps its old values; see the refusal."""
    folder = tmp_path_factory.mktemp("untied")
    config = small_qwen2(EmbeddedSpec(), len(tokenizer)).config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    pytest.importorskip("vllm")
    log = tmp_path_factory.mktemp("server") / "server.log"
    with vllm_server(model, log, "--max-model-len", "2048", "--logprobs-mode",
                     "processed_logprobs", "--enable-lora", "--max-lora-rank", "16",
                     VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as address:
        yield address


@pytest.fixture
def trained(tmp_path):
    """Run a script; the metrics of its iterations."""
    def run(script: str, *keys: str) -> list[dict]:
        (tmp_path / "own_rewards.py").write_text(LETTERS)
        finished([sys.executable, SCRIPTS / script, "hydra.run.dir=run", *keys], tmp_path,
                 environment(PYTHONPATH=f"{tmp_path}:{REPO}"), seconds=800.0)
        rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
        assert max(row["canary/max_abs_diff"] for row in rows) < 1e-3
        assert max(row["policy/log_prob_diff_abs_max"] for row in rows) < 1e-3
        return rows

    return run


def raised(rows: list[dict]) -> bool:
    """Whether the reward of the last three iterations is clearly above that of the first."""
    rewards = [row["reward/mean"] for row in rows]
    return sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05


def test_the_offline_trainer_raises_a_reward_with_adapters_over_http(
        trained, url, model, tmp_path):
    rows = trained(
        "grpo-offline.py", f"model.train_id={model}", "model.device=cpu",
        f"generation.base_url={url}/v1", "generation.max_new_tokens=8", "iterations=10",
        "data.difficulty=0", "data.num_train_seeds=16", "data.rollouts_per_problem=8",
        "train.batch_size=32", "train.lr=0.1", "train.kl_coef=0", "eval.interval=5",
        "eval.num_ids=4", "checkpoint.save_interval=5", "run.train_model.lora.enabled=true",
        "run.env.reward=own_rewards:letters")
    assert raised(rows)
    metrics = tmp_path / "run" / "metrics"
    assert sorted(path.name for path in metrics.glob("train_*")) == [
        f"train_iter_{i:03d}.json" for i in range(1, 11)]
    evaluated = [json.loads((metrics / f"eval_iter_{i:03d}.json").read_text()) for i in (0, 5, 10)]
    assert evaluated[2]["mean@4"] > evaluated[0]["mean@4"]
    assert (tmp_path / "run/checkpoints/iter_010/adapter_model.safetensors").is_file()
    # What the run uploaded is gone, and the base model is as it was.
    assert [card["id"] for card in StockServer(url).call("GET", "/v1/models")["data"]] == [
        str(model)]


def test_a_checkpoint_is_read_by_a_server_in_development_mode(trained, url, model, tmp_path):
    rows = trained(
        "grpo.py", f"model.name={model}", "device=cpu", "inference_model.engine=server",
        f"inference_model.url={url}", "inference_model.max_tokens=8", "train.max_steps=12",
        "env.num_envs=4", "env.repeats=16", "env.task.num_test=8", "optimizer.lr=2e-3",
        "inference_model.temperature=0.7", "env.reward=own_rewards:letters",
        "train.checkpoint_frequency=0")
    assert raised(rows)
    # The server has what the run ended with, in all tensors that it does not pack.
    newest = tmp_path / "run" / "engine" / "weights" / "version_000012"
    assert (newest / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "final_model" / "model.safetensors").read_bytes()
    StockServer(url).read_checkpoint(model, timeout=60.0)  # as the other test wants it


def test_a_server_that_takes_nothing_is_refused_with_how_to_start_one(model, tmp_path):
    pytest.importorskip("vllm")
    with vllm_server(model, tmp_path / "server.log", "--max-model-len", "64") as url:
        said = finished(
            [sys.executable, SCRIPTS / "grpo.py", f"model.name={model}", "device=cpu",
             "inference_model.engine=server", f"inference_model.url={url}",
             "inference_model.max_tokens=8"], tmp_path, environment(), expect=1)
    assert "takes no new weights" in said and "VLLM_SERVER_DEV_MODE=1 python -m vllm" in said
    assert "Traceback" not in said
