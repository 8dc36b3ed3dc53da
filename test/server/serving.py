"""A server around the stand-in engine, in a thread, and ways to call it."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from grpo.policies.client import EngineCallError, EngineClient
from grpo.server.app import create_app
from grpo.server.engine_process import bind

from .fake_engine import MAKE, FakeEngine


class Tokenizer:
    """One token a character."""

    chat_template = "yes"

    def __call__(self, text, *, add_special_tokens=True):
        return {"input_ids": [ord(character) % 90 for character in text]}

    def decode(self, ids):
        return "".join(chr(32 + token) for token in ids)

    def apply_chat_template(self, messages, **options):
        if "content" not in messages[0]:
            raise ValueError("a message needs content")
        self.options = options
        return self("".join(message["content"] for message in messages))["input_ids"]


@contextmanager
def server(**options):
    """A server in a thread; yields its engine, its client, and the event loop."""
    sock, started = bind("127.0.0.1", 0), threading.Event()
    holder = {}

    async def serve():
        engine = holder["engine"] = FakeEngine()
        holder["loop"] = asyncio.get_running_loop()
        app = create_app(engine, **{
            "tokenizer": Tokenizer(), "model_names": ("tiny", "/models/tiny"), "make": MAKE,
            "max_model_len": 1000, "vocab_size": 100, "rpc_methods": ("synchronize", "hang"),
            **options})
        holder["server"] = uvicorn.Server(uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        started.set()
        await holder["server"].serve(sockets=[sock])
        engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    client = EngineClient(f"http://127.0.0.1:{sock.getsockname()[1]}",
                          token=options.get("token"), timeout=10)
    while not client.alive():
        time.sleep(0.01)
    try:
        yield holder["engine"], client
    finally:
        holder["server"].should_exit = True
        thread.join(10)
        sock.close()


def post(client, path, body):
    return client.call("POST", path, body)


def raw(client, method, path, data=b"", headers=None, *, timeout=10):
    connection = http.client.HTTPConnection(client.host, client.port, timeout=timeout)
    headers = headers or {}
    connection.request(method, path, data, headers, encode_chunked="Transfer-Encoding" in headers)
    response = connection.getresponse()
    value = response.status, response.read(), response.getheader("content-type")
    connection.close()
    return value


def refusal(client, path, body):
    with pytest.raises(EngineCallError) as info:
        post(client, path, body)
    return info.value
