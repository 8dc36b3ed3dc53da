"""Samples and benchmarks beside training: what they find, when, and that training never notices."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch

from grpo.config.recipes import env_recipe
from grpo.envs.prompts import question, render
from grpo.envs.rewards import RewardResult, RewardScorer
from grpo.envs.tasks import Problem
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.report.charts import charts_of
from grpo.report.eval_file import read_tasks
from grpo.report.history import History
from grpo.report.loggers import read_jsonl
from grpo.run import build_eval
from grpo.training.evaluations import Sampler, without_trace

from . import runs

BENCHMARK = {"arithmetic": {"task": {"max_operand": 9, "num_train": 15, "num_test": 3}}}


@pytest.fixture
def make_sampler(prompts, tokenizer, byte_model):
    def make(reward, *, n: int = 4, count: int = 5, at_once: int = 2, **options) -> Sampler:
        env = VerifiableEnv(
            prompts[:count], RewardScorer([(reward, 1.0)], workers=1), tokenizer,
            num_prompts=at_once, group_size=n, shuffle=False, max_prompt_tokens=4,
            max_response_tokens=3, eos_token_ids=(1,))
        policy = TransformersPolicy(byte_model, Sampling(max_tokens=3), pad_token_id=0,
                                    eos_token_ids=(1,), max_model_len=16)
        return Sampler(env, policy, **{"temperature": 1.0, "seed": 0, **options})

    return make


def test_each_problem_has_its_own_samples_in_their_order(make_sampler):
    asked = []

    def reward(completion, problem):
        asked.append((problem.id, completion))
        return RewardResult(float(len(completion)), len(completion) > 2)

    samples, errors = make_sampler(reward).run()
    assert (samples.problems, samples.n, errors) == (5, 4, 0)
    kept = asked[:20]  # the last batch wraps around
    assert [problem for problem, _ in kept[::4]] == [p.problem.id for p in make_sampler(
        reward).env.stream.prompts]
    assert samples.rewards.flatten().tolist() == [float(len(text)) for _, text in kept]
    assert samples.correct.flatten().tolist() == [len(text) > 2 for _, text in kept]


def test_samples_are_the_same_each_time_and_others_with_another_seed(make_sampler):
    sampler = make_sampler(runs.by_text)
    first, again = sampler.run()[0], sampler.run()[0]
    assert first.answers == again.answers
    assert make_sampler(runs.by_text, seed=1).run()[0].answers != first.answers
    assert len({*first.answers[0]}) > 1


def test_a_sample_without_a_reward_is_wrong_and_counted(make_sampler):
    def reward(completion, problem):
        return None if sum(map(ord, completion)) % 3 == 0 else RewardResult(1.0, True)

    samples, errors = make_sampler(reward, count=4).run()
    assert 0 < errors == (~samples.correct).sum()
    assert (np.isnan(samples.rewards) == ~samples.correct).all()


def test_random_numbers_go_on_where_they_were():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    inside = []
    for _ in range(2):
        with without_trace(7):
            inside.append(draw())
    assert inside[0] == inside[1] != expected
    assert draw() == expected


@pytest.mark.parametrize("reward", ["by_text", "by_text_and_chance"])
def test_training_is_the_same_to_the_bit_with_samples_and_benchmarks(
        make_config, tmp_path, reward):
    """Also where rewards draw from the generators of the process."""
    found = []
    for number, options in enumerate([{}, {"samples": 3, "temperature": 0.7,
                                           "benchmarks": BENCHMARK}]):
        config = make_config(iterations=3, reward=reward, eval=options,
                             train={"checkpoint_frequency": 0})
        trainer = runs.make_trainer(config, tmp_path / str(number))
        trainer.fit()
        rows = runs.timeless(read_jsonl(tmp_path / str(number) / "metrics.jsonl"))
        found.append((rows, runs.weights(trainer)))
    (plain, weights), (sampled, also) = found
    assert torch.equal(weights, also)
    assert len(plain) == len(sampled)
    for row, more in zip(plain, sampled, strict=True):
        assert row.items() <= more.items()
    added = {name for row in sampled for name in row} - {name for row in plain for name in row}
    assert {"eval/pass@1", "eval/pass@3", "eval/coverage@3", "eval/majority@3", "eval/distinct@3",
            "eval/arithmetic_2/accuracy", "eval/arithmetic_2/pass@3"} <= added
    assert "eval/accuracy" in plain[0]


def test_training_is_the_same_to_the_bit_however_often_it_is_evaluated(make_config, tmp_path):
    """The greedy completions, too, have rewards that draw from the generators of the process."""
    found = []
    for every in (1, 3):
        trainer = runs.make_trainer(
            make_config(iterations=3, reward="by_text_and_chance", env={"reward_workers": 1},
                        train={"eval_frequency": every, "checkpoint_frequency": 0}),
            tmp_path / str(every))
        trainer.fit()
        found.append(runs.weights(trainer))
    assert torch.equal(*found)


def test_the_file_of_an_evaluation_has_what_the_metrics_say(make_config, tmp_path):
    config = make_config(iterations=2, eval={"samples": 4, "k": [2, 4], "benchmarks": BENCHMARK})
    runs.make_trainer(config, tmp_path).fit()
    rows = {row["step"]: row for row in read_jsonl(tmp_path / "metrics.jsonl")}
    for step in (0, 2):
        path = tmp_path / "metrics" / f"eval_iter_{step:03d}.json"
        record, row = json.loads(path.read_text()), rows[step]
        assert (record["iteration"], record["replicates"], record["num_ids"]) == (step, 4, 5)
        for name in ("pass@2", "pass_ordered@4", "mean@4", "best@4"):
            assert record[name] == row[f"eval/{name}"]
        assert record["accuracy"] == row["eval/accuracy"]
        own, benchmark = read_tasks(path).values()
        assert own.samples.per_problem("pass", 4).mean() == record["pass@4"]
        assert np.mean(benchmark.greedy) == row["eval/arithmetic_2/accuracy"]
        assert len(benchmark.ids) == 3
    charts = {chart.name: chart for chart in charts_of(History.read(tmp_path))}
    assert [line.label for line in charts["at_k"].lines] == [
        "coverage@2", "coverage@4", "majority@2", "majority@4", "pass@2", "pass@4"]
    assert charts["at_k_arithmetic_2"].has_data(History.read(tmp_path))


def test_what_a_run_trains_on_is_left_out_of_its_benchmarks(make_config, tmp_path, caplog):
    other_seed = {"arithmetic": {"task": {"max_operand": 9, "num_train": 9, "num_test": 30,
                                          "seed": 1}}}
    trainer = runs.make_trainer(make_config(eval={"benchmarks": other_seed}), tmp_path)
    trained = {prompt.problem.prompt for prompt in trainer.collector.env.stream.prompts}
    asked = [prompt.problem.prompt
             for prompt in trainer.evaluator.benchmarks[0].greedy.env.stream.prompts]
    assert 0 < len(asked) < 30 and not trained & {*asked}
    assert f"{30 - len(asked)} of 30 problems are among the run's training" in caplog.text


def conversation(number: int, row: dict) -> Problem:
    return Problem(({"role": "user", "content": "Guess."},), "", f"train/{number}",
                   partner=lambda: None, row={"example_id": number, **row})


def test_conversations_that_begin_alike_are_told_apart_by_what_they_are_about(caplog):
    trained = build_eval.questions(conversation(n, {"info": {"secret": n}}) for n in range(3))
    assert not caplog.text
    held_out = [conversation(n, {"info": {"secret": secret}}) for n, secret in enumerate((2, 7))]
    assert [question(problem) in trained for problem in held_out] == [True, False]


def test_conversations_that_cannot_be_told_apart_are_said_to_be_unknown(caplog):
    plain = Problem("1+1=", "2", "sum")
    trained = build_eval.questions([plain, *(conversation(n, {}) for n in range(3))])
    assert trained == {question(plain)}
    assert "3 training conversations cannot be told from one another" in caplog.text


def test_benchmarks_can_wait_for_checkpoints(make_config, tmp_path):
    config = make_config(iterations=4, train={"eval_frequency": 1, "checkpoint_frequency": 3},
                         eval={"benchmarks": BENCHMARK, "at_checkpoints": True})
    runs.make_trainer(config, tmp_path).fit()
    asked = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")
             if "eval/arithmetic_2/accuracy" in row]
    assert asked == [3, 4]


def test_longer_benchmarks_make_the_engines_rows_longer(make_config, tmp_path):
    config = make_config(eval={"benchmarks": BENCHMARK, "benchmark_max_tokens": 9})
    trainer = runs.make_trainer(config, tmp_path)
    assert trainer.collector.policy.max_model_len == 4 + 9
    assert trainer.evaluator.benchmarks[0].greedy.policy.sampling.max_tokens == 9
    assert trainer.evaluator.policy.sampling.max_tokens == 4


def test_the_chat_template_of_a_benchmark_is_its_own(make_config, tokenizer, byte_model):
    """The run's tokenizer, which checkpoints save, and a later benchmark know nothing of it."""
    config, own = make_config(eval={"benchmarks": {
        "arithmetic": {"system_prompt": "Add.", "chat_template": "{{ messages[-1]['content'] }}!"},
        "countdown": {"task": {"num_train_seeds": 2, "num_test_seeds": 2}}}}), copy.copy(tokenizer)
    first, second = build_eval.build_benchmarks(config, own, limit=4096)
    assert own.chat_template == tokenizer.chat_template == second.tokenizer.chat_template
    assert tokenizer.decode(first.prompts[0].tokens).endswith("=!")
    assert second.prompts[0].tokens == render(second.prompts[0].problem, tokenizer)
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=3), pad_token_id=0,
                                eos_token_ids=(1,), max_model_len=64)
    evaluator = build_eval.task_evaluator(first, policy, rows=4)
    assert evaluator.greedy.env.tokenizer.chat_template.endswith("}}!")


