"""The whole server around a real vLLM: what it samples, what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.client import EngineCallError, EngineTimeoutError
from grpo.policies.server import ServerPolicy
from grpo.system.child_process import last_lines

from ..support import wait_until
from .real import PROMPT, InFlight, close, log_probs

pytestmark = pytest.mark.vllm


@pytest.fixture
def client(real_client):
    return real_client


def test_log_probs_are_those_of_the_sampled_distribution(client, folders):
    (answer,) = client.generate([PROMPT], max_tokens=20, temperature=0.7, seed=3, n=2)
    assert answer.tokens[0] != answer.tokens[1]
    for tokens, values in zip(answer.tokens, answer.log_probs, strict=True):
        assert close(values, log_probs(folders[0], PROMPT, tokens, temperature=0.7))


def test_policy_repeats_a_call_and_not_the_samples_of_a_group(client, folders):
    def policy():
        return ServerPolicy(client, Sampling(max_tokens=12, seed=4), pad_token_id=0,
                            eos_token_ids=(1,))

    first = policy()
    one, two = first.generate_from_ids([PROMPT] * 3), first.generate_from_ids([PROMPT] * 3)
    told = {}
    again = policy().stream(first.pad_prompts([PROMPT] * 3), told.__setitem__)
    rows = [row for batch in (one, two) for row in batch[data.RESPONSE_TOKENS].tolist()]
    assert len({tuple(row) for row in rows}) == 6
    assert again[data.RESPONSE_TOKENS].tolist() == one[data.RESPONSE_TOKENS].tolist()
    assert all(again[data.RESPONSE_TOKENS][row, :len(told[row])].tolist() == told[row]
               for row in range(3))
    # The prompt comes from the cache the second time, and sums are rounded in another order.
    torch.testing.assert_close(one[data.LOG_PROBS], again[data.LOG_PROBS], atol=1e-4, rtol=0)
    assert one[data.POLICY_VERSION].tolist() == [client.version] * 3


def test_teacher_log_probs_of_the_prompt(client, folders):
    answer = client.call("POST", "/generate", {
        "prompt": {"prompt_token_ids": PROMPT}, "prompt_logprobs": 2, "n": 1, "temperature": 0.0,
        "top_p": 1.0, "max_tokens": 1})
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    values = [position[str(token)] for position, token in zip(rest, PROMPT[1:], strict=True)]
    assert close(values, log_probs(folders[0], PROMPT[:1], PROMPT[1:]))


def test_altered_sampling_reports_the_altered_distribution(client):
    answer = client.call("POST", "/generate", {
        "prompt": PROMPT, "top_k": 1, "logprobs": 2, "max_tokens": 4})
    assert answer["altered_by"] == ["top_k"]
    for position in answer["logprobs"][0]:
        sampled, *others = position[0].values()
        assert sampled == 0.0 and others and set(others) == {-9999.0}


def test_a_cpu_says_why_it_cannot_sleep(client):
    if client.info()["device"] != "cpu":
        pytest.skip("for CPUs")
    with pytest.raises(EngineCallError, match="this engine runs on a CPU") as info:
        client.sleep()
    assert info.value.status == 501
    client.sleep(0)
    assert client.call("GET", "/bridge/is_sleeping") == {"sleeping": True}
    with pytest.raises(EngineCallError, match="wake_up"):
        client.collective_rpc("synchronize")
    client.wake_up()
    assert client.call("GET", "/bridge/is_sleeping") == {"sleeping": False}
    assert client.generate([PROMPT], max_tokens=3)


def caught_in_the_middle(client, *, stream: bool) -> http.client.HTTPConnection | None:
    """A client whose rows run, or None where the small model was through before one could look."""
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(
        {"prompt": [PROMPT, PROMPT[1:]], "n": 15, "max_tokens": 900, "ignore_eos": True,
         "stream": stream}))
    if stream:
        assert connection.getresponse().readline()
    # Blocks of a request that runs cannot be dropped.
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if client.info()["open_requests"] == 2 and not client.reset_prefix_cache():
            return connection
    connection.close()
    return None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(client, stream):
    tries = (caught_in_the_middle(client, stream=stream) for _ in range(5))
    connection = next(filter(None, tries))
    connection.close()
    wait_until(lambda: not client.info()["open_requests"])
    client.generate([[5]], max_tokens=1)  # in a step after the one that was under way
    assert client.reset_prefix_cache()


def test_streams_add_up_to_the_whole_answer(client):
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 16, "seed": 7, "logprobs": 0,
            "flat_logprobs": True, "ignore_eos": True, "return_text": False}
    whole = client.call("POST", "/generate", body)["results"]
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", "/generate", json.dumps({**body, "stream": True}))
    pieces = [json.loads(line) for line in connection.getresponse().read().splitlines()]
    connection.close()
    assert len(pieces) > 4
    for row, answer in enumerate(whole):
        for index in range(2):
            mine = [p for p in pieces if (p["prompt_index"], p["index"]) == (row, index)]
            assert [t for p in mine for t in p["token_ids"]] == answer["token_ids"][index]
            values = [value for p in mine for value in p["logprobs"]]
            assert close(values, torch.tensor(answer["logprobs"][index]))
            assert [p["finish_reason"] for p in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.slow
def test_limits_of_time_and_size(client):
    request = InFlight(client, size=1000, n=8)  # longer than a loaded machine takes to ask
    with pytest.raises(EngineTimeoutError, match=r"running requests to stop \(mode wait\)") as info:
        client.pause("wait", timeout=0.05)
    assert info.value.status == 504 and not client.info()["paused"]
    assert all(len(tokens) == 1000 for tokens, _, _, _ in request.samples())
    with pytest.raises(EngineCallError, match="--max-body-mib") as info:
        client.call("POST", "/generate", {"prompt": "a" * (33 << 20)})
    assert info.value.status == 413 and client.alive()


@pytest.mark.parametrize("body, message", [
    ({"prompt": [5] * 1024}, "1024 tokens"), ({"prompt": [10**6]}, "token id 1000000"),
    ({"prompt": [5], "logprobs": 10_000}, "logprobs"), ({"prompt": [5], "n": 2, "temperature": 0.0},
                                                        "greedy")])
def test_refusals_are_400(client, body, message):
    with pytest.raises(EngineCallError) as info:
        client.call("POST", "/generate", body)
    assert info.value.status == 400 and message in str(info.value)
    assert client.alive()


def test_openai_routes(client, tokenizer):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(api_key="x", base_url=client.url + "/v1", max_retries=0) as api:
        model = api.models.list().data[0].id
        text = api.completions.create(model=model, prompt="3+4=", max_tokens=5, logprobs=1, n=2)
        assert [len(choice.token_ids) for choice in text.choices] == [
            choice and len(choice.logprobs.token_logprobs) for choice in text.choices]
        if tokenizer.chat_template:
            chat = api.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "3+4="}], max_tokens=5,
                logprobs=True, top_logprobs=1, extra_body={"ignore_eos": True})
            assert chat.usage.completion_tokens == 5
            assert len(chat.choices[0].logprobs.content) == 5


def test_health_generate_and_facts(client):
    assert client.call("GET", "/health_generate") == {"status": "ok"}
    info = client.info()
    assert info["device"] in ("cpu", "cuda") and info["dtype"] == "float32"
    assert "load_checkpoint" in client.call("GET", "/bridge/debug")["rpc_methods"]


def test_a_request_to_end_ends_the_server_and_its_workers(real_server):
    """The last test: nothing is left of the server."""
    def stacks() -> str:
        os.kill(real_server.pid, signal.SIGABRT)
        wait_until(lambda: not real_server.alive())
        return "\n".join(last_lines(real_server.log_path, 80))

    os.kill(real_server.pid, signal.SIGTERM)
    wait_until(lambda: not real_server.alive(), seconds=60, said=stacks)
    wait_until(lambda: not _members(real_server.pid))


def _members(group):
    """Command lines of a process group's living members, its leader left out."""
    members = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) == group != int(pid):
                members.append(Path(f"/proc/{pid}/cmdline").read_text())  # a dead one's is empty
        except (ProcessLookupError, FileNotFoundError):
            continue
    return [member for member in members if member]
