"""Tests of the task base class and its registry."""

from __future__ import annotations

import pytest

from grpo.envs.rewards import reward_names
from grpo.envs.tasks import ArithmeticTask, Problem, Task, make_task, register_task
from grpo.envs.tasks.base import check_count


def one_problem_task(**splits):
    problem = Problem(prompt="1+1=", answer="2", id="p0")
    return Task(source="a test", **{"train": [problem], "test": [problem]} | splits)


class TestProblem:
    def test_chat_problems_can_be_members_of_a_set(self):
        chat = ({"role": "user", "content": "1+1?"},)
        one, same = (Problem(prompt=chat, answer="2", id="p0") for _ in range(2))
        assert len({one, same}) == 1

    def test_is_immutable(self):
        with pytest.raises(AttributeError):
            Problem(prompt="1+1=", answer="2", id="p0").answer = "3"


class TestSplit:
    @pytest.mark.parametrize("split", ["train", "test"])
    def test_empty_split_names_task_split_source_and_fix(self, split):
        task = one_problem_task(**{split: []})
        with pytest.raises(ValueError) as error:
            task.split(split)
        for part in (repr(task.name), repr(split), "a test", f"num_{split}"):
            assert part in str(error.value)
        assert task.split({"train": "test", "test": "train"}[split])[0].id == "p0"

    def test_unknown_split_lists_the_known_ones(self):
        with pytest.raises(ValueError, match="'validation'; use 'train' or 'test'"):
            one_problem_task().split("validation")


class TestRegistry:
    def test_builds_the_task_with_its_options(self):
        task = make_task("arithmetic", max_operand=9, num_train=50, num_test=20)
        assert isinstance(task, ArithmeticTask)
        assert task.name == "arithmetic"
        assert (len(task.train), len(task.test)) == (50, 20)

    def test_unknown_task_lists_the_known_ones(self):
        with pytest.raises(ValueError, match=r"unknown task 'gsm9k'.*arithmetic.*gsm8k"):
            make_task("gsm9k")

    def test_option_that_would_be_ignored_is_an_error(self):
        with pytest.raises(ValueError, match="'arithmetic' has no option 'data_path'.*'/data'"):
            make_task("arithmetic", data_path="/data")

    @pytest.mark.parametrize(("name", "options"), [
        ("arithmetic", {"operators": 5}), ("arithmetic", {"operators": [5]}),
        ("countdown", {"num_numbers": None}), ("countdown", {"num_numbers": ["3"]}),
        ("sat", {"difficulty": "1"}), ("gsm8k", {"num_train": "10"}),
        ("dataset", {"dataset_mixture": "a/b"}), ("verifiers", {"args": [1]})])
    def test_an_option_of_another_type_is_named_before_anything_is_loaded(self, name, options):
        (option, _), = options.items()
        with pytest.raises(ValueError, match=f"env.task.{option}=.* should be a "):
            make_task(name, **options)

    def test_unnamed_options_of_a_constructor_do_not_hide_a_typo(self, monkeypatch):
        monkeypatch.setattr("grpo.envs.tasks.base._TASKS", {})

        @register_task("loose")
        class Loose(Task):
            default_reward = "exact_match"

            def __init__(self, *, size=1, **ignored):
                super().__init__(train=[], test=[], source="a test")

        assert make_task("loose", size=2).name == "loose"
        with pytest.raises(ValueError, match="no option 'sise'.*use one of: size$"):
            make_task("loose", sise=2)

    def test_a_name_is_registered_once(self):
        with pytest.raises(ValueError, match="already registered by ArithmeticTask"):
            register_task("arithmetic")(type("Other", (Task,), {}))

    @pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
    def test_default_reward_is_registered(self, name):
        assert make_task(name, num_train=0, num_test=0).default_reward in reward_names()


@pytest.mark.parametrize("value", [-1, 1.0, "3", True, None])
def test_check_count_refuses_what_is_no_count(value):
    with pytest.raises(ValueError, match="num_train="):
        check_count("num_train", value)
