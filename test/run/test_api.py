"""Runs from Python: ``grpo.train`` and the ten lines of TRL's users."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import grpo
from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import ConfigError
from grpo.envs.rewards import get_reward
from grpo.run import api
from grpo.run.api import compose, of_rows, own_keys, reward_name, train
from grpo.run.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(8)
        for b in range(5)]
#: The same code on less work.
SMALL = {"device": "cpu", "inference_model.backend": "transformers", "model.warm_start_steps": 5,
         "inference_model.max_tokens": 4}
STEPS = {"train.max_steps": 2, "env.num_envs": 2, "env.repeats": 2}


def right(completion, problem):
    assert problem.row["level"] in range(8)
    return float(completion.strip() == problem.answer)


def levels(prompts, completions, level, **kwargs):
    return [None if one > 6 else float(len(text) < 4)
            for text, one in zip(completions, level, strict=True)]


# -- configurations --------------------------------------------------------------------------------


def test_keys_may_be_dotted_in_sections_groups_or_trls_names(capsys):
    keys = own_keys({"preset": "dapo", "env": {"repeats": 4}, "train.seed": 3,
                     "learning_rate": 1e-4})
    config = compose(keys)
    assert (config.env.repeats, config.train.seed, config.optimizer.lr) == (4, 3, 1e-4)
    assert config.train.clip_epsilon == (0.2, 0.28)
    said = capsys.readouterr().out
    assert "learning_rate is now called optimizer.lr" in said and "preset dapo: train.obj" in said


def test_a_task_by_its_name_brings_what_goes_with_it():
    assert compose({"env.dataset": "countdown"}) == compose({"env": "countdown"})


def test_a_recipe_may_be_asynchronous():
    assert isinstance(compose({"train.staleness": 0}, "grpo_async"), AsyncConfig)


@pytest.mark.parametrize("config, message", [
    ({"train.sead": 1}, "train.sead: unknown key.*'seed'"),
    ({"learning_rate": 1e-4, "optimizer.lr": 1e-5}, "give one"),
    ({"top_p": 0.5}, "top_p=0.5: tokens are sampled")])
def test_a_wrong_key_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        train(config)


@pytest.mark.parametrize("given, message", [
    ({"dataset": []}, "dataset: it has no rows"),
    ({"dataset": [{"prompt": "a"}, {"question": "b"}]}, "row 1 has no column 'prompt'.*question"),
    ({"dataset": [{"prompt": "a", "image": object()}]}, "texts, numbers, lists and tables"),
    ({"eval_dataset": ROWS}, "eval_dataset without dataset"),
    ({"reward": 3}, "give a function"),
    ({"reward": right, "config": {"env.reward": "gsm8k"}}, "same setting"),
    ({"reward": lambda completion, problem: 0.0, "dataset": ROWS,
      "config": {"inference_model.num_devices": 2}}, "put it into a module")])
def test_what_cannot_run_is_refused_before_anything_is_built(given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(run_dir=tmp_path / "run", **given)


def test_rows_become_files_that_every_process_reads(tmp_path):
    keys = of_rows(ROWS, None, tmp_path)
    assert keys["env.task.num_test"] == 4 and keys["env.answer_column"] == "answer"
    assert [json.loads(line) for line in (tmp_path / "train.jsonl").open()] == ROWS
    keys = of_rows(({"prompt": one["prompt"]} for one in ROWS), ROWS[:3], tmp_path)
    assert keys["env.task.test_split"] == "test" and "env.answer_column" not in keys


def test_a_function_goes_by_its_path_or_else_by_a_name_of_its_own():
    assert reward_name("gsm8k") == "gsm8k"
    assert reward_name(get_reward("gsm8k")) == "grpo.envs.rewards.answers:gsm8k"

    def gsm8k(completion, problem):
        return 1.0

    assert reward_name(gsm8k) == reward_name(gsm8k) == "gsm8k_2"
    assert get_reward("gsm8k_2") is gsm8k
    method = SimpleNamespace(score=lambda completion, problem: 1.0)
    assert get_reward(reward_name(method.score)) is method.score


def test_the_package_names_train_without_importing_anything():
    code = "import sys, grpo; print({'torch', 'hydra', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
    assert grpo.train is train and "train" in grpo.__all__


# -- TRL's trainer ---------------------------------------------------------------------------------


def test_settings_are_trls_with_its_defaults():
    args = GRPOConfig("out", learning_rate=2e-6)
    assert (args.learning_rate, args.num_generations, args.loss_type) == (2e-6, 8, "dapo")
    with pytest.raises(AttributeError, match="docs/trl.md"):
        _ = args.learning_rat
    with pytest.raises(ConfigError, match="learning_rat: unknown name"):
        GRPOConfig("out", learning_rat=1)


@pytest.mark.parametrize("given, error, message", [
    ({"callbacks": [1]}, ConfigError, "callbacks: it has nothing here; .*metrics.jsonl"),
    ({"args": SimpleNamespace()}, ConfigError, "use grpo.run.trl.GRPOConfig"),
    ({"train_dataset": None}, ConfigError, "train_dataset: there is none"),
    ({"modle": 1}, TypeError, "no argument 'modle'")])
def test_arguments_that_have_nothing_here_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        GRPOTrainer(**{"model": "embedded", "reward_funcs": levels, "train_dataset": ROWS} | given)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the trainer asks of ``train``, which does not run."""
    found = {}

    def instead(keys, **given):
        found.update(keys=keys, **given)
        (tmp_path / "final_model").mkdir()
        (tmp_path / "final_model" / "config.json").write_text("{}")
        return api.Result(tmp_path, compose({}), [], tmp_path / "final_model")

    monkeypatch.setattr("grpo.run.trl.train", instead)
    return found


