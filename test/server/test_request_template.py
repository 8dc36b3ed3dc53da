"""Templates that come with requests: refused, or run apart with limits; nobody waits for them."""

from __future__ import annotations

import json
import threading
import time

import pytest

from grpo.atropos.client import AtroposClient
from grpo.envs.embedded import byte_tokenizer
from grpo.policies.client import EngineCallError
from grpo.server.request_template import MAX_CHARACTERS

from ..atropos.environments import serving
from .serving import post, raw, refusal, server

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# The text doubles with each line; the 30th would be a GiB.
GREAT = "{% set ns = namespace(t='x' * 1000) %}" + "{% set ns.t = ns.t ~ ns.t %}" * 24
WORDY = "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}"
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ colour }}{{ eos_token }}"


def chat(template=None, **fields):
    own = {} if template is None else {"chat_template_kwargs": {"chat_template": template}}
    return {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 2, **own, **fields}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def trusting(tokenizer):
    with server(tokenizer=tokenizer, vocab_size=len(tokenizer),
                trust_templates=True) as (_, client):
        yield client


@pytest.mark.parametrize("template", [OWN, ENDLESS, GREAT])
def test_an_engine_refuses_them(client, template):
    error = refusal(client, "/v1/chat/completions", chat(template))
    assert error.status == 403 and "--trust-request-chat-template" in str(error)


def test_a_bridge_refuses_them_in_the_trainers_process(tokenizer):
    with serving(tokenizer) as (_, url):
        client = AtroposClient(url)
        with pytest.raises(Exception, match="--trust-request-chat-template") as caught:
            client.call("POST", "/v1/chat/completions", chat(ENDLESS))
    assert caught.value.status == 403


@pytest.mark.parametrize("name", ["tokenize", "return_tensors", "padding", "max_length",
                                  "tokenizer_kwargs", "continue_final_message"])
def test_how_the_tokenizer_works_is_not_the_requests_to_choose(trusting, name):
    error = refusal(trusting, "/v1/chat/completions", chat(chat_template_kwargs={name: 10**12}))
    assert error.status == 400 and name in str(error)


def test_a_trusted_one_is_rendered(trusting, tokenizer):
    answer = post(trusting, "/v1/chat/completions", chat(
        chat_template_kwargs={"chat_template": OWN, "colour": "red"}))
    text = tokenizer.decode(answer["choices"][0]["prompt_token_ids"])
    assert text == "<user>1+2=red" + tokenizer.eos_token


@pytest.mark.parametrize(("template", "message"), [
    (ENDLESS, "not done after 5 s"), (GREAT, "MemoryError|more than"),
    (WORDY, f"more than {MAX_CHARACTERS} characters"), ("{% if %}", "TemplateSyntaxError"),
    ("{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}", "SecurityError|unsafe"),
    ("{{ raise_exception('no tools here') }}", "no tools here")])
def test_a_trusted_one_has_limits_and_others_are_answered_meanwhile(trusting, template, message):
    slowest, ended = 0.0, threading.Event()

    def watch():
        nonlocal slowest
        while not ended.is_set():
            start = time.monotonic()
            assert raw(trusting, "GET", "/health")[0] == 200
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(EngineCallError, match=message) as caught:
            trusting.call("POST", "/v1/chat/completions", chat(template), timeout=30)
    finally:
        ended.set()
        watcher.join()
    assert caught.value.status == 400 and slowest < 1.0


def test_messages_that_no_template_expects_are_the_requests_fault(trusting):
    for content in (None, 5, [[]], {"a": {}}, [{"type": "image_url"}]):
        status, answer, _ = raw(trusting, "POST", "/v1/chat/completions", json.dumps(
            chat(messages=[{"role": "user", "content": content}])).encode())
        assert status in (200, 400), answer
