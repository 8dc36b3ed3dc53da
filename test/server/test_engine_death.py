"""What requests are told when the engine dies while it answers them, streamed or not."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.policies.client import EngineCallError, EngineClient
from grpo.server.engine_process import EngineProcess, server_command

from ..atropos.environments import serving
from ..support import wait_until
from .serving import raw, refusal, server


@pytest.mark.parametrize(("path", "body", "last"), [
    ("/generate", {"prompt": [5]}, None),
    ("/v1/completions", {"prompt": "5"}, b"data: [DONE]"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "5"}]}, b"data: [DONE]"),
])
def test_an_engine_that_dies_in_a_stream_says_so_and_the_stream_ends(path, body, last):
    with server() as (engine, client), ThreadPoolExecutor(2) as pool:
        stream, whole = (
            pool.submit(raw, client, "POST", path, json.dumps(
                {**body, "max_tokens": 900, "stream": streamed}).encode())
            for streamed in (True, False))
        wait_until(lambda: len(engine.running) == 2)
        engine.loop.call_soon_threadsafe(engine.die)
        status, data, _ = stream.result(10)  # http.client raises if it is cut
        lines = [line for line in data.split(b"\n") if line]
        if last is not None:
            assert lines.pop() == last
        said = json.loads(lines[-1].removeprefix(b"data: "))["error"]
        assert status == 200 and said["type"] == "engine_dead"
        assert "the engine died" in said["message"] and "EngineCore is gone" in said["message"]
        status, data, _ = whole.result(10)
        assert status == 503 and json.loads(data)["error"]["type"] == "engine_dead"
        for streamed in (True, False):  # and later requests are refused before anything is sent
            error = refusal(client, path, {**body, "stream": streamed})
            assert error.status == 503 and "the engine died" in str(error)


def test_an_accident_in_a_stream_is_told_in_it():
    with server() as (_, client):
        body = json.dumps({"prompt": [5], "max_tokens": 667, "stream": True})
        status, data, _ = raw(client, "POST", "/generate", body)
    assert status == 200
    assert json.loads(data)["error"]["message"] == "RuntimeError: an accident"


@pytest.mark.parametrize("stream", [True, False])
def test_what_waits_for_the_end_of_a_pause_hears_of_the_engines_death(stream):
    with server() as (engine, client), ThreadPoolExecutor(1) as pool:
        client.pause("keep")
        waits = pool.submit(raw, client, "POST", "/generate", json.dumps(
            {"prompt": [5], "stream": stream}).encode())
        time.sleep(0.1)  # it has come to the pause, or finds the engine dead at once
        engine.loop.call_soon_threadsafe(engine.die)
        _, data, _ = waits.result(10)
    assert "the engine died" in json.loads(data)["error"]["message"]


# -- the bridge ------------------------------------------------------------------------------------


def sent(pool, client, stream):
    return pool.submit(raw, client, "POST", "/v1/completions", json.dumps(
        {"prompt": [20, 21], "max_tokens": 4, "stream": stream}).encode())


def check_told(stream, whole, *parts):
    """Both answers are whole, and say why there is no more."""
    status, data, _ = stream.result(10)
    first, last = (line for line in data.split(b"\n") if line)
    said = [json.loads(first.removeprefix(b"data: "))["error"]["message"]]
    assert status == 200 and last == b"data: [DONE]"
    status, data, _ = whole.result(10)
    said.append(json.loads(data)["error"]["message"])
    assert status == 503
    assert all(part in message for message in said for part in parts), said


def test_what_the_policy_has_begun_is_answered_when_it_fails(tokenizer):
    """The policy took the calls and died of them; nothing waits in the bridge any more."""
    with ThreadPoolExecutor(2) as pool:
        with (pytest.raises(RuntimeError, match="out of memory"),
              serving(tokenizer) as (bridge, url)):
            client = EngineClient(url)
            stream, whole = (sent(pool, client, streamed) for streamed in (True, False))
            taken = []
            wait_until(lambda: taken.extend(bridge.take()) or len(taken) == 2)
            raise RuntimeError("CUDA: out of memory\nin a kernel")
        check_told(stream, whole, "ended with RuntimeError: CUDA: out of memory; see its log")


def test_a_run_that_finishes_says_that(tokenizer):
    with ThreadPoolExecutor(2) as pool:
        with serving(tokenizer) as (bridge, url):
            stream, whole = (sent(pool, EngineClient(url), streamed) for streamed in (True, False))
            wait_until(lambda: bridge.waiting == 2)
            assert len(bridge.take(1)) == 1  # one taken, one waiting
        check_told(stream, whole, "the trainer has finished")


# -- processes that die ----------------------------------------------------------------------------


@pytest.fixture
def dying(folders, tmp_path):
    """A real engine server, and a way to kill the process that samples."""
    pytest.importorskip("vllm")
    command = server_command(folders[0], dtype="float32", max_model_len=2048, max_num_seqs=8,
                             kv_cache_memory_bytes=64 << 20)
    with EngineProcess(command, start_timeout=240, log_path=tmp_path / "log") as process:
        def kill():
            (core,) = [int(pid) for pid in Path(
                f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(core, signal.SIGKILL)

        yield process, kill


LONG = {"prompt": [20, 21], "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_engine_that_is_killed_says_so_in_stream_and_answer(dying):
    process, kill = dying
    client = process.client()
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True}))
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(client.call, "POST", "/v1/completions", LONG)
        answer = connection.getresponse()
        assert b"token_ids" in answer.readline()  # it is in the middle of it
        wait_until(lambda: client.info()["open_requests"] == 2)
        kill()
        *_, error, done = (line for line in answer.read().split(b"\n") if line)
        assert done == b"data: [DONE]"
        assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "engine_dead"
        with pytest.raises(EngineCallError, match="the engine died") as info:
            whole.result(30)
        assert info.value.status == 503
    for path in ("/v1/completions", "/generate"):
        for stream in (True, False):
            error = refusal(client, path, {**LONG, "stream": stream})
            assert error.status == 503 and "the engine died" in str(error)
