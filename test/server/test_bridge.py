"""The server's other routes around a stand-in engine: pauses, versions, adapters, guards."""

from __future__ import annotations

import json

import pytest

from grpo.policies.client import EngineCallError, EngineClient, EngineTimeoutError

from .serving import post, raw, refusal, server


def test_pause_version_resume(client, engine):
    before = client.version
    client.pause("wait", clear_cache=False)
    assert engine.calls[-1] == ("pause", "wait", False)
    assert client.call("GET", "/bridge/is_paused") == {"paused": True}
    with pytest.raises(EngineTimeoutError, match="is the engine paused"):
        client.generate([[5]], timeout=0.2)
    with pytest.raises(EngineCallError, match="resume first") as info:
        client.call("GET", "/health_generate")
    assert info.value.status == 503 and client.alive()
    client.set_version(before + 1)
    client.resume()
    assert client.generate([[5]], max_tokens=2)[0].versions == [[[before + 1, 2]]]
    info = client.info()
    assert info["policy_version"] == before + 1 and info["update_count"] >= 1
    assert info["last_update_time"] > 0 and not info["paused"]


def test_health_generate_samples_a_token_or_says_that_it_did_not(client, engine):
    assert client.call("GET", "/health_generate") == {"status": "ok"}
    engine.stuck = True
    with pytest.raises(EngineTimeoutError, match="waited 0.1 s for one token") as info:
        client.call("GET", "/health_generate?timeout=0.1")
    assert info.value.status == 504
    with pytest.raises(EngineCallError, match="timeout='soon'") as info:
        client.call("GET", "/health_generate?timeout=soon")
    assert info.value.status == 400
    engine.stuck = False


def test_rpc_calls_listed_methods_only(client):
    assert client.collective_rpc("synchronize", 1, "a") == [
        {"method": "synchronize", "args": [1, "a"]}]
    error = refusal(client, "/bridge/rpc", {"method": "save_sharded_state"})
    assert error.status == 403 and "synchronize" in str(error)
    with pytest.raises(EngineTimeoutError, match="hang on the engine's workers"):
        client.collective_rpc("hang", timeout=0.1)


def test_prefix_cache_and_facts(client):
    assert client.reset_prefix_cache() is True
    assert client.call("GET", "/bridge/debug")["engine_type"] == "FakeEngine"
    assert client.call("GET", "/bridge/is_sleeping") == {"sleeping": False}


def test_sleep_needs_its_mode_and_ends_with_wake_up(client, engine):
    with pytest.raises(EngineCallError, match="--enable-sleep-mode"):
        client.sleep()
    client.sleep(0)
    assert client.call("GET", "/bridge/is_sleeping") == {"sleeping": True}
    for touch in (client.resume, lambda: client.collective_rpc("synchronize"),
                  lambda: client.load_lora("/nowhere")):
        with pytest.raises(EngineCallError, match="wake_up") as info:
            touch()
        assert info.value.status == 409
    client.wake_up()
    assert client.generate([[5]], max_tokens=1)


def test_sleep_that_a_cpu_cannot_do_is_refused():
    with server(info={"device": "cpu"}) as (_, client):
        with pytest.raises(EngineCallError, match="this engine runs on a CPU") as info:
            client.sleep(1)
        assert info.value.status == 501
        client.sleep(0)
        client.wake_up()
    with server(info={"device": "cuda", "sleep_mode": True}) as (engine, client):
        client.sleep(2)
        assert ("sleep", 2) in engine.calls


def test_handover_is_described_without_its_handles():
    handover = {"kind": "cuda_ipc", "storages": [{"device": "cuda:0", "handle": {"memory": "x"}}]}
    with server(handover=handover) as (_, client):
        info = client.call("GET", "/bridge/state_dict_info")
        assert info["shared_weights_enabled"]
        assert info["handover"] == {"kind": "cuda_ipc", "storages": [{"device": "cuda:0"}]}


