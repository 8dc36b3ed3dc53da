"""The configuration: YAML and schema agree, nothing is ignored, every key reaches its part."""

from __future__ import annotations

import copy
import string
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import BaseModel

from grpo import build
from grpo.config import Config, ConfigError, load_config
from grpo.tasks import make_task
from grpo.tasks.base import Problem

FOLDER = Path(__file__).resolve().parents[1] / "config"
RUNS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)}


def composed(name: str, *overrides: str):
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose(name, overrides=list(overrides))


def small(**changes) -> dict:
    """A small valid configuration; ``changes`` are merged in, section by section."""
    values = {"env": {"num_envs": 2, "repeats": 2, "task": {"num_train": 20, "num_test": 8}},
              "train": {"total_dialog_turns": 40},
              "inference_model": {"backend": "transformers", "max_tokens": 3}}
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return values


def message(values: dict) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(values)
    return str(error.value)


# -- YAML and schema ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_every_run_of_the_config_folder_composes_and_is_valid(name):
    values = composed(name)
    config = load_config(values)
    assert config.train.exp_name == values.train.exp_name != "grpo"  # a run says what it is
    assert config.iterations >= 5


def test_there_is_a_run_to_compose():
    assert {"grpo", "grpo_gsm8k"} <= set(RUNS)


@pytest.mark.parametrize("group", sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))
def test_every_yaml_of_a_group_has_exactly_the_keys_of_the_schema(group):
    files = sorted((FOLDER / group).glob("*.yaml"))
    assert files
    top_level = set(Config.model_fields) - set(SECTIONS)
    expected = top_level if group == "run" else set(SECTIONS[group].model_fields)
    for file in files:
        assert set(OmegaConf.load(file)) - {"hydra"} == expected, file


def test_every_section_of_the_schema_has_a_yaml_group():
    assert set(SECTIONS) | {"run"} == {path.name for path in FOLDER.iterdir() if path.is_dir()}


@pytest.mark.parametrize("group", sorted(set(SECTIONS) - {"env"}))
def test_the_defaults_of_yaml_and_schema_are_the_same(group):
    (file,) = (FOLDER / group).glob("*.yaml")
    assert SECTIONS[group](**OmegaConf.to_container(OmegaConf.load(file))) == SECTIONS[group]()


