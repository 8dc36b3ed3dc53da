"""Reward functions with TRL's signature, in runs of this library."""

from __future__ import annotations

import sys

import pytest

from grpo.config.schema import Config, ConfigError
from grpo.envs.rewards import Completion, RewardScorer, batch_reward
from grpo.envs.rewards.registry import name_of
from grpo.envs.rewards.trl import arguments, as_trl_reward, is_trl_reward
from grpo.envs.tasks import make_task
from grpo.envs.tasks.base import Problem
from grpo.run.build import named_reward, reward_function

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


def test_a_failing_function_is_named_as_its_own():
    def broken(completions, **kwargs):
        raise KeyError("solution")

    found = RewardScorer([(as_trl_reward(broken), 1.0)])(["4"], [TEXT])
    assert "broken" in found.messages[0] and "KeyError" in found.messages[0]


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
