"""Reward functions with TRL's signature, in runs of this library."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo.config.schema import Config, ConfigError
from grpo.envs.rewards import Completion, RewardScorer, batch_reward
from grpo.envs.rewards.registry import name_of
from grpo.envs.rewards.trl import arguments, as_trl_reward, is_trl_reward
from grpo.envs.tasks import make_task
from grpo.envs.tasks.base import Problem
from grpo.run.build_rewards import named_reward, reward_function

ROW = {"prompt": "not handed over", "solution": "4", "level": 2}
TEXT = Problem(prompt="2+2=", answer="4", id="text", row=ROW)
CHAT = Problem(prompt=({"role": "user", "content": "2+2?"},), answer="4", id="chat", row=ROW)
MODULE = '''
def right(prompts, completions, solution, **kwargs):
    assert {*kwargs} == {"completion_ids", "level", "answer"}, kwargs
    return [float(text == wanted) for text, wanted in zip(completions, solution)]


async def late(completions, **kwargs):
    return [0.5] * len(completions)


def plain(completion, problem):
    return 1.0


def scaled(prompts, completions, *, scale: float = 1.0, **kwargs):
    return [scale * (text == "4") for text in completions]


def named(*, prompts, completions, solution, scale=1.0, **kwargs):
    assert len(prompts) == len(completions) == len(kwargs["completion_ids"])
    return [scale * (text == wanted) for text, wanted in zip(completions, solution)]


async def late_named(*, completions, share, **kwargs):
    return [share for _ in completions]
'''


def solved(completions, solution, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, solution, strict=True)]


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "trl_style.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trl_style", raising=False)
    return "trl_style"


@pytest.mark.parametrize("fn, wanted", [
    (solved, True), (lambda prompts, completions, **kwargs: [], True),
    (lambda completion, problem: 0.0, False), (lambda completions, problems: [], False),
    (batch_reward(lambda completions, problems, **kwargs: []), False), (max, False),
    (lambda **kwargs: [], False), (lambda completions, solution: [], False)])
def test_a_function_is_told_by_its_signature(fn, wanted):
    assert is_trl_reward(fn) is wanted


def test_prompts_and_completions_have_the_form_of_the_data():
    completion = Completion("4", token_ids=[7, 1])
    assert arguments([completion], [TEXT]) == {
        "prompts": ["2+2="], "completions": ["4"], "completion_ids": [[7, 1]], "solution": ["4"],
        "level": [2], "answer": ["4"]}
    found = arguments([completion], [CHAT])
    assert found["prompts"] == [[{"role": "user", "content": "2+2?"}]]
    assert found["completions"] == [[{"role": "assistant", "content": "4"}]]


@pytest.mark.parametrize("name, reward", [("right", 1.0), ("late", 0.5), ("plain", 1.0)])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_path_is_called_as_its_signature_says_here_and_in_a_process(
        module, name, reward, processes):
    path = f"{module}:{name}"
    score = RewardScorer([(named_reward(path, {}), 1.0)], names=[path], processes=processes)
    found = score(["4", "4"], [TEXT, TEXT])
    assert found.messages == [] and found.reward.tolist() == [reward] * 2
    assert score.labels == (name,) and name_of(named_reward(path, {})) == repr(path)


@pytest.mark.parametrize("name, options, reward", [
    ("scaled", {"scale": 2}, 2.0), ("named", {}, 1.0), ("named", {"scale": 3.0}, 3.0),
    ("named", {"solution": "no"}, 0.0), ("late_named", {"share": 0.25}, 0.25)])
@pytest.mark.parametrize("processes", [0, 1])
def test_keyword_only_parameters_are_columns_or_options(module, name, options, reward, processes):
    path = f"{module}:{name}"
    fn = named_reward(path, options)
    score = RewardScorer([(fn, 1.0)], names=[path], processes=processes)
    found = score(["4", "4"], [TEXT, TEXT])
    assert found.messages == [] and found.reward.tolist() == [reward] * 2
    assert name_of(fn) == repr(path)


@pytest.mark.parametrize("name, options, message", [
    ("scaled", {"scale": "2"}, "scale='2' should be a valid number"),
    ("scaled", {"size": 2}, "has no option 'size'.*use one of: scale$"),
    ("named", {"completions": ["4"]}, "has no option 'completions'.*use one of: solution, scale$")])
def test_options_of_a_function_of_trl_are_checked(module, name, options, message):
    with pytest.raises(ConfigError, match=message):
        named_reward(f"{module}:{name}", options)


def test_a_failing_function_is_named_as_its_own():
    def broken(completions, **kwargs):
        raise KeyError("solution")

    found = RewardScorer([(as_trl_reward(broken), 1.0)])(["4"], [TEXT])
    assert "broken" in found.messages[0] and "KeyError" in found.messages[0]


async def later(completions, **kwargs):
    return torch.tensor([1.0, 0.5])


@pytest.mark.parametrize("fn", [
    lambda completions, **kwargs: torch.tensor([1.0, 0.5]),
    lambda completions, **kwargs: np.array([1.0, 0.5], dtype=np.float32),
    lambda completions, **kwargs: [torch.tensor(1.0), torch.tensor([0.5])],
    later], ids=["tensor", "array", "list of tensors", "coroutine"])
def test_rewards_may_be_tensors(fn):
    rewards = RewardScorer([(as_trl_reward(fn), 1.0)])(["4", "5"], [TEXT, TEXT])
    assert rewards.reward.tolist() == [1.0, 0.5], rewards.messages


def test_none_of_one_of_several_functions_leaves_the_others():
    def sometimes(completions, **kwargs):
        return [None if text == "?" else 1.0 for text in completions]

    def never(completions, **kwargs):
        return [None] * len(completions)

    both = RewardScorer([(as_trl_reward(sometimes), 1.0), (as_trl_reward(solved), 0.5)])
    assert both(["4", "?"], [TEXT, TEXT]).reward.tolist() == [1.5, 0.0]
    assert not both(["4", "?"], [TEXT, TEXT]).error.any()
    alone = RewardScorer([(as_trl_reward(sometimes), 1.0), (as_trl_reward(never), 1.0)])
    assert alone(["4", "?"], [TEXT, TEXT]).error.tolist() == [False, True]


def test_rows_of_two_tasks_succeed_by_the_function_of_their_own():
    def of_kind(kind):
        def reward(completions, level, **kwargs):
            return [1.0 if mine == kind else None for mine in level]
        return as_trl_reward(reward)

    two, three = TEXT, replace(TEXT, row=ROW | {"level": 3})
    found = RewardScorer([(of_kind(2), 1.0), (of_kind(3), 1.0)], names=["two", "three"])(
        ["4", "4"], [two, three])
    assert found.reward.tolist() == [1.0, 1.0] and found.success.tolist() == [True, True]
    assert {name: [None if math.isnan(one) else one for one in part.tolist()]
            for name, part in found.parts.items()} == {"two": [1.0, None], "three": [None, 1.0]}


def test_a_function_of_this_library_still_leaves_its_row_out():
    score = RewardScorer([(as_trl_reward(solved), 1.0), (lambda completion, problem: None, 1.0)])
    assert score(["4"], [TEXT]).error.tolist() == [True]


def test_what_only_trls_trainer_has_is_refused_at_the_start():
    def paced(completions, trainer_state, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="'paced' asks for trainer_state"):
        as_trl_reward(paced)


def test_options_are_those_of_keyword_only_parameters_alone(module):
    config = Config(env={"reward": f"{module}:right", "reward_options": {
        f"{module}:right": {"solution": "x"}}})
    with pytest.raises(ConfigError, match="has no option 'solution'"):
        reward_function(config, make_task("arithmetic"))


@pytest.mark.parametrize("options, wanted", [
    ({"chat": False}, ["2+2=", ({"role": "user", "content": "hi"},)]),
    ({"chat": False, "system_prompt": "Be brief."}, ["2+2=", (
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})]),
    ({"system_prompt": None}, [({"role": "user", "content": "2+2="},),
                               ({"role": "user", "content": "hi"},)])])
def test_prompts_of_a_data_set_may_stay_as_they_stand(tmp_path, options, wanted):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2="}\n{"prompt": [{"role": "user", "content": "hi"}]}\n'
                    '{"prompt": "x"}\n{"prompt": "y"}\n')
    task = make_task("dataset", path=str(path), prompt_column="prompt", num_test=1, seed=3,
                     **options)
    found = [problem.prompt for problem in task.train + task.test]
    assert all(one in found for one in wanted)
