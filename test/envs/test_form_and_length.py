"""Rewards for form and length, beside computations of their own and, where it is installed, TRL."""

from __future__ import annotations

import math
import re
import time
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo import data
from grpo.config.schema import ConfigError, load_config
from grpo.envs.rewards import Completion, RewardResult, RewardScorer, get_reward, reward_names
from grpo.envs.rewards.length import judged_by
from grpo.envs.rewards.registry import _REWARDS, options_of, register_reward, with_options
from grpo.envs.tasks import Problem, task_class
from grpo.run.build_rewards import reward_function

HALF = Problem(prompt="...", answer="0.5", id="half")


def of_tokens(count: int, text: str = "") -> Completion:
    return Completion(text, token_ids=range(count))


def reward(name: str, text: str, **options) -> float:
    return with_options(get_reward(name), options)(text, HALF)


pieces = st.lists(st.sampled_from(
    ["<think>\n", "\n</think>\n", "<answer>\n", "\n<answer>\n", "\n</answer>", "\n", "x", "First,",
     "Step 12:", "1.", "\n-", "\n*", "Next", "Step ", "7"])).map("".join)
tokens = st.lists(st.integers(0, 3), max_size=30)


@given(pieces)
@example("<think>\na\n</think>\n<answer>\n\n</answer>\nmore")
@example("<think>\n\n</think>\n<answer>\nb\n</answer> more")
def test_the_format_is_that_of_a_regular_expression(text):
    inside = r"(?:.|\n)*?"
    wanted = re.compile(rf"<think>\n{inside}\n</think>\n<answer>\n{inside}\n</answer>(?=\n|\Z)")
    assert reward("format", text) == float(wanted.match(text) is not None)


@given(pieces)
def test_a_quarter_for_each_tag_that_is_there_once(text):
    tags = ["<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"]
    assert reward("tag_count", text) == 0.25 * [len(text.split(tag)) for tag in tags].count(2)


@given(pieces)
def test_signs_of_steps_are_counted_up_to_three(text):
    count = len(re.findall(r"Step [0-9]+:", text)) + sum(
        text.count(sign) for sign in ("\n-", "\n*", "First,", "Second,", "Next,", "Finally,"))
    count += re.match(r"[0-9]+\.", text) is not None
    assert reward("reasoning_steps", text) == min(count, 3) / 3


@given(tokens, st.integers(1, 4), st.floats(-3, 0))
def test_repeated_n_grams_cost_their_share(ids, size, penalty):
    grams = Counter(tuple(ids[i:i + size]) for i in range(len(ids) - size + 1))
    repeated = sum(count - 1 for count in grams.values())
    expected = penalty * repeated / grams.total() if grams else 0.0
    found = reward("repetition_penalty", Completion("", token_ids=ids), ngram_size=size,
                   max_penalty=penalty)
    assert found == pytest.approx(expected, abs=1e-12)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 150))
def test_overlong_completions_are_punished_softly(count, cache, free):
    expected = -sum(free < place <= free + cache for place in range(1, count + 1)) / cache
    found = reward("soft_overlong_punishment", of_tokens(count), soft_punish_cache=cache,
                   max_completion_len=free + cache)
    assert found == pytest.approx(expected)


@register_reward("says_right", quick=True)
def says_right(completion, problem):
    return None if completion == "?" else RewardResult(7.0, completion == "right")


def scored(name: str, texts, **options):
    fn = with_options(get_reward(name), {"verdict": "says_right", **options})
    return RewardScorer([(fn, 1.0)])(texts, [HALF] * len(texts))


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8))
def test_length_ranks_right_completions_and_costs_long_wrong_ones(rows):
    texts = [of_tokens(count, "right" if right else "") for count, right in rows]
    least, most = min(rows)[0], max(rows)[0]
    expected = []
    for count, right in rows:
        place = (most - count) / (most - least) - 0.5 if most > least else 0.0
        expected.append(place if right or place < 0 else 0.0)
    assert scored("length", texts).reward.tolist() == pytest.approx(expected, abs=1e-6)


def test_length_compares_completions_of_one_problem():
    texts = [of_tokens(count, "right") for count in (10, 20, 1, 2)]
    other = Problem(prompt="", answer="", id="other")
    fn = with_options(get_reward("length"), {"verdict": "says_right"})
    batch = RewardScorer([(fn, 1.0)])(texts, [HALF, HALF, other, other])
    assert batch.reward.tolist() == [0.5, -0.5, 0.5, -0.5]


