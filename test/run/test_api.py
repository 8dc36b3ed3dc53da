"""Runs from Python: ``grpo.train`` and the ten lines of TRL's users."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import grpo
from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import ConfigError
from grpo.envs.rewards import get_reward
from grpo.run import api
from grpo.run.api import compose, own_keys, train
from grpo.run.given import as_rewards, as_rows, of_rows, reward_name, write_rows
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


@pytest.mark.parametrize("keys", [{"ray.max_restarts": 5}, {"ray": {"max_restarts": 5}},
                                  {"train.staleness": 1}])
def test_no_key_makes_a_recipe_asynchronous_that_is_not(keys):
    assert type(compose(keys, "grpo_async_gsm8k")) is AsyncConfig
    with pytest.raises(ConfigError, match=r"unknown key .*from Python: recipe='grpo_async'"):
        compose(keys, "grpo_gsm8k")


@pytest.mark.parametrize("config, message", [
    ({"train.sead": 1}, "train.sead: unknown key.*'seed'"),
    ({"learning_rate": 1e-4, "optimizer.lr": 1e-5}, "give one"),
    ({"env": "gsm8"}, "env=gsm8: there is no group 'gsm8' of env; did you mean env=gsm8k. Known: "),
    ({"preset": "zzz"}, "preset=zzz: there is no group 'zzz' of preset; known: .*dapo, "),
    ({"model": "gpt2"}, "model=gpt2: model is a section; write .* such as model.name=gpt2"),
    ({"optimizer": "adafactor"}, "write optimizer.name=adafactor"),
    (["train.seed=1"], "config is a list: give a dictionary of keys"),
    ({"top_p": 0.5}, "top_p=0.5: tokens are sampled")])
def test_a_wrong_key_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        train(config)


@pytest.mark.parametrize("given, message", [
    ({"dataset": []}, "dataset: it has no rows"),
    ({"dataset": [{"prompt": "a"}, {"question": "b"}]}, "row 1 has no column 'prompt'.*question"),
    ({"dataset": [{"prompt": "a", "image": object()}]}, "texts, numbers, lists and tables"),
    ({"dataset": ROWS[:1]}, "one row, which cannot be trained on and held out"),
    ({"dataset": ROWS, "config": {"env": "gsm8k"}}, "dataset and env=gsm8k both say"),
    ({"dataset": ROWS, "config": {"env.path": "/data"}}, "dataset and env.path=/data both say"),
    ({"dataset": ROWS, "config": {"model.name": "/no/such"}}, "model.name=/no/such: there is no"),
    ({"dataset": ROWS, "recipe": "grp"}, "recipe='grp': there is no such recipe; known: grpo, "),
    ({"dataset": [{"prompt": str(n)} for n in range(9)]}, "reward=None: .*the column 'answer'"),
    ({"eval_dataset": ROWS}, "eval_dataset without dataset"),
    ({"dataset": ROWS, "eval_dataset": {"a": ROWS[:2]}}, r"give one, such as eval_dataset\['a'\]"),
    ({"reward": 3}, "give a function"),
    ({"reward": right, "config": {"env.reward": "gsm8k"}}, "same setting"),
    ({"reward": lambda completion, problem: 0.0, "dataset": ROWS,
      "config": {"inference_model.num_devices": 2}}, "put it into a module")])
def test_what_cannot_run_is_refused_before_anything_is_built(given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(run_dir=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_dir, message", [
    (3, "run_dir=3: give the path of a folder"),
    ("/dev/null", "run_dir=/dev/null: runs cannot be written there .*; give another")])
def test_a_folder_that_is_none_is_named(run_dir, message):
    with pytest.raises(ConfigError, match=message):
        train(run_dir=run_dir)


def test_the_rows_of_a_run_that_is_there_are_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    write_rows(ROWS, None, tmp_path / "dataset")
    with pytest.raises(FileExistsError, match="run_dir=.*already holds.*resume=auto"):
        train(dataset=ROWS[:5], run_dir=tmp_path)
    assert [json.loads(line) for line in (tmp_path / "dataset/train.jsonl").open()] == ROWS


class Frame:
    """As pandas has it: what it gives one after another are names of columns."""

    def __iter__(self):
        return iter(["prompt"])

    def iterrows(self):
        return enumerate(ROWS)


@pytest.mark.parametrize("given, message", [
    ("trl-lib/tldr", r"rows='trl-lib/tldr': .*load_dataset\('trl-lib/tldr', split='train'\)"),
    ({"prompt": ["a", "b"]}, r"rows: it has columns \(prompt\).*Dataset.from_dict"),
    ({"train": ROWS, "test": ROWS}, r"rows: it has the data sets train, test; .*rows\['train'\]"),
    ({"prompt": "a"}, "rows: it is one row .*give a list of rows"),
    (Frame(), r"rows: a DataFrame .*to_dict\('records'\)"),
    (3, "rows=3: give rows"), (["a"], "rows: row 0 is 'a'; a row has columns"),
    ([{"prompt": 3}], "rows: row 0 has prompt=3; give a text, or a list of messages"),
    ([{"prompt": [{"role": "user"}]}], "rows: row 0 has prompt=.*give a text, or a list")])
def test_what_has_no_rows_is_told_how_to_become_some(given, message):
    with pytest.raises(ConfigError, match=message):
        as_rows(given, "rows")


def test_rows_are_read_of_all_that_has_some():
    from datasets import Dataset, IterableDataset

    assert as_rows(iter(ROWS), "rows") == as_rows(Dataset.from_list(ROWS), "rows") == ROWS
    assert as_rows(IterableDataset.from_generator(lambda: iter(ROWS)), "rows") == ROWS
    chat = [{"question": [{"role": "user", "content": "1+1?"}]}]
    assert as_rows(chat, "rows", "question") == chat


def nothing():
    return 0.0


def without_columns(completions, solution):
    return [0.0] * len(completions)


def of_a_column(completions, solution, **kwargs):
    return [0.0] * len(completions)


class Judge:
    """What scores and is saved as models of Transformers are."""

    def __call__(self, completion, problem):
        return 0.0

    def save_pretrained(self, folder):
        pass


@pytest.mark.parametrize("given, message", [
    ([], r"fn=\[\]: give a function"), ([right, 3], r"fn\[1\]=3: give a function"),
    ({"a": right}, "give a function"), (Judge, "give a function"),
    (Judge(), "fn is a Judge: models that score are not loaded"),
    ("some/reward-model", "fn='some/reward-model': models that score are not loaded"),
    ("exact_matc", "fn='exact_matc': there is no such reward; did you mean 'exact_match'"),
    (nothing, r"fn: nothing\(\) cannot be called .*\(completion, problem\)"),
    (without_columns, r"without_columns\(completions, solution\) .*add \*\*kwargs"),
    (of_a_column, r"asks for solution, which is no column of the rows \(prompt, answer, level\)")])
def test_a_reward_that_cannot_be_called_is_refused_by_its_form(given, message):
    with pytest.raises(ConfigError, match=message):
        as_rewards(given, "fn", ROWS)


def test_rewards_of_every_form_are_taken():
    forms = [right, levels, "gsm8k", "some.module:function", lambda completion, problem: 0.0]
    assert as_rewards(forms, "fn", ROWS) == forms
    assert as_rewards(right, "fn") == [right] and as_rewards(None, "fn") == []
    assert as_rewards(of_a_column, "fn", [{"solution": "1", "prompt": ""}]) == [of_a_column]


def test_rows_become_files_that_every_process_reads(tmp_path):
    keys = of_rows(ROWS, None, tmp_path)
    assert keys["env.task.num_test"] == 4 and keys["env.answer_column"] == "answer"
    write_rows(ROWS, ROWS[:3], tmp_path)
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 3
    assert [json.loads(line) for line in (tmp_path / "train.jsonl").open()] == ROWS
    keys = of_rows([{"prompt": one["prompt"]} for one in ROWS], ROWS[:3], tmp_path)
    assert keys["env.task.test_split"] == "test" and "env.answer_column" not in keys
    lists = [row | {"answer": ["1", "2"]} for row in ROWS]  # which a reward function may read
    assert "env.answer_column" not in of_rows(lists, None, tmp_path)


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


def test_settings_may_be_changed_and_an_unknown_one_is_named():
    args = GRPOConfig("out")
    args.max_steps, args.output_dir = 3, "other"
    assert (args.max_steps, args.names, args.output_dir) == (3, {"max_steps": 3}, "other")
    with pytest.raises(ConfigError, match="max_step: unknown name .*'max_steps'"):
        args.max_step = 3
    with pytest.raises(ConfigError, match="overrides=.*give a dictionary"):
        GRPOConfig("out", overrides=["train.seed=1"])
    with pytest.raises(ConfigError, match="output_dir=3: give the path"):
        GRPOConfig(3)


@pytest.mark.parametrize("given, error, message", [
    ({"callbacks": [1]}, ConfigError, r"callbacks=\[1\]: it has nothing here; .*metrics.jsonl"),
    ({"args": SimpleNamespace()}, ConfigError, "args is a types.SimpleNamespace: give a grpo.run"),
    ({"train_dataset": None}, ConfigError, "train_dataset: there is none"),
    ({"train_dataset": []}, ConfigError, "train_dataset: it has no rows"),
    ({"eval_dataset": [{"q": 1}]}, ConfigError, "eval_dataset: row 0 has no column 'prompt'"),
    ({"modle": 1}, TypeError, r"no argument 'modle' \(given 1\); did you mean 'model'"),
    ({"tokenizer": 1}, TypeError, "no argument 'tokenizer' .*write processing_class"),
    ({"model": None}, ConfigError, "model=None: give a folder"),
    ({"model": Judge(), "processing_class": 3}, ConfigError, "processing_class=3: give a token"),
    ({"model": SimpleNamespace(merge_and_unload=1)}, ConfigError, "and peft_config"),
    ({"processing_class": "gpt2"}, ConfigError, "processing_class='gpt2': give a tokenizer"),
    ({"peft_config": {"r": 4}}, ConfigError, "peft_config=.*: give a peft.LoraConfig"),
    ({"reward_funcs": None}, ConfigError, "reward_funcs=None: give a function"),
    ({"reward_funcs": [levels, 3]}, ConfigError, r"reward_funcs\[1\]=3: give a function"),
    ({"args": GRPOConfig("out", reward_weights=[1.0, 2.0])}, ConfigError,
     "reward_weights=.* has 2, reward_funcs 1; give one weight for each")])
def test_arguments_that_have_nothing_here_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        GRPOTrainer(**{"model": "embedded", "reward_funcs": levels, "train_dataset": ROWS} | given)


def test_the_order_of_arguments_is_that_of_trl():
    """Whose trainer is looked at, where it is installed."""
    ours = list(inspect.signature(GRPOTrainer).parameters)[:-1]
    assert ours[6:] == ["reward_processing_classes", "callbacks", "optimizers",
                        "quantization_config", "peft_config"]
    if spec := find_spec("trl"):
        source = Path(spec.origin).with_name("trainer") / "grpo_trainer.py"
        theirs = next(node for node in ast.walk(ast.parse(source.read_text()))
                      if isinstance(node, ast.FunctionDef) and node.name == "__init__"
                      and "reward_funcs" in [one.arg for one in node.args.args])
        assert ours == [one.arg for one in theirs.args.args][1:len(ours) + 1]
    trainer = GRPOTrainer("embedded", levels, GRPOConfig("out"), ROWS, ROWS[:2], None, [None], [],
                          (None, None), None, None)
    assert trainer.eval_dataset == ROWS[:2]


def test_what_of_a_lora_config_would_be_ignored_is_refused():
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="peft_config.bias='all': adapters are plain LoRA"):
        GRPOTrainer("embedded", levels, train_dataset=ROWS,
                    peft_config=peft.LoraConfig(bias="all"))
    GRPOTrainer("embedded", levels, train_dataset=ROWS, peft_config=peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules="all-linear"))


@pytest.mark.parametrize("resume, message", [
    (None, "model=/no/such: there is no such folder"), ("/no/run", "checkpoint=/no/run: there is"),
    (3, "resume_from_checkpoint=3: give True")])
def test_what_shows_when_the_trainer_begins_leaves_no_folder(tmp_path, resume, message):
    trainer = GRPOTrainer("/no/such", levels, GRPOConfig(tmp_path / "out"), ROWS)
    with pytest.raises(ConfigError, match=message):
        trainer.train(resume_from_checkpoint=resume)
    assert not (tmp_path / "out").exists()


def test_what_else_trls_trainer_has_is_named_with_what_to_do():
    trainer = GRPOTrainer("embedded", levels, train_dataset=ROWS)
    with pytest.raises(AttributeError, match="no 'push_to_hub'; `hf upload"):
        trainer.push_to_hub()
    assert not hasattr(trainer, "anything")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the trainer asks of ``train``, which does not run."""
    found = {}

    def instead(keys, rewards, rows, held_out, folder, **given):
        found.update(keys=keys, rows=rows, folder=folder)
        (tmp_path / "final_model").mkdir()
        (tmp_path / "final_model" / "config.json").write_text("{}")
        return api.Result(tmp_path, compose({}), [], tmp_path / "final_model")

    monkeypatch.setattr("grpo.run.trl.run", instead)
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
    assert asked["folder"] == tmp_path / "out" and asked["rows"] == ROWS
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
            Dataset.from_list(ROWS), processing_class=tokenizer)

    tokenizer = None  # that of the folder which the model came from
    once = trainer(2)
    first = once.train()
    assert [row["step"] for row in first.history] == [0, 1]  # of two optimizer steps each
    assert first.config.train.proximal == "scored" and first.config.env.num_envs == 4
    with pytest.raises(FileExistsError, match=r"output_dir=.*by train\(resume_from_"):
        once.train()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    second = trainer(4)
    assert [row["step"] for row in second.train(resume_from_checkpoint=True).history] == [0, 1, 2]
    saved = second.save_model()
    assert saved == tmp_path / "out" and AutoModelForCausalLM.from_pretrained(saved)