def test_the_trainer_asks_for_what_its_settings_say(asked, tmp_path, capsys):
    lora = SimpleNamespace(r=4, lora_alpha=8, lora_dropout=0.0, target_modules={"v_proj", "q_proj"})
    trainer = GRPOTrainer(
        "some/model", levels, GRPOConfig(
            tmp_path / "out", num_generations=4, max_steps=3, overrides={"env.num_envs": 7}),
        ROWS, processing_class=SimpleNamespace(chat_template="{{ x }}"), peft_config=lora)
    with pytest.raises(RuntimeError, match="call train"):
        trainer.save_model()
    trainer.train(resume_from_checkpoint=True)
    keys = asked["keys"]
    assert asked["run_dir"] == tmp_path / "out" and asked["dataset"] is ROWS
    assert keys["model.name"] == "some/model" and keys["env.chat_template"] == "{{ x }}"
    assert (keys["env.num_envs"], keys["env.repeats"], keys["resume"]) == (7, 4, "auto")
    assert keys["train_model.lora.target_modules"] == ["q_proj", "v_proj"]
    assert keys["train.seed"] == 42 and keys["optimizer.lr"] == 1e-6  # TRL's
    assert "TRL's defaults for what is left open: " in capsys.readouterr().out
    assert (trainer.save_model(tmp_path / "saved") / "config.json").is_file()


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_returns_what_the_run_has_left(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    result = train(SMALL | STEPS, reward=[right, levels], dataset=ROWS, eval_dataset=ROWS[:5],
                   run_dir=tmp_path / "run")
    assert [row["step"] for row in result.history] == [0, 1, 2]
    assert {"reward/right/mean", "reward/levels/mean"} <= result.history[-1].keys()
    assert result.history[-1]["reward/raised"] == 0
    assert (result.final_model / "model.safetensors").is_file()
    assert result.config.env.repeats == 2 and (result.run_dir / "report.html").is_file()
    with pytest.raises(FileExistsError, match="already holds the metrics of a run"):
        train(SMALL | STEPS, reward=right, dataset=ROWS, run_dir=tmp_path / "run")


@pytest.mark.slow
def test_the_ten_lines_train_a_model_of_transformers_and_go_on(tmp_path, model_folder):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def trainer(steps: int) -> GRPOTrainer:
        own = {key: value for key, value in SMALL.items() if not key.startswith("model.")}
        return GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model_folder), levels,
            GRPOConfig(tmp_path / "out", per_device_train_batch_size=4, num_generations=2,
                       steps_per_generation=2, max_steps=steps, save_steps=2,
                       lr_scheduler_type="constant", overrides=own),
            Dataset.from_list(ROWS), processing_class=AutoTokenizer.from_pretrained(model_folder))

    first = trainer(2).train()
    assert [row["step"] for row in first.history] == [0, 1]  # of two optimizer steps each
    assert first.config.train.proximal == "scored" and first.config.env.num_envs == 4
    second = trainer(4)
    assert [row["step"] for row in second.train(resume_from_checkpoint=True).history] == [0, 1, 2]
    saved = second.save_model()
    assert saved == tmp_path / "out" and AutoModelForCausalLM.from_pretrained(saved)
