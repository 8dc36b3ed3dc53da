"""Held-out accuracy: every problem once, greedily, without touching the training run."""

from __future__ import annotations

import pytest
import torch

from grpo import data
from grpo.envs.rewards import RewardResult, RewardScorer
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.training.evaluation import Evaluator


@pytest.fixture
def policy(byte_model):
    return TransformersPolicy(byte_model, Sampling(max_tokens=3), pad_token_id=0,
                              eos_token_ids=(1,), max_model_len=16)


@pytest.fixture
def make_env(prompts, tokenizer):
    def make(reward, *, count: int = 5, rows: int = 2, **options) -> VerifiableEnv:
        return VerifiableEnv(
            prompts[:count], RewardScorer([(reward, 1.0)], workers=1), tokenizer,
            num_prompts=rows, max_prompt_tokens=4, max_response_tokens=3, eos_token_ids=(1,),
            **{"group_size": 1, "shuffle": False, **options})

    return make


def test_problems_that_fill_up_the_last_batch_are_not_counted_twice(make_env, policy, prompts):
    first = prompts[0].problem.id
    seen = []

    def only_the_first(completion, problem):
        seen.append(problem.id)
        return RewardResult(4.0, True) if problem.id == first else RewardResult(1.0, False)

    result = Evaluator(make_env(only_the_first), policy).run()
    assert seen == [p.problem.id for p in prompts[:5]] + [first]
    assert result.accuracy == 1 / 5
    assert result.reward == (4 + 4 * 1) / 5
    assert result.errors == 0
    assert [p.id for p in result.problems] == seen[:2]
    assert result.batch.batch_size == (2,)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_the_result_does_not_depend_on_the_batch_size(make_env, policy, rows):
    def reward(completion, problem):
        return RewardResult(float(sum(map(ord, completion)) % 5), ord(problem.id[-1]) % 2 == 0)

    result = Evaluator(make_env(reward, rows=rows), policy).run()
    expected = Evaluator(make_env(reward, rows=5), policy).run()
    assert 0 < expected.accuracy < 1
    assert (result.accuracy, result.reward) == (expected.accuracy, pytest.approx(expected.reward))


def test_decoding_is_greedy_and_leaves_the_training_policy_alone(make_env, policy, byte_model):
    evaluator = Evaluator(make_env(lambda c, p: 0.0), policy)
    batch = evaluator.run().batch
    with torch.no_grad():
        prompt = batch[data.PROMPT_TOKENS]
        likely = byte_model(input_ids=prompt).logits[:, -1].argmax(-1)
    assert torch.equal(batch[data.RESPONSE_TOKENS][:, 0], likely)
    assert policy.calls == 0
    assert policy.sampling.temperature == 1.0
    again = evaluator.run().batch
    assert torch.equal(again[data.TOKENS], batch[data.TOKENS])


def test_it_evaluates_the_weights_as_they_are_now(make_env, policy, byte_model):
    evaluator = Evaluator(make_env(lambda c, p: 0.0), policy)
    before = evaluator.run().batch[data.TOKENS]
    with torch.no_grad():
        for param in byte_model.parameters():
            param.add_(0.5 * torch.randn_like(param))
    assert not torch.equal(evaluator.run().batch[data.TOKENS], before)


def test_problems_without_a_reward_count_as_unsolved_and_leave_the_mean_alone(
        make_env, policy, prompts):
    broken = {prompts[1].problem.id, prompts[2].problem.id}

    def reward(completion, problem):
        return None if problem.id in broken else RewardResult(1.0, True)

    result = Evaluator(make_env(reward), policy).run()
    assert (result.accuracy, result.reward, result.errors) == (3 / 5, 1.0, 2)


@pytest.mark.parametrize("options", [{"group_size": 2}, {"group_size": 2, "shuffle": True}])
def test_an_environment_that_repeats_or_reorders_problems_is_refused(make_env, policy, options):
    with pytest.raises(ValueError, match="group_size=1 and shuffle=False"):
        Evaluator(make_env(lambda c, p: 0.0, **options), policy)
