"""TRL's names: every one has an answer, and translations mean what TRL means."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import ConfigError
from grpo.config.schema import load_config
from grpo.config.trl_names import FIELDS, translate, typed
from grpo.config.trl_names.fields import GRPO_CONFIG, SCRIPTS
from grpo.config.trl_names.groups import GROUPS
from grpo.config.trl_names.training import TRAINING
from grpo.run.cli.recipe_files import read_recipe, recipe_folder
from grpo.run.cli.trl_names import with_trl_names

from .configs import composed

KNOWN = composed("grpo_async", "env=dataset")
RECIPES = sorted(path.name for path in recipe_folder().glob("*.yaml"))
#: Names whose default in TRL itself is another than in Transformers.
OF_TRL = {"gradient_checkpointing": True, "logging_steps": 10, "bf16": None,
          "use_liger_kernel": False, "learning_rate": 1e-6, "remove_unused_columns": False}

base = functools.cache(functools.partial(composed, "grpo_async"))


def loaded(*arguments: str):
    """The configuration of a command line with TRL's names."""
    overrides = OverridesParser.create().parse_overrides(with_trl_names(list(arguments)))
    groups = [one.input_line for one in overrides if one.key_or_group in ("env", "preset")]
    values = copy.deepcopy(base(*groups))
    for one in overrides:
        if one.input_line not in groups and not one.is_hydra_override():
            OmegaConf.update(values, one.key_or_group, one.value(), merge=False)
    return load_config(values, AsyncConfig)


# -- the table -------------------------------------------------------------------------------------


def test_each_field_says_what_its_rule_needs():
    for name, one in FIELDS.items():
        assert one.rule not in ("refused", "no effect") or one.text, name
        assert (one.group in GROUPS) == (one.rule == "joint"), name
        assert bool(one.to) == (one.rule in ("same", "joint")), name
        assert not one.taken or one.rule == "same", name
        for key in one.to:
            there = key.startswith("hydra.") or OmegaConf.select(KNOWN, key, default="?") != "?"
            assert there, (name, key)
    assert {one.group for one in FIELDS.values()} - {""} == {*GROUPS}


@pytest.mark.slow
def test_every_training_argument_has_an_answer_and_its_default():
    from transformers import TrainingArguments

    for one in dataclasses.fields(TrainingArguments):
        assert one.name in FIELDS, one.name
        if one.name in OF_TRL or one.default is dataclasses.MISSING:
            continue
        found = FIELDS[one.name].default
        if one.name not in ("trackio_space_id", "deepspeed", "report_to"):
            assert found == getattr(one.default, "value", one.default) or (
                found is None and not one.default), one.name


@pytest.mark.slow
def test_every_name_of_trl_has_an_answer_and_its_default():
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    for kind, table in ((trl.GRPOConfig, GRPO_CONFIG | TRAINING | OF_TRL),
                        (trl.ModelConfig, SCRIPTS), (trl.ScriptArguments, SCRIPTS)):
        for one in dataclasses.fields(kind):
            assert one.name in table, one.name
            if one.name in GRPO_CONFIG | SCRIPTS and one.name not in ("trackio_space_id",):
                assert FIELDS[one.name].default == one.default, one.name
    own = {one.name for one in dataclasses.fields(trl.GRPOConfig)}
    assert own >= GRPO_CONFIG.keys()  # and nothing is made up


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.rule == "refused"])
def test_what_is_refused_says_what_to_write(name):
    one = FIELDS[name]
    assert translate({name: one.default}).keys == {}
    with pytest.raises(ConfigError) as error:
        translate({name: "another"})
    assert str(error.value) == f"{name}=another: {one.text}"


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.rule == "no effect"])
def test_what_has_no_effect_is_named(name):
    done = translate({name: "another"})
    assert done.keys == {} and done.said == [f"{name}=another has no effect: {FIELDS[name].text}"]


@pytest.mark.parametrize("name", [name for name, one in FIELDS.items() if one.rule == "same"])
def test_another_name_of_a_key_sets_it_and_says_so(name):
    done = translate({name: 2})
    assert done.keys[FIELDS[name].to[0]] == 2
    assert done.said[0].startswith(f"{name} is now called {FIELDS[name].to[0]}; using 2")


@pytest.mark.parametrize("beside", [{}, {"lr_scheduler_type": "cosine_with_min_lr", "beta": 0.1,
                                         "learning_rate": 1e-5, "vllm_mode": "server"}])
