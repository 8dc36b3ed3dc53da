"""The classes by which atroposlib's environments ask an inference server, against ours."""

from __future__ import annotations

import asyncio
import os

import aiohttp
import pytest
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.vllm_server import VLLMServer

MODEL, URL = os.environ["GRPO_PEER_MODEL"], os.environ["GRPO_PEER_URL"]
STOP = ["User:", "Human:", "Assistant:", "</answer>"]
QUESTION = [{"role": "user", "content": "What is 3+4?"}]


def config(**options):
    return APIServerConfig(**{"base_url": URL + "/v1", "model_name": MODEL, "api_key": "x",
                              "timeout": 60, "server_type": "vllm", **options})


@pytest.fixture
def vllm():
    return VLLMServer(config())


@pytest.fixture
def openai():
    return OpenAIServer(config(server_type="openai"))


async def teacher(server, tokens):
    """Log-prob of each token but the first, given those before it."""
    answer = await server.get_logprobs(input_ids=tokens, top_k=1)
    assert answer["prompt_tokens"] == tokens
    rows = zip(tokens, answer["prompt_topk_token_ids"], answer["prompt_topk_logprobs"],
               strict=True)
    return [dict(zip(ids, values, strict=True))[token]
            for token, ids, values in list(rows)[1:]]


async def test_tokens_and_log_probs_of_a_group(vllm):
    prompt, outputs, log_probs, reasons = await vllm.tokens_and_logprobs_completion(
        prompt="The capital of France is", n=4, max_tokens=32, temperature=1.0, top_p=1.0,
        stop=STOP)
    assert prompt == vllm.tokenizer.encode("The capital of France is")
    assert len(outputs) == len(log_probs) == len(reasons) == 4
    assert len({tuple(output) for output in outputs}) == 4
    for output, values, reason in zip(outputs, log_probs, reasons, strict=True):
        assert 1 <= len(output) == len(values) <= 32
        assert reason == ("length" if len(output) == 32 else "stop")
        expected = (await teacher(vllm, prompt + output))[len(prompt) - 1:]
        assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-4


async def test_the_end_token_is_an_output_token_with_a_log_prob(vllm):
    eos = vllm.tokenizer.eos_token_id
    for _ in range(20):
        _, outputs, log_probs, reasons = await vllm.tokens_and_logprobs_completion(
            prompt="a", n=32, max_tokens=64, temperature=1.0)
        ended = [i for i, reason in enumerate(reasons) if reason == "stop"]
        if ended:
            break
    assert ended
    assert all(outputs[i][-1] == eos and len(outputs[i]) == len(log_probs[i]) for i in ended)


@pytest.mark.parametrize("options", [
    {"max_new_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "top_k": -1},
    {"max_tokens": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3},
    {"max_tokens": 5, "temperature": 0.0, "stop_token_ids": [1], "skip_special_tokens": False}])
async def test_sampling_options_that_environments_send(vllm, options):
    _, ((*output,),), _, _ = await vllm.tokens_and_logprobs_completion(prompt="abc", **options)
    assert 1 <= len(output) <= 5


async def test_health_and_a_server_that_is_not_there(vllm):
    async def look(server):
        server.server_healthy = None
        task = asyncio.ensure_future(server.check_server_status_task())
        while server.server_healthy is None:
            await asyncio.sleep(0.01)
        task.cancel()
        return server.server_healthy

    assert await look(vllm)
    assert not await look(VLLMServer(config(base_url="http://127.0.0.1:9/v1")))
    assert await look(OpenAIServer(config(server_type="openai")))


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_chat_and_completions_return_n_choices_in_one_call(kind, request):
    server = request.getfixturevalue(kind)
    chat = await server.chat_completion(messages=QUESTION, n=4, max_tokens=8, temperature=1.0)
    assert len(chat.choices) == 4 and chat.usage.completion_tokens <= 32
    assert all(choice.message.role == "assistant" for choice in chat.choices)
    text = await server.completion(prompt="3+4=", n=4, max_tokens=8, stop=STOP)
    assert len(text.choices) == 4 and all(c.finish_reason in ("stop", "length")
                                          for c in text.choices)
    # Set by the client once a server answers with one choice where it asked for four.
    assert not server.config.n_kwarg_is_ignored


async def test_streams_of_the_openai_client(vllm):
    stream = await vllm.openai.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, stream=True, extra_body={"ignore_eos": True})
    pieces = [piece async for piece in stream]
    assert pieces[-1].choices[0].finish_reason == "length"
    assert sum(len(piece.choices[0].token_ids) for piece in pieces) == 8


async def test_the_manager_spreads_and_splits_large_groups():
    manager = ServerManager([config(), config()], max_n_completions=3)
    prompt, outputs, log_probs, reasons = await manager.tokens_and_logprobs_completion(
        prompt="3+4=", n=7, max_tokens=4)
    assert len(outputs) == len(log_probs) == len(reasons) == 7
    chat = await manager.chat_completion(messages=QUESTION, n=7, max_tokens=4, split="eval")
    assert len(chat.choices) == 7


async def test_a_managed_conversation_has_the_tokens_and_log_probs_that_were_sampled(vllm):
    manager = ServerManager([config()])
    async with manager.managed_server(tokenizer=vllm.tokenizer) as managed:
        answer = await managed.chat_completion(messages=QUESTION, n=2, max_tokens=12,
                                               temperature=1.0)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == len(answer.choices) == 2
    for node in nodes:
        start = next(i for i, token in enumerate(node.masked_tokens) if token != -100)
        assert node.logprobs[:start] == [1.0] * start
        assert node.masked_tokens[start:] == node.tokens[start:]
        expected = (await teacher(vllm, node.tokens))[start - 1:]
        assert max(abs(a - b) for a, b in zip(node.logprobs[start:], expected,
                                              strict=True)) < 1e-4


async def test_many_workers_at_once(vllm):
    answers = await asyncio.gather(*[vllm.tokens_and_logprobs_completion(
        prompt=f"{i}+{i}=", n=4, max_tokens=8) for i in range(32)])
    assert all(len(outputs) == 4 for _, outputs, _, _ in answers)


async def test_a_refusal_reaches_the_client_as_an_error(vllm):
    with pytest.raises(aiohttp.ClientResponseError) as info:
        await vllm._tokens_and_logprobs_completion_wrapper(
            model=MODEL, prompt="a", temperature=-1.0)
    assert info.value.status == 400
