"""Malformed requests by the thousand, and what watches a server while they come."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

from ..atropos.groups import env_registration, group, registration
from .serving import raw

PATIENCE = 30.0  # seconds for any answer
SAMPLING = {"max_tokens": 1, "n": 1, "stop": "a", "temperature": 1.0}
CHAT = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1,
        "chat_template_kwargs": {}}
HUB = {"/scored_data": group(), "/scored_data_list": [group(), group()],
       "/register": registration().model_dump(), "/batch": {}, "/reset_data": {},
       "/register-env": env_registration().model_dump(), "/status-env": {"env_id": 0},
       "/disconnect-env": {"env_id": 0}, "/ack": {"lease": "x"}, "/release": {"lease": "x"},
       "/renew": {"lease": "x", "lease_seconds": 5}, "/status": {}, "/latest_example": {},
       "/info": {}, "/wandb_info": {}, "/": {}}
ASKED = {"/generate": {"prompt": [5, 6], **SAMPLING},
         "/v1/completions": {"prompt": "1+2", "logprobs": 1, **SAMPLING},
         "/v1/chat/completions": CHAT, "/v1/models": {}, "/health": {}, "/health_generate": {}}
WHOLE = {
    "hub": HUB,
    # Not what pauses: requests would wait for the end of that, as they should.
    "engine": {**ASKED, "/lora/load": {"adapter_path": "/nowhere", "version": 1},
               "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
               "/v1/unload_lora_adapter": {"lora_name": "a"}, "/lora/unload": {},
               "/lora/status": {}, "/bridge/rpc": {"method": "synchronize", "args": []},
               "/bridge/resume": {"timeout": 5}, "/bridge/info": {}, "/bridge/debug": {},
               "/bridge/version": {"version": 0}, "/bridge/state_dict_info": {},
               "/bridge/reset_prefix_cache": {"timeout": 5}},
    "bridge": ASKED,
}
OFTEN = ("/generate", "/v1/completions", "/v1/chat/completions", "/scored_data")
INTEGERS = [str(2**62), str(2**63 - 1), str(2**63), str(-2**63 - 1), str(2**64), "9" * 30,
            "9" * 5000, "-0", "1e0"]
SURROGATES = ['"\\ud800"', '["\\udfff"]', '{"\\ud800":1}', '{"role":"user","content":"\\udc00"}',
              '[{"role":"user","content":"\\ud83d"}]']
DEEP = ["[" * depth + "]" * depth for depth in (60, 70, 260, 1100)] + [
    '{"a":' * 300 + "1" + "}" * 300, "[" * 5000, "[{" * 200]
TEMPLATES = ['{"chat_template":' + json.dumps(text) + "}" for text in (
    "{{1}}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}", "{{ ''.__class__ }}",
    "{{ messages.__init__.__globals__ }}", "{% include '/etc/passwd' %}", "{%")] + [
    '{"tokenize":false}', '{"return_tensors":"pt"}', '{"tools":[{"a":1}]}', '{"documents":"x"}',
    '{"messages":[]}', '{"add_generation_prompt":1}', '{"\\u0000":1}']
JSON = ["null", "true", "0", "-1", "1e39", "1e400", "NaN", "-Infinity", '""', '"\\u0000"',
        '"' + "x" * 3000 + '"', "[]", "{}", "[[]]", '{"a":[{}]}', "[" + "1," * 5000 + "1]", "1.5",
        '"5"', "[null]", '[{"role":"user"}]', '{"a":1,"a":2}',
        *INTEGERS, *SURROGATES, *DEEP, *TEMPLATES]
HEADERS = [{}, {}, {}, {}, {"Content-Type": "text/plain"}, {"Authorization": "Basic x"},
           {"Accept": "text/event-stream"}, {"Origin": "null"}, {"Host": "[::"}, {"Host": ""},
           {"Host": "evil.example"}, {"X-Forwarded-For": "1.2.3.4, x"}, {"Content-Length": "-1"},
           {"Content-Length": "9" * 30}, {"Content-Length": "0x5"}, {"Content-Length": "5"},
           {"Transfer-Encoding": "x"}, {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"},
           {"Content-Encoding": "gzip, gzip"}, {"Referer": "http://evil.example"},
           {"Sec-Fetch-Site": "cross-site"}, {"X-Long": "x" * 60_000}, {"Cookie": "\xff\xfe"},
           {"Authorization": "Bearer \xe9"}, {"Expect": "100-continue"}, {"Upgrade": "h2c"}]
QUERIES = ["", "", "", "", "?timeout=nan", "?timeout=inf", "?timeout=-1", "?timeout=1e400",
           "?timeout=x", "?lease_seconds=nan", "?lease_seconds=1e9", "?%00", "?a=%ff",
           "?" + "&" * 99]


def bombs():
    """Packed bodies that are greater unpacked, cut short, or packed again and again."""
    once = gzip.compress(b"[" * (8 << 20))
    whole = gzip.compress(json.dumps(group()).encode())
    return [once, gzip.compress(once), whole, whole * 100, whole[:-9],
            whole[:5] + b"xx" + whole[7:], gzip.compress(b"") * 5000,
            gzip.compress(b"[" * 5000)]


def body_of(random, whole):
    """A whole request's JSON with one value, or one byte, or all of it wrong."""
    text = json.dumps(whole)
    kind = random.randrange(6)
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
    values = [value for value in JSON if value != "null" and not value.startswith("9")
              and value not in INTEGERS] if name == "max_tokens" else JSON
    return marked.replace('"@@"', random.choice(values)).encode()


