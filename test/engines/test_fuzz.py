"""Malformed requests, one after another, to hub, bridge and engine server: refusals, no faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time

import pytest

from grpo.atropos.hub_server import HubServer

from ..atropos.environments import serving
from ..atropos.groups import env_registration, group, registration
from .serving import raw, server

LENGTH_OF_A_STALL = 1.0  # seconds
WHOLE = {
    "hub": {"/scored_data": group(), "/scored_data_list": [group(), group()],
            "/register": registration().model_dump(), "/batch": {}, "/reset_data": {},
            "/register-env": env_registration().model_dump(), "/status-env": {"env_id": 0},
            "/disconnect-env": {"env_id": 0}, "/ack": {"lease": "x"}, "/release": {"lease": "x"},
            "/renew": {"lease": "x", "lease_seconds": 5}, "/status": {}, "/latest_example": {}},
    "engine": {"/generate": {"prompt": [5, 6], "max_tokens": 1, "n": 1, "stop": "a"},
               "/v1/completions": {"prompt": "1+2", "max_tokens": 1, "logprobs": 1},
               "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}],
                                        "max_tokens": 1, "chat_template_kwargs": {}},
               "/lora/load": {"adapter_path": "/nowhere", "version": 1},
               "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
               "/v1/unload_lora_adapter": {"lora_name": "a"},
               "/bridge/rpc": {"method": "synchronize", "args": []},
               "/bridge/resume": {"timeout": 5}, "/bridge/info": {}, "/lora/status": {}},
}
# The bridge's calls wait for a policy; nobody drives it here, so each of these has two faults.
WHOLE["bridge"] = {
    path: {**WHOLE["engine"][path], "max_tokens": 0, "model": "nobody"}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions")}
JSON = ["null", "true", "0", "-1", "1e39", "1e400", "NaN", "-Infinity", "9" * 30, "9" * 5000,
        '""', '"\\ud800"', '"\\u0000"', '"' + "x" * 3000 + '"', "[]", "{}", "[[]]", '{"a":[{}]}',
        "[" * 300 + "]" * 300, "[" * 1100 + "]" * 1100, "[" * 5000, '{"chat_template":"{{1}}"}',
        "[" + "1," * 5000 + "1]", "1.5", '"5"', "[null]", '[{"role":"user"}]']
HEADERS = [{}, {}, {}, {"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"},
           {"Authorization": "Basic x"}, {"Accept": "text/event-stream"}, {"Origin": "null"},
           {"Host": "[::"}, {"X-Forwarded-For": "1.2.3.4, x"}, {"Content-Length": "-1"},
           {"Content-Length": "9" * 30}, {"Content-Length": "5"}, {"Transfer-Encoding": "x"}]


def body_of(random, whole):
    """A whole request's JSON with one value, or one byte, or all of it wrong."""
    text = json.dumps(whole)
    kind = random.randrange(5)
    if kind == 0:
        return random.choice(JSON).encode()
    if kind == 1:
        return bytes(random.randrange(256) for _ in range(random.randrange(60)))
    if kind == 2:
        at = random.randrange(len(text))
        return text[:at].encode() + bytes([random.randrange(256)]) + text[at + 1:].encode()
    if kind == 3:
        return text[:random.randrange(len(text))].encode()
    names = list(whole) if isinstance(whole, dict) else [0]
    name = random.choice([*names, "extra"]) if isinstance(whole, dict) else 0
    marked = json.dumps({**whole, name: "@@"} if isinstance(whole, dict) else ["@@", *whole])
    # The stand-in for the engine goes on for ever where there is no limit.
    values = JSON[1:] if name == "max_tokens" else JSON
    return marked.replace('"@@"', random.choice(values)).encode()


def send(client, method, path, body, headers):
    """The status of the answer, which may be none: a request that is no HTTP is not answered."""
    try:
        return raw(client, method, path, body, headers)[:2]
    except (ConnectionError, OSError, ValueError) as error:
        assert not isinstance(error, TimeoutError), (method, path, body[:200], headers)
        return None, b""
    except Exception as error:  # http.client's, for an answer that is cut
        return None, str(error).encode()


class Health:
    """Asks ``/health`` all the time, and keeps the longest answer."""

    def __init__(self, client):
        self.client, self.slowest, self.ended = client, 0.0, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while not self.ended.wait(0.01):
            start = time.monotonic()
            assert raw(self.client, "GET", "/health")[0] == 200
            self.slowest = max(self.slowest, time.monotonic() - start)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join(10)


def memory():
    """Resident bytes of this process, in which the servers are threads."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(client, which, count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        path, whole = draw.choice(list(WHOLE[which].items()))
        method = draw.choice(["POST"] * 8 + ["GET", "PUT"])
        body, headers = body_of(draw, whole), draw.choice(HEADERS)
        if draw.random() < 0.02:  # no HTTP at all
            with (contextlib.suppress(OSError),
                  socket.create_connection((client.host, client.port), timeout=5) as connection):
                connection.sendall(body[:2000])
            continue
        if headers.get("Content-Length") == "5" and len(body) < 5:
            headers = {}  # half a request, which has a test of its own
        status, answer = send(client, method, path, body, headers)
        if status is not None and status >= 500:
            assert status in (501, 503, 504) and b"message" in answer, (
                method, path, body[:300], headers, status, answer[:300])


@contextlib.contextmanager
def running(which, tokenizer, tmp_path):
    from grpo.atropos.client import AtroposClient

    if which == "engine":
        with server(info={"max_lora_rank": 8}, adapter_roots=(tmp_path,)) as (_, client):
            yield client
        return
    with (HubServer(max_body_bytes=1 << 20) if which == "hub" else serving(tokenizer)) as found:
        client = AtroposClient(found.url if which == "hub" else found[1], timeout=10.0)
        client.host, client.port = client._host, client._port
        yield client


def check(which, count, tokenizer, tmp_path):
    with running(which, tokenizer, tmp_path) as client:
        fuzz(client, which, count // 10, seed=1)  # what is made once is made now
        before = memory()
        with Health(client) as health:
            fuzz(client, which, count, seed=0)
        assert health.slowest < LENGTH_OF_A_STALL
        if which == "hub":
            client.reset_data()
        assert memory() - before < 64 << 20
        assert raw(client, "GET", "/health")[0] == 200


@pytest.mark.parametrize("which", WHOLE)
def test_some_malformed_requests(which, tokenizer, tmp_path):
    check(which, 250, tokenizer, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("which", WHOLE)
def test_ten_thousand_malformed_requests(which, tokenizer, tmp_path):
    check(which, 10_000, tokenizer, tmp_path)
