"""The server's command line: what it refuses, and what it makes of the rest."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from grpo.server import serve as server
from grpo.server.engine_process import TOKEN_VARIABLE
from grpo.server.serve import check, engine_arguments, main, parser


def parse(*options):
    return parser().parse_args(["--model", "tiny", *options])


@pytest.mark.parametrize("options, message", [
    (["--host", "0.0.0.0"], "--token"),
    (["--shared-weights", "--enable-sleep-mode"], "exclude each other"),
    (["--shared-weights", "--tensor-parallel-size", "2"], "--tensor-parallel-size 1, not 2"),
    (["--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "1"], "one of them"),
    (["--engine-options", "[1]"], "JSON object"),
    (["--max-loras", "2"], "--max-loras 2 is not read without --enable-lora; give that, too"),
    (["--adapter-root", "a"], "--adapter-root a is not read"),
    (["--max-lora-rank", "8"], "--max-lora-rank 8 is not read"),
    (["--seed", "4294967296"], "--seed 4294967296 must be from 0 to 4294967295"),
    (["--seed", "-1"], "--seed -1 must be")])
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check(parse(*options))


def test_other_machines_need_the_token():
    check(parse("--host", "0.0.0.0", "--token", "secret"))
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check(parse("--host", host))


def test_errors_of_the_command_line_end_the_program(capsys, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        main(["--model", "tiny", "--host", "0.0.0.0"])
    assert "opens the engine to other machines" in capsys.readouterr().err


def test_environment_variables_stand_for_options(monkeypatch):
    assert not parse().shared_weights
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    monkeypatch.setenv("LOGDIR", "/logs")
    monkeypatch.setenv("VLLM_BRIDGE_CONFIG_PATH", "/a/b.json")
    args = parse()
    assert (args.shared_weights, args.log_dir, args.bridge_config_path) == (
        True, "/logs", "/a/b.json")


def test_engine_arguments():
    gpu = engine_arguments(parse("--max-model-len", "64", "--engine-options", '{"max_logprobs": 5}',
                                 "--enable-lora", "--no-prefix-caching"), device_type="cuda")
    assert gpu["logprobs_mode"] == "processed_logprobs" and not gpu["enforce_eager"]
    assert gpu["max_model_len"] == 64 and gpu["max_logprobs"] == 5 and gpu["max_lora_rank"] == 16
    assert not gpu["enable_prefix_caching"] and "kv_cache_memory_bytes" not in gpu
    ranks = [engine_arguments(parse("--enable-lora", "--max-lora-rank", rank), device_type="cuda")[
        "max_lora_rank"] for rank in ("4", "12", "320")]  # sizes of vLLM's slots
    assert ranks == [8, 16, 320]
    sized = engine_arguments(parse("--kv-cache-memory-bytes", "7"), device_type="cuda")
    assert sized["kv_cache_memory_bytes"] == 7 and sized["gpu_memory_utilization"] < 0.1
    cpu = engine_arguments(parse(), device_type="cpu")
    assert "hf_overrides" not in cpu
    assert cpu["enforce_eager"] and cpu["kv_cache_memory_bytes"] > 0
    assert not cpu["enable_chunked_prefill"] and "enable_chunked_prefill" not in gpu


@pytest.mark.parametrize(("options", "kept"), [
    ([], 16), (["--max-loras", "2"], 16), (["--max-loras", "20"], 20),
    (["--engine-options", '{"max_cpu_loras": 3}'], 3)])
def test_adapters_that_open_requests_use_are_not_evicted(options, kept):
    fields = engine_arguments(parse("--enable-lora", *options), device_type="cuda")
    assert fields["max_cpu_loras"] == kept
    assert "max_cpu_loras" not in engine_arguments(parse(), device_type="cuda")


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="no effect on a CPU"):
        engine_arguments(parse("--gpu-memory-utilization", "0.5"), device_type="cpu")
    with pytest.raises(ValueError, match="--enable-sleep-mode needs a GPU"):
        engine_arguments(parse("--enable-sleep-mode"), device_type="cpu")
    with pytest.raises(ValueError, match="--engine-options sets logprobs_mode"):
        engine_arguments(parse("--engine-options", '{"logprobs_mode": "raw_logprobs"}'),
                         device_type="cuda")


@pytest.mark.parametrize("private", [False, True])
def test_a_server_says_whether_it_is_one_runs_alone(private, tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="1"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(
        current_platform=SimpleNamespace(device_type="cpu")))
    monkeypatch.setattr(server, "_rpc_methods", lambda: ())
    monkeypatch.setattr("grpo.server.app.create_app", lambda engine, **options: options["info"])
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8, dtype="float32", get_vocab_size=lambda: 9),
        vllm_config=SimpleNamespace(lora_config=None))
    args = parser().parse_args(["--model", str(tmp_path), *(["--private"] if private else [])])
    assert asyncio.run(server.make_app(engine, args))["private"] is private


def test_float32_logits_are_vllms_own_option(monkeypatch):
    logits_processor = pytest.importorskip("vllm.model_executor.layers.logits_processor")
    fields = engine_arguments(parse("--fp32-head"), device_type="cuda")
    assert fields["hf_overrides"] == {"head_dtype": "float32"}
    monkeypatch.delattr(logits_processor.LogitsProcessor, "_apply_head")
    with pytest.raises(ValueError, match="fp32_head=true: vLLM .* rounds the logits.*update vLLM"):
        engine_arguments(parse("--fp32-head"), device_type="cuda")
