"""The problems of reasoning-gym, on the package itself: what is asked, and what it is worth."""

from __future__ import annotations

import doctest
import importlib
import pickle
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from grpo import data
from grpo.envs.prompts import render_all
from grpo.envs.rewards import RewardResult, RewardScorer, get_reward
from grpo.envs.tasks import Problem, ReasoningGymTask, make_task
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.run.build import build_task, reward_function
from grpo.run.identity import identity_changes

from ..config.configs import composed_like

pytest.importorskip("reasoning_gym", reason="needs `pip install reasoning-gym`")
from reasoning_gym.factory import create_curriculum, create_dataset  # noqa: E402
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer  # noqa: E402

MODULE = importlib.import_module("grpo.envs.tasks.reasoning_gym")
VERIFIER = get_reward("verifier")
SMALL = {"max_terms": 2, "max_digits": 1}


@pytest.fixture
def in_this_process(monkeypatch):
    """Spares the seconds in which another process imports the package."""
    monkeypatch.setattr(MODULE, "_calls_apart", lambda: lambda fn, *args: fn(*args))


def make(name="chain_sum", **options) -> ReasoningGymTask:
    return make_task("reasoning_gym", name=name, **{"num_train": 20, "num_test": 5, **options})


def questions(problems) -> list[str]:
    return [problem.prompt[-1]["content"] for problem in problems]


# -- problems -------------------------------------------------------------------------------------


def test_problems_are_the_packages_own_for_the_seed():
    task, package = make(seed=7), create_dataset("chain_sum", seed=7, size=99)
    assert questions(task.test) == [package[index]["question"] for index in range(5)]
    assert questions(task.train) == [package[index]["question"] for index in range(5, 25)]
    assert task.train[0].answer == package[5]["answer"]
    assert task.train[0].id == "chain_sum/5"


@pytest.mark.parametrize("name", ["chain_sum", {"chain_sum": 1, "gcd": 2}, "list_functions"])
def test_the_same_seed_gives_the_same_problems_and_draws_nothing_from_the_process(name):
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, again, other = (make(name, seed=seed) for seed in (3, 3, 30))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert (first.train, first.test) == (again.train, again.test)
    assert questions(first.train) != questions(other.train)


def test_a_mix_follows_its_weights():
    task = make({"chain_sum": 3, "gcd": 1}, num_train=800, num_test=0)
    count = Counter(problem.id.split("/")[0] for problem in task.train)
    assert count["chain_sum"] / 800 == pytest.approx(0.75, abs=0.05)
    assert len({problem.id for problem in task.train}) == 800
    equal = make(["chain_sum", "gcd"], num_train=800, num_test=0)
    count = Counter(problem.id.split("/")[0] for problem in equal.train)
    assert count["gcd"] / 800 == pytest.approx(0.5, abs=0.05)


def test_no_training_problem_is_held_out_where_there_are_few():
    task = make(options=SMALL, num_train=150, num_test=60)  # of 200 that differ
    assert not set(questions(task.train)) & set(questions(task.test))
    assert (len(task.train), len(task.test)) == (150, 60)


def test_options_are_those_of_each_data_set():
    alone = make(options=SMALL)
    assert all(len(question.split(": ")[1]) == len("1 + 2 =") for question in questions(alone.test))
    mixed = make(["chain_sum", "gcd"], options={"chain_sum": SMALL})
    sums = [problem for problem in mixed.train if problem.id.startswith("chain_sum")]
    assert all(question.endswith(" =") and len(question.split(": ")[1]) == 7
               for question in questions(sums))


def test_levels_are_those_of_the_curriculum_and_options_win_over_them():
    curriculum = create_curriculum("chain_sum")
    curriculum.set_global_level(2)
    found = curriculum.generate_configuration()
    task = make(level=2, options={"min_terms": 4}, num_test=40)
    package = create_dataset("chain_sum", seed=0, size=40, min_terms=4, max_terms=found.max_terms,
                             min_digits=found.min_digits, max_digits=found.max_digits)
    assert found.max_terms == 4 and questions(task.test) == [one["question"] for one in package]
    each = make(["chain_sum", "gcd"], level={"chain_sum": 0}, num_test=40)
    sums = [problem for problem in each.test if problem.id.startswith("chain_sum")]
    assert sums and all(len(question.split(": ")[1]) == 7 for question in questions(sums))