@given(st.integers(0, 200), st.booleans())
def test_the_cosine_runs_from_one_value_to_the_other(count, right):
    ends = (1.0, 0.5) if right else (-1.0, -0.5)
    share = (1 - math.cos(math.pi * min(count, 100) / 100)) / 2
    (found,) = scored("cosine", [of_tokens(count, "right" if right else "")], max_len=100).reward
    assert float(found) == pytest.approx(ends[0] + (ends[1] - ends[0]) * share, abs=1e-6)


@pytest.mark.parametrize("name", ["cosine", "length"])
def test_what_the_verdict_does_not_know_has_no_reward(name):
    batch = scored(name, [of_tokens(5, "right"), of_tokens(9, "?"), of_tokens(7, "right")])
    assert batch.fault.tolist() == [0, 1, 0]
    if name == "length":  # nor is it compared with others
        assert batch.reward.tolist() == [0.5, 0.0, -0.5]


def unusable(completion, problem):
    return {"nan": math.nan, "text": "right"}.get(completion, 1.0)


@pytest.mark.parametrize("name", ["cosine", "length"])
def test_a_verdict_that_is_no_number_costs_its_rows(name):
    fn = with_options(get_reward(name), {"verdict": f"{__name__}:unusable"})
    texts = [of_tokens(count, said) for count, said in ((5, ""), (6, "nan"), (7, "text"))]
    batch = RewardScorer([(fn, 1.0)])(texts, [HALF] * 3)
    assert batch.fault.tolist() == [data.FAULT_NONE] + [data.FAULT_INVALID] * 2
    assert "not finite" in batch.messages[0] and "returned 'right'" in batch.messages[1]


