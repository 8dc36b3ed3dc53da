"""Runs by servers that are none of this library, stand-ins here: weights arrive, or a run ends."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from grpo.config.atropos import AtroposConfig
from grpo.config.offline import in_offline_keys
from grpo.config.schema import ConfigError, load_config
from grpo.policies.client import EngineClient
from grpo.report.loggers import read_jsonl
from grpo.run.assemble import assemble
from grpo.run.engine_attach import (
    bring_to_start,
    open_stock_server,
    server_info,
    with_server_kind,
)
from grpo.weights.canary import StaleWeightsError
from grpo.weights.stock import StockReload

from ..conftest import make_tiny_model
from ..policies.stand_in import StandIn
from ..training import runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return runs.save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, seed=0)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("grpo.report.reporter.write_report",
                        lambda run_dir, **_: run_dir / "none")


def config_of(url, folder, **sections):
    values = {
        "device": "cpu", "model": {"name": str(folder)}, "optimizer": {"lr": 0.01},
        "env": {"num_envs": 2, "repeats": 4, "reward": f"{runs.__name__}:by_text",
                "task": {"max_operand": 9, "num_train": 15, "num_test": 5}},
        "train": {"max_steps": 3, "eval_frequency": 2, "checkpoint_frequency": 0},
        "inference_model": {"engine": "server", "url": url, "max_tokens": 4, "temperature": 0.7}}
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return load_config(values)


def fit(config, run_dir):
    with ExitStack() as at_end:
        assemble(config, run_dir, None, at_end).fit()
    return [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["step"] > 0]


def opened(config, tokens=20):
    return open_stock_server(SimpleNamespace(
        config=with_server_kind(config), max_model_len=tokens, path=config.model.name))


def test_a_server_is_sent_its_own_key_and_none_of_a_service(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-service")
    with StandIn("vllm", folder) as there:
        opened(config_of(there.url, folder))
        assert there.authorizations == {None}
        monkeypatch.setenv("VLLM_API_KEY", "of-this-server")
        opened(config_of(there.url, folder))
        assert there.authorizations == {None, "Bearer of-this-server"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_stock_server_gets_each_checkpoint_and_the_canary_agrees(kind, folder, tmp_path):
    with StandIn(kind, folder) as there:
        rows = fit(config_of(there.url, folder), tmp_path)
        assert [row["policy/version"] for row in rows] == [1, 2, 3]
        assert max(row["canary/max_abs_diff"] for row in rows) < 1e-3
        assert max(row["policy/log_prob_diff_abs_max"] for row in rows) < 1e-3
        final = (tmp_path / "final_model" / "model.safetensors").read_bytes()
        assert (tmp_path / "engine" / "weights" / "version_000003" /
                "model.safetensors").read_bytes() == final


@pytest.mark.parametrize("kind, message", [
    ("vllm", "the self-test changed a few values and published them, but the engine does not"),
    ("sglang", "engine and trainer disagree on the same tokens")])
def test_a_server_that_only_says_that_it_has_new_weights_ends_the_run(
        kind, message, folder, tmp_path):
    with StandIn(kind, folder, deaf=True) as there, pytest.raises(StaleWeightsError,
                                                                  match=message):
        fit(config_of(there.url, folder, optimizer={"lr": 0.3}), tmp_path)


def test_log_probs_before_the_temperature_are_found_and_the_fix_is_named(folder, tmp_path):
    with StandIn("vllm", folder, raw=True) as there, pytest.raises(
            StaleWeightsError, match="those of 1.00.*logprobs_mode=processed_logprobs"):
        fit(config_of(there.url, folder), tmp_path)


@pytest.mark.parametrize("kind, lora, message", [
    ("vllm", False, "VLLM_SERVER_DEV_MODE=1 python -m vllm"),
    ("vllm", True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python .* --enable-lora --max-lora-rank 16"),
    ("sglang", False, "start a newer SGLang"), ("sglang", True, "start it with --enable-lora")])
def test_a_server_that_takes_no_weights_is_refused_with_how_to_start_one(
        kind, lora, message, folder):
    routes = {"/collective_rpc", "/update_weights_from_disk", "/v1/load_lora_adapter",
              "/load_lora_adapter"}
    with StandIn(kind, folder, without=routes) as there, pytest.raises(ConfigError, match=message):
        opened(config_of(there.url, folder, train_model={"lora": {"enabled": lora}}))


def test_adapters_are_uploaded_under_a_new_name_each_and_the_last_is_unloaded(folder, tmp_path):
    with StandIn("sglang", folder) as there, ExitStack() as at_end:
        # The stand-in computes no adapters; they stay at their start, which adds nothing.
        config = config_of(there.url, folder, train_model={"lora": {"enabled": True, "r": 4}},
                           optimizer={"lr": 1e-30})
        trainer = assemble(config, tmp_path, None, at_end)
        (first,) = there.adapters
        trainer.weights.publish()
        (second,) = there.adapters
        assert first != second and trainer.weights.differing() == []
        factor = next(p for n, p in trainer.model.named_parameters() if "lora_B" in n)
        factor.data.add_(1.0)
        assert trainer.weights.differing() != []
        at_end.close()
        assert there.adapters == {}


def test_another_kind_of_server_than_the_key_says_is_refused(folder):
    with StandIn("vllm", folder) as there, pytest.raises(
            ConfigError, match="is vllm's, which is not what inference_model.server says"):
        opened(config_of(there.url, folder, inference_model={"server": "sglang"}))


def test_with_atropos_a_server_is_one_of_this_library_whatever_it_says(folder):
    config = AtroposConfig(inference_model={"url": "http://127.0.0.1:1"})
    with StandIn("vllm", folder) as there, pytest.raises(ConfigError) as raised:
        bring_to_start(EngineClient(there.url), SimpleNamespace(config=config, path=str(folder)))
    assert ("so it is not one of this library, whose servers alone answer Atropos environments; "
            f"start one in another terminal: python -m grpo.server.serve --model {folder}"
            ) in str(raised.value)


@pytest.mark.parametrize(("kind", "lora", "line"), [
    ("vllm", False, "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model "
     "{path} --port 9 --logprobs-mode processed_logprobs;"),
    ("vllm", True, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server"
     " --model {path} --port 9 --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 8"),
    ("sglang", False, "python -m sglang.launch_server --model-path {path} --port 9;"),
    ("sglang", True, "--model-path {path} --port 9 --enable-lora --max-lora-rank 8 --lora-target"),
    ("own", False, "python -m grpo.server.serve --model {path} --port 9,")])
def test_where_no_server_answers_the_line_that_starts_one_is_told(folder, kind, lora, line):
    more = {"train_model": {"lora": {"enabled": True, "r": 4}}} if lora else {}
    config = config_of("http://127.0.0.1:9", folder, inference_model={"server": kind}, **more)
    with pytest.raises(ConfigError, match="no server answers .*Connection refused") as raised:
        opened(config) if kind != "own" else server_info(
            EngineClient("http://127.0.0.1:9"), str(folder))
    assert line.format(path=folder) in str(raised.value)
    assert "or have none: inference_model.backend=vllm" in str(raised.value)
    assert "generation.base_url=http://127.0.0.1:9: no server" in in_offline_keys(str(raised.value))


def test_a_server_that_takes_less_than_a_row_is_refused(folder):
    with StandIn("vllm", folder) as there, pytest.raises(ConfigError, match="takes 64 tokens"):
        opened(config_of(there.url, folder), tokens=65)


def test_a_way_that_a_stock_server_does_not_take_is_refused(folder):
    with pytest.raises(ConfigError, match="weight_sync=transfer is not what a stock server takes"):
        config_of("http://127.0.0.1:9", folder, inference_model={
            "server": "vllm", "weight_sync": "transfer"})


def test_a_tied_head_that_the_server_has_packed_is_refused(tokenizer, tmp_path):
    class Packed:
        url = "http://127.0.0.1:8000"

        def digests(self):
            from grpo.policies.stock_server import PACKED
            return {"model.layers.0.mlp.down_proj.weight": PACKED}

    model = make_tiny_model(dtype=torch.float32, vocab_size=len(tokenizer))
    with pytest.raises(ConfigError, match="tied to the embedding.*train_model.lora.enabled=true"):
        StockReload(model, tokenizer, Packed(), tmp_path)
    untied = make_tiny_model(dtype=torch.float32, vocab_size=len(tokenizer),
                             tie_word_embeddings=False)
    StockReload(untied, tokenizer, Packed(), tmp_path)
