"""The server's inference routes around a stand-in engine: what they answer, what they refuse."""

from __future__ import annotations

import http.client
import json
import time

import pytest

from grpo.server.api import GenerateRequest

from .fake_engine import FIRST
from .serving import post, raw, refusal, server

ALTERED = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
           "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0},
           "allowed_token_ids": [5], "bad_words": ["no"]}


def test_generate_answers_in_the_form_that_atropos_reads(client):
    answer = post(client, "/generate", {
        "prompt": {"prompt_token_ids": [7, 8, 9]}, "logprobs": 0, "n": 2, "max_tokens": 3,
        "temperature": 1.0, "top_p": 1.0, "stop": ["</answer>"]})
    version = client.version
    token = answer["token_ids"][0][0]
    assert answer == {
        "prompt": "'()", "prompt_token_ids": [7, 8, 9], "token_ids": [[token] * 3] * 2,
        "text": ["xxx", "xxx"], "finish_reasons": ["length", "length"],
        "logprobs": [[[{str(token): -0.5}]] * 3] * 2, "altered_by": [],
        "policy_version": [[[version, 3]]] * 2}


def test_teacher_log_probs_of_the_prompt(client):
    answer = post(client, "/generate", {
        "prompt": {"prompt_token_ids": [7, 8, 9]}, "prompt_logprobs": 1, "n": 1,
        "temperature": 0.0, "top_p": 1.0, "max_tokens": 1})
    assert answer["prompt_logprobs"] == [None, {"8": -2.0}, {"9": -2.0}]
    assert "logprobs" not in answer


@pytest.mark.parametrize("body", [
    {"prompt": "abc"}, {"prompt": [7, 8, 9]}, {"prompt": {"prompt_token_ids": [7, 8, 9]}},
    {"prompt_token_ids": [7, 8, 9]}, {"prompt": {"prompt": "abc"}}])
