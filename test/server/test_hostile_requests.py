"""Single requests that used to hang a server, to break it for others, or to get a traceback."""

from __future__ import annotations

import gzip
import json
import socket
import time

import orjson
import pytest

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub import Hub
from grpo.atropos.hub_app import create_app
from grpo.atropos.hub_server import HubServer
from grpo.system import http_app, http_connections
from grpo.system.http_connections import server_of

from ..atropos.groups import env_registration, group, registration
from .serving import raw, refusal, server


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield AtroposClient(server.url, timeout=20.0)


@pytest.fixture(autouse=True)
def empty(hub):
    hub.reset_data()


def deep(levels):
    return b"[" * levels + b"]" * levels


def with_field(name, value: bytes):
    return orjson.dumps(group())[:-1] + b',"' + name.encode() + b'":' + value + b"}"


# -- the hub ---------------------------------------------------------------------------------------


def test_many_gzip_members_are_refused_at_once(hub):
    packed = gzip.compress(b"") * 115_000  # 2.3 MB
    start = time.monotonic()
    status, answer, _ = raw(hub, "POST", "/scored_data", packed, {"Content-Encoding": "gzip"})
    assert status == 400 and b"members" in answer
    assert time.monotonic() - start < 2.0


def test_a_few_gzip_members_are_one_body(hub):
    body = orjson.dumps(group())
    packed = gzip.compress(body[:50]) + gzip.compress(body[50:])
    assert raw(hub, "POST", "/scored_data", packed, {"Content-Encoding": "gzip"})[0] == 200


@pytest.mark.parametrize("levels", [100, 260, 1000, 1030, 100_000])
@pytest.mark.parametrize("field", ["messages", "generation_params", "images", "overrides", "extra"])
def test_a_group_that_is_nested_deeply_is_refused_and_takes_no_other_along(hub, levels, field):
    bad = with_field(field, deep(levels))
    status, answer, _ = raw(hub, "POST", "/scored_data", bad)
    assert status == 422, answer[:200]
    status, answer, _ = raw(hub, "POST", "/scored_data_list",
                            b"[" + orjson.dumps(group()) + b"," + bad + b"]")
    assert status == (200 if levels <= 1000 else status) and status in (200, 422), answer[:200]
    hub.register(registration(batch_size=2))
    if status == 200:
        assert len(hub.batch().groups) == 1
    hub.status()


SURROGATE = b'"\\ud800"'


def test_half_a_surrogate_pair_does_not_break_what_is_shown(hub):
    trainer = orjson.dumps(registration().model_dump() | {"wandb_group": "@"})
    assert raw(hub, "POST", "/register", trainer.replace(b'"@"', SURROGATE))[0] == 200
    hub.batch()
    env = orjson.dumps(env_registration().model_dump() | {"desired_name": "@"})
    assert raw(hub, "POST", "/register-env", env.replace(b'"@"', SURROGATE))[0] == 200
    for name in ("group_uid", "tokens", "env_id", "messages"):
        raw(hub, "POST", "/scored_data", with_field(name, SURROGATE))
    raw(hub, "POST", "/scored_data", orjson.dumps(group() | {"scores": ["@", 1]}).replace(
        b'"@"', SURROGATE))
    for path in ("/status", "/wandb_info", "/latest_example", "/info"):
        assert raw(hub, "GET", path)[0] == 200
    assert raw(hub, "POST", "/ack", b'{"lease":' + SURROGATE + b"}")[0] == 409


@pytest.mark.parametrize("digits", [
    b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809", b"1" + b"0" * 30,
    b"1" + b"0" * 400, b"1" + b"0" * 5000], ids=len)
def test_integers_of_any_size_are_answered(hub, digits):
    for name in ("env_id", "tokens", "scores", "group_uid", "extra", "generation_params"):
        value = digits if name != "generation_params" else b'{"temperature":' + digits + b"}"
        assert raw(hub, "POST", "/scored_data", with_field(name, value))[0] in (200, 422), name
    for path, model in (("/register", registration()), ("/register-env", env_registration())):
        for name, value in model.model_dump().items():
            if isinstance(value, (int, float)):
                body = orjson.dumps(model.model_dump() | {name: "@"}).replace(b'"@"', digits)
                assert raw(hub, "POST", path, body)[0] in (200, 422), (path, name)
    for path, method in (("/disconnect-env", "POST"), ("/status-env", "GET")):
        assert raw(hub, method, path, b'{"env_id":' + digits + b"}")[0] in (200, 404, 422)
    hub.register(registration(batch_size=2))
    while hub.batch() is not None:  # what was taken can be read
        pass
    hub.status()


def test_a_million_wrong_values_are_one_error(hub):
    body = orjson.dumps(group() | {"tokens": [["x"] * 1_000_000]})
    start = time.monotonic()
    assert raw(hub, "POST", "/scored_data", body)[0] == 422
    assert time.monotonic() - start < 2.0