def test_null_is_not_given():
    assert env_recipe("gsm8k", {"task": None}, key="eval.benchmarks") == env_recipe(
        "gsm8k", {}, key="eval.benchmarks")


@pytest.mark.parametrize(("options", "message"), [
    ({"samples": 4, "k": [1, 8]}, r"eval.k=\[1, 8\] has 8, and eval.samples=4"),
    ({"k": [1]}, "eval.k=.* is not read because eval.samples is null"),
    ({"at_checkpoints": True}, "eval.at_checkpoints=true is not read because eval.bench"),
    ({"benchmarks": ["gsm8k", "gsm8k"]}, "names a task twice"),
    ({"benchmarks": ["gsm9k"]}, "no recipe 'gsm9k'; known: arithmetic"),
    ({"benchmarks": {"arithmetic": {"repaets": 3}}}, "eval.benchmarks=arithmetic"),
    ({"benchmarks": BENCHMARK, "benchmark_max_tokens": 62}, "nothing is left"),
    *(({"benchmarks": {"arithmetic": keys}}, f"eval.benchmarks=arithmetic: {message}")
      for keys, message in [
          ({"repeats": 3}, "env.repeats=3 is not read by a benchmark"),
          ({"num_envs": 7}, "env.num_envs=7 is not read by a benchmark"),
          ({"url": "http://h"}, "env.url=http://h is not read by env.dataset=arithmetic"),
          ({"max_steps": 3}, "env.max_steps=3 is not read because env.step is null"),
          ({"task": 5}, "(.|\n)*task\n.*valid dictionary"),
      ]),
    ({"benchmarks": {"arithmetic": {"path": "foo"}}}, "'arithmetic' has no option 'path'"),
])
def test_what_cannot_be_evaluated_is_refused(make_config, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        runs.make_trainer(make_config(eval=options), tmp_path)


def test_conversations_are_sampled_too(make_config, tmp_path, tokenizer):
    talker = runs.save_talker(tmp_path / "talker", tokenizer, seed=0)
    config = make_config(iterations=1, model={"name": str(talker)}, eval={"samples": 3},
                         env={"step": f"{runs.__name__}:again"},
                         inference_model={"max_tokens": 24})
    trainer = runs.make_trainer(config, tmp_path / "run")
    env, first = trainer.evaluator.own.sampler.env, trainer.evaluator.run()
    assert any(row.talk != row.tokens for row in env.responses)
    assert first.more == trainer.evaluator.run().more
