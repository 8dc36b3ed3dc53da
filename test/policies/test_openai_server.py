"""The policy behind OpenAI's completions: what is sent, what is read, what is tried again."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo import data
from grpo.policies import openai_server
from grpo.policies.base import Sampling
from grpo.policies.openai_server import OpenAIPolicy, OpenAIServerError


class Server(ThreadingHTTPServer):
    """Answers with the prompt's first token and the end token; ``refusals`` come first."""

    def __init__(self, **card) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 12, **card}
        self.asked: list[dict] = []
        self.refusals: list[tuple[int, str]] = []
        self.answer = None

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [self.server.card]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.refusals:
            self._send(*self.server.refusals.pop())
            return
        self.server.asked.append(body | {"key": self.headers.get("authorization")})
        choice = {"text": "7", "finish_reason": "stop"}
        if body.get("return_token_ids"):
            choice["token_ids"] = [body["prompt"][0], 1]
        self._send(200, self.server.answer or json.dumps({"choices": [choice]}))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server():
    with Server() as running:
        yield running


@pytest.fixture
def make_policy(server, tokenizer, monkeypatch):
    monkeypatch.setattr(openai_server, "_PAUSE", 0.01)

    def make(**options):
        sampling = Sampling(max_tokens=4, temperature=options.pop("temperature", 1.0), seed=3)
        return OpenAIPolicy(options.pop("url", server.url), sampling, **{
            "tokenizer": tokenizer, "pad_token_id": 0, "eos_token_ids": (1,), "max_model_len": 64,
            "timeout": 20.0, **options})

    return make


def test_tokens_go_out_and_come_back(make_policy, server):
    told = []
    policy = make_policy(api_key="k")
    batch = policy.stream(policy.pad_prompts([[7, 8], [9]]), lambda row, ids: told.append(row))
    assert batch[data.RESPONSE_TOKENS].tolist() == [[7, 1, 0, 0], [9, 1, 0, 0]]
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_STOP] * 2
    assert sorted(told) == [0, 1]
    first = next(body for body in server.asked if body["prompt"] == [7, 8])
    assert (first["seed"], first["temperature"], first["key"]) == (
        policy.sampling.row_seed(0, 0), 1.0, "Bearer k")
    assert first["top_p"] == 1.0 and first["top_k"] == -1
    assert policy.max_model_len == 12


def test_a_strict_server_gets_openais_fields_alone_and_text_is_tokenised(
        make_policy, server, tokenizer):
    server.card["owned_by"] = "somebody"
    policy = make_policy(temperature=0.0, send="text")
    prompt = tokenizer("1+6=", add_special_tokens=False)["input_ids"]
    batch = policy.generate_from_ids([prompt])
    seven = tokenizer("7", add_special_tokens=False)["input_ids"]
    assert batch[data.RESPONSE_TOKENS].tolist() == [[*seven, 1, 0, 0]]
    (body,) = server.asked
    assert body.keys() - {"key"} == {"model", "max_tokens", "n", "top_p", "prompt", "temperature"}
    assert body["prompt"] == "1+6="


def test_what_may_still_succeed_is_tried_again(make_policy, server):
    server.refusals = [(503, "busy"), (429, "slow down"), (500, "oops")]
    batch = make_policy().generate_from_ids([[7], [8], [9]])
    assert batch[data.RESPONSE_TOKENS][:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize(("refusals", "message"), [
    ([(400, json.dumps({"error": {"message": "no such thing"}}))], "no such thing .status 400"),
    ([(401, "")], "Unauthorized .status 401"),
    ([(503, "busy")] * 500, "busy .status 503., until the deadline"),
])
def test_what_cannot_succeed_ends_with_the_servers_words(make_policy, server, refusals, message):
    policy = make_policy(timeout=1.0)
    server.refusals = refusals
    with pytest.raises(OpenAIServerError, match=message):
        policy.generate_from_ids([[7]])


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"choices": []}', '{"choices": [{}]}'])
def test_an_answer_that_is_none_is_named(make_policy, server, answer):
    server.answer = answer
    with pytest.raises(OpenAIServerError, match=r"completions: the answer (is|has) no"):
        make_policy().generate_from_ids([[7]])


@pytest.mark.parametrize("reason", ["abort", "content_filter", None])
def test_a_completion_that_neither_ended_nor_was_cut_is_refused(make_policy, server, reason):
    choice = {"text": "7", "token_ids": [7], "finish_reason": reason}
    server.answer = json.dumps({"choices": [choice]})
    with pytest.raises(OpenAIServerError, match=f"finish_reason={reason!r} is a fragment"):
        make_policy().generate_from_ids([[7]])


def test_the_model_must_be_served(make_policy):
    with pytest.raises(OpenAIServerError, match="serves m, and not served_model=other"):
        make_policy(model="other")


def test_nobody_at_the_address_is_said_so(make_policy, monkeypatch):
    monkeypatch.setattr(openai_server, "_LOOK", 0.3)
    with pytest.raises(OpenAIServerError, match="127.0.0.1:1/v1/models: .*is the server running"):
        make_policy(url="http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://[::"])
def test_an_address_that_is_none_is_refused(make_policy, url):
    with pytest.raises(ValueError, match="give such as http://|must begin with http"):
        make_policy(url=url)
