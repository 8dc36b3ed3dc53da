"""The bridge as a TorchRL environment: prompts are observations, replies are actions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchrl.envs import check_env_specs

from grpo import data
from grpo.atropos.bridge_env import AtroposBridgeEnv, RequestedSampling
from grpo.policies.client import EngineCallError, EngineClient

from .environments import DicePolicy, post, serving


def make_env(bridge, **options):
    return AtroposBridgeEnv(bridge, **{"rows": 8, "max_prompt_tokens": 64,
                                       "max_response_tokens": 6, "pad_token_id": 0,
                                       "timeout": 10.0, **options})


@pytest.mark.parametrize("rows", [1, 3])
def test_specs_are_true(tokenizer, rows):
    with serving(tokenizer) as (bridge, url):
        stop = threading.Event()

        def ask():
            client = EngineClient(url, timeout=10)
            while not stop.is_set():
                post(client, "/generate", prompt="abc", max_tokens=3)

        threads = [threading.Thread(target=lambda: _quietly(ask), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        env = make_env(bridge, rows=rows, max_prompt_tokens=4, max_response_tokens=3)
        check_env_specs(env)
        stop.set()


def _quietly(function):
    try:
        function()
    except EngineCallError:
        pass  # the server has gone


def test_rows_without_a_request_are_idle_and_nothing_has_a_reward(tokenizer):
    with serving(tokenizer) as (bridge, url), ThreadPoolExecutor(1) as pool:
        future = pool.submit(post, EngineClient(url, timeout=10), "/generate", prompt="ab", n=3)
        env, policy = make_env(bridge, linger=0.05), DicePolicy()
        out = env.rollout(1, RequestedSampling(policy)).flatten()
        assert future.result(10)["token_ids"] == [list(tokens) for _, tokens, _, _ in policy.said]
    assert out["active"].flatten().tolist() == [True] * 3 + [False] * 5
    assert out[data.REWARD_ERROR].all() and not out[data.REWARD].any()
    assert out[data.ASSISTANT_MASK].any(-1).tolist() == [True] * 3 + [False] * 5


def test_a_reset_before_the_reply_loses_no_request(tokenizer):
    with serving(tokenizer) as (bridge, url), ThreadPoolExecutor(1) as pool:
        future = pool.submit(post, EngineClient(url, timeout=10), "/generate", prompt="ab", n=2)
        env = make_env(bridge, linger=0.05)
        first = env.reset()
        again = env.reset()
        assert torch.equal(first[data.PROMPT_TOKENS], again[data.PROMPT_TOKENS])
        env.step(RequestedSampling(DicePolicy())(again))
        assert len(future.result(10)["token_ids"]) == 2


def test_waiting_for_requests_has_a_deadline(tokenizer):
    with serving(tokenizer) as (bridge, _):
        with pytest.raises(TimeoutError, match="no environment asked .* within 0.05 s; check"):
            make_env(bridge, timeout=0.05).reset()


def test_each_row_is_sampled_as_its_request_asks(tokenizer):
    asked = [(0.0, 2), (0.5, 2), (0.5, 5), (1.0, 99)]
    with serving(tokenizer) as (bridge, url), ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(post, EngineClient(url, timeout=10), "/generate", prompt="a",
                               temperature=temperature, max_tokens=tokens)
                   for temperature, tokens in asked]
        env, policy = make_env(bridge, rows=4, linger=2.0), DicePolicy()
        env.rollout(1, RequestedSampling(policy))
        assert all(len(reply.result(10)["token_ids"][0]) <= tokens
                   for reply, (_, tokens) in zip(replies, asked, strict=True))
    assert set(policy.asked) == {(0.0, 2), (0.5, 2), (0.5, 5), (1.0, 6)}
    assert len(set(policy.numbers)) == 4  # no two calls draw from the same random numbers
