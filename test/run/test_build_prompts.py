"""Prompts of a run: a model without a chat template gets one, here and in workers."""

from __future__ import annotations

import copy

import pytest

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import load_config
from grpo.run import build
from grpo.run.build_async import _sent

from ..config.configs import small

SEEDS = {"num_train_seeds": 4, "num_test_seeds": 2}


@pytest.fixture
def base(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    return bare


def prompts_of(tokenizer, folder, **env) -> build.Prompts:
    config = load_config(small(env={"dataset": "countdown", "task": SEEDS, **env}))
    return build.build_prompts(config, build.build_task(config), tokenizer, str(folder))


def test_a_base_model_is_asked_in_plain_text_and_a_line_says_so(base, model_folder, caplog):
    prompt = prompts_of(base, model_folder).train[0]
    text = base.decode(prompt.tokens)
    assert text.startswith("System: ") and text.endswith("\n\nAssistant:")
    assert caplog.text.count("has no chat template: prompts are plain text") == 1
    assert base.chat_template is not None  # which is what checkpoints save


def test_a_chosen_template_is_used_and_nothing_is_said(base, model_folder, caplog):
    prompts = prompts_of(base, model_folder, chat_template="{{ messages[-1]['content'] }}!")
    assert base.decode(prompts.train[0].tokens).startswith("Reach ")
    assert base.decode(prompts.train[0].tokens).endswith("!") and not caplog.text


def test_the_system_prompt_is_the_tasks_own_option_where_it_has_one(tokenizer, model_folder):
    for given, roles in (("Count.", ["system", "user"]), ("", ["user"])):
        prompt = prompts_of(copy.deepcopy(tokenizer), model_folder, system_prompt=given).test[0]
        assert [message["role"] for message in prompt.problem.prompt] == roles
    assert prompt.problem.prompt[0]["content"].startswith("Reach ")


def test_workers_get_the_template_and_not_the_name_of_a_file_that_others_lack(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    config = load_config(small(env={"dataset": "countdown", "task": SEEDS,
                                    "chat_template": str(tmp_path / "own.jinja")}), AsyncConfig)
    assert _sent(config)["env"]["chat_template"] == "{{ messages }}"
