"""Malformed requests, one after another, to hub, bridge and engine server: refusals, no faults."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_server import HubServer
from grpo.policies.client import EngineClient

from ..atropos.environments import EOS, serving
from .fuzz import WHOLE, Health, fuzz, memory
from .serving import raw, server

LENGTH_OF_A_STALL = 1.0  # seconds
GROWTH = 64 << 20  # bytes


@contextlib.contextmanager
def answering(bridge):
    """Somebody who drives the bridge: every call gets one token and the end token."""
    ended = threading.Event()

    def drive():
        while not ended.is_set():
            for call in bridge.take(64, timeout=0.02):
                tokens = [70, EOS][: call.max_tokens]
                bridge.reply(call, tokens, [-0.5] * len(tokens), versions=[(0, len(tokens))])

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


@contextlib.contextmanager
def running(which, tokenizer, tmp_path):
    if which == "engine":
        with server(info={"max_lora_rank": 8}, adapter_roots=(tmp_path,)) as (_, client):
            yield client
    elif which == "bridge":
        with serving(tokenizer) as (bridge, url), answering(bridge):
            yield EngineClient(url)
    else:
        with HubServer(max_body_bytes=1 << 20, wait_for_room=1.0) as hub:
            yield EngineClient(hub.url)


def check(which, count, tokenizer, tmp_path):
    with running(which, tokenizer, tmp_path) as client:
        fuzz(client, which, count // 10, seed=1)  # what is made once is made now
        before = memory()
        with Health(client) as health:
            fuzz(client, which, count, seed=0)
        assert health.slowest < LENGTH_OF_A_STALL
        if which == "hub":
            AtroposClient(client.url).reset_data()
        assert memory() - before < GROWTH
        assert raw(client, "GET", "/health")[0] == 200


@pytest.mark.parametrize("which", WHOLE)
def test_some_malformed_requests(which, tokenizer, tmp_path):
    check(which, 250, tokenizer, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", WHOLE)
def test_ten_thousand_malformed_requests(which, tokenizer, tmp_path):
    check(which, 10_000, tokenizer, tmp_path)


def work(seconds):
    """Take so much of a core's time, however long it takes to get it."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


@pytest.mark.parametrize("hold_up", [time.sleep, work])
def test_a_stall_of_the_server_is_noticed(hold_up):
    """The measure is no excuse: what holds up the event loop itself is not the machine's."""
    done = threading.Event()
    with server() as (engine, client), Health(client) as health:
        time.sleep(0.1)
        engine.loop.call_soon_threadsafe(lambda: (hold_up(1.5), done.set()))
        assert done.wait(60)
        time.sleep(0.1)
    assert health.slowest > LENGTH_OF_A_STALL


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "0", "1e400", "x"])
def test_a_deadline_that_is_none_is_refused(timeout):
    """NaN among the timers of an event loop would bring all of them out of order."""
    with server() as (_, client):
        status, answer, _ = raw(client, "GET", f"/health_generate?timeout={timeout}")
    assert status == 400 and b"timeout=" in answer