def send(client, method, path, body, headers):
    """The status of the answer, which may be none: a request that is no HTTP is not answered."""
    try:
        return raw(client, method, path, body, headers, timeout=PATIENCE)[:2]
    except (OSError, ValueError, http.client.HTTPException) as error:
        assert not isinstance(error, TimeoutError), (method, path, body[:200], headers)
        return None, str(error).encode()


def send_half(client, random, path, body):
    """Something that is no request, or the beginning of one; who sent it is gone at once."""
    head = f"POST {path} HTTP/1.1\r\nHost: {client.host}\r\n".encode()
    size = len(body)
    text = random.choice([
        body, head, head[:random.randrange(len(head))], head + b"Content-Length: %d\r\n" % size,
        head + b"Content-Length: %d\r\n\r\n" % (size + 9) + body,
        head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (size + 9) + body,
        head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        head + b"Content-Length: %d\r\n\r\n" % size + body + head, b"\x16\x03\x01" + body,
        b"GET " + b"/" * 70_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 3000])
    with (contextlib.suppress(OSError),
          socket.create_connection((client.host, client.port), timeout=5) as connection):
        connection.sendall(text[:200_000])
        if random.random() < 0.5:
            connection.shutdown(socket.SHUT_WR)


def fuzz(client, which, count, seed):
    """Send so many requests; none may be answered with a fault."""
    draw, packed, whole_of = random.Random(seed), bombs(), WHOLE[which]
    paths = [*whole_of, *(path for path in OFTEN * 3 if path in whole_of)]
    for _ in range(count):
        path = draw.choice(paths)
        method = draw.choice(["POST"] * 8 + ["GET", "GET", "PUT", "HEAD"])
        body, headers = body_of(draw, whole_of[path]), draw.choice(HEADERS)
        if draw.random() < 0.05:
            send_half(client, draw, path, body)
            continue
        if headers.get("Content-Encoding") == "gzip":
            body = draw.choice([body, *packed])
        if headers.get("Content-Length") == "5" and len(body) < 5:
            headers = {}  # half a request that stays open, which has a test of its own
        status, answer = send(client, method, path + draw.choice(QUERIES), body, headers)
        if status is not None and status >= 500:
            assert status in (503, 504) and b"message" in answer, (
                method, path, body[:300], headers, status, answer[:300])


class Health:
    """Asks ``/health`` all the time, and keeps the longest time that an answer took.

    While the threads of this process wait for a core that other processes have, nothing here can
    answer; Linux counts that time, and it is left out. On a machine with cores to spare it is
    nothing.
    """

    def __init__(self, client):
        self.client, self.slowest, self.ended = client, 0.0, threading.Event()
        self.asked, self.error = 0, None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        try:
            while not self.ended.wait(0.01):
                start, held_up = time.monotonic(), waited_for_cores()
                assert raw(self.client, "GET", "/health", timeout=PATIENCE)[0] == 200
                took = time.monotonic() - start
                if took > self.slowest:
                    self.slowest = max(self.slowest, took - (waited_for_cores() - held_up))
                self.asked += 1
        except Exception as error:  # noqa: BLE001 - for the thread of the test
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join(PATIENCE)
        assert self.error is None and self.asked, self.error


def waited_for_cores():
    """Seconds for which this process's threads could have run, had a core been free."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def memory():
    """Resident bytes of this process, in which the servers are threads."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