def test_numbers_for_which_there_is_no_problem_are_left_out(monkeypatch):
    package = importlib.import_module("reasoning_gym.arithmetic.chain_sum").ChainSumDataset
    made = package.__getitem__

    def some(self, index):
        if index % 2:
            raise ValueError("found none")
        return made(self, index)

    monkeypatch.setattr(package, "__getitem__", some)
    assert [problem.id for problem in make(num_train=2, num_test=2).train] == [
        "chain_sum/4", "chain_sum/6"]


def test_the_example_of_the_documentation_is_what_comes():
    source = ReasoningGymTask.__doc__.replace("# doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(
        source, {"ReasoningGymTask": ReasoningGymTask}, "ReasoningGymTask", None, 0)
    assert len(example.examples) == 2 and not doctest.DocTestRunner().run(example).failed


def test_the_system_prompt_is_one_of_the_packages_or_ones_own():
    assert make().test[0].prompt[0] == {"role": "system", "content": SYSTEM_PROMPTS["default"]}
    simple, own = (make(system_prompt=text).test[0].prompt[0]["content"]
                   for text in ("simple", "Write <answer>42</answer>."))
    assert (simple, own) == (SYSTEM_PROMPTS["simple"], "Write <answer>42</answer>.")
    assert [message["role"] for message in make(system_prompt=None).test[0].prompt] == ["user"]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"name": None}, r"env.name names no data set.*env.name=countdown"),
    ({"name": "count_down"}, r"env.name: .*no data set 'count_down'; did you mean countdown"),
    ({"name": "qqq"}, "no data set 'qqq'; its gallery lists them"),
    ({"name": "composite"}, "no data set 'composite'"),
    ({"name": ["gcd", "gcd"]}, r"names a data set twice; give weights instead.*\{gcd: 2\}"),
    ({"name": {"gcd": 0}}, "the weight 0 of 'gcd' must be above 0; leave the data set out"),
    ({"options": {"max_term": 2}},
     "env.task.options: the data set 'chain_sum' has no option 'max_term' .*min_terms"),
    ({"options": {"size": 9}}, "size=9 of 'chain_sum' is not read; set env.task.seed, or"),
    ({"options": {"max_terms": 1}}, "options or env.task.level of 'chain_sum'.* max_terms"),
    ({"name": ["gcd", "chain_sum"], "options": SMALL},
     r"env.task.options has \['max_digits', 'max_terms'\].*a table with their names"),
    ({"name": ["gcd"], "level": {"chain_sum": 1}}, r"env.task.level has \['chain_sum'\]"),
    ({"level": -1}, "env.task.level=-1 must be an integer of at least 0"),
    ({"level": 99}, "env.task.level=99: the curriculum of 'chain_sum' ends at 10; lower it"),
    ({"name": "gsm_symbolic", "level": 1}, "'gsm_symbolic' has no curriculum; set its difficulty"),
    ({"num_test": -1}, "env.task.num_test=-1"), ({"seed": None}, "env.task.seed=None"),
    ({"system_prompt": "Default"}, "env.task.system_prompt='Default' is neither one of"),
    ({"options": SMALL, "num_train": 1, "num_test": 2000},
     "env.name='chain_sum' gave 2000 of env.task.num_test=2000 problems, and 0 of env.task"),
], ids=str)
def test_an_error_names_the_key_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match="needs the reasoning-gym package: pip install"):
        make()


def test_a_problem_without_a_rule_is_named():
    with pytest.raises(ValueError, match="problem 'p0' has no verifier .*another env.reward"):
        VERIFIER("2", Problem(prompt="1+1=", answer="2", id="p0"))


# -- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain_sum", "countdown"])
def test_the_right_answer_is_worth_1_and_others_less(in_this_process, name):
    for problem in make(name).test:
        assert VERIFIER(f"So <answer> {problem.answer} </answer>.", problem) == (1.0, True)
        for wrong in ("<answer>7</answer>", "<answer></answer>", problem.answer, ""):
            assert VERIFIER(wrong, problem).reward < 1 and not VERIFIER(wrong, problem).success


def test_the_reward_is_the_packages_own_score_of_the_last_answer(in_this_process):
    task, package = make("countdown"), create_dataset("countdown", seed=0, size=5)
    for number, problem in enumerate(task.test):
        entry = package[number]
        for text in ("", "none", "<answer>1 + 1</answer>", "<answer>1</answer><answer>(</answer>",
                     f"<answer>2</answer> no, <answer>{entry['answer']}</answer>"):
            score = package.score_answer(extract_answer(text), entry)
            assert VERIFIER(text, problem) == RewardResult(score, score == 1.0)


