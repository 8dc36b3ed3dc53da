"""Continuous batching: a real engine that answers a bridge's calls as they come."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from grpo.atropos.bridge_driver import BridgeDriver
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.policies.base import Sampling
from grpo.policies.client import EngineCallError, EngineClient
from grpo.policies.samplers import VLLMSampler
from grpo.policies.vllm import VLLMPolicy

from ..support import wait_until
from .environments import EOS, serving

pytestmark = pytest.mark.vllm


@pytest.fixture
def driven(engine, tokenizer):
    policy = VLLMPolicy(engine, Sampling(max_tokens=8), pad_token_id=0, eos_token_ids=(EOS,),
                        version=lambda: 4)
    with serving(tokenizer, temperature_only=False, max_model_len=256) as (bridge, url):
        driver = BridgeDriver(bridge, VLLMSampler(policy, seeded=False))
        yield driver, EngineClient(url, timeout=60)
        driver.drain()


def ask(driver, client, *requests):
    """Send requests at the same time; drive the engine until all are answered."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(client.call, "POST", "/generate", body) for body in requests]
        drive(driver, lambda: all(future.done() for future in futures))
        return [future.result() for future in futures]


def drive(driver, condition):
    wait_until(lambda: driver.advance(0.01) or condition(), seconds=60.0)


def values_of(out):
    return [[next(iter(position[0].values())) for position in of_sample]
            for of_sample in out["logprobs"]]


def test_concurrent_requests_get_the_models_tokens_log_probs_and_version(driven, model_folder):
    from transformers import AutoModelForCausalLM

    driver, client = driven
    prompts = [[10 + i] * (3 + i % 4) for i in range(24)]
    outs = ask(driver, client, *[
        {"prompt_token_ids": prompt, "n": 1 + i % 2, "logprobs": 0, "max_tokens": 2 + i % 7,
         "temperature": 0.5 + 0.5 * (i % 2)} for i, prompt in enumerate(prompts)])
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        assert len(out["token_ids"]) == 1 + i % 2
        for tokens, values, spans in zip(out["token_ids"], values_of(out), out["policy_version"],
                                         strict=True):
            assert len(tokens) <= 2 + i % 7 and spans == [[4, len(tokens)]]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            expected = (logits / (0.5 + 0.5 * (i % 2))).log_softmax(-1).gather(
                1, torch.tensor(tokens)[:, None])[:, 0]
            assert values == pytest.approx(expected.tolist(), abs=1e-4)
            row = ScoredGroup(tokens=[prompt + tokens], masks=[[IGNORED] * len(prompt) + tokens],
                              scores=[0.0])
            known = driver.bridge.records.restore(row)
            assert known.log_probs[0][len(prompt):] == pytest.approx(values)
            assert known.temperatures == [0.5 + 0.5 * (i % 2)]


def test_every_option_of_the_engine_can_be_asked_for(driven, tokenizer):
    driver, client = driven
    prompt = {"prompt_token_ids": [10, 11, 12], "max_tokens": 6}
    seeded = {**prompt, "seed": 3, "n": 2, "ignore_eos": True}
    first, again, top, stop, refused = (*ask(
        driver, client, seeded, seeded, {**prompt, "logprobs": 3, "top_p": 0.9},
        {**prompt, "stop": [tokenizer.decode([token]) for token in range(34, 120)],
         "max_tokens": 40, "allowed_token_ids": list(range(10, 120))}), None)
    assert refused is None
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"][0] != first["token_ids"][1]
    assert all(len(position[0]) in (3, 4) for position in top["logprobs"][0])
    # A row from a cut distribution has no temperature that a trainer could score it at.
    row = [10, 11, 12, *top["token_ids"][0]]
    group = ScoredGroup(tokens=[row], masks=[[IGNORED] * 3 + row[3:]], scores=[0.0])
    (temperature,) = driver.bridge.records.restore(group).temperatures
    assert temperature != temperature
    *before, last = stop["token_ids"][0]
    assert stop["finish_reasons"] == ["stop"] and 34 <= last < 120
    assert not any(34 <= token < 120 for token in before)
    with pytest.raises(EngineCallError, match="allowed_token_ids"):
        ask(driver, client, {**prompt, "allowed_token_ids": [99_999]})


def test_a_client_that_leaves_frees_the_engine(driven):
    driver, client = driven
    leaver = http.client.HTTPConnection(client.host, client.port, timeout=5)
    leaver.request("POST", "/generate", json.dumps({
        "prompt_token_ids": [10, 11], "n": 3, "max_tokens": 250, "ignore_eos": True}))
    drive(driver, lambda: driver.running == 3)
    leaver.close()
    drive(driver, lambda: driver.running == 0)
    assert driver.bridge.counts["cancelled"] == 3 and driver.bridge.counts["replies"] == 0
    assert not driver.policy.engine.llm_engine.has_unfinished_requests()


def test_after_draining_the_weights_may_change_and_what_waits_is_kept(driven):
    driver, client = driven
    long = {"prompt_token_ids": [10, 11], "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.call, "POST", "/generate", long)
        drive(driver, lambda: driver.running == 1)
        waiting = pool.submit(client.call, "POST", "/generate", {**long, "max_tokens": 3})
        wait_until(lambda: driver.bridge.waiting)
        driver.drain()
        assert driver.running == 0 and driver.bridge.waiting == 1
        assert running.result(10)["finish_reasons"] == ["length"] and not waiting.done()
        assert driver.policy.engine.reset_prefix_cache()
        driver.policy.version = lambda: 5
        drive(driver, waiting.done)
        assert waiting.result()["policy_version"] == [[[5, 3]]]
    with pytest.raises(RuntimeError, match="still works on 1 calls after 0 s; lower the env"):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(client.call, "POST", "/generate", long)
            drive(driver, lambda: driver.running == 1)
            try:
                driver.drain(timeout=0)
            finally:
                driver.drain()
