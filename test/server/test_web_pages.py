"""A web page in a browser on this machine reaches every port of it: none of ours obeys one."""

from __future__ import annotations

import contextlib

import pytest

from grpo.atropos.bridge_server import BridgeServer
from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer
from grpo.server import serve as engine_server
from grpo.system.http_app import bare_app

from ..atropos.environments import serving
from ..atropos.groups import group, registration
from .serving import raw, server

PAGES = {
    "another site": {"Origin": "http://example.com"},
    "a file, or a sandboxed frame": {"Origin": "null"},
    "another port of this machine": {"Origin": "http://127.0.0.1:1"},
    "an image, which sends no Origin": {"Sec-Fetch-Site": "cross-site"},
    "a name that now leads here": {"Host": "rebound.example.com"},
    "a name that ends like an address": {"Host": "127.0.0.1.example.com:80"},
    "an empty name": {"Host": ""},
}
ROUTES = {
    "hub": [("GET", "/"), ("GET", "/health"), ("GET", "/status"), ("GET", "/batch"),
            ("POST", "/batch"), ("GET", "/reset_data"), ("POST", "/reset_data"),
            ("POST", "/scored_data"), ("POST", "/register"), ("POST", "/ack"),
            ("GET", "/latest_example"), ("GET", "/nowhere")],
    "engine": [("GET", "/health"), ("POST", "/bridge/pause"), ("POST", "/bridge/rpc"),
               ("POST", "/generate"), ("GET", "/bridge/info"), ("POST", "/lora/load"),
               ("GET", "/v1/models")],
    "bridge": [("GET", "/health"), ("POST", "/generate"), ("POST", "/v1/chat/completions")],
}


@pytest.fixture(scope="module")
def clients(tokenizer):
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(HubServer())
        _, engine = stack.enter_context(server())
        _, url = stack.enter_context(serving(tokenizer))
        yield {
            "hub": AtroposClient(hub.url), "engine": engine, "bridge": AtroposClient(url)}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("which", ROUTES)
def test_no_route_answers_a_page(which, page, clients):
    for method, path in ROUTES[which]:
        status, answer, _ = raw(clients[which], method, path, b"{}", PAGES[page])
        assert status == 403 and b"web page" in answer, (method, path, answer)


def test_the_hub_keeps_what_it_has(clients):
    hub = clients["hub"]
    hub.register(registration(batch_size=2))
    hub.send(group())
    for page in (*PAGES.values(), {"Referer": "http://example.com/"}, {"Sec-Fetch-Site": "none"}):
        for method, path in (("GET", "/reset_data"), ("GET", "/batch")):
            assert raw(hub, method, path, headers=page)[0] == 403
    assert hub.status()["queue_size"] == 1
    assert len(hub.batch().groups) == 1


def test_an_engine_is_not_paused(clients):
    raw(clients["engine"], "POST", "/bridge/pause", b"{}", PAGES["another site"])
    assert not clients["engine"].call("GET", "/bridge/is_paused")["paused"]


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000",
                                  "10.0.0.5:8000", "a.localhost"])
def test_programs_are_answered(host, clients):
    for client in clients.values():
        assert raw(client, "GET", "/health", headers={"Host": host})[0] == 200


def test_pages_of_the_server_itself_are_answered(clients):
    hub = clients["hub"]
    own = {"Origin": f"http://127.0.0.1:{hub.port}", "Sec-Fetch-Site": "same-origin"}
    assert raw(hub, "GET", "/status", headers=own)[0] == 200


def test_state_is_changed_by_post_and_by_upstreams_get(clients):
    hub = clients["hub"]
    for method in ("POST", "GET"):
        hub.send(group())
        assert raw(hub, method, "/reset_data")[0] == 200
        assert hub.status()["queue_size"] == 0
    hub.register(registration(batch_size=2))
    for method in ("POST", "GET"):
        hub.send(group())
        assert b"tokens" in raw(hub, method, "/batch")[1]


def test_whoever_has_the_token_may_use_any_name():
    with HubServer(token="secret") as hub:
        client = AtroposClient(hub.url)
        headers = {"Authorization": "Bearer secret", "Host": "node17:8000"}
        assert raw(client, "GET", "/status", headers=headers)[0] == 200
        assert raw(client, "GET", "/status", headers={"Host": "node17:8000"})[0] == 401
        assert raw(client, "GET", "/health", headers={"Host": "node17:8000"})[0] == 200
        assert raw(client, "GET", "/status", headers=headers | PAGES["another site"])[0] == 403


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_no_token(token, tokenizer):
    with pytest.raises(ValueError, match="opens the hub to other machines"):
        HubServer(host="0.0.0.0", token=token)
    with pytest.raises(ValueError, match="opens the policy to other machines"):
        BridgeServer(None, host="0.0.0.0", token=token)
    args = engine_server.parser().parse_args(["--model", "m", "--host", "0.0.0.0", "--token",
                                              token])
    with pytest.raises(ValueError, match="opens the engine to other machines"):
        engine_server.check(args)
    with pytest.raises(ValueError, match="token"):
        bare_app("app", token=token, max_body_bytes=1)
