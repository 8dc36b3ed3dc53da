"""Groups that end together are scored together, and come out as if each had been alone."""

from __future__ import annotations

import threading

import pytest
import torch

from grpo import data
from grpo.collectors.group_scoring import Environments, GroupScoring
from grpo.envs.rewards import RewardScorer, get_reward, register_reward
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy

ROWS, WIDTH, RESPONSE = 3, 6, 4


@pytest.fixture
def make_scoring(prompts, tokenizer, byte_model):
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=RESPONSE, seed=3), pad_token_id=0,
                                eos_token_ids=(1,), max_model_len=WIDTH + RESPONSE)

    def make(together: int, reward) -> tuple[GroupScoring, list[int]]:
        sizes: list[int] = []

        def make_env(groups: int) -> VerifiableEnv:
            sizes.append(groups)
            return VerifiableEnv(prompts, RewardScorer([(reward, 1.0)], try_first=False), tokenizer,
                                 num_prompts=groups, group_size=ROWS, max_prompt_tokens=WIDTH,
                                 max_response_tokens=RESPONSE, eos_token_ids=(1,), seed=2)

        return GroupScoring(policy, Environments(make_env, together=together)), sizes

    return make


def score(scoring: GroupScoring, numbers: list[int]) -> dict[int, tuple]:
    """Outcomes by lease, of groups that all wait before the first is scored."""
    go_on = threading.Event()
    scoring._threads.submit(go_on.wait)
    for number in numbers:
        asked = scoring.begin(number)
        scoring.add(100 + number, number, scoring.policy._generate(asked.prompts))
    go_on.set()
    outcomes = {}
    while len(outcomes) < len(numbers):
        groups, _ = scoring.taken(30.0)
        assert groups, "nothing was scored within 30 s"
        outcomes |= {lease: (group, error) for found in groups
                     for lease, group, error in found.outcomes()}
    return outcomes


def test_groups_that_wait_are_scored_in_one_call_and_come_out_as_alone(make_scoring):
    numbers = [7, 2, 3, 11, 50]  # of several epochs
    together, sizes = make_scoring(4, get_reward("negative_length"))
    alone, _ = make_scoring(1, get_reward("negative_length"))
    torch.manual_seed(0)
    found = score(together, numbers)
    assert sizes == [1, 4]  # the first begins groups and has scored the last
    torch.manual_seed(0)
    for lease, (group, error) in score(alone, numbers).items():
        assert error is None and found[lease][1] is None
        assert (found[lease][0][data.GROUP_ID] == lease - 100).all()
        assert set(group.keys(True, True)) == set(found[lease][0].keys(True, True))
        assert (group == found[lease][0]).all()


def test_a_group_takes_no_others_memory_along(make_scoring):
    scoring, _ = make_scoring(4, get_reward("negative_length"))
    for group, _ in score(scoring, [0, 1, 2, 3]).values():
        for value in group.values(True, True):
            assert value.untyped_storage().nbytes() == value.nbytes


def test_one_that_cannot_be_scored_costs_no_other(make_scoring, monkeypatch):
    scoring, _ = make_scoring(4, get_reward("negative_length"))
    step = VerifiableEnv._step

    def breaks(env, batch):
        if (batch[data.GROUP_ID] == 2).any():
            raise RuntimeError("broken on purpose")
        return step(env, batch)

    monkeypatch.setattr(VerifiableEnv, "_step", breaks)
    found = score(scoring, [0, 1, 2, 3])
    assert found[102] == (None, "RuntimeError: broken on purpose")
    assert all(found[lease][0] is not None for lease in (100, 101, 103))


def test_rewards_are_quick_only_if_all_of_them_are():
    @register_reward("not_quick_here")
    def slow(completion, problem) -> float:
        return 0.0

    quick, judged = get_reward("exact_match"), get_reward("length")
    assert RewardScorer([(quick, 1.0)]).quick
    assert not RewardScorer([(quick, 1.0), (slow, 1.0)]).quick
    assert judged.quick  # by itself, but it asks another