def like_trl(completions, answer, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def test_a_verdict_may_have_trls_signature():
    fn = with_options(get_reward("cosine"), {"verdict": f"{__name__}:like_trl", "max_len": 100})
    asked = Problem(prompt="", answer="right", id="p")
    batch = RewardScorer([(fn, 1.0)])([of_tokens(5, "right"), of_tokens(5, "no")], [asked] * 2)
    assert (batch.reward > 0).tolist() == [True, False] and not batch.error.any(), batch.messages


@pytest.mark.parametrize(("rewards", "answer", "right"), [
    (["gsm8k", "cosine"], "<answer>18</answer>", True),
    (["format", "gsm8k", "length"], "18", False),
    (["format", "exact_match", "cosine"], "18", True),
    ({"exact_match": 1.0, "length": 1.0}, "<answer>18</answer>", False)])
def test_what_is_right_is_what_the_run_takes_for_right(rewards, answer, right):
    scorer = scorer_of("gsm8k", rewards)
    texts = [of_tokens(5, answer), of_tokens(9, answer)]
    asked = [Problem(prompt="", answer="18", id="p")] * 2
    *_, paid = scorer(texts, asked).parts.values()
    assert (paid.max() > 0) == right, paid


def scorer_of(task: str, rewards, **options) -> RewardScorer:
    config = load_config({"env": {"dataset": task, "reward": rewards, "reward_options": options,
                                  "reward_processes": 0}})
    return reward_function(config, task_class(task))


def test_programs_are_right_by_their_tests_which_run_once_with_the_runs_options(monkeypatch):
    calls = []

    def fake(completion, problem, *, unsafe=False, total_seconds=20.0):
        calls.append((str(completion), unsafe))
        return RewardResult(0.5, completion == "right")

    monkeypatch.setitem(_REWARDS, "code", fake)
    scorer = scorer_of("dataset", ["code", "cosine"], code={"unsafe": True})
    batch = scorer([of_tokens(5, "right"), of_tokens(5, "wrong")], [HALF] * 2)
    assert (batch.parts["cosine"] > 0).tolist() == [True, False] and not batch.messages
    assert sorted(calls) == [("right", True), ("wrong", True)]


@pytest.mark.parametrize(("task", "rewards", "own"), [
    ("dataset", ["judge", "cosine"], "gsm8k"), ("gsm8k", "length", "gsm8k"),
    ("arithmetic", ["format", f"{__name__}:says_right", "length"], "exact_match")])
def test_where_no_reward_of_the_run_says_what_is_right_it_is_asked_for(task, rewards, own):
    name = rewards if isinstance(rewards, str) else rewards[-1]
    options = {"judge": {"url": "http://127.0.0.1:1", "model": "m"}} if "judge" in rewards else {}
    with pytest.raises(ConfigError) as refused:
        scorer_of(task, rewards, **options)
    assert f"env.reward_options={{{name}: {{verdict: {own}}}}}" in str(refused.value)
    with_verdict = {name: {"verdict": "answer_tag"}}
    assert scorer_of(task, rewards, **options, **with_verdict)


def test_the_tasks_own_reward_says_what_is_right_if_it_is_one_of_the_run():
    own = f"{__name__}:says_right"
    assert options_of(judged_by(get_reward("length"), [own, "length"], own)) == {"verdict": own}


def test_a_verdict_that_nobody_gives_is_asked_for():
    with pytest.raises(ValueError, match="reward 'length' needs the option verdict"):
        RewardScorer([(get_reward("length"), 1.0)])


def test_a_verdict_that_asks_another_is_refused():
    cosine = with_options(get_reward("cosine"), {"verdict": "length"})
    with pytest.raises(ValueError, match="verdict=length of the reward 'cosine'.*name one"):
        RewardScorer([(cosine, 1.0)])


def test_options_are_those_of_the_function():
    with pytest.raises(ValueError, match="'cosine' has no option 'max_length'.* max_len"):
        with_options(get_reward("cosine"), {"max_length": 3})
    with pytest.raises(ValueError, match="'gsm8k' has no option.*(none)"):
        with_options(get_reward("gsm8k"), {"scale": 3})


@pytest.mark.parametrize(("name", "options"), [
    ("cosine", {"max_len": 0}), ("repetition_penalty", {"ngram_size": 0}),
    ("repetition_penalty", {"max_penalty": 1.0}),
    ("soft_overlong_punishment", {"soft_punish_cache": 0}),
    ("soft_overlong_punishment", {"max_completion_len": 5}), ("cosine", {"max_len": "1000"}),
    ("cosine", {"max_value_wrong": math.inf}), ("repetition_penalty", {"ngram_size": "3"}),
    ("repetition_penalty", {"max_penalty": -math.inf}), ("repetition_penalty", {"max_penalty": 1}),
    ("length", {"verdict": 5})])
def test_options_out_of_their_range_are_named_before_a_run(name, options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=(.|\n)*{name}|{name}(.|\n)*="):
        with_options(get_reward(name), options)


def test_rewards_of_tokens_refuse_texts_without_them():
    with pytest.raises(TypeError, match="counts tokens"):
        reward("repetition_penalty", "a text")


LONG = {
    "open tags": "<think>\n" + "\n</think>\n<answer>\n" * 50_000,
    "digits": "Step " + "1" * 1_000_000,
    "steps": "Step 1" * 160_000, "answers": "<answer>" * 120_000, "lines": "\n" * 1_000_000,
    "brackets": "(" * 1_000_000, "nulls": "\0" * 1_000_000, "surrogates": "\ud800" * 1_000_000,
    "numbers": "1,111" * 200_000}


@pytest.mark.parametrize("kind", LONG)
def test_no_built_in_that_is_called_on_the_spot_takes_a_second(kind):
    text = Completion(LONG[kind], token_ids=[i % 7 for i in range(300_000)])
    quick = [name for name in reward_names() if getattr(get_reward(name), "quick", False)
             and get_reward(name).__module__.startswith("grpo.")]
    assert {"format", "tag_count", "gsm8k", "cosine", "length", "answer_tag"} <= set(quick)
    for name in quick:
        fn = get_reward(name)
        options = {"verdict": "says_right"} if "verdict" in options_of(fn) else {}
        scorer = RewardScorer([(with_options(fn, options), 1.0)])
        started = time.process_time()
        batch = scorer([text], [HALF])
        assert time.process_time() - started < 1, name
        assert not batch.error.any(), batch.messages


@pytest.mark.slow
def test_values_are_those_of_trl():
    rewards = pytest.importorskip("trl.rewards", reason="needs `pip install trl`")
    ids = [[1, 2, 3, 1, 2, 3, 4], [5] * 9, [1], []]
    theirs = rewards.get_repetition_penalty_reward()(ids)
    assert [reward("repetition_penalty", Completion("", token_ids=one)) for one in ids] == (
        pytest.approx(theirs))
    counts = [*range(0, 130, 7), 80, 100]
    theirs = rewards.get_soft_overlong_punishment(100, 20)([[1] * count for count in counts])
    assert [reward("soft_overlong_punishment", of_tokens(count), max_completion_len=100,
                   soft_punish_cache=20) for count in counts] == pytest.approx(theirs)
    answers = [r"\boxed{\frac{1}{2}}", r"\boxed{2}"]
    theirs = rewards.get_cosine_scaled_reward(max_len=100)(
        [[{"content": answer}] for answer in answers for _ in range(3)], [r"\frac{1}{2}"] * 6,
        [[1] * count for _ in answers for count in (0, 30, 100)])
    cosine = with_options(get_reward("cosine"), {"max_len": 100})
    ours = [cosine(of_tokens(count), HALF, right) for right in (True, False)
            for count in (0, 30, 100)]
    assert ours == pytest.approx(theirs)
