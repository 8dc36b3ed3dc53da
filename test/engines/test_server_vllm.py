"""The whole server around a real vLLM: one process for all tests of this file."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from grpo import data
from grpo.engines.process import EngineProcess, server_command
from grpo.policies.base import Sampling
from grpo.policies.server import ServerPolicy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPT = list(range(10, 26))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Two checkpoints of one shape with other weights."""
    from grpo.embedded import EmbeddedSpec, small_qwen2

    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"model{seed}")
        model = small_qwen2(EmbeddedSpec(), len(tokenizer))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "norm" not in name:
                    param.normal_(std=0.2)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory):
    pytest.importorskip("vllm")
    log_dir = tmp_path_factory.mktemp("log")
    command = server_command(
        folders[0], dtype="float32", max_model_len=1024, max_num_seqs=32, shared_weights=True,
        log_dir=log_dir, kv_cache_memory_bytes=64 << 20)
    with EngineProcess(command, start_timeout=240, log_path=log_dir / "server.log") as server:
        server.log_dir = log_dir
        yield server


@pytest.fixture
def client(server, folders):
    client = server.client()
    yield client
    client.resume()
    client.collective_rpc("load_checkpoint", folders[0], timeout=30)
    client.reset_prefix_cache()


def log_probs(folder, prompt, tokens, *, temperature=1.0):
    """Log-probs of ``tokens`` after ``prompt`` by Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def close(ours, theirs):
    return (torch.tensor(ours) - theirs).abs().max() < 1e-4


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
    again = policy().generate_from_ids([PROMPT] * 3)
    rows = [row for batch in (one, two) for row in batch[data.RESPONSE_TOKENS].tolist()]
    assert len({tuple(row) for row in rows}) == 6
    assert again[data.RESPONSE_TOKENS].tolist() == one[data.RESPONSE_TOKENS].tolist()
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


def in_flight(client, *, stream, size, n=2):
    """Start a long request; returns a function that waits for its samples."""
    body = {"prompt": PROMPT, "max_tokens": size, "n": n, "ignore_eos": True, "logprobs": 0,
            "flat_logprobs": True, "stream": stream, "return_text": False}
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body))
    holder = {}

    def read():
        lines = [json.loads(line) for line in connection.getresponse().read().splitlines()]
        if not stream:
            (answer,) = lines
            holder["samples"] = list(zip(answer["token_ids"], answer["logprobs"],
                                         answer["policy_version"], strict=True))
            return
        holder["samples"] = []
        for index in range(n):
            mine = [line for line in lines if line["index"] == index]
            holder["samples"].append(tuple(
                [x for line in mine for x in line[key]]
                for key in ("token_ids", "logprobs", "policy_version")))

    thread = threading.Thread(target=read)
    thread.start()
    while client.info()["open_requests"] == 0:
        time.sleep(0.005)

    def wait():
        thread.join(60)
        connection.close()
        return holder["samples"]

    return wait


@pytest.mark.parametrize("stream", [False, True])
def test_an_update_in_flight_dates_every_token_by_the_weights_that_sampled_it(
        client, folders, stream):
    old = client.version
    wait = in_flight(client, stream=stream, size=900)
    time.sleep(0.15)
    client.pause("keep")
    client.collective_rpc("load_checkpoint", folders[1], timeout=30)
    assert client.reset_prefix_cache()
    client.set_version(old + 1)
    client.resume()
    for tokens, values, spans in wait():
        versions = [version for version, count in spans for _ in range(count)]
        assert len(tokens) == 900 and len(versions) == 900
        split = versions.count(old)
        assert 0 < split < 900 and versions == sorted(versions)
        # Up to the update the old weights agree, behind it the new ones, to the very token.
        before = log_probs(folders[0], PROMPT, tokens)
        after = log_probs(folders[1], PROMPT, tokens)
        assert close(values[:split], before[:split]) and close(values[split:], after[split:])
        differ = (before - after).abs()
        assert differ[split - 1] > 1e-3 and differ[split] > 1e-3


def test_abort_ends_requests_and_wait_lets_them_finish(client):
    wait = in_flight(client, stream=False, size=900)
    time.sleep(0.15)
    client.pause("abort")
    assert all(0 < len(tokens) < 900 for tokens, _, _ in wait())
    client.resume()
    wait = in_flight(client, stream=False, size=100)
    client.pause("wait")
    assert all(len(tokens) == 100 for tokens, _, _ in wait())
    assert client.info()["open_requests"] == 0


def test_a_client_that_goes_away_frees_its_place(client):
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(
        {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}))
    while client.info()["open_requests"] == 0:
        time.sleep(0.01)
    connection.close()
    deadline = time.monotonic() + 5
    while client.info()["open_requests"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.info()["open_requests"] == 0
    # Blocks of a request that still ran could not be dropped.
    assert client.reset_prefix_cache()


@pytest.mark.parametrize("body, message", [
    ({"prompt": [5] * 1024}, "1024 tokens"), ({"prompt": [10**6]}, "token id 1000000"),
    ({"prompt": [5], "logprobs": 10_000}, "logprobs"), ({"prompt": [5], "n": 2, "temperature": 0.0},
                                                        "greedy")])
def test_refusals_are_400(client, body, message):
    from grpo.engines.client import EngineCallError

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


def test_the_weights_are_shared_through_the_handover_file(client, server, folders):
    from grpo.weights.handover import Handover, map_tensors

    info = client.call("GET", "/bridge/state_dict_info")
    assert info["shared_weights_enabled"] and info["handover"]["kind"] == "shared_memory"
    tensors = map_tensors(Handover.read(server.log_dir))
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    before = client.collective_rpc("fingerprints", [name], timeout=30)[0][name]
    with torch.no_grad():
        tensors[name].mul_(0.5)
    after = client.collective_rpc("fingerprints", [name], timeout=30)[0][name]
    assert before != after and after[1] == pytest.approx(before[1] / 2, rel=1e-4)


def test_health_generate_and_facts(client):
    assert client.call("GET", "/health_generate") == {"status": "ok"}
    info = client.info()
    assert info["device"] in ("cpu", "cuda") and info["dtype"] == "float32"
    assert "load_checkpoint" in client.call("GET", "/bridge/debug")["rpc_methods"]


def test_a_request_to_end_ends_the_server_and_its_workers(server):
    """The last test: nothing is left of the server."""
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while server.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.alive()
    while (left := _members(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


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
