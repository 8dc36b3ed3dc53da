"""Tests of the reward registry and of the safe execution of reward functions."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.envs.rewards import RewardResult, RewardScorer, exact_match, get_reward
from grpo.envs.rewards.registry import register_reward, reward_names

from .test_reward_scorer import problems


def constant(value):
    return lambda completion, problem: value


def compute_rewards(fns_with_weights, completions, problems):
    return RewardScorer(fns_with_weights, workers=1)(completions, problems)


def score_one(*fns_with_weights):
    return compute_rewards(fns_with_weights, ["42"], problems(1))


class TestLookUp:
    def test_by_name(self):
        assert get_reward("exact_match") is exact_match

    def test_by_import_path(self, tmp_path, monkeypatch):
        (tmp_path / "my_own_rewards.py").write_text("def shout(completion, problem): return 7.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        fn = get_reward("my_own_rewards:shout")
        assert compute_rewards([(fn, 1.0)], ["x"], problems(1)).reward.item() == 7.0
        del sys.modules["my_own_rewards"]

    def test_unknown_name_lists_the_known_ones(self):
        with pytest.raises(ValueError, match="unknown reward 'exact'; .*exact_match.*gsm8k"):
            get_reward("exact")

    def test_unknown_module_is_named(self):
        with pytest.raises(ValueError, match="no module 'no_such_package'.*PYTHONPATH"):
            get_reward("no_such_package.rewards:fn")

    @pytest.mark.parametrize("path", ["math:no_such_function", "math:pi"])
    def test_unknown_function_is_named(self, path):
        with pytest.raises(ValueError, match=f"'math' has no function '{path[5:]}'"):
            get_reward(path)

    @pytest.mark.parametrize("path", [":fn", "math:", "math:a:b", "../rewards.py:fn", ".math:sqrt"])
    def test_malformed_path_shows_the_form(self, path):
        with pytest.raises(ValueError, match="'package.module:function'"):
            get_reward(path)

    def test_missing_dependency_of_a_module_surfaces_unchanged(self, tmp_path, monkeypatch):
        (tmp_path / "needy_rewards.py").write_text("import no_such_dependency\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            get_reward("needy_rewards:fn")


class TestRegister:
    def test_registered_function_is_found_and_listed(self, monkeypatch):
        monkeypatch.setattr("grpo.envs.rewards.registry._REWARDS", {})
        fn = register_reward("mine")(constant(1.0))
        assert get_reward("mine") is fn
        assert reward_names() == ("mine",)

    def test_a_name_is_registered_once(self):
        with pytest.raises(ValueError, match="'gsm8k' is already registered"):
            register_reward("gsm8k")(constant(1.0))

    def test_a_name_is_no_import_path(self):
        with pytest.raises(ValueError, match="must not hold ':'"):
            register_reward("my:reward")


class TestSum:
    def test_dtypes_and_shapes(self):
        batch = compute_rewards([(exact_match, 1.0)], ["42", "41", "42"], problems(3))
        assert batch.reward.dtype == torch.float32
        assert batch.reward.tolist() == [1.0, 0.0, 1.0]
        assert batch.success.tolist() == [True, False, True]
        assert batch.error.tolist() == [False] * 3
        assert batch.messages == []

    @given(st.lists(st.tuples(st.floats(-100, 100), st.floats(-10, 10)), min_size=1, max_size=5))
    def test_is_weighted(self, terms):
        batch = score_one(*((constant(value), weight) for value, weight in terms))
        expected = math.fsum(value * weight for value, weight in terms)
        assert batch.reward.item() == pytest.approx(expected, rel=1e-5, abs=1e-4)

    @given(st.lists(st.sampled_from(["42", "41", "raise", "none"]), max_size=20))
    @example([])
    def test_rows_do_not_depend_on_each_other(self, completions):
        def fn(completion, problem):
            return {"42": 1.0, "41": 0.0, "none": None}[completion]  # KeyError on "raise"

        batch = compute_rewards([(fn, 1.0)], completions, problems(len(completions)))
        assert batch.reward.shape == batch.success.shape == (len(completions),)
        assert batch.reward.tolist() == [float(c == "42") for c in completions]
        assert batch.error.tolist() == [c in ("raise", "none") for c in completions]
        assert len(batch.messages) == int(batch.error.sum())

    @pytest.mark.parametrize("value", [1, True, torch.tensor(1.0).numpy()[()]])
    def test_any_real_number_is_a_reward(self, value):
        batch = score_one((constant(value), 2.0))
        assert (batch.reward.item(), batch.success.item()) == (2.0, True)


class TestSuccess:
    @pytest.mark.parametrize(("value", "success"), [(1.0, True), (1.5, True), (0.99, False)])
    def test_of_a_float_is_a_reward_of_at_least_one(self, value, success):
        assert score_one((constant(value), 0.1)).success.item() is success

    def test_is_that_of_the_first_function_that_reports_one(self):
        form = constant(1.0)
        right, wrong = constant(RewardResult(0.5, True)), constant(RewardResult(2.0, False))
        assert score_one((form, 1.0), (wrong, 1.0), (right, 1.0)).success.item() is False
        assert score_one((form, 1.0), (right, 1.0), (wrong, 1.0)).success.item() is True

    def test_without_a_report_the_first_reward_decides(self):
        assert score_one((constant(0.0), 1.0), (constant(1.0), 1.0)).success.item() is False


class TestFailures:
    @pytest.mark.parametrize(("value", "reason"), [
        (None, "returned None"),
        (math.nan, "nan, which is not finite"),
        (math.inf, "inf, which is not finite"),
        (RewardResult(-math.inf, True), "-inf, which is not finite"),
        (1e39, "not finite in float32"),
        (10**400, "not finite in float32"),
        ("1.0", "returned '1.0'; return a float"),
        ((1.0, True), "returned (1.0, True); return a float")])
    def test_value_that_is_no_reward_marks_its_row_alone(self, value, reason):
        def second(completion, problem):
            return value if problem.id == "p1" else 1.0

        batch = compute_rewards([(exact_match, 1.0), (second, 0.5)], ["42", "42"], problems(2))
        assert batch.error.tolist() == [False, True]
        assert batch.reward.tolist() == [1.5, 0.0]
        assert batch.success.tolist() == [True, False]
        (message,) = batch.messages
        assert all(part in message for part in ("second", "'p1'", reason))

    def test_exception_is_reported_with_function_problem_reason_and_place(self):
        def parse(completion, problem):
            return float(int(completion))

        batch = compute_rewards([(parse, 1.0)], ["7", "seven"], problems(2))
        assert batch.error.tolist() == [False, True]
        assert batch.reward.tolist() == [7.0, 0.0]
        (message,) = batch.messages
        for part in ("parse", "'p1'", "ValueError: invalid literal", "test_reward_registry.py:"):
            assert part in message

    def test_registered_functions_are_called_by_their_name(self):
        class Broken:
            id = "p9"

        (message,) = compute_rewards([(exact_match, 1.0)], ["42"], [Broken()]).messages
        assert message.startswith("reward 'exact_match', problem 'p9': AttributeError")

    def test_interrupts_are_not_swallowed(self):
        def interrupted(completion, problem):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            score_one((interrupted, 1.0))

    def test_sum_that_overflows_is_an_error(self):
        batch = score_one((constant(3e38), 1.0), (constant(3e38), 1.0))
        assert batch.error.item()
        assert "'p0'" in batch.messages[0]

    def test_functions_are_required(self):
        with pytest.raises(ValueError, match="fns_with_weights is empty"):
            compute_rewards([], ["42"], problems(1))

    def test_weight_is_finite(self):
        with pytest.raises(ValueError, match="weight=nan of reward 'exact_match'"):
            score_one((exact_match, math.nan))

    def test_each_completion_has_its_problem(self):
        with pytest.raises(ValueError, match="2 completions but 3 problems"):
            compute_rewards([(exact_match, 1.0)], ["42", "41"], problems(3))