def test_without_a_system_prompt_all_of_a_completion_is_the_answer(in_this_process):
    problem = make(options=SMALL, system_prompt=None).test[0]
    assert VERIFIER(f" {problem.answer}\n", problem) == (1.0, True)
    assert VERIFIER(f"<answer>{problem.answer}</answer>", problem).reward < 1


def test_rewards_of_a_rollout_are_the_packages_own_row_by_row(in_this_process, byte_model,
                                                             tokenizer):
    task = make(options=SMALL, system_prompt=None, num_train=4, num_test=0)
    prompts = render_all(task.train, tokenizer, max_prompt_tokens=200, what="train")
    answers = {problem.id: problem.answer for problem in task.train}
    package = create_dataset("chain_sum", seed=0, size=99, **SMALL)
    width = max(len(prompt.tokens) for prompt in prompts)
    byte_model.config.max_position_embeddings = 256
    env = VerifiableEnv(prompts, RewardScorer([(VERIFIER, 1.0)]), tokenizer, num_prompts=4,
                        group_size=2, max_prompt_tokens=width, max_response_tokens=3,
                        eos_token_ids=(1,))
    policy = TransformersPolicy(byte_model, Sampling(max_tokens=3, seed=3), pad_token_id=0,
                                eos_token_ids=(1,), max_model_len=width + 3, version=lambda: 0)
    batch = policy(env.reset())
    for row, problem in enumerate(env.current_problems):  # half of them right
        if row % 2:
            ids = tokenizer(answers[problem.id])["input_ids"] + [1]
            batch[data.RESPONSE_TOKENS][row] = torch.tensor(ids + [0] * (3 - len(ids)))
    texts = [tokenizer.decode([token for token in row if token > 1])
             for row in batch[data.RESPONSE_TOKENS].tolist()]
    done = env.step(batch)["next"]
    expected = [package.score_answer(text.strip(), package[int(problem.id.split("/")[1])])
                for text, problem in zip(texts, env.current_problems, strict=True)]
    assert done["reward"][:, 0].tolist() == pytest.approx(expected)
    assert done["success"][1::2].all() and not done["reward_error"].any()


@pytest.mark.slow
def test_problems_go_to_other_processes_and_nothing_that_a_model_writes_stops_the_scores():
    tasks = [make(name) for name in ("countdown", "string_manipulation", "acre")]
    for task in tasks:  # of which two have data sets that cannot be pickled, or are large
        assert len(pickle.dumps(task.train)) < 100_000
    problem = pickle.loads(pickle.dumps(tasks[0].train[0]))
    score = RewardScorer([(VERIFIER, 1.0)], timeout=120)
    answers = [problem.answer, "9**9**9", "1", problem.answer]
    scores = score([f"<answer>{answer}</answer>" for answer in answers], [problem] * 4)
    assert scores.reward.tolist() == pytest.approx([1.0, 0.0, 0.05, 1.0])
    assert scores.error.tolist() == [False, True, False, False]
    assert "took more than 10 s of computing" in scores.messages[0]


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_everything_can_be_set_on_the_command_line(script, in_this_process):
    config = composed_like([
        "env=reasoning_gym", "env.name={chain_sum: 2, gcd: 1}", "preset=dapo", "env.num_envs=2",
        "env.task.options={chain_sum: {max_terms: 2, max_digits: 1}}", "env.task.level={gcd: 0}",
        "env.task.system_prompt=null", "env.task.num_train=20", "env.task.num_test=5",
        "env.task.seed=4", "env.reward={verifier: 1.0, negative_length: 0.5}"], script=script)
    task = build_task(config)
    same = make({"chain_sum": 2, "gcd": 1}, options={"chain_sum": SMALL}, level={"gcd": 0}, seed=4,
                system_prompt=None)
    assert (task.train, task.test) == (same.train, same.test)
    problem = task.train[0]
    scores = reward_function(config, type(task))([problem.answer], [problem])
    assert scores.reward.tolist() == [1.0 - 0.5 * len(problem.answer)] and scores.success.all()


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="env.name='gcd' and env.task.name='gcd' are the same"):
        build_task(composed_like(["env=reasoning_gym", "env.name=gcd", "+env.task.name=gcd"]))


def test_a_run_on_other_problems_does_not_go_on():
    assert identity_changes({"env": {"name": "gcd"}}, {"env": {"name": "lcm"}})
    assert identity_changes({"env": {"name": {"gcd": 1}}}, {"env": {"name": {"gcd": 2}}})
