"""SyncCollector: whole groups, one version, times."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from grpo import data
from grpo.collectors import SyncCollector
from grpo.envs import VerifiableEnv
from grpo.policies import Sampling, TransformersPolicy
from grpo.rewards import compute_rewards


@pytest.fixture
def make_collector(byte_model, prompts, tokenizer):
    def make(reward=lambda c, p: float(len(c)), **options) -> SyncCollector:
        policy = TransformersPolicy(byte_model, Sampling(max_tokens=3), pad_token_id=0,
                                    eos_token_ids=(1,), max_model_len=16)
        env = VerifiableEnv(
            prompts, functools.partial(compute_rewards, [(reward, 1.0)]), tokenizer,
            num_prompts=2, group_size=3, max_prompt_tokens=4, max_response_tokens=3,
            eos_token_ids=(1,))
        return SyncCollector(env, policy, **options)

    return make


def test_a_batch_of_several_rollouts_is_their_concatenation_with_separate_groups(make_collector):
    batch = make_collector(turns_per_batch=18).collect()
    single = make_collector()
    parts = [single.collect() for _ in range(3)]
    assert batch.batch_size == (18,)
    assert batch[data.GROUP_ID].bincount().tolist() == [3] * 6
    for key in (data.TOKENS, data.LOG_PROBS, data.REWARD, data.GROUP_ID):
        assert torch.equal(batch[key], torch.cat([part[key] for part in parts])), key


def test_a_batch_holds_each_entry_once(make_collector):
    batch = make_collector().collect()
    assert ("next", "tokens") not in batch.keys(True)
    assert "done" not in batch.keys()
    assert {data.REWARD, data.REWARD_ERROR, data.SUCCESS, data.TRUNCATED} <= set(batch.keys(True))


def test_a_batch_that_is_no_multiple_of_the_environment_is_refused(make_collector):
    with pytest.raises(ValueError, match="turns_per_batch=9 must be a multiple of .* 6"):
        make_collector(turns_per_batch=9)


def test_generation_and_reward_are_timed_apart_and_anew_for_each_batch(make_collector):
    collector = make_collector(reward=lambda c, p: time.sleep(0.01) or 1.0)
    for _ in range(2):
        start = time.perf_counter()
        collector.collect()
        total = time.perf_counter() - start
        assert 0.06 <= collector.seconds["reward"] < total
        assert 0 < collector.seconds["generate"] < total - collector.seconds["reward"]