def test_forms_of_one_prompt(client, body):
    answer = post(client, "/generate", {**body, "max_tokens": 1})
    assert answer["prompt_token_ids"] == [7, 8, 9]
    as_text = body in ({"prompt": "abc"}, {"prompt": {"prompt": "abc"}})
    assert answer["prompt"] == ("abc" if as_text else "'()")  # token ids are decoded


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_text_begins_as_the_tokenizer_has_it_and_is_not_ended(adding_tokenizer, path):
    with server(tokenizer=adding_tokenizer, vocab_size=len(adding_tokenizer)) as (_, client):
        answer = post(client, path, {"prompt": "abc", "max_tokens": 1})
        chat = post(client, "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    tokens = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert adding_tokenizer.decode(tokens) == "<bos>abc"
    assert adding_tokenizer.decode(chat["choices"][0]["prompt_token_ids"]) == (
        "<bos>user: hi\nassistant: ")


@pytest.mark.parametrize("body", [
    {"prompt": ["abc", [5]]}, {"prompt_token_ids": [[7, 8, 9], [5]]},
    {"prompt": [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": [5]}]}])
def test_a_list_of_prompts_is_answered_by_a_list(client, body):
    answer = post(client, "/generate", {**body, "max_tokens": 1})
    assert [one["prompt_token_ids"] for one in answer["results"]] == [[7, 8, 9], [5]]


def test_repeated_prompts_with_a_seed_draw_differently(client, engine):
    post(client, "/generate", {"prompt": [[5], [5], [6]], "n": 4, "seed": 100, "max_tokens": 1})
    assert [request.params.seed for request in engine.seen[-3:]] == [100, 104, 108]


def test_flat_log_probs_are_one_number_a_token(client):
    answer = post(client, "/generate", {"prompt": [5], "logprobs": 0, "flat_logprobs": True,
                                        "return_text": False, "max_tokens": 2})
    assert answer["logprobs"] == [[-0.5, -0.5]] and not {"text", "prompt"} & answer.keys()


def test_top_log_probs_come_after_the_sampled_token(client):
    answer = post(client, "/generate", {"prompt": [5], "logprobs": 2, "max_tokens": 1})
    ((((token), value), *rest),) = [list(answer["logprobs"][0][0][0].items())]
    assert int(token) >= FIRST and value == -0.5
    assert rest == [("0", -1.0), ("1", -2.0)]


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_distribution_is_named(client, name):
    answer = post(client, "/generate", {"prompt": [5], "max_tokens": 3, name: ALTERED[name]})
    assert answer["altered_by"] == [name]


def test_every_sampling_field_reaches_the_engine(client, engine):
    wanted = {**ALTERED, "temperature": 0.5, "max_tokens": 3, "stop": ["a"], "seed": 3, "n": 2,
              "stop_token_ids": [4], "ignore_eos": True, "include_stop_str_in_output": True,
              "skip_special_tokens": False, "spaces_between_special_tokens": False,
              "logprobs": 2, "prompt_logprobs": 1}
    post(client, "/generate", {"prompt": [5], **wanted})
    got = vars(engine.seen[-1].params)
    assert {key: got[key] for key in wanted} == {**wanted, "logit_bias": {5: 1.0}}
    assert wanted.keys() >= GenerateRequest.model_fields.keys() - {
        "prompt", "prompt_token_ids", "flat_logprobs", "return_text", "stream", "model"}


@pytest.mark.parametrize("body, param, message", [
    ({"prompt": [5], "nn": 2}, "nn", "unknown field 'nn'"),
    ({"prompt": [5], "n": 0}, "n", "n=0"),
    ({"prompt": [5], "n": "2"}, "n", "valid integer"),
    ({"prompt": [5], "temperature": -1}, "temperature", "temperature=-1"),
    ({"prompt": [5], "temperature": None}, "temperature", "valid number"),
    ({"prompt": [5], "top_p": 0}, "top_p", "top_p=0"),
    ({"prompt": [5], "max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"prompt": [5], "logit_bias": {"x": 1.0}}, "logit_bias", "token ids"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt[0]", "empty"),
    ({"prompt": [[5], [-1]]}, "prompt[1]", "token id -1"),
    ({"prompt": [100]}, "prompt", "0 to 99"),
    ({"prompt": [5.5]}, "prompt[0]", "5.5"),
    ({"prompt": {"ids": [5]}}, "prompt", "prompt_token_ids"),
    ({"prompt": [5] * 1000}, "prompt", "1000 tokens"),
    ({}, None, "exactly one of prompt"),
    ({"prompt": [5], "prompt_token_ids": [5]}, None, "exactly one of prompt"),
    ({"prompt": [5], "flat_logprobs": True}, None, "logprobs=0"),
    ({"prompt": [5], "stop": "a", "return_text": False}, None, "return_text"),
    ({"prompt": [5], "stream": True, "prompt_logprobs": 1}, None, "stream=false"),
    ({"prompt": [5], "n": 2, "temperature": 0.0}, None, "greedy"),
    ({"prompt": [5], "max_tokens": 666}, None, "refused by the engine"),
])
def test_bad_input_is_refused_and_named(client, body, param, message):
    error = refusal(client, "/generate", body)
    assert error.status == 400 and error.param == param
    assert message in str(error)


@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"prompt": [5], "temperature": NaN}',
                                  b'{"prompt": [5], "temperature": 1e999}', b"\xff"])
def test_what_is_not_a_json_object_is_refused(client, data):
    status, body, _ = raw(client, "POST", "/generate", data)
    assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_faults_are_500_and_missing_routes_404_in_json(client):
    error = refusal(client, "/generate", {"prompt": [5], "max_tokens": 667})
    assert error.status == 500 and "an accident" in str(error)
    assert refusal(client, "/nothing", {}).status == 404
    status, body, _ = raw(client, "GET", "/generate")
    assert status == 405 and "error" in json.loads(body)


def test_a_failing_prompt_of_a_list_aborts_the_others(client, engine):
    refusal(client, "/generate", {"prompt": [[5]] * 3, "max_tokens": 666})
    assert client.info()["open_requests"] == 0


@pytest.mark.parametrize("accept, kind", [("text/event-stream", "text/event-stream"),
                                          ("*/*", "application/x-ndjson")])
def test_streams_add_up_to_the_whole_answer(client, accept, kind):
    body = {"prompt": [[5], [6]], "n": 2, "max_tokens": 5, "logprobs": 0, "stream": True}
    status, data, content_type = raw(client, "POST", "/generate", json.dumps(body),
                                     {"Accept": accept})
    assert status == 200 and content_type.startswith(kind)
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line]
    pieces = [json.loads(line) for line in lines]
    for key in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        mine = [p for p in pieces if (p["prompt_index"], p["index"]) == key]
        assert sum(len(p["token_ids"]) for p in mine) == 5
        assert sum(len(p["logprobs"]) for p in mine) == 5
        assert sum(count for p in mine for _, count in p["policy_version"]) == 5
        assert mine[-1]["finish_reason"] == "length"


def test_an_error_in_a_stream_is_its_last_line(client):
    body = {"prompt": [5], "max_tokens": 666, "stream": True}
    _, data, _ = raw(client, "POST", "/generate", json.dumps(body))
    assert json.loads(data)["error"]["message"] == "refused by the engine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(client, engine, stream):
    connection = http.client.HTTPConnection(client.host, client.port, timeout=10)
    before = len(engine.aborted)
    connection.request("POST", "/generate", json.dumps(
        {"prompt": [[5], [6]], "max_tokens": 10_000, "stream": stream}))
    while len(engine.running) < 2:
        time.sleep(0.005)
    connection.close()
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.running and len(engine.aborted) == before + 2


def test_openai_completions(client):
    answer = post(client, "/v1/completions", {
        "model": "tiny", "prompt": ["ab", "c"], "n": 2, "max_tokens": 2, "logprobs": 1})
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    choice = answer["choices"][3]
    assert choice["text"] == "xx" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert len(choice["token_ids"]) == 2 and choice["prompt_token_ids"] == [9]
    assert sum(count for _, count in choice["policy_version"]) == 2


def test_offsets_in_a_stream_go_on_from_piece_to_piece(client):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 4, "logprobs": 0, "stream": True}
    _, answer, _ = raw(client, "POST", "/v1/completions", json.dumps(body))
    pieces = [json.loads(line.removeprefix(b"data: "))["choices"][0]
              for line in answer.split(b"\n") if line.startswith(b"data: {")]
    for index in range(4):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert len(mine) > 1
        assert [offset for piece in mine for offset in piece["logprobs"]["text_offset"]] == [
            0, 1, 2, 3]


def test_openai_chat(client):
    answer = post(client, "/v1/chat/completions", {
        "model": "/models/tiny", "messages": [{"role": "user", "content": "hello"}], "n": 2,
        "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 1})
    assert answer["object"] == "chat.completion" and len(answer["choices"]) == 2
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "xx"}
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -0.5]
    assert len(content[0]["top_logprobs"]) == 1
    assert len(choice["prompt_token_ids"]) == 5


def test_openai_client_reads_answers_and_streams(client):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(api_key="x", base_url=client.url + "/v1", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        chat = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        assert chat.choices[0].message.content == "xxx"
        stream = api.completions.create(model="tiny", prompt="hi", max_tokens=3, stream=True)
        assert "".join(piece.choices[0].text for piece in stream) == "xxx"
        stream = api.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True)
        assert "".join(piece.choices[0].delta.content for piece in stream) == "xxx"
        with pytest.raises(openai.NotFoundError, match="model='other' is not served"):
            api.completions.create(model="other", prompt="hi")


@pytest.mark.parametrize("body, message", [
    ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "needs content"),
    ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "logprobs=true"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": []}, "unknown field 'tools'"),
    ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1,
      "max_completion_tokens": 1}, "one of them")])
def test_bad_chats_are_refused(client, body, message):
    error = refusal(client, "/v1/chat/completions", body)
    assert error.status == 400 and message in str(error)
