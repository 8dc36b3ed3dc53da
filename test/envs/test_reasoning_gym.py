"""The problems of reasoning-gym, on the package itself: what is asked, and what it is worth."""

from __future__ import annotations

import doctest
import importlib
import pickle
import random
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

from grpo import GroupAdvantage, GRPOLoss, data, total_loss
from grpo.collectors.sync import SyncCollector
from grpo.envs.prompts import render_all
from grpo.envs.rewards import RewardResult, RewardScorer, get_reward
from grpo.envs.tasks import Problem, ReasoningGymTask, make_task
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy
from grpo.run.build import build_task, rendered
from grpo.run.build_rewards import reward_function
from grpo.run.identity import identity_changes
from grpo.system.threads import in_background

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


@pytest.mark.parametrize(("given", "text"), [
    ("DeepSeekZero", SYSTEM_PROMPTS["DeepSeekZero"]), ("In <answer>.", "In <answer>.")])
def test_what_the_model_reads_is_the_prompt_and_not_its_name(given, text, tokenizer):
    config = composed_like([
        "env=reasoning_gym", f"env.system_prompt='{given}'", "env.name=chain_sum",
        "env.task.num_train=1", "env.task.num_test=1"])
    (prompt,) = rendered(config, build_task(config), "train", tokenizer, max_prompt_tokens=999)
    assert prompt.problem.prompt[0]["content"] == text.strip()


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "message"), [
    (["env=reasoning_gym", "env.name=gcd", "env.system_prompt='Answer briefly.'"],
     "^env.system_prompt='Answer briefly.' is neither one of reasoning-gym's"),
    (["env=reasoning_gym", "env.name=gcd", "env.task.system_prompt='Answer briefly.'"],
     "^env.task.system_prompt='Answer briefly.' is neither one of reasoning-gym's"),
    (["env.name=countdown"], "^env.name='countdown': the task 'arithmetic' has no option 'name'; "
     "remove it, or choose one that has: env=reasoning_gym"),
    (["env.id=GSM8KEnv"], "^env.id='GSM8KEnv': .* has: env=chat_env or env=verifiers")])
def test_an_error_names_the_key_that_was_typed(typed, message):
    with pytest.raises(ValueError, match=message):
        build_task(composed_like(typed))


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


class Knowing(TransformersPolicy):
    """Gives the right answer in every second row."""

    answers: dict[tuple[int, ...], list[int]]  # by prompt

    def _generate(self, prompts, on_row=None):
        sampled = super()._generate(prompts, on_row)
        sampled.tokens[1::2] = [self.answers[tuple(prompt)] for prompt in prompts[1::2]]
        sampled.log_probs = [[0.0] * len(tokens) for tokens in sampled.tokens]
        return sampled


@pytest.fixture(params=[("chain_sum", SMALL), ("countdown", {"max_numbers": 3, "min_numbers": 2})],
                ids=lambda param: param[0])
def rollout(request, in_this_process, byte_model, tokenizer):
    """A batch of eight rows as the collector hands it on, what was asked, what was said, and the
    scores that the package gives."""
    (name, options), room = request.param, 24
    task = make(name, options=options, system_prompt=None, num_train=4, num_test=0)
    prompts = render_all(task.train, tokenizer, max_prompt_tokens=1000, what="train")
    width = max(len(prompt.tokens) for prompt in prompts)
    byte_model.config.max_position_embeddings = width + room
    env = VerifiableEnv(prompts, RewardScorer([(VERIFIER, 1.0)]), tokenizer, num_prompts=4,
                        group_size=2, max_prompt_tokens=width, max_response_tokens=room,
                        eos_token_ids=(1,))
    policy = Knowing(byte_model, Sampling(max_tokens=room, seed=3), pad_token_id=0,
                     eos_token_ids=(1,), max_model_len=width + room)
    policy.answers = {tuple(prompt.tokens): tokenizer(prompt.problem.answer)["input_ids"] + [1]
                      for prompt in prompts}
    batch = SyncCollector(env, policy).collect()
    package = create_dataset(name, seed=0, size=99, **options)
    entries = [package[int(problem.id.split("/")[1])] for problem in env.current_problems]
    asked = [list(prompt.tokens) for problem in env.current_problems
             for prompt in prompts if prompt.problem.id == problem.id]
    said = [row[row_mask].tolist() for row, row_mask in zip(
        batch[data.TOKENS], batch[data.ASSISTANT_MASK], strict=True)]
    texts = [tokenizer.decode([token for token in row if token > 1]).strip() for row in said]
    return batch, asked, said, [
        package.score_answer(text, entry) for text, entry in zip(texts, entries, strict=True)]


def test_rewards_of_a_rollout_are_the_packages_own_row_by_row(rollout):
    batch, asked, said, scores = rollout
    assert batch["next", "reward"][:, 0].tolist() == pytest.approx(scores)
    assert scores[1::2] == [1.0] * 4 and max(scores[::2]) < 1.0
    assert not batch[data.REWARD_ERROR].any()
    for i, row in enumerate(zip(asked, said, strict=True)):  # padded on both sides
        assert batch[data.TOKENS][i][batch[data.ATTENTION_MASK][i]].tolist() == sum(row, [])


def test_the_losss_gradient_is_that_of_the_packages_scores_worked_out_row_by_row(
        rollout, byte_model):
    batch, asked, said, scores = rollout
    model, clip = byte_model.double().requires_grad_(True), 0.2

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, [*model.parameters()])])

    def log_probs(prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]

    rows = [log_probs(*row) for row in zip(asked, said, strict=True)]
    counts = [*map(len, said)]
    # A policy that has moved on since: some ratios are clipped, some not.
    moved = torch.linspace(-0.4, 0.4, sum(counts))[
        torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))]
    sampled = (torch.cat(rows).detach() + moved).float()
    terms = []
    for i, (row, old) in enumerate(zip(rows, sampled.split(counts), strict=True)):
        advantage = scores[i] - (scores[i] + scores[i ^ 1]) / 2  # the other row of the group
        ratio = (row - old.double()).exp()
        terms.append(torch.minimum(ratio * advantage,
                                   ratio.clamp(1 - clip, 1 + clip) * advantage))
    by_hand = gradient(-torch.cat(terms).mean())

    batch[data.LOG_PROBS] = torch.zeros_like(batch[data.LOG_PROBS]).masked_scatter(
        batch[data.ASSISTANT_MASK], sampled)
    GroupAdvantage(estimator="group_mean")(batch)
    found = gradient(total_loss(GRPOLoss(model, clip_epsilon=clip, pad_token_id=0)(batch)))
    assert by_hand.norm() > 1e-3
    assert (found - by_hand).norm() < 1e-6 * by_hand.norm()


@pytest.mark.slow
def test_completions_that_compute_for_long_do_not_make_others_wait():
    calls = MODULE._calls_apart()
    calls(max, 1, 2)  # which takes the time of the imports
    long = [in_background(calls, time.sleep, 4) for _ in range(15)]
    time.sleep(1)
    start = time.monotonic()
    assert calls(max, 1, 2) == 2 and time.monotonic() - start < 2
    assert [one.result(timeout=60) for one in long] == [None] * 15


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