def test_who_asks_is_not_what_a_header_says(hub):
    hub.register(registration(batch_size=2))
    hub.send(group())
    hub.send(group(tag=8))
    first = raw(hub, "GET", "/batch", headers={"X-Forwarded-For": "10.1.1.1"})[1]
    # The same address asks again, so the first batch was used.
    second = raw(hub, "GET", "/batch", headers={"X-Forwarded-For": "10.2.2.2"})[1]
    assert b"tokens" in first and b"tokens" in second
    assert hub.status()["hub"]["acknowledged"] == 1


# -- connections -----------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(http_connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(http_app, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(http_app, "BODY_SECONDS", 0.8)
    with HubServer() as server:
        yield AtroposClient(server.url, timeout=10.0)


def answer_to(client, *pieces, pause=0.1):
    """What comes back on a connection that sends some pieces and then waits."""
    with socket.create_connection((client.host, client.port), timeout=5.0) as connection:
        received = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            while more := connection.recv(4096):
                received += more
        except (BrokenPipeError, ConnectionResetError):
            pass
        return received


HEAD = b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"


def test_half_a_request_is_not_waited_for(hasty):
    start = time.monotonic()
    assert answer_to(hasty) == b""
    assert answer_to(hasty, b"GET /sta") == b""
    assert answer_to(hasty, *[b"X"] * 8) == b""  # a byte now and then is no head either
    assert b" 408 " in answer_to(hasty, HEAD + b"{")
    assert b" 408 " in answer_to(hasty, HEAD, *[b"1"] * 6)
    assert time.monotonic() - start < 8.0
    # The second request of a connection has the same deadline.
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert answer_to(hasty, whole, b"GET /sta").count(b"200 OK") == 1
    assert hasty.alive()


def test_a_long_answer_is_not_cut_by_the_deadlines(hasty, monkeypatch):
    async def slow(request):
        import asyncio

        await asyncio.sleep(1.2)
        return await original(request)

    from grpo.atropos import hub_app

    original = hub_app.status
    monkeypatch.setitem(hub_app._ROUTES, "/status", ("GET", slow))
    with HubServer() as server:
        assert AtroposClient(server.url, timeout=10.0).status()["queue_size"] == 0


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(http_connections, "_connections", lambda: 7)
    server = server_of(create_app(Hub()), grace=1)
    assert server.config.limit_concurrency == 7
    assert not server.config.proxy_headers


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rooted(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    with server(info={"max_lora_rank": 8}, adapter_roots=(root,)) as (engine, client):
        client.root, client.outside = root, tmp_path_factory.mktemp("elsewhere")
        yield client


def adapter(folder, config: bytes):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize("config", [b"", b"[]", b"1", b'{"r":"x"}', b'{"r":null}', b'{"r":1.5}',
                                    b"\xff\xfe", deep(100_000), b'{"r":[]}', b'{"r":9}'])
def test_a_malformed_adapter_is_the_senders_fault(rooted, config):
    error = refusal(rooted, "/lora/load", {"adapter_path": adapter(rooted.root / "bad", config)})
    assert error.status == 400 and "adapter_path" in str(error)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "/proc/self/mem/x", "~root", "/etc", "/",
                                  "../..", "/nowhere"])
def test_a_far_away_folder_is_not_looked_into(rooted, path):
    assert refusal(rooted, "/lora/load", {"adapter_path": path}).status in (400, 403)
    assert refusal(rooted, "/v1/load_lora_adapter",
                   {"lora_name": "a", "lora_path": path}).status in (400, 403)


def test_links_lead_nowhere_else_and_folders_of_the_root_are_taken(rooted):
    adapter(rooted.outside / "good", b'{"r":4}')
    (rooted.root / "link").symlink_to(rooted.outside / "good")
    error = refusal(rooted, "/lora/load", {"adapter_path": str(rooted.root / "link")})
    assert error.status == 403 and "--adapter-root" in str(error)
    rooted.load_lora(adapter(rooted.root / "good", b'{"r":4}'))


def test_a_dead_engine_says_so_whatever_it_is_asked():
    with server() as (engine, client):
        engine.errored = True
        error = refusal(client, "/generate", {"prompt": [5], "max_tokens": 667})
    assert error.status == 503 and "the engine died" in str(error)


def test_deep_values_in_messages_are_shortened(client):
    nested = deep(900)
    for path, body in (("/generate", b'{"prompt":@}'), ("/generate", b'{"stop":@}'),
                       ("/bridge/rpc", b'{"method":"hang","timeout":@}'),
                       ("/v1/completions", b'{"prompt":[@]}')):
        status, answer, _ = raw(client, "POST", path, body.replace(b"@", nested))
        assert status == 400 and len(answer) < 1000, answer
    assert json.loads(raw(client, "GET", "/health")[1]) == {"status": "ok"}
