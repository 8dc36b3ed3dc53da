"""Rewards in processes that can be ended: what ill-behaved functions cost, and nothing more."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from grpo import data
from grpo.envs.rewards import RewardScorer, get_reward
from grpo.envs.rewards.registry import path_of
from grpo.envs.tasks import Problem

from ..support import runs, wait_until
from . import ill_behaved as same_code

LIMIT = 1 << 30
TEXTS = ["b", "a", "d", "c"]  # of which the second and the last are not spared


def problems(count, answer="42"):
    return [Problem(prompt="6*7=", answer=answer, id=f"p{i}") for i in range(count)]


@pytest.fixture
def scored(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def score(name: str, texts=TEXTS, *, timeout: float = 30.0, processes: int = 2):
        fn = get_reward(f"ill_behaved:{name}")
        scorer = RewardScorer([(fn, 1.0)], timeout=timeout, processes=processes, memory=LIMIT)
        assert scorer._functions[0].path == f"ill_behaved:{name}"
        started = time.monotonic()
        batch = scorer(texts, problems(len(texts), str(tmp_path)))
        assert time.monotonic() - started < 60
        return batch

    return score


@pytest.mark.parametrize(("name", "fault", "said"), [
    ("raises", data.FAULT_FAILED, "KeyError: 'a fault of my own'"),
    ("exits", data.FAULT_FAILED, "SystemExit: 3"),
    ("is_nan", data.FAULT_INVALID, "not finite in float32"),
    ("ends", data.FAULT_ENDED, "its process has ended, exit code -6"),
    ("eats_20_gib", data.FAULT_FAILED, "MemoryError: .*its process may take 1 GiB"),
    pytest.param("eats_bit_by_bit", data.FAULT_FAILED, "may take 1 GiB", marks=pytest.mark.slow)])
def test_a_bad_call_costs_its_row(scored, name, fault, said):
    batch = scored(name)
    assert batch.fault.tolist() == [0, fault, 0, fault]
    assert batch.reward.tolist() == [1.0, 0.0, 1.0, 0.0]
    (failure,) = batch.failures.values()
    assert re.search(said, failure)


@pytest.mark.parametrize("name", [
    "loops_in_c", "backtracks", "forks"])
@pytest.mark.slow
def test_a_call_that_does_not_return_is_ended(scored, name, tmp_path):
    batch = scored(name, timeout=2.0)
    assert batch.fault.tolist() == [0, data.FAULT_LATE, 0, data.FAULT_LATE]
    (failure,) = batch.failures.values()
    assert "took longer than 2 s" in failure
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4 * (name == "forks")
    wait_until(lambda: not any(map(runs, pids)))


def test_a_copy_that_a_function_makes_gives_no_second_answer(scored):
    batch = scored("forks_and_returns", ["a", "b"] * 10)
    assert batch.reward.tolist() == [1.0] * 20


def test_the_failure_shows_where_it_was_raised(scored):
    (failure,) = scored("raises").failures.values()
    assert "ill_behaved.py" in failure and 'raise KeyError("a fault of my own")' in failure
    assert "apart" not in failure.partition("problem")[2]


@pytest.mark.slow
def test_calls_wait_side_by_side_in_as_many_processes(monkeypatch, tmp_path):
    (tmp_path / "sleepy.py").write_text(
        "import time\ndef score(completion, problem): time.sleep(0.1); return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    scorer = RewardScorer([(get_reward("sleepy:score"), 1.0)], processes=16)
    scorer(["x"] * 16, problems(16))  # starts them
    started = time.monotonic()
    assert scorer(["x"] * 64, problems(64)).reward.tolist() == [1.0] * 64
    assert time.monotonic() - started < 1.5
    del sys.modules["sleepy"]


def test_draws_are_those_of_the_sample(monkeypatch, tmp_path):
    (tmp_path / "lucky.py").write_text(
        "import random\ndef score(completion, problem): return random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    fn = get_reward("lucky:score")
    first, again = (RewardScorer([(fn, 1.0)], processes=count)(list("aabc"), problems(4)).reward
                    for count in (1, 3))
    assert first.tolist() == again.tolist() and len(set(first.tolist())) == 4
    del sys.modules["lucky"]


def test_what_others_cannot_find_is_called_here():
    assert path_of(same_code.raises) is None  # its package hides behind one of Python's own
    scorer = RewardScorer([(lambda completion, problem: 1.0, 1.0)], processes=2)
    assert scorer._apart is None and scorer(["a"], problems(1)).reward.tolist() == [1.0]


def test_problems_that_cannot_be_sent_are_scored_here(scored, caplog):
    fn = get_reward("ill_behaved:raises")
    problem = Problem(prompt="", answer="", id="p", verifier=lambda text: 1.0)
    batch = RewardScorer([(fn, 1.0)], processes=2)(["b"], [problem])
    assert batch.reward.tolist() == [1.0]
    assert "is called in the run's own process" in caplog.text


# -- mathematics -----------------------------------------------------------------------------------

ANSWERS = [
    (r"\boxed{\frac{1}{2}}", "0.5", True), (r"so $0.5$", "0.5", False),
    (r"The answer is $0.5$", r"\frac{1}{2}", True),
    (r"\boxed{3}", "0.5", False), ("0.5 without LaTeX", "0.5", False), ("", "0.5", False),
    (r"\boxed{1,080}", "1080", True), (r"\boxed{x^2+2x+1}", "$(x+1)^2$", True),
    (r"\boxed{9^{9^{9^{9}}}}", "0.5", False), (r"\boxed{" + "(" * 3000, "0.5", False)]


@pytest.mark.slow
def test_answers_are_compared_as_mathematics():
    pytest.importorskip("math_verify", reason="needs `pip install math-verify`")
    asked = [Problem(prompt="", answer=gold, id=f"p{i}") for i, (_, gold, _) in enumerate(ANSWERS)]
    scorer = RewardScorer([(get_reward("accuracy"), 1.0)])
    batch = scorer([text for text, *_ in ANSWERS], asked)
    assert not batch.error.any(), batch.messages
    assert batch.success.tolist() == [right for *_, right in ANSWERS]
    unreadable = Problem(prompt="", answer="", id="none")
    assert scorer([r"\boxed{1}"], [unreadable]).fault.tolist() == [data.FAULT_SKIPPED]


BARE = [  # as in the columns of MATH and of word problems: answer, said so, taken for it until now
    (r"2\sqrt{3}", r"2\sqrt{3}", "2"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", "3"),
    ("x^2+1", "1+x^2", "2"), (r"\sqrt{2}", r"\sqrt{8}/2", "2"), ("(1,2)", "(1, 2)", "1"),
    (r"\frac43", r"\frac{4}{3}", "4"), (r"\frac43", r"\frac43", "3"), ("6 - 5i", "-5i + 6", "5"),
    (r"\begin{pmatrix} 1 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2/3 \end{pmatrix}",
     "2/3"), (r"\$32,\!348", "32348", "32"), ("3,5,7", "7, 5, 3", "3.5"), ("1,080", "1080", "1"),
    (r"\text{(C)}", "C", "B"), ("18 dollars", "18", "1"), ("$2\\sqrt{3}$", r"\sqrt{12}", "2"),
    ("The answer is 7.", "7", "8"), (r"90^\circ", "90", "9"), (r"10\%", "10", "1"),
    (r"10\%", r"10\%", "1"), ("2:30 p.m.", "2:30 p.m.", "2")]


@pytest.mark.slow
def test_a_bare_answer_is_read_whole():
    pytest.importorskip("math_verify", reason="needs `pip install math-verify`")
    from grpo.envs.rewards.mathematics import accuracy

    found = {}
    for gold, *said in BARE:
        asked = Problem(prompt="", answer=gold, id="p")
        found[gold, said[0]] = [accuracy(rf"\boxed{{{one}}}", asked) for one in said]
    assert {key: [one and one.reward for one in values] for key, values in found.items()} == (
        dict.fromkeys(found, [1.0, 0.0]))


@pytest.mark.slow
def test_accuracy_is_that_of_trl():
    theirs = pytest.importorskip("trl.rewards", reason="needs `pip install trl`").accuracy_reward
    from grpo.envs.rewards.mathematics import accuracy

    for text, gold, _ in ANSWERS[:-2]:
        (expected,) = theirs([[{"content": text}]], [gold])
        assert accuracy(text, Problem(prompt="", answer=gold, id="p")).reward == expected, text


FUZZED = {
    "bytes": bytes(range(256)).decode("latin-1") * 4000, "brackets": r"\boxed{" * 100_000,
    "fractions": r"\boxed{" + r"\frac{1}{" * 1500 + "2" + "}" * 1501,
    "powers": r"\boxed{" + "9^{" * 500 + "9" + "}" * 501, "digits": "$" + "1" * 1_000_000 + "$",
    "dollars": "$" * 1_000_000, "commas": r"\boxed{" + "1," * 400_000 + "}",
    "factorials": r"\boxed{((((99!)!)!)!)!}", "sums": r"\boxed{" + "1+" * 5000 + "1}",
    "roots": r"\boxed{" + r"\sqrt{" * 800 + "2" + "}" * 801}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUZZED)
def test_no_text_takes_accuracy_a_second(kind):
    pytest.importorskip("math_verify", reason="needs `pip install math-verify`")
    scorer = RewardScorer([(get_reward("accuracy"), 1.0)], workers=2)
    scorer([r"\boxed{1}"], problems(1))
    started = time.monotonic()
    batch = scorer([FUZZED[kind]], problems(1))
    seconds = time.monotonic() - started
    # Half a second of computing, and of others that share the processor.
    assert seconds < 1 or os.getloadavg()[0] > 1 and seconds < 5
    assert batch.reward.tolist() == [0.0] and not batch.error.any()
