"""Rewards of a run beside the problems that they are for."""

from __future__ import annotations

import json

import pytest

from grpo.config.schema import ConfigError, load_config
from grpo.envs.tasks.base import Problem, Task
from grpo.run.api import train
from grpo.run.build import build_task
from grpo.run.build_rewards import reward_function
from grpo.run.given import as_rewards, reward_name
from grpo.run.trl import GRPOConfig, GRPOTrainer

from ..config.configs import small

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def scored(folder, rows, reward=None, options=None, **env):
    """The reward of a run on such rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"dataset": "dataset", "path": str(folder / "rows.jsonl"), "prompt_column": "prompt",
             "task": {"num_test": 1}, "reward": reward, "reward_options": options, **env}
    config = load_config(small(env=given))
    return reward_function(config, build_task(config))


def sums(**columns):
    return [{"prompt": f"{n}+1=", **columns, "gold": str(n + 1)} for n in range(4)]


@pytest.mark.parametrize(("reward", "options", "compared"), [
    (None, None, "gsm8k"), ("exact_match", None, "exact_match"), ("answer_tag", None, "answer_tag"),
    (["format", "grpo.envs.rewards.answers:gsm8k"], None, "gsm8k"),
    (["format", "length"], {"length": {"verdict": "exact_match"}}, "exact_match")])
def test_a_reward_that_compares_is_refused_where_no_column_has_the_answer(
        tmp_path, reward, options, compared):
    with pytest.raises(ConfigError, match=(
            f"env.answer_column=null: .*rows.jsonl.* env.reward={compared} compares completions "
            "with; set it to the column that has the answer, of prompt, gold, or")):
        scored(tmp_path, sums(), reward, options)


def test_answers_of_math_are_compared_too(tmp_path):
    pytest.importorskip("math_verify")
    with pytest.raises(ConfigError, match="env.reward=accuracy compares"):
        scored(tmp_path, sums(), "accuracy")


@pytest.mark.parametrize("reward", ["verifier", "format", f"{__name__}:brevity"])
def test_other_rewards_need_no_answer(tmp_path, reward):
    scored(tmp_path, sums(), reward)


def brevity(completion, problem):
    return -float(len(completion))


def test_answers_may_be_in_a_column_or_in_a_chat_or_in_both(tmp_path):
    scored(tmp_path, sums(), answer_column="gold")
    scored(tmp_path, [{"prompt": CHAT}] * 3 + [{"prompt": CHAT[:1] + [{
        "role": "assistant", "content": "5"}]}], task={"num_test": 0})
    with pytest.raises(ConfigError, match="env.answer_column=null"):
        scored(tmp_path, [{"prompt": CHAT}, *sums()])
    with pytest.raises(ConfigError, match="no problem of .*rows.jsonl has one"):
        scored(tmp_path, sums(nothing=" "), answer_column="nothing")


def test_of_a_mixture_each_data_set_needs_its_column(tmp_path):
    entries = [{"id": str(tmp_path / "rows.jsonl"), "answer_column": "gold"},
               {"id": str(tmp_path / "rows.jsonl")}]
    mixture = {"datasets": entries, "test_split_size": 1}
    given = {"path": None, "task": {}, "dataset_mixture": mixture}
    with pytest.raises(ConfigError, match="env.answer_column=null"):
        scored(tmp_path, sums(), **given)
    scored(tmp_path, sums(), **given, answer_column="gold")


def test_other_tasks_without_answers_are_refused_as_well():
    problems = [Problem(prompt="An even number: ", answer="", id="p", verifier=lambda text: 1.0)]

    class Even(Task):
        default_reward = "verifier"

    task = Even(train=problems, test=problems, source="nature")
    reward_function(load_config(small()), task)
    config = load_config(small(env={"reward": "exact_match"}))
    with pytest.raises(ConfigError, match="env.reward=exact_match .* no problem of nature has one"):
        reward_function(config, task)


def scaled(completions, *, scale, **kwargs):
    return [scale for _ in completions]


def test_an_option_of_a_function_of_trls_kind_needs_no_column_where_it_is_given():
    name, rows = reward_name(scaled), sums(answer="1")
    given = {"env.reward_options": {name: {"scale": 2.0}}}
    with pytest.raises(ConfigError, match="^model.name=/no/such"):  # nothing is wrong before that
        train({**given, "model.name": "/no/such"}, reward=scaled, dataset=rows)
    GRPOTrainer("embedded", scaled, GRPOConfig("out", overrides=given), rows)
    for options in (None, 3, {name: 3}, {name: {"seed": 1}}, {"gsm8k": {"scale": 2.0}}):
        with pytest.raises(ConfigError, match="for scale.*; add that, set it in env.reward_op"):
            as_rewards(scaled, "fn", rows, options)