def test_adapters_are_loaded_once_under_new_names(client, engine, tmp_path):
    with pytest.raises(EngineCallError, match="adapter_config.json") as info:
        client.load_lora(str(tmp_path))
    assert info.value.status == 404
    (tmp_path / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32}')
    with pytest.raises(EngineCallError, match="adapter_model.safetensors"):
        client.load_lora(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(EngineCallError, match="rank 16.*--max-lora-rank 8"):
        client.load_lora(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    names = [client.load_lora(str(tmp_path), name="policy") for _ in range(2)]
    assert len(set(names)) == 2 and all(name.startswith("policy-v") for name in names)
    version = client.version
    client.generate([[5]], max_tokens=1)
    assert engine.seen[-1].lora.name == names[1]
    status = client.call("GET", "/lora/status")
    assert status["active_adapter_name"] == names[1] and status["lora_available"]
    assert status["loaded_adapters"] == [names[1]]
    added = [call for call in engine.calls if call[0] == "add_lora"]
    client.load_lora(adapter_id=3, version=version + 1)
    assert client.version == version + 1
    client.generate([[5]], max_tokens=1)
    assert engine.seen[-1].lora.id == 3
    assert [call for call in engine.calls if call[0] == "add_lora"] == added
    client.unload_lora()
    client.generate([[5]], max_tokens=1)
    assert engine.seen[-1].lora is None


def test_adapters_by_the_routes_of_vllm_and_by_their_bare_name(client, engine, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    body = {"lora_name": "tuned", "lora_path": str(tmp_path)}
    first, second = (post(client, "/v1/load_lora_adapter", body)["adapter_name"] for _ in range(2))
    assert first != second and second.startswith("tuned-v")
    for model in (None, "tuned", second):
        post(client, "/generate", {"prompt": [5], "max_tokens": 1, "model": model})
        assert engine.seen[-1].lora.name == second
    error = refusal(client, "/generate", {"prompt": [5], "model": first})
    assert error.status == 404 and second in str(error)
    assert refusal(client, "/v1/load_lora_adapter", {"lora_name": "tuned"}).param == "lora_path"
    assert post(client, "/v1/unload_lora_adapter", {"lora_name": "tuned"})[
        "previous_name"] == second
    post(client, "/generate", {"prompt": [5], "max_tokens": 1})
    assert engine.seen[-1].lora is None
    for name, status in (("tuned", 404), ("tiny", 400)):
        assert refusal(client, "/v1/unload_lora_adapter", {"lora_name": name}).status == status


def test_an_adapter_may_be_unloaded_after_the_next_one_was_loaded(client, engine, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    unload = "/v1/unload_lora_adapter"
    for name in ("one", "two"):
        post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)})
    assert refusal(client, unload, {"lora_name": "tiny"}).status == 400
    assert post(client, unload, {"lora_name": "one"})["status"] == "ok"
    assert refusal(client, unload, {"lora_name": "one"}).status == 404
    post(client, "/generate", {"prompt": [5], "max_tokens": 1})
    assert engine.seen[-1].lora.name.startswith("two-v")
    assert post(client, unload, {"lora_name": "two"})["previous_name"].startswith("two-v")
    assert refusal(client, unload, {"lora_name": "two"}).status == 404


def test_adapters_need_a_server_for_them():
    with server() as (_, client), pytest.raises(EngineCallError, match="--enable-lora"):
        client.load_lora("/nowhere")


def test_a_token_guards_everything_but_health():
    with server(token="secret") as (_, client):
        assert client.generate([[5]], max_tokens=1)
        for token in (None, "wrong"):
            stranger = EngineClient(client.url, token=token)
            assert stranger.alive()
            for path in ("/bridge/info", "/v1/models", "/nothing"):
                with pytest.raises(EngineCallError, match="Bearer") as info:
                    stranger.call("GET", path)
                assert info.value.status == 401


def test_too_great_a_body_is_refused_announced_or_not():
    with server(max_body_bytes=1000) as (_, client):
        body = json.dumps({"prompt": "a" * 2000})
        assert refusal(client, "/generate", {"prompt": "a" * 2000}).status == 413
        # More than the connection's buffers hold: the server answers before all is sent.
        assert refusal(client, "/generate", {"prompt": "a" * (20 << 20)}).status == 413
        status, answer, _ = raw(client, "POST", "/generate", (c.encode() for c in [body]),
                                {"Transfer-Encoding": "chunked"})
        assert status == 413 and "--max-body-mib" in json.loads(answer)["error"]["message"]


def test_a_dead_engine_is_not_healthy():
    with server() as (engine, client):
        engine.errored = True
        assert not client.alive()
        assert raw(client, "GET", "/health")[0] == 503
