"""Keys whose value is a table have it whole, from Python and from recipe files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel

from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import TABLES, ConfigError
from grpo.run import api
from grpo.run.api import compose, own_keys, run

from .configs import composed_like

ROWS = [{"prompt": f"{n}+1="} for n in range(9)]
#: Key -> a table for it, and keys that it needs beside it.
GIVEN = {
    "env.name": ({"chain_sum": 2.0}, {"env.dataset": "reasoning_gym"}),
    "env.dataset_mixture": ({"datasets": [{"id": "org/sums"}], "seed": 1},
                            {"env.dataset": "dataset"}),
    "env.reward": ({"exact_match": 1.0, "my.pkg:brevity": 0.1}, {}),
    "env.reward_options": ({"cosine": {"max_len": 77}}, {"env.reward": "cosine"}),
    "eval.benchmarks": ({"countdown": {}, "lm_eval:a b": {"limit": 3}}, {}),
    "train.mismatch": ({"tis": 2.0}, {"train.proximal": "scored"}),
    "train.objective_options": ({"delta": 3.0}, {}),
}


def tables(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Keys of the schema that take a table."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from tables(field.annotation, f"{path}{name}.")
        elif any(getattr(kind, "__origin__", kind) is dict for kind in kinds):
            yield f"{path}{name}"


def test_the_keys_that_take_a_table_are_those_of_the_schema():
    assert {*tables(AsyncConfig)} - {"env.task"} == TABLES == GIVEN.keys()


@pytest.mark.parametrize("sections", [False, True], ids=["dotted", "in sections"])
@pytest.mark.parametrize("key", GIVEN)
def test_from_python_it_is_the_value(key, sections):
    table, beside = GIVEN[key]
    section, _, name = key.partition(".")
    given = {section: {name: table}} if sections else {key: table}
    config = compose(own_keys(beside | given))
    assert getattr(getattr(config, section), name) == table


@pytest.mark.parametrize("text", ["{key}: {table}\n", "{section}:\n  {name}: {table}\n"],
                         ids=["dotted", "in sections"])
@pytest.mark.parametrize("key", GIVEN)
def test_in_a_recipe_file_it_is_the_value(key, text, tmp_path):
    table, beside = GIVEN[key]
    section, _, name = key.partition(".")
    path = tmp_path / "recipe.yaml"
    path.write_text(text.format(key=key, section=section, name=name, table=json.dumps(table)))
    typed = [f"{key}={value}" for key, value in beside.items()]
    typed = [text.replace("env.dataset=", "env=") for text in typed]
    config = composed_like(["--config", str(path), "max_steps=1", *typed])
    assert getattr(getattr(config, section), name) == table


@pytest.mark.parametrize("given", [
    {"env.task": {"num_test": 8}}, {"env": {"task": {"num_test": 8}}}])
def test_options_of_a_task_are_merged(given):
    task = compose(own_keys(given)).env.task
    assert task["num_test"] == 8 and "seed" in task


def test_an_option_of_a_task_may_be_a_table():
    flags = {"env": {"max_num_workers": 8}}
    assert own_keys({"env": {"task": {"flags": flags}}}) == {"env.task.flags": flags}


def test_an_empty_table_changes_nothing_but_is_a_name():
    assert compose(own_keys({"train_model.lora": {}, "train": {}})) == compose({})
    with pytest.raises(ConfigError, match=r"train\.sead: unknown key"):
        compose(own_keys({"train": {"sead": {}}}))


def test_a_table_of_rewards_is_refused_beside_reward_functions(tmp_path):
    keys = own_keys({"env.reward": {"exact_match": 1.0}})
    with pytest.raises(ConfigError, match="env.reward=.*and reward= are the same setting"):
        run(keys, [lambda completion, problem: 0.0], ROWS, None, tmp_path / "run")


def test_a_table_of_rewards_scores_rows_without_answers(tmp_path, monkeypatch):
    class Accepted(Exception):
        pass

    def accepted(config, *_, **__):
        raise Accepted(config.env.reward)

    monkeypatch.setattr(api, "open_run", accepted)
    with pytest.raises(Accepted, match="format"):
        run(own_keys({"env.reward": {"format": 1.0}}), [], ROWS, None, tmp_path / "run")