@pytest.mark.parametrize("file", sorted((FOLDER / "env").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_task_options_of_yaml_are_those_of_the_task(file):
    env = OmegaConf.to_container(OmegaConf.load(file))
    with pytest.raises(ValueError, match="has no option 'no_such_option'") as error:
        make_task(env["dataset"], no_such_option=1)
    options = str(error.value).split("use one of: ")[1].split(", ")
    assert env["task"]
    assert set(env["task"]) <= set(options)


def test_overrides_of_the_command_line_reach_the_configuration():
    config = load_config(composed("grpo_gsm8k", "optimizer.lr=3e-4", "env.num_envs=4",
                                  "env.repeats=3", "train.clip_epsilon=[0.1,0.3]", "resume=auto"))
    assert (config.optimizer.lr, config.turns_per_batch, config.train.clip_epsilon, config.resume) \
        == (3e-4, 12, (0.1, 0.3), "auto")


# -- Errors ---------------------------------------------------------------------------------------


PATHS = [((name,), key) for name, section in SECTIONS.items() for key in section.model_fields] + [
    ((), key) for key in Config.model_fields]


@given(where=st.sampled_from(PATHS), position=st.integers(0, 40),
       letter=st.sampled_from(string.ascii_lowercase + "_"), how=st.sampled_from(
           ["insert", "delete", "replace"]))
def test_any_misspelt_key_anywhere_is_rejected_and_named(where, position, letter, how):
    parents, key = where
    at = position % len(key)
    wrong = {"insert": key[:at] + letter + key[at:], "delete": key[:at] + key[at + 1:],
             "replace": key[:at] + letter + key[at + 1:]}[how]
    known = SECTIONS[parents[0]].model_fields if parents else Config.model_fields
    assume(wrong and wrong not in known)
    text = message({parents[0]: {wrong: 1}} if parents else {wrong: 1})
    path = ".".join((*parents, wrong))
    assert f"{path}: unknown key (given 1)" in text
    assert "did you mean" in text or "known keys of" in text


def test_a_near_miss_is_answered_with_the_right_name():
    assert "did you mean 'repeats'?" in message({"env": {"repeat": 8}})


def test_all_errors_are_reported_at_once():
    text = message({"optimizer": {"lr": -1}, "env": {"nums": 1}})
    assert "has 2 errors" in text
    assert "optimizer.lr=-1" in text
    assert "env.nums" in text


@pytest.mark.parametrize(("section", "key", "value", "hint"), [
    ("env", "num_envs", 0, "greater than or equal to 1"),
    ("env", "repeats", 1, "greater than or equal to 2"),
    ("env", "num_envs", 1.5, "integer"),
    ("env", "reward", 3, "valid string"),
    ("env", "max_prompt_tokens", 0, "greater than or equal to 1"),
    ("model", "warm_start_steps", 0, "greater than or equal to 1"),
    ("model", "warm_start_noise", 1.1, "less than or equal to 1"),
    ("train", "seed", -1, "greater than or equal to 0"),
    ("train", "epochs", 0, "greater than or equal to 1"),
    ("train", "kl_to_ref_coeff", -0.1, "greater than or equal to 0"),
    ("train", "kl_to_inference_coeff", -0.1, "greater than or equal to 0"),
    ("train", "kl_estimator", "k4", "'k1', 'k2' or 'k3'"),
    ("train", "aggregation", "mean", "'token', 'sequence' or 'dr_grpo'"),
    ("train", "advantage_estimator", "gae", "'group_norm'"),
    ("train", "packing", "perhaps", "valid boolean"),
    ("train", "keep_checkpoints", 0, "greater than or equal to 1"),
    ("train_model", "torch_dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
    ("inference_model", "backend", "sglang", "'auto', 'vllm' or 'transformers'"),
    ("inference_model", "temperature", 0, "greater than 0"),
    ("inference_model", "temperature", float("inf"), "finite number"),
    ("inference_model", "gpu_memory_utilization", 1.5, "less than or equal to 1"),
    ("optimizer", "lr", 0, "greater than 0"),
    ("optimizer", "lr", float("nan"), "finite number"),
    ("optimizer", "lr", "fast", "valid number"),
    ("optimizer", "betas", [0.9], "Field required"),
    ("optimizer", "betas", [0.9, 1.0], "less than 1"),
    ("optimizer", "clip_grad_norm", 0, "greater than 0"),
    ("optimizer", "schedule", "step", "'constant', 'linear' or 'cosine'"),
    ("optimizer", "final_lr_fraction", 2, "less than or equal to 1"),
    ("logging", "backends", ["csv"], "'wandb' or 'tensorboard'"),
    ("logging", "num_samples", -1, "greater than or equal to 0"),
])
def test_a_value_of_the_wrong_type_or_range_names_key_value_and_what_is_allowed(
        section, key, value, hint):
    text = message(small(**{section: {key: value}}))
    assert f"{section}.{key}" in text
    # A wrong element of a list is named alone.
    assert any(repr(part) in text for part in ([value, *value] if isinstance(value, list)
                                               else [value]))
    assert hint in text


@pytest.mark.parametrize(("values", "parts"), [
    ({"device": "tpu"}, ["device='tpu'", "'auto', 'cpu' or 'cuda'"]),
    ({"train": 3}, ["train=3", "dictionary"]),
    ({"policy": 3}, ["policy=3", "dictionary"]),
    ({"train": {"objective": "pppo"}}, ["objective 'pppo'", "known:", "ppo_clip"]),
    ({"train": {"clip_epsilon": None}}, ["'ppo_clip'", "clip_epsilon", "(0.2, 0.2)"]),
    ({"train": {"clip_epsilon": [-0.1, 0.2]}}, ["clip_epsilon=(-0.1, 0.2)", "0 <= low <= 1"]),
])
def test_ill_typed_sections_and_unknown_objectives_are_configuration_errors(values, parts):
    text = message(values)
    assert all(part in text for part in parts), text


IGNORED = {
    "warm start of a model that is not embedded": (
        {"model": {"name": "some/model", "warm_start_steps": 5}},
        ["model.warm_start_steps=5", "model.name=embedded", "remove it"]),
    "noise of a model that is not embedded": (
        {"model": {"name": "some/model", "warm_start_noise": 0.5}},
        ["model.warm_start_noise=0.5", "model.name=embedded", "remove it"]),
    "two ways to split": (
        {"train": {"gradient_accumulation_steps": 2, "max_tokens_per_micro_batch": 64}},
        ["train.gradient_accumulation_steps", "train.max_tokens_per_micro_batch", "to null"]),
    "final fraction without a decay": (
        {"optimizer": {"final_lr_fraction": 0.1}},
        ["optimizer.final_lr_fraction=0.1", "schedule=constant", "choose linear or cosine"]),
    "wandb keys without wandb": (
        {"logging": {"wandb_mode": "offline"}},
        ["logging.wandb_mode='offline'", "logging.backends", "add it, or remove the key"]),
    "reference without its coefficient": (
        {"ref_model": {"name": "some/model"}},
        ["ref_model.name='some/model'", "train.kl_to_ref_coeff is null", "set the coefficient"]),
    "a batch of no whole groups": (
        {"train": {"dialog_turns_per_batch": 6}},
        ["train.dialog_turns_per_batch=6", "multiple of env.num_envs * env.repeats = 4"]),
    "an optimizer batch that does not divide": (
        {"train": {"optim_batch_size": 3}}, ["train.optim_batch_size=3", "must divide the 4"]),
    "less than one batch": (
        {"train": {"total_dialog_turns": 3}},
        ["train.total_dialog_turns=3", "less than one batch of 4"]),
}


@pytest.mark.parametrize(("values", "parts"), IGNORED.values(), ids=IGNORED)
def test_a_key_that_would_be_ignored_or_cannot_work_is_an_error(values, parts):
    text = message(small(**values))
    assert "has 1 error" in text
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("key", "value"), [
    ("max_num_seqs", 4), ("gpu_memory_utilization", 0.5), ("kv_cache_memory_bytes", 1 << 20),
    ("enforce_eager", True)])
def test_engine_options_are_refused_by_the_transformers_backend(key, value):
    config = load_config(small(inference_model={key: value}))
    given = f"{key}={value}".lower()
    with pytest.raises(ConfigError, match=f"{given} .*backend=transformers; remove it"):
        build.check(config, build.build_task(config), device=torch.device("cpu"),
                    backend="transformers")


def test_an_unknown_reward_is_refused_before_an_engine_starts():
    config = load_config(small(env={"reward": "nothing"}))
    with pytest.raises(ValueError, match="unknown reward 'nothing'"):
        build.check(config, build.build_task(config), device=torch.device("cpu"), backend="vllm")


def test_a_gpu_that_is_not_there_is_named_with_the_fix():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"device=cuda.*set device=cpu"):
        build.resolve_device(load_config(small(device="cuda")))


def test_the_earlier_name_of_the_kl_coefficient_is_accepted(capsys):
    assert load_config(small(policy={"kl_coef": 0.05})).train.kl_to_ref_coeff == 0.05
    assert "train.kl_to_ref_coeff" in capsys.readouterr().out
    both = small(policy={"kl_coef": 0.05}, train={"kl_to_ref_coeff": 0.05})
    assert load_config(both).train.kl_to_ref_coeff == 0.05


def test_two_different_kl_coefficients_are_refused():
    text = message(small(policy={"kl_coef": 0.05}, train={"kl_to_ref_coeff": 0.1}))
    assert "policy.kl_coef=0.05" in text
    assert "train.kl_to_ref_coeff=0.1" in text
    assert "give one" in text


def test_a_resolved_configuration_can_be_loaded_again_as_it_was():
    config = load_config(small(policy={"kl_coef": 0.05}, optimizer={"betas": [0.8, 0.9]}))
    assert load_config(config.model_dump(mode="json")) == config


def test_derived_counts():
    config = load_config(small(train={"dialog_turns_per_batch": 8, "optim_batch_size": 4,
                                      "epochs": 3, "total_dialog_turns": 43}))
    assert (config.turns_per_batch, config.rows_per_optimizer_step) == (8, 4)
    assert (config.iterations, config.optimizer_steps) == (5, 30)


# -- Every key reaches the part it configures ------------------------------------------------------


class Built:
    """The parts of one configuration around the small model on disk."""

    def __init__(self, folder: Path, tokenizer) -> None:
        self.folder, self.tokenizer = str(folder), tokenizer

    def task(self, config: Config):
        return build.build_task(config)

    def prompts(self, config: Config):
        return build.build_prompts(config, self.task(config), self.tokenizer, self.folder)

    def actor(self, config: Config):
        return build.build_actor(
            config, self.folder, self.tokenizer, self.prompts(config), device=torch.device("cpu"),
            dtype=build.resolve_dtype(config, torch.device("cpu")), backend="transformers")

    def env(self, config: Config):
        return build.build_env(config, self.task(config), self.prompts(config), self.tokenizer,
                               self.actor(config).policy)

    def loss(self, config: Config):
        return build.build_loss(config, self.actor(config).model, self.tokenizer)

    def learner(self, config: Config):
        return build.build_learner(config, self.loss(config))


@pytest.fixture(scope="module")
def built(model_folder, tokenizer) -> Built:
    return Built(model_folder, tokenizer)


def contains_seven(completion: str, problem: Problem) -> float:
    return float("7" in completion)


LOSS = lambda b, c: b.loss(c)  # noqa: E731
LEARNER = lambda b, c: b.learner(c)  # noqa: E731
ADAMW = lambda b, c: b.learner(c).optimizer.adamw.param_groups[0]  # noqa: E731
POLICY = lambda b, c: b.actor(c).policy  # noqa: E731
KL = {"train": {"kl_to_ref_coeff": 0.1}}
LINEAR = {"optimizer": {"schedule": "linear", "warmup_steps": 1}}

# key: (part that is built, what is read from it, other keys that it needs, value, expected)
REACHES = {
    "train.objective": (LOSS, lambda x: x.objective, {}, "reinforce", "reinforce"),
    "train.clip_epsilon": (LOSS, lambda x: x.clip_epsilon, {}, [0.1, 0.3], (0.1, 0.3)),
    "train.aggregation": (LOSS, lambda x: (x.aggregation, x.constant_length), {}, "dr_grpo",
                          ("dr_grpo", 3)),
    "train.kl_to_ref_coeff": (LOSS, lambda x: x.kl_to_ref_coeff, {}, 0.2, 0.2),
    "train.kl_to_inference_coeff": (LOSS, lambda x: x.kl_to_inference_coeff, {}, 0.2, 0.2),
    "train.kl_estimator": (LOSS, lambda x: x.kl_estimator, KL, "k1", "k1"),
    "train.entropy_coeff": (LOSS, lambda x: x.entropy_coeff, {}, 0.2, 0.2),
    "train.advantage_estimator": (LOSS, lambda x: x.advantage_estimator, {}, "rloo", "rloo"),
    "train.packing": (LOSS, lambda x: x.scorer.packing, {}, True, True),
    "inference_model.temperature": (LOSS, lambda x: x.scorer.temperature, {}, 0.5, 0.5),
    "train.seed": (LEARNER, lambda x: x.seed, {}, 7, 7),
    "train.epochs": (LEARNER, lambda x: x.epochs, {}, 2, 2),
    "train.optim_batch_size": (LEARNER, lambda x: x.rows_per_step, {}, 2, 2),
    "train.gradient_accumulation_steps": (
        LEARNER, lambda x: x.split, {}, 3,
        {"num_micro_batches": 3, "max_tokens": None, "multiple_of": 1}),
    "train.max_tokens_per_micro_batch": (
        LEARNER, lambda x: x.split, {}, 99,
        {"num_micro_batches": None, "max_tokens": 99, "multiple_of": 1}),
    "train_model.compile": (LEARNER, lambda x: x.split["multiple_of"], {}, True, 64),
    "train_model.gradient_checkpointing": (LEARNER, lambda x: x._probe is not None, {}, True, True),
    "optimizer.lr": (LEARNER, lambda x: x.optimizer.lr, {}, 0.5, 0.5),
    "optimizer.betas": (ADAMW, lambda x: x["betas"], {}, [0.5, 0.6], (0.5, 0.6)),
    "optimizer.eps": (ADAMW, lambda x: x["eps"], {}, 0.5, 0.5),
    "optimizer.weight_decay": (ADAMW, lambda x: x["weight_decay"], {}, 0.5, 0.5),
    "optimizer.clip_grad_norm": (LEARNER, lambda x: x.optimizer.clip_grad_norm, {}, None, None),
    "optimizer.warmup_steps": (LEARNER, lambda x: x.optimizer._factor(0), {}, 4, 0.25),
    "optimizer.schedule": (LEARNER, lambda x: x.optimizer._factor(5), {}, "linear", 0.5),
    "optimizer.final_lr_fraction": (LEARNER, lambda x: x.optimizer._factor(10), LINEAR, 0.5, 0.5),
    "train.total_dialog_turns": (LEARNER, lambda x: x.optimizer._factor(4),
                                 {"optimizer": {"schedule": "linear"}}, 32, 0.5),
    "inference_model.max_tokens": (POLICY, lambda x: x.sampling.max_tokens, {}, 5, 5),
    "inference_model.max_model_len": (POLICY, lambda x: x.max_model_len, {}, 50, 50),
    "inference_model.ignore_eos": (POLICY, lambda x: x.ignore_eos, {}, True, True),
    "train_model.torch_dtype": (POLICY, lambda x: x.model.dtype, {}, "bfloat16", torch.bfloat16),
    "train_model.attn_implementation": (
        POLICY, lambda x: x.model.config._attn_implementation, {}, "eager", "eager"),
    "env.num_envs": (lambda b, c: b.env(c), lambda x: x.num_prompts, {}, 3, 3),
    "env.repeats": (lambda b, c: b.env(c), lambda x: x.group_size, {}, 4, 4),
    "env.task": (lambda b, c: b.env(c), lambda x: len(x.stream.prompts), {}, {"num_train": 9}, 9),
    "env.dataset": (lambda b, c: b.task(c), lambda x: x.name, {"env": {"task": {}}},
                    "test_dataset", "test_dataset"),
    "env.reward_timeout": (lambda b, c: build.reward_function(c, b.task(c)),
                           lambda x: x.keywords["timeout"], {}, 2.5, 2.5),
    "env.reward": (lambda b, c: build.reward_function(c, b.task(c)),
                   lambda x: x(["47"], [Problem("", "0", "p")]).reward.tolist(), {},
                   {f"{__name__}:contains_seven": 0.5, "exact_match": 1.0}, [0.5]),
}


@pytest.fixture(scope="module", autouse=True)
def other_task():
    from grpo.tasks.base import Task, register_task

    @register_task("test_dataset")
    class Other(Task):
        default_reward = "exact_match"

        def __init__(self) -> None:
            problem = Problem("1+1=", "2", "p")
            super().__init__(train=[problem], test=[problem], source="here")


@pytest.mark.parametrize("key", sorted(REACHES))
def test_every_key_changes_the_part_it_configures(key, built):
    part, read, needed, value, expected = REACHES[key]
    section, name = key.split(".")
    before = small(**needed)
    after = copy.deepcopy(before)
    after.setdefault(section, {})[name] = value
    changed = read(part(built, load_config(after)))
    assert changed == expected
    assert read(part(built, load_config(before))) != changed


def test_every_key_of_the_objective_and_the_optimizer_is_covered():
    # Read by the loop, the loggers and the environment; tested where they are.
    elsewhere = {"train.exp_name", "train.dialog_turns_per_batch", "train.eval_frequency",
                 "train.checkpoint_frequency", "train.keep_checkpoints"}
    keys = {f"{section}.{key}" for section in ("train", "optimizer", "train_model")
            for key in SECTIONS[section].model_fields}
    assert keys == {key for key in REACHES if key.split(".")[0] in
                    ("train", "optimizer", "train_model")} | elsewhere


def test_the_data_path_reaches_the_task(gsm8k_folder):
    config = load_config(small(env={"dataset": "gsm8k", "data_path": str(gsm8k_folder),
                                    "task": {}}))
    assert len(build.build_task(config).test) == 1319


def test_an_option_the_task_does_not_have_is_refused():
    config = load_config(small(env={"task": {"max_operands": 9}}))
    with pytest.raises(ValueError, match="no option 'max_operands'.*max_operand"):
        build.build_task(config)


def test_the_prompt_limit_decides_which_prompts_are_kept(built):
    with pytest.raises(ValueError, match=r"env\.max_prompt_tokens=3 .*nothing is left"):
        built.prompts(load_config(small(env={"max_prompt_tokens": 3})))


@pytest.mark.parametrize(("inference", "parts"), [
    ({"max_model_len": 4096}, "max_model_len=4096 is more than the model's context of 2048"),
    ({"max_tokens": 2048}, "max_tokens=2048 leaves no room"),
])
def test_lengths_that_do_not_fit_the_model_are_refused(inference, parts, built):
    with pytest.raises(ConfigError, match=parts):
        built.prompts(load_config(small(inference_model=inference)))


def test_a_reference_is_only_loaded_for_its_term_and_is_the_named_model(built, tmp_path):
    cpu, dtype = torch.device("cpu"), torch.float32
    assert build.build_reference(load_config(small()), built.folder, device=cpu,
                                 dtype=dtype) is None
    config = load_config(small(train={"kl_to_ref_coeff": 0.1}, ref_model={"name": built.folder}))
    reference = build.build_reference(config, str(tmp_path), device=cpu, dtype=dtype)
    assert not any(param.requires_grad for param in reference.scorer.model.parameters())


def test_a_model_folder_without_a_model_is_named(tmp_path):
    config = load_config(small(model={"name": str(tmp_path)}))
    with pytest.raises(ConfigError, match="no config.json"):
        build.model_folder(config, build.build_task(config))


@pytest.mark.parametrize(("model", "dataset", "turns", "tokens"), [
    ("embedded", "gsm8k", 5 * 4, 128), ("some/model", "gsm8k", 100_000, 1024),
    ("embedded", "arithmetic", 100_000, 1024)])
def test_sizes_left_at_null_suit_the_model(model, dataset, turns, tokens):
    config = load_config({"model": {"name": model},
                          "env": {"dataset": dataset, "num_envs": 2, "repeats": 2}})
    assert (config.total_turns, config.max_tokens) == (turns, tokens)
