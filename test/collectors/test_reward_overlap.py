"""Groups are scored while others are generated, and nothing else comes of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from grpo import data
from grpo.collectors.sync import SyncCollector
from grpo.envs.rewards import RewardScorer, batch_reward
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Completions, Policy, Sampling
from grpo.policies.transformers import TransformersPolicy

EOS, GROUP, PROMPTS, RESPONSE = 1, 3, 4, 6
PATIENCE = 60.0


class Scored:
    """A reward that notes which groups it has been asked for, by the ids of their problems."""

    def __init__(self) -> None:
        self.done: dict[str, threading.Semaphore] = {}

    def expect(self, ids) -> None:
        self.done = {id: threading.Semaphore(0) for id in ids}

    def __call__(self, completion, problem):
        time.sleep(0.05)
        self.done[problem.id].release()
        return float(len(completion))

    def wait_for_group(self, id) -> None:
        for _ in range(GROUP):
            assert self.done[id].acquire(timeout=PATIENCE), "the group was not scored meanwhile"


class OneByOne(Policy):
    """An engine whose groups finish one after the other: each only when ``between`` returns."""

    def __init__(self, between) -> None:
        super().__init__(Sampling(max_tokens=RESPONSE), pad_token_id=0, eos_token_ids=(EOS,),
                         max_model_len=32)
        self.between = between

    def _generate(self, prompts, on_row=None):
        rows = [[70 + row, 71, EOS] for row in range(len(prompts))]
        for row, tokens in enumerate(rows):
            if on_row is not None:
                on_row(row, tokens)
            if row % GROUP == GROUP - 1:
                self.between(row // GROUP)
        return Completions(rows, [[-1.0] * len(row) for row in rows], [False] * len(rows))


@pytest.fixture
def make_env(prompts, tokenizer):
    def make(fn, **options) -> VerifiableEnv:
        return VerifiableEnv(
            prompts, RewardScorer([(fn, 1.0)], **options), tokenizer, num_prompts=PROMPTS,
            group_size=GROUP, max_prompt_tokens=6, max_response_tokens=RESPONSE,
            eos_token_ids=(EOS,), shuffle=False)

    return make


def test_a_group_is_scored_before_the_next_is_finished(make_env):
    scored = Scored()
    env = make_env(scored)
    scored.expect(prompt.problem.id for prompt in env.stream.prompts)
    policy = OneByOne(lambda group: scored.wait_for_group(env.current_problems[group * GROUP].id))
    batch = SyncCollector(env, policy).collect()
    assert batch[data.REWARD].flatten().tolist() == [2.0] * (PROMPTS * GROUP)


def test_what_takes_as_long_as_generation_costs_little_beside_it(make_env):
    def slow(completion, problem):
        time.sleep(0.3)
        return 1.0

    collector = SyncCollector(make_env(slow), OneByOne(lambda group: time.sleep(0.6)))
    for _ in range(3):  # others may have the processor at times
        collector.collect()
        waited = collector.seconds["reward"]
        if waited < 0.3:
            break
    assert waited < 0.3 and collector.seconds["generate"] >= PROMPTS * 0.6


def test_the_transformers_engine_tells_of_rows_at_the_step_that_ends_them(make_env, byte_model):
    scored = Scored()
    env = make_env(scored)
    scored.expect(prompt.problem.id for prompt in env.stream.prompts)
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=RESPONSE), pad_token_id=0,
                                eos_token_ids=(EOS,), max_model_len=32)
    drawn, steps = policy._draw, iter(range(RESPONSE))

    def draw(logits):
        step = next(steps)  # group g ends at step g; before the next, its rewards are there
        if 0 < step < PROMPTS:
            scored.wait_for_group(env.current_problems[(step - 1) * GROUP].id)
        tokens, log_probs = drawn(logits)
        ends = torch.arange(len(tokens)) // GROUP == step
        return torch.where(ends, EOS, 70), log_probs

    policy._draw = draw
    batch = SyncCollector(env, policy).collect()
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [
        group + 1 for group in range(PROMPTS) for _ in range(GROUP)]
    assert not batch[data.REWARD_ERROR].any()


def test_rows_are_told_once_with_the_tokens_that_come_in_the_end(byte_model):
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=RESPONSE, seed=3), pad_token_id=0,
                                eos_token_ids=tuple(range(1, 60)), max_model_len=9)
    prompts = policy.pad_prompts([[70 + row] * (1 + row % 5) for row in range(20)])
    expected = policy(prompts.clone())
    policy.calls = 0
    told = {}
    batch = policy.stream(prompts, lambda row, tokens: told.setdefault(row, []).append(tokens))
    for key in expected.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key
    rows = [row[mask].tolist() for row, mask in
            zip(batch[data.TOKENS], batch[data.ASSISTANT_MASK], strict=True)]
    assert {row: [tokens] for row, tokens in enumerate(rows)} == told
    assert len(set(map(len, rows))) > 2


@pytest.mark.parametrize("workers", [1, 16])
def test_a_group_is_scored_once_and_all_groups_apart(make_env, byte_model, workers):
    calls = []

    @batch_reward
    def note(completions, problems):
        assert len({problem.id for problem in problems}) == 1
        calls.append(problems[0].id)
        return [float(len(completion)) for completion in completions]

    env = make_env(note, workers=workers)
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=RESPONSE), pad_token_id=0,
                                eos_token_ids=(EOS, 70, 80), max_model_len=9)  # cuts rows, too
    streamed = SyncCollector(env, policy).collect()
    assert sorted(calls) == sorted({problem.id for problem in env.current_problems})
    policy.calls, other = 0, make_env(note)
    whole = other.step(policy(other.reset()))
    assert torch.equal(streamed[data.REWARD].flatten(), whole[data.REWARD].flatten())
    assert len(calls) == 2 * PROMPTS


def test_a_batch_that_is_dropped_leaves_nothing_to_the_next(make_env):
    env = make_env(lambda completion, problem: float(problem.id == ids[0]))
    ids = [prompt.problem.id for prompt in env.stream.prompts]
    policy = OneByOne(lambda group: None)
    policy.stream(env.reset(), env.row_finished)
    batch = SyncCollector(env, policy).collect()
    assert batch[data.REWARD].flatten().tolist() == [
        float(problem.id == ids[0]) for problem in env.current_problems]
