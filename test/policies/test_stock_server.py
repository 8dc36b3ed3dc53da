"""Rollouts by a server that is none of this library: ids and log-probs as they were sampled."""

from __future__ import annotations

import pytest
import torch

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.client import EngineUnreachableError
from grpo.policies.openai_server import OpenAIServerError
from grpo.policies.stock_server import StockPolicy, StockServer

from ..training import runs
from .stand_in import StandIn


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    return runs.save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, seed=0)


@pytest.fixture(params=["vllm", "sglang"])
def there(request, folder):
    with StandIn(request.param, folder) as running:
        yield running


def policy_of(there, tokenizer, **options):
    return StockPolicy(StockServer(there.url), Sampling(max_tokens=5, temperature=0.7),
                       tokenizer=tokenizer, pad_token_id=0, eos_token_ids=(1,), max_model_len=99,
                       timeout=20.0, **options)


def test_log_probs_are_those_of_the_sampled_ids(there, tokenizer):
    policy = policy_of(there, tokenizer)
    batch = policy.generate_from_ids([[5, 6, 7], [9, 8]])
    for row in batch:
        tokens = row[data.TOKENS][row[data.ATTENTION_MASK]]
        sampled = row[data.ASSISTANT_MASK][row[data.ATTENTION_MASK]]
        with torch.no_grad():
            logits = there.model(tokens[None]).logits[0] / 0.7
        wanted = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        assert torch.allclose(row[data.LOG_PROBS][row[data.ATTENTION_MASK]][sampled],
                              wanted[sampled[1:]], atol=1e-5)
    assert policy.max_model_len == 64  # the server's
    policy.close()


def test_a_batch_that_takes_too_long_says_how_it_gets_more_time(there, tokenizer):
    policy = policy_of(there, tokenizer)
    policy.timeout = 0.0
    with pytest.raises(OpenAIServerError, match="until the deadline.* give timeout=SECONDS"):
        policy.generate_from_ids([[5, 6]])


def test_who_answers_and_what_it_takes_is_seen_without_changing_anything(there, folder):
    server = StockServer(there.url)
    assert (server.kind, server.model, server.max_model_len) == (there.kind, "m", 64)
    assert server.reloads and server.takes_adapters and there.bodies == []
    with StandIn(there.kind, folder, without={
            "/collective_rpc", "/update_weights_from_disk", "/v1/load_lora_adapter",
            "/load_lora_adapter"}) as bare:
        assert not StockServer(bare.url).reloads and not StockServer(bare.url).takes_adapters
    with pytest.raises(EngineUnreachableError, match="is the server running"):
        StockServer("http://127.0.0.1:9")


def test_requests_ask_for_the_adapter_and_neutral_sampling(there, tokenizer):
    policy = policy_of(there, tokenizer, ignore_eos=True)
    policy.server.load_adapter("grpo-1", there.folder, timeout=5.0)
    policy.with_sampling(max_tokens=2).generate_from_ids([[5, 6]])
    _, body = there.bodies[-1]
    options = body.get("sampling_params", body)
    assert body.get("lora_path", body.get("model")) == "grpo-1"
    assert (options["top_p"], options["top_k"], options["repetition_penalty"]) == (1.0, -1, 1.0)
    assert options["ignore_eos"] and options["stop_token_ids"] == []
    policy.server.unload_adapter("grpo-1")
    assert there.adapters == {}


@pytest.mark.parametrize("answer", [
    {"choices": [{"text": "x", "finish_reason": "stop", "logprobs": None}],
     "meta_info": {"finish_reason": {"type": "stop"}}},
    {"choices": [{"token_ids": [5], "finish_reason": "abort",
                  "logprobs": {"token_logprobs": [-1.0]}}],
     "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1.0, 5, None]]}},
    {"choices": [{"token_ids": [5], "finish_reason": "stop",
                  "logprobs": {"token_logprobs": [None]}}],
     "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[None, 5, None]]}},
], ids=["no ids", "aborted", "no log-prob"])
def test_what_is_no_sample_with_log_probs_is_an_error(there, tokenizer, answer):
    there.answer = answer
    with pytest.raises(OpenAIServerError, match="nothing can be trained|no sample of the policy"):
        policy_of(there, tokenizer).generate_from_ids([[5, 6, 7]])
