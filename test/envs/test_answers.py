"""Tests of the rewards that compare a completion with the known answer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.envs.rewards import answer_tag, exact_match, gsm8k, negative_length, normalize_number
from grpo.envs.tasks import Problem


def problem(answer="18"):
    return Problem(prompt="...", answer=answer, id="p0")


class TestAnswerTag:
    @pytest.mark.parametrize(("completion", "content"), [
        ("<answer>18</answer>", "18"),
        ("<think>a</think>\n<answer>\n18\n</answer> so", "18"),
        ("<answer>1</answer><answer>2</answer>", "1"),
        ("</answer><answer>18</answer>", "18"),
        ("<answer></answer>", ""),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>18", None),
        ("18</answer>", None),
        ("<ANSWER>18</ANSWER>", None),
        ("18", None),
        ("", None)])
    def test_first_complete_block(self, completion, content):
        assert answer_tag(completion) == content

    @given(st.text(), st.text(), st.text())
    def test_finds_whatever_stands_in_the_block(self, before, content, after):
        completion = f"{before}<answer>{content}</answer>{after}"
        if "<answer>" not in before and "</answer>" not in content:
            assert answer_tag(completion) == content.strip()

    def test_is_linear_in_text_that_never_closes_the_tag(self):
        assert answer_tag("<answer>" * 200_000) is None


class TestNormalizeNumber:
    @pytest.mark.parametrize(("text", "normal"), [
        ("18", "18"), ("  18\n", "18"), ("1,080", "1080"), ("$18", "18"), ("$ 18", "18"),
        ("18%", "18"), ("18 %.", "18"), ("18.", "18"), ("18.0", "18"), ("18.00.", "18"),
        ("18.50", "18.5"), ("0.0", "0"), ("100", "100"), ("1,000.10", "1000.1"), ("100.00", "100"),
        ("-6.0", "-6"), ("1.2.300", "1.2.300"), ("ten.", "ten"), ("$", ""), ("", "")])
    def test_golden_table(self, text, normal):
        assert normalize_number(text) == normal

    @given(st.integers(), st.integers(0, 6), st.sampled_from(["", "$"]), st.sampled_from(["", "%"]))
    def test_notation_of_an_integer_does_not_matter(self, number, zeros, dollar, percent):
        text = f" {dollar}{number:,}.{'0' * zeros}{percent}\n"
        assert normalize_number(text) == str(number)

    @given(st.decimals(allow_nan=False, allow_infinity=False, places=4))
    def test_keeps_the_value_of_a_number(self, number):
        assert float(normalize_number(f"{number:f}")) == float(number)


class TestGsm8k:
    @pytest.mark.parametrize(("completion", "gold", "reward", "success"), [
        ("<think>3*6</think><answer>18</answer>", "18", 1.0, True),
        ("<answer>$18.00</answer>", "18", 1.0, True),
        ("<answer>1080</answer>", "1,080", 1.0, True),
        ("<answer>1080</answer>", "2 * 540 #### no\n#### 1,080\n", 1.0, True),
        ("<answer>540</answer>", "540\n#### 1080", 0.1, False),
        ("<answer>19</answer>", "18", 0.1, False),
        ("<answer>180</answer>", "18", 0.1, False),
        ("<answer>19</answer><answer>18</answer>", "18", 0.1, False),
        ("<answer>18 dollars</answer>", "18", 0.1, False),
        ("<answer> </answer>", "18", 0.0, False),
        ("<answer>$</answer>", "18", 0.0, False),
        ("<answer>18", "18", 0.0, False),
        ("18", "18", 0.0, False),
        ("", "18", 0.0, False)])
    def test_golden_table(self, completion, gold, reward, success):
        assert gsm8k(completion, problem(gold)) == (reward, success)

    @given(st.lists(st.sampled_from(["<answer>", "</answer>", "18", "1", "$", ".0", " ", "x"])))
    def test_any_text_has_one_of_three_rewards(self, pieces):
        completion = "".join(pieces)
        expected = [(1.0, True), (0.1, False)] if answer_tag(completion) else []
        assert gsm8k(completion, problem()) in [*expected, (0.0, False)]


class TestExactMatch:
    @pytest.mark.parametrize(
        ("completion", "reward"),
        [("42", 1.0), (" 42\n", 1.0), ("042", 0.0), ("42.", 0.0), ("4 2", 0.0), ("", 0.0)])
    def test_golden_table(self, completion, reward):
        assert exact_match(completion, problem("42")) == (reward, reward == 1.0)


class TestNegativeLength:
    @given(st.text())
    @example("")
    @example(" ")
    def test_every_character_costs_one(self, completion):
        result = negative_length(completion, problem())
        assert result.reward + len(completion) == 0
        assert result.success == (len(completion) == 0)
