"""``VLLMPolicy`` on a real engine: token in, token out, log-probs of what was sampled."""

from __future__ import annotations

import pytest
import torch

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.vllm import VLLMPolicy

pytestmark = pytest.mark.vllm

PROMPTS = [[10, 11, 12], [20] * 17, [30, 31]]


@pytest.fixture
def policy(engine) -> VLLMPolicy:
    return VLLMPolicy(engine, Sampling(max_tokens=8, seed=3), pad_token_id=0, eos_token_ids=(1,))


def test_end_token_is_kept_and_the_reason_reported(policy, engine):
    every_token_ends = VLLMPolicy(engine, Sampling(max_tokens=8), pad_token_id=0,
                                  eos_token_ids=tuple(range(2, 258)))
    batch = every_token_ends.generate_from_ids(PROMPTS)
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [1, 1, 1]
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_STOP] * 3
    endless = VLLMPolicy(engine, Sampling(max_tokens=8), pad_token_id=0, eos_token_ids=(1,),
                         ignore_eos=True)
    batch = endless.generate_from_ids(PROMPTS)
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [8, 8, 8]
    assert (batch[data.LOG_PROBS][batch[data.ASSISTANT_MASK]] < 0).all()
    assert batch[data.FINISH_REASON].tolist() == [data.FINISH_LENGTH] * 3


def test_seed_and_call_fix_the_samples(policy):
    first = policy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS]
    second = policy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS]
    policy.calls = 0
    assert torch.equal(first, policy.generate_from_ids(PROMPTS)[data.RESPONSE_TOKENS])
    assert not torch.equal(first, second)


def test_generation_leaves_the_global_random_numbers_alone(policy):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    policy.generate_from_ids(PROMPTS)
    assert torch.equal(torch.rand(3), expected)


def test_greedy_takes_the_most_likely_token(policy, model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    batch = policy.with_sampling(temperature=0.0).generate_from_ids(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].argmax()
        assert batch[data.RESPONSE_TOKENS][row, 0] == expected


def test_prompt_without_room_is_refused(policy):
    with pytest.raises(ValueError, match=r"256 tokens.*max_model_len=256"):
        policy.generate_from_ids([[5] * 256])
