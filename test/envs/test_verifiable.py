"""VerifiableEnv: specs, groups, ends of responses, failing rewards, TorchRL's components."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import check_env_specs

from grpo import data
from grpo.collectors.sync import SyncCollector
from grpo.envs.rewards import RewardResult, RewardScorer
from grpo.envs.verifiable import VerifiableEnv
from grpo.objectives import GroupAdvantage, GRPOLoss
from grpo.objectives.grpo import total_loss
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy

EOS, PAD = 1, 0
WIDTH, RESPONSE = 6, 5


def by_length(completion: str, problem) -> RewardResult:
    """Something that differs between completions of a random model."""
    return RewardResult(sum(map(ord, completion)) % 7 / 7, len(completion) == RESPONSE)


def score(*functions):
    return RewardScorer([(f, 1.0) for f in functions or (by_length,)], workers=1)


@pytest.fixture
def make_env(prompts, tokenizer):
    def make(**changes) -> VerifiableEnv:
        options = {"prompts": prompts, "score": score(), "tokenizer": tokenizer, "num_prompts": 3,
                   "group_size": 4, "max_prompt_tokens": WIDTH, "max_response_tokens": RESPONSE,
                   "eos_token_ids": (EOS,), **changes}
        return VerifiableEnv(options.pop("prompts"), options.pop("score"),
                             options.pop("tokenizer"), **options)

    return make


@pytest.fixture
def policy(byte_model):
    return TransformersPolicy(byte_model, Sampling(max_tokens=RESPONSE, seed=3), pad_token_id=PAD,
                              eos_token_ids=(EOS,), max_model_len=WIDTH + RESPONSE,
                              version=lambda: 5)


def act(env: VerifiableEnv, texts: list[str | list[int]]) -> TensorDict:
    """One step with the given responses: texts, or token ids."""
    batch = env.reset()
    rows = [t if isinstance(t, list) else env.tokenizer(t)["input_ids"] for t in texts]
    batch[data.RESPONSE_TOKENS] = data.pad_rows(rows, RESPONSE, PAD)
    return env.step(batch)


def test_the_environment_keeps_its_own_specs(make_env):
    check_env_specs(make_env(), seed=0)


def test_a_rollout_has_the_documented_layout(make_env, policy):
    env = make_env()
    batch = env.rollout(1, policy)
    assert batch.batch_size == (12, 1)
    batch = batch.flatten()
    total = WIDTH + RESPONSE
    for key, dtype, shape in [
            (data.PROMPT_TOKENS, torch.int64, (12, WIDTH)),
            (data.PROMPT_MASK, torch.bool, (12, WIDTH)),
            (data.RESPONSE_TOKENS, torch.int64, (12, RESPONSE)),
            (data.TOKENS, torch.int64, (12, total)),
            (data.ATTENTION_MASK, torch.bool, (12, total)),
            (data.ASSISTANT_MASK, torch.bool, (12, total)),
            (data.LOG_PROBS, torch.float32, (12, total)),
            (data.REWARD, torch.float32, (12, 1)), (data.REWARD_ERROR, torch.bool, (12, 1)),
            (data.SUCCESS, torch.bool, (12, 1)), (data.TRUNCATED, torch.bool, (12, 1)),
            (data.GROUP_ID, torch.int64, (12,)), (data.POLICY_VERSION, torch.int64, (12,))]:
        assert (batch[key].dtype, batch[key].shape) == (dtype, shape), key
    assert batch["next", "done"].all()
    assert (batch[data.POLICY_VERSION] == 5).all()
    assert batch[data.REWARD].unique().numel() > 3


def test_rows_of_a_group_share_the_prompt_and_groups_are_numbered_over_the_run(make_env):
    env = make_env(shuffle=False)
    first, second = env.reset(), env.reset()
    assert first[data.GROUP_ID].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert second[data.GROUP_ID].tolist() == [3] * 4 + [4] * 4 + [5] * 4
    expected = [prompt.tokens for prompt in env.stream.prompts[:3] for _ in range(4)]
    mask = first[data.PROMPT_MASK]
    assert [row[keep].tolist() for row, keep in
            zip(first[data.PROMPT_TOKENS], mask, strict=True)] == expected
    assert (first[data.PROMPT_TOKENS][~mask] == PAD).all()
    assert [p.id for p in env.current_problems[::4]] == [
        p.problem.id for p in env.stream.prompts[3:6]]


def test_each_completion_is_scored_against_the_problem_of_its_row(make_env):
    seen = []

    def record(completion, problem):
        seen.append((completion, problem.id))
        return 0.0

    env = make_env(num_prompts=2, group_size=2, score=score(record))
    act(env, ["a", "b", "c", "d"])
    assert seen == list(zip("abcd", [p.id for p in env.current_problems], strict=True))


def test_text_is_read_up_to_the_first_of_any_end_token(make_env, tokenizer):
    seen = []
    seven, eight, other = tokenizer("78#")["input_ids"]
    env = make_env(num_prompts=1, group_size=5, eos_token_ids=(EOS, other),
                   score=score(lambda c, p: seen.append(c) or 0.0))
    batch = act(env, [[seven, EOS, eight, EOS], [EOS, seven], [seven, eight, seven],
                      [seven, PAD, EOS], [seven, other, eight]])
    assert seen == ["7", "", "787", "7", "7"]
    assert batch[data.TRUNCATED].flatten().tolist() == [False, False, True, False, False]
    assert batch["next", "terminated"].flatten().tolist() == [True, True, False, True, True]
    assert batch["next", "done"].all()


def test_the_policys_finish_reason_decides_over_the_tokens(make_env):
    env = make_env(num_prompts=1, group_size=2)
    batch = env.reset()
    batch[data.RESPONSE_TOKENS] = torch.full((2, RESPONSE), EOS)
    batch[data.FINISH_REASON] = torch.tensor([data.FINISH_STOP, data.FINISH_LENGTH])
    batch = env.step(batch)
    assert batch[data.TRUNCATED].flatten().tolist() == [False, True]
    assert batch["next", "terminated"].flatten().tolist() == [True, False]


def test_a_partial_reset_is_refused(make_env):
    env = make_env()
    mask = torch.ones(12, 1, dtype=torch.bool)
    env.reset(TensorDict({"_reset": mask}, [12]))
    mask[3] = False
    with pytest.raises(ValueError, match="resets whole batches.*partial '_reset'"):
        env.reset(TensorDict({"_reset": mask}, [12]))


def test_a_group_of_one_is_refused_for_training_only(make_env):
    with pytest.raises(ValueError, match=r"env\.repeats=1: .*at least 2"):
        make_env(group_size=1)
    assert make_env(group_size=1, shuffle=False).batch_size == (3,)


def test_an_empty_split_and_no_prompts_are_refused(make_env):
    with pytest.raises(ValueError, match="at least one prompt"):
        make_env(prompts=[])
    with pytest.raises(ValueError, match=r"env\.num_envs=0"):
        make_env(num_prompts=0)


def test_a_prompt_wider_than_the_spec_is_an_error(make_env):
    with pytest.raises(ValueError, match="padded width is 3"):
        make_env(max_prompt_tokens=3).reset()


def test_the_state_restores_data_position_and_counters(make_env):
    first = make_env(score=score(lambda c, p: None))
    act(first, ["x"] * 12)
    state = first.state_dict()
    assert state["reward_errors"] == 12
    expected = first.reset()
    second = make_env()
    second.load_state_dict(state)
    assert (second.reset() == expected).all()
    assert second.reward_errors == 12


def test_a_new_seed_gives_another_order(make_env):
    one, two = make_env(seed=1), make_env(seed=2)
    first = one.reset()[data.PROMPT_TOKENS]
    assert not torch.equal(first, two.reset()[data.PROMPT_TOKENS])
    two.set_seed(1)
    assert torch.equal(first, two.reset()[data.PROMPT_TOKENS])


# -- Rewards that fail ----------------------------------------------------------------------------


def failing(completion: str, problem) -> float | None:
    if completion == "a":
        raise RuntimeError("no verifier")
    return {"b": None, "c": math.nan, "d": math.inf}.get(completion, 1.0)


def test_failed_rewards_are_counted_logged_and_marked_and_never_a_silent_zero(make_env, caplog):
    env = make_env(num_prompts=2, group_size=3, score=score(failing))
    with caplog.at_level(logging.WARNING, logger="grpo"):
        batch = act(env, ["a", "b", "c", "d", "e", "f"])
    assert batch[data.REWARD_ERROR].flatten().tolist() == [True] * 4 + [False] * 2
    assert batch[data.REWARD].flatten().tolist() == [0.0] * 4 + [1.0] * 2
    assert not batch[data.SUCCESS].flatten()[:4].any()
    assert env.reward_errors == 4
    (record,) = caplog.records
    assert "4 of 6 completions got no reward" in record.message
    assert "RuntimeError: no verifier" in record.message


def test_the_tokens_of_rows_without_a_reward_do_not_influence_the_gradient(
        make_env, policy, byte_model):
    env = make_env(score=score(lambda c, p: None if len(c) % 3 == 0 else by_length(c, p)))
    batch = SyncCollector(env, policy).collect()
    error = batch[data.REWARD_ERROR].flatten()
    # The reward above must have failed for some rows and worked for others.
    error[0], error[1] = True, False
    batch[data.REWARD_ERROR] = error[:, None]

    def gradient() -> torch.Tensor:
        loss = GRPOLoss(byte_model, pad_token_id=PAD)
        byte_model.zero_grad()
        GroupAdvantage()(batch)
        total_loss(loss(batch)).backward()
        return torch.cat([p.grad.flatten() for p in byte_model.parameters()])

    before = gradient()
    assert before.abs().max() > 0
    changed = error[:, None] & batch[data.ASSISTANT_MASK]
    assert changed.any()
    batch[data.TOKENS] = torch.where(changed, 7, batch[data.TOKENS])
    batch[data.LOG_PROBS] = torch.where(changed, -9.0, batch[data.LOG_PROBS])
    batch[data.REWARD][error] = 100.0
    assert torch.equal(gradient(), before)
    # The same change in a row that has a reward is seen.
    batch[data.TOKENS][~error] = torch.where(
        batch[data.ASSISTANT_MASK][~error], 7, batch[data.TOKENS][~error])
    assert not torch.equal(gradient(), before)


# -- TorchRL's own components ----------------------------------------------------------------------


def test_torchrls_collector_yields_the_batch_of_ours_with_the_same_loss(
        make_env, policy, byte_model):
    env = make_env()
    env.reset()  # as LLMCollector does when it is built
    ours = SyncCollector(env, policy).collect()
    policy.calls = 0
    collector = LLMCollector(make_env(), policy=policy, dialog_turns_per_batch=12,
                             total_dialog_turns=24, flatten_data=True)
    batches = list(collector)
    assert [batch.numel() for batch in batches] == [12, 12]
    theirs = batches[0].contiguous()
    for key in (data.TOKENS, data.ASSISTANT_MASK, data.LOG_PROBS, data.REWARD, data.TRUNCATED):
        assert torch.equal(theirs[key], ours[key]), key
    assert (batches[1][data.GROUP_ID].unique() == torch.tensor([6, 7, 8])).all()
    loss = GRPOLoss(byte_model, pad_token_id=PAD, entropy_coeff=0.1)
    value = total_loss(loss(theirs))
    assert value.isfinite()
    assert value.abs() > 0
    assert torch.equal(value, total_loss(loss(ours)))
    value.backward()


def test_a_batch_survives_a_replay_buffer_unchanged(make_env, policy):
    batch = GroupAdvantage()(SyncCollector(make_env(), policy).collect())
    buffer = ReplayBuffer(storage=LazyTensorStorage(32))
    index = buffer.extend(batch)
    stored = buffer[index]
    for key in batch.keys(True, True):
        assert torch.equal(stored[key], batch[key]), key
    sample = buffer.sample(5)
    assert sample[data.TOKENS].shape == (5, WIDTH + RESPONSE)