def test_a_value_of_another_kind_is_named_for_every_name(beside):
    for name, value in itertools.product(FIELDS, (
            "a", 3, -2, 0.5, math.nan, True, [1], ["a"], [{"a": 1}], {"a": 1}, [], {})):
        for whole in (False, True):
            with contextlib.suppress(ConfigError):  # no other error
                translate(beside | {name: value}, whole=whole)


@pytest.mark.parametrize("name, value, kind", [
    ("reward_funcs", 3, "a text, or a list of them"), ("datasets", "a", r"a list of .*path: org"),
    ("lr_scheduler_kwargs", "cosine", r"a table, such as \{min_lr_rate: 0.1\}"),
    ("epsilon_high", "wide", "a number"), ("num_processes", "all", "a whole number above 0")])
def test_a_value_of_another_kind_is_refused(name, value, kind):
    with pytest.raises(ConfigError, match=f"{name}={value}: expected {kind}"):
        translate({name: value})


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(ConfigError, match="num_generation: unknown name.*'num_generations'"):
        translate({"num_generation": 4})


# -- what several say together ---------------------------------------------------------------------

#: Names -> keys that come of them.
MEANS = [
    # 2 devices x 16 x 4 completions a step, of 8 prompts
    ("per_device_train_batch_size=16 gradient_accumulation_steps=4 num_generations=16 "
     "num_processes=2", {"env.num_envs": 8, "env.repeats": 16, "train.optim_batch_size": None,
                         "train_model.num_devices": 2}),
    ("per_device_train_batch_size=8", {"env.num_envs": 1, "env.repeats": 8}),
    ("per_device_train_batch_size=8 steps_per_generation=4 num_iterations=2 max_steps=80",
     {"env.num_envs": 4, "train.optim_batch_size": 8, "train.epochs": 2, "train.max_steps": 10}),
    ("generation_batch_size=64 num_generations=4",
     {"env.num_envs": 16, "env.repeats": 4, "train.optim_batch_size": 8}),
    ("num_iterations=2 max_steps=5", {"train.epochs": 2, "train.max_steps": 3}),
    ("max_steps=200 train.epochs=4", {"train.epochs": 4, "train.max_steps": 50}),
    ("max_steps=200 eval_steps=20 save_steps=40 train.optim_batch_size=64 env.num_envs=8 "
     "env.repeats=16", {"train.max_steps": 100, "train.eval_frequency": 10,
                        "train.checkpoint_frequency": 20}),
    ("max_steps=200 train.optim_batch_size=64 train.dialog_turns_per_batch=1024 env.num_envs=8 "
     "num_generations=16", {"train.max_steps": 13}),
    ("--config gsm8k_grpo.yaml max_steps=200 train.epochs=2 train.optim_batch_size=128 "
     "env.num_envs=64 num_generations=8", {"train.max_steps": 25, "train.proximal": "scored"}),
    ("--config gsm8k_grpo.yaml max_steps=200 train.optim_batch_size=null num_iterations=4 "
     "per_device_train_batch_size=8 steps_per_generation=4", {"train.max_steps": 50}),
    ("num_generations=4", {"env.repeats": 4}), ("num_train_epochs=2", {"train.data_epochs": 2.0}),
    ("max_steps=-1 num_train_epochs=2", {"train.data_epochs": 2.0, "train.max_steps": None}),
    ("eval_steps=20 save_steps=40 per_device_train_batch_size=8 steps_per_generation=2",
     {"train.eval_frequency": 10, "train.checkpoint_frequency": 20}),
    ("save_strategy=no", {"train.checkpoint_frequency": 0}),
    ("loss_type=grpo epsilon=0.1", {"train.aggregation": "sequence",
                                    "train.clip_epsilon": (0.1, 0.1)}),
    ("loss_type=cispo epsilon_high=5.0", {"train.objective": "cispo",
                                          "train.clip_epsilon": (1.0, 4.0)}),
    ("preset=gspo epsilon_high=0.28", {"train.objective": "gspo",
                                       "train.clip_epsilon": (0.2, 0.28)}),
    ("preset=maxent_listwise maxent_tau=0.3", {"maxent.tau": 0.3}),
    ("beta=0.04", {"train.kl_to_ref_coeff": 0.04, "train.kl_estimator": "unbiased_k3"}),
    ("train.kl_to_ref_coeff=0.1 use_bias_correction_kl=false", {"train.kl_estimator": "k3"}),
    ("preset=grpo beta=0", {"train.kl_to_ref_coeff": None, "train.kl_estimator": None}),
    ("scale_rewards=false", {"train.advantage_estimator": "group_mean"}),
    ("use_adaptive_entropy=true", {"entropy_controller.target": 0.2, "train.entropy_coeff": 0.0}),
    ("top_entropy_quantile=0.2", {"train.entropy_top_fraction": 0.2}),
    ("lr_scheduler_type=cosine warmup_ratio=0.1",
     {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 0.1}),
    ("learning_rate=1e-5 lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr:1e-6}",
     {"optimizer.final_lr_fraction": pytest.approx(0.1)}),
    ("optimizer.lr=1e-5 lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr:1e-6}",
     {"optimizer.lr": 1e-5, "optimizer.final_lr_fraction": pytest.approx(0.1)}),
    ("--config gsm8k_grpo.yaml optimizer.lr=1e-5 lr_scheduler_type=cosine_with_min_lr "
     "lr_scheduler_kwargs={min_lr:1e-7}", {"optimizer.final_lr_fraction": pytest.approx(0.01)}),
    ("optim=adamw_bnb_8bit adam_beta2=0.99 max_grad_norm=0",
     {"optimizer.name": "adamw_8bit", "optimizer.betas": (0.9, 0.99),
      "optimizer.clip_grad_norm": None}),
    ("bf16=false", {"train_model.torch_dtype": "float32"}),
    ("torch_dtype=float32 bf16=true", {"train_model.torch_dtype": "auto"}),
    ("use_peft=true lora_r=8 lora_target_modules=all-linear load_in_4bit=true",
     {"train_model.lora.enabled": True, "train_model.lora.r": 8,
      "train_model.lora.target_modules": None, "train_model.quantization": "nf4"}),
    ("use_vllm=false", {"inference_model.backend": "transformers"}),
    ("report_to=[wandb] run_name=mine wandb_project=p",
     {"logging.backends": ["wandb"], "train.exp_name": "mine", "logging.wandb_run_name": "mine",
      "logging.wandb_project": "p"}),
    ("report_to=none", {"logging.backends": []}), ("use_cpu=true", {"device": "cpu"}),
    ("resume_from_checkpoint=true", {"resume": "auto"}),
    ("dataset_name=org/sums dataset_train_split=all dataset_config=c",
     {"env.dataset": "dataset", "env.path": "org/sums", "env.prompt_column": "prompt",
      "env.task": {"config": "c", "train_split": "all", "test_split": None, "num_train": None,
                   "num_test": None, "seed": 0, "chat": False}}),
    ("dataset_name=org/sums dataset_prompt_column=q reward_funcs=[accuracy,my.rewards.own]",
     {"env.prompt_column": "q", "env.reward": ["accuracy", "my.rewards:own"], "env.system_prompt":
      "", "env.answer_column": "solution"}),
    ("dataset_name=openai/gsm8k", {"env.dataset": "gsm8k"}),
    ("reward_funcs=cosine cosine_max_len=77",
     {"env.reward": ["cosine"], "env.reward_options": {"cosine": {"max_len": 77}}}),
    ("reward_funcs=get_soft_overlong_punishment", {"env.reward_options": {
        "soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}}),
    ("chat_template='{{ x }}\n \"y\"'", {"env.chat_template": "{{ x }}\n \"y\""}),
    ("benchmarks=[gsm8k]", {"eval.benchmarks": ["gsm8k"]}),
    ("gradient_checkpointing=true max_prompt_length=9 vllm_gpu_memory_utilization=0.5 seed=7",
     {"train_model.gradient_checkpointing": True, "env.max_prompt_tokens": 9,
      "inference_model.gpu_memory_utilization": 0.5, "train.seed": 7}),
]


@pytest.mark.parametrize("line, keys", MEANS, ids=[line.split("\n")[0] for line, _ in MEANS])
def test_names_mean_these_keys(line, keys):
    words = [line] if "chat_template" in line else line.split(" ")
    config = loaded(*words)
    for key, wanted in keys.items():
        section, _, name = key.rpartition(".")
        holder = config
        for part in section.split(".") if section else ():
            holder = getattr(holder, part)
        found = getattr(holder, name)
        assert found == wanted, key


@pytest.mark.parametrize("line, message", [
    ("loss_type=luspo", "train.objective=gspo train.aggregation=dr_grpo"),
    ("loss_type=dapoo", "known are"), ("loss_type=cispo", "give one above 1"),
    ("scale_rewards=batch", "train.advantage_estimator=batch_norm"),
    ("importance_sampling_level=sequence loss_type=sapo", "train.objective=gspo"),
    ("importance_sampling_level=sequence beta=0.1", "use_bias_correction_kl=false"),
    ("fp16=true", "bf16=true"), ("per_device_train_batch_size=6", "no multiple of num_generations"),
    ("per_device_train_batch_size=8 gradient_accumulation_steps=4 steps_per_generation=2",
     "an optimizer step has 32"),
    ("steps_per_generation=2 generation_batch_size=8", "give one"),
    ("save_steps=0.2", "a share of the run"),
    ("lr_scheduler_type=polynomial", "known are"), ("optim=sgd", "known are"),
    ("lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr:1e-6}",
     r"\{min_lr: 1e-06\}: it is a share .*give learning_rate, too, or write min_lr_rate"),
    ("-m learning_rate=1e-4,1e-5 lr_scheduler_type=cosine_with_min_lr "
     "lr_scheduler_kwargs={min_lr:1e-6}", "several values in this sweep; write min_lr_rate"),
    ("lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr:low} optimizer.lr=1e-5",
     "min_lr: low.*expected numbers"),
    ("max_steps=200 train.optim_batch_size=64", "max_steps=200: it counts optimizer steps, .*with "
     "train.optim_batch_size=64 depends on env.num_envs and env.repeats; give both, or write "
     "train.max_steps, in iterations"),
    ("-m save_steps=200 train.epochs=1,2", "each run of this sweep of train.epochs; write "
     "train.checkpoint_frequency, in iterations"),
    ("per_device_train_batch_size=auto", "expected a whole number above 0"),
    ("num_generations=0", "expected a whole number above 0"), ("use_vllm=1", "true or false"),
    ("epsilon=low", "epsilon=low: expected a number"),
    ("report_to=trackio", "report_to=trackio"), ("vllm_mode=both", "colocate and server"),
    ("reward_funcs=think_format_reward", "write format"),
    ("datasets=[{path:a,data_dir:b}]", "data_dir is not read"),
    ("learning_rate=1e-5 optimizer.lr=1e-6", "are the same setting"),
    ("seed=1 seed=2", "given twice"), ("loss_type=grpo,dapo", "sweep over those"),
    ("seed=1 --seed 2", "seed is given twice, as 2 and 1|seed is given twice, as 1 and 2"),
    ("--learning_rate 1e-5 --learning_rate 1e-6", "given twice, as 1e-5 and 1e-6; give one"),
    ("--config a.yaml --config b.yaml", "given twice, as a.yaml and b.yaml; give one"),
    ("--config --learning_rate 1e-5", "which file"),
    ("init_kl_coeff=0.1 beta=0.2", "init_kl_coeff and beta both say train.kl_to_ref_coeff, 0.1"),
    ("eval_strategy=sometimes", "eval_strategy=sometimes: known are no, steps, epoch"),
    ("save_strategy=often", "save_strategy=often: known are no, steps, epoch, best"),
    ("scale_rewards=groups", "known are group, none and batch"),
    ("dataset_name=openai/gsm8k dataset_config=socratic", "its task reads main; write "),
    ("dataset_test_split=test", "dataset_test_split: says more of a data set"),
    ("dataset_prompt_column=q", "dataset_prompt_column: says more of a data set"),
    ("dataset_name=org/sums test_split_size=0.1", "write env.task.num_test"),
])
def test_what_cannot_be_translated_says_what_to_write(line, message):
    with pytest.raises(ConfigError, match=message):
        with_trl_names(line.split(" "))


def test_keys_beside_a_whole_configuration_count_in_a_batch():
    keys = translate({"max_steps": 200}, {"train.epochs": 4}, whole=True).keys
    assert keys["train.max_steps"] == 50 and keys["train.proximal"] == "scored"
    # TRL's defaults of what is not given need not be refused where a sweep leaves them open.
    assert translate({}, whole=True, swept={"train.epochs"}).keys["train.checkpoint_frequency"] == (
        500)


# -- recipe files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_this_library_is_a_run(name):
    config = loaded("--config", name)
    assert config.model.name.startswith("Qwen/") and config.train.exp_name == Path(name).stem
    assert config.optimizer.lr == 1e-6 and config.train.seed == 42  # the one given, one TRL's
    assert config.train.objective == ("maxent_listwise" if "maxent" in name else "ppo_clip")
    assert "# " in (recipe_folder() / name).read_text().splitlines()[0]


OPEN_R1 = Path(__file__).with_name("open_r1.yaml")


def test_a_recipe_in_the_form_of_open_r1_runs_as_it_is_and_what_is_behind_it_wins(capsys):
    config = loaded(f"--config={OPEN_R1}", "--learning_rate", "1e-5", "env.num_envs=2",
                    "train.max_steps=7", "--report-to", "none")
    said = capsys.readouterr().out
    assert config.optimizer.lr == 1e-5 and config.env.num_envs == 2
    assert (config.train.max_steps, config.train.data_epochs) == (7, None)
    assert config.logging.backends == [] and config.inference_model.temperature == 0.7
    assert config.env.system_prompt == 'Think.\n"Then" answer: 1 \' 2\n'
    assert config.train.mismatch == {"sequence_mis": 3.0} and config.train.proximal == "current"
    assert "push_to_hub=true has no effect" in said and "env.num_envs=2" in said
    # In either order, and with flags as TRL's scripts take them.
    assert loaded("env.num_envs=2", "--report_to=none", "train.max_steps=7", "learning_rate=1e-5",
                  "--config", str(OPEN_R1)) == config


def test_with_a_preset_trls_defaults_of_the_objective_are_not_taken(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: dapo\nenv: gsm8k\nmax_steps: 9\ntrain:\n  proof_interval: 2\n")
    config = loaded("--config", str(path))
    assert config.train.clip_epsilon == (0.2, 0.28) and config.train.mismatch is None
    assert config.env.dataset == "gsm8k" and config.train.proof_interval == 2
    assert config.env.num_envs * config.env.repeats == 8 and config.optimizer.schedule == "linear"


@pytest.mark.parametrize("typed_behind", [
    ["learning_rate=2e-5"], ["--learning_rate", "2e-5"], ["optimizer.lr=2e-5"]])
@pytest.mark.parametrize("in_the_file", ["learning_rate: 1e-5", "optimizer.lr: 1e-5",
                                         "optimizer:\n  lr: 1e-5"])
def test_what_is_typed_wins_over_the_file_by_either_name(tmp_path, in_the_file, typed_behind):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"env: gsm8k\n{in_the_file}\n")
    assert loaded("--config", str(path), *typed_behind).optimizer.lr == 2e-5


@pytest.mark.parametrize("swept", ["learning_rate=1e-5,1e-6", "optimizer.lr=1e-5,1e-6"])
@pytest.mark.parametrize("in_the_file", ["learning_rate: 1e-4", "optimizer.lr: 1e-4"])
def test_a_sweep_takes_the_place_of_what_the_file_says(tmp_path, in_the_file, swept):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"env: gsm8k\n{in_the_file}\n")
    given = with_trl_names(["-m", "--config", str(path), swept])
    assert [text for text in given if text.startswith("optimizer.lr=")] == [
        "optimizer.lr=1e-5,1e-6"]


def test_no_is_a_strategy_in_a_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("eval_strategy: no\nsave_strategy: no\n")
    config = loaded("--config", str(path))
    assert config.train.eval_frequency == config.train.checkpoint_frequency == 0


@pytest.mark.parametrize("text, message", [
    (b"- a\n", "expected a table"), (b"a: [b\n", "cannot be read as YAML.*expected ','"),
    (b"a: \xff\n", "cannot be read as YAML")])
def test_a_file_that_is_no_table_is_refused(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s)--config .*recipe.yaml: .*{message}"):
        read_recipe(str(path))


def test_a_sweep_of_another_name_is_one_of_the_key(capsys):
    assert with_trl_names(["-m", "learning_rate=1e-5,1e-6", "output_dir=x"]) == [
        "-m", "hydra.sweep.dir=x", "optimizer.lr=1e-5,1e-6"]


@pytest.mark.parametrize("value", ["a", "a b", 'say "x"', "it's", "back\\slash", 'end\\"', "tail\\",
                                   "line\nbreak", "{{ x }}", "[1, 2]", "1e5", "true", "", "a=b,c",
                                   ["x y", {"k": [1.5, None, True]}], "ünï", "$x", "~a", "50%"])
def test_a_value_is_read_by_hydra_as_it_was(value):
    found = composed("grpo", f"train.exp_name={typed(value)}").train.exp_name
    assert OmegaConf.to_container(found) == value if OmegaConf.is_config(found) else found == value


def test_a_share_of_the_run_is_warmed_up():
    config = loaded("max_steps=30", "warmup_ratio=0.1", "lr_scheduler_type=linear")
    assert config.optimizer.warmup(config.optimizer_steps) == math.ceil(0.1 * 30)
    with pytest.raises(ConfigError, match="must be a whole number of steps"):
        load_config({"optimizer": {"warmup_steps": 2.5}})
