"""SyncCollector: whole groups, one version, times, dynamic sampling."""

from __future__ import annotations

import itertools
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from grpo import data
from grpo.collectors.sync import SyncCollector
from grpo.envs.rewards import RewardScorer
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy


@pytest.fixture
def make_collector(byte_model, prompts, tokenizer):
    def make(reward=lambda c, p: float(len(c)), **options) -> SyncCollector:
        policy = TransformersPolicy(byte_model, Sampling(max_tokens=3), pad_token_id=0,
                                    eos_token_ids=(1,), max_model_len=16)
        env = VerifiableEnv(
            prompts, RewardScorer([(reward, 1.0)], workers=1), tokenizer,
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


@pytest.mark.parametrize("rounds", [1, 3])
def test_generation_and_reward_are_timed_apart_and_anew_for_each_batch(make_collector, rounds):
    collector = make_collector(reward=lambda c, p: time.sleep(0.01) or 1.0,
                               max_rounds=rounds if rounds > 1 else None)
    for _ in range(2):
        start = time.perf_counter()
        collector.collect()
        total = time.perf_counter() - start
        assert rounds * 6 * 0.01 <= collector.seconds["reward"] < total
        assert 0 < collector.seconds["generate"] < total - collector.seconds["reward"]


# -- Dynamic sampling ------------------------------------------------------------------------------


GROUP = 3  # completions of a prompt, two prompts a round


def scripted(plan: str):
    """A reward that is decided group by group: ``i`` differs inside the group, ``e`` is an error,
    ``h`` too for half of it, ``u`` and everything after the plan is the same for all."""
    calls = itertools.count()

    def reward(completion, problem):
        group, member = divmod(next(calls), GROUP)
        kind = plan[group] if group < len(plan) else "u"
        if kind == "e" or kind == "h" and member:
            return None
        return 5.0 + member if kind == "i" else 1.0

    return reward


def groups_of(batch) -> list[int]:
    """The groups of a batch in its order; they must be whole and not interleaved."""
    ids = batch[data.GROUP_ID].tolist()
    assert ids == [group for group in ids[::GROUP] for _ in range(GROUP)]
    assert len(set(ids)) == len(ids) // GROUP
    return ids[::GROUP]


@pytest.mark.parametrize(("plan", "groups", "rounds", "share"), [
    ("ii", [0, 1], 1, 1.0),
    ("iuui", [0, 3], 2, 0.5),
    ("uiii", [1, 2], 2, 0.75),        # one more than fits is left out
    ("uuuiui", [3, 5], 3, 1 / 3),
    ("ehii", [2, 3], 2, 0.5),         # a group with one reward teaches nothing either
    ("uuuuui", [5, 0], 3, 1 / 6),     # the bound is reached: filled up with what came first
    ("uuuuuuii", [0, 1], 3, 0.0),
])
def test_a_batch_is_filled_with_groups_that_teach_something(
        make_collector, plan, groups, rounds, share):
    collector = make_collector(reward=scripted(plan), max_rounds=3)
    batch = collector.collect()
    assert batch.batch_size == (6,)
    assert groups_of(batch) == groups
    assert collector.metrics["sampling/rounds"] == rounds
    assert collector.metrics["sampling/informative_fraction"] == pytest.approx(share)
    assert collector.env.groups_started == 2 * rounds  # nothing was generated in vain


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.text("iueh", max_size=16), batch_rollouts=st.integers(1, 2),
       max_rounds=st.integers(2, 3))
def test_any_rewards_give_a_whole_batch_within_the_bound(
        make_collector, plan, batch_rollouts, max_rounds):
    wanted = 2 * batch_rollouts
    collector = make_collector(reward=scripted(plan), turns_per_batch=GROUP * wanted,
                               max_rounds=max_rounds)
    chosen = groups_of(collector.collect())
    drawn = collector.env.groups_started
    assert len(chosen) == wanted and drawn <= max_rounds * wanted
    kinds = plan.ljust(drawn, "u")[:drawn]
    useful = [group for group in range(drawn) if kinds[group] == "i"]
    # Those that teach something in the order they came, then the others, without rewards last.
    others = sorted(set(range(drawn)) - set(useful), key=lambda group: (kinds[group] == "e", group))
    assert chosen == (useful + others)[:wanted]
    assert len(useful) >= wanted or drawn == max_rounds * wanted
    assert drawn == wanted * collector.metrics["sampling/rounds"]
    assert collector.metrics["sampling/informative_fraction"] == len(useful) / drawn


def test_the_mean_of_all_rewards_is_reported_beside_that_of_the_batch(make_collector):
    collector = make_collector(reward=scripted("uiei"), max_rounds=2)
    batch = collector.collect()
    assert batch[data.REWARD].tolist() == [[5.0], [6.0], [7.0]] * 2
    # 5, 6, 7 twice and three times 1; the errors do not count.
    assert collector.metrics["sampling/reward_mean"] == pytest.approx((2 * 18 + 3) / 9)


def test_if_every_group_teaches_something_sampling_changes_nothing(make_collector):
    plain = make_collector(reward=scripted("iiii"), turns_per_batch=12)
    dynamic = make_collector(reward=scripted("iiii"), turns_per_batch=12, max_rounds=5)
    expected, batch = plain.collect(), dynamic.collect()
    assert plain.metrics == {}
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key
    assert dynamic.env.state_dict() == plain.env.state_dict()
    assert dynamic.metrics["sampling/rounds"] == 1


def by_text(completion, problem) -> float:
    return float(sum(map(ord, completion)) % 5 == 0)


def test_sampling_goes_on_from_a_saved_position_as_it_would_have(make_collector):
    collector = make_collector(reward=by_text, max_rounds=4)
    for _ in range(2):
        collector.collect()
    state, calls = collector.env.state_dict(), collector.policy.calls
    expected, metrics = collector.collect(), collector.metrics
    again = make_collector(reward=by_text, max_rounds=4)
    again.env.load_state_dict(state)
    again.policy.calls = calls
    batch = again.collect()
    assert again.metrics == metrics
    assert metrics["sampling/rounds"] > 1 and metrics["sampling/informative_fraction"] > 0
    for key in (data.TOKENS, data.LOG_PROBS, data.REWARD, data.GROUP_ID):
        assert torch.equal(batch[key], expected[key]), key


@pytest.mark.parametrize("max_rounds", [1, 0, -2])
def test_a_bound_without_a_second_round_is_refused(make_collector, max_rounds):
    with pytest.raises(ValueError, match=f"max_rounds={max_rounds} .* give at least 2, or None"):
        make_collector(max_rounds=max_rounds)
