"""The configuration: YAML and schema agree, wrong and unread keys are errors, sizes resolve."""

from __future__ import annotations

import string
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, ConfigError, load_config
from grpo.envs.tasks import make_task
from grpo.objectives import registry
from grpo.run import build, build_objective

from .configs import FOLDER, MAXENT, SECTIONS, composed, message, small

# Of grpo.py; those of grpo-async.py and grpo-offline.py have schemas of their own, see
# test_asynchronous.py and test_offline.py.
RUNS = sorted(path.stem for path in FOLDER.glob("*.yaml")
              if not {"async", "offline"} & {*path.stem.split("_")})
# The files of config/preset set keys of several sections, see test_presets.py; so do those of
# config/with_env. What is in config/outputs is Hydra's.
GROUPS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and path.name not in (
    "preset", "async", "ray", "with_env", "outputs"))


# -- YAML and schema ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_every_run_of_the_config_folder_composes_and_is_valid(name):
    values = composed(name)
    config = load_config(values)
    assert config.train.exp_name == values.train.exp_name != "grpo"  # a run says what it is
    assert config.iterations >= 5


def test_there_is_a_run_to_compose():
    assert {"grpo", "grpo_gsm8k", "grpo_ifeval"} <= set(RUNS)


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_of_a_group_has_exactly_the_keys_of_the_schema(group):
    files = sorted((FOLDER / group).glob("*.yaml"))
    assert files
    top_level = set(Config.model_fields) - set(SECTIONS)
    expected = top_level if group == "run" else set(SECTIONS[group].model_fields)
    for file in files:
        assert set(OmegaConf.load(file)) - {"hydra", "defaults"} == expected, file


def test_every_section_of_the_schema_has_a_yaml_group():
    assert set(SECTIONS) | {"run"} == set(GROUPS)


@pytest.mark.parametrize("group", sorted(set(SECTIONS) - {"env"}))
def test_the_defaults_of_yaml_and_schema_are_the_same(group):
    (file,) = (FOLDER / group).glob("*.yaml")
    assert SECTIONS[group](**OmegaConf.to_container(OmegaConf.load(file))) == SECTIONS[group]()


@pytest.mark.parametrize("file", [file for file in sorted((FOLDER / "env").glob("*.yaml"))
                                  if file.stem != "atropos"], ids=lambda f: f.stem)
def test_the_task_options_of_yaml_are_those_of_the_task(file):
    env = OmegaConf.to_container(OmegaConf.load(file))
    with pytest.raises(ValueError, match="has no option 'no_such_option'") as error:
        make_task(env["dataset"], no_such_option=1)
    options = str(error.value).split("use one of: ")[1].split(", ")
    assert env["task"]
    assert set(env["task"]) <= set(options)


@pytest.mark.parametrize("recipe", RUNS)
def test_additions_bring_what_suits_them_to_every_recipe_and_take_it_along(recipe):
    for env, expected in (("arithmetic", (4, 5e-4, "linear", 20)),
                          ("gsm8k", (None, 1e-5, "constant", 10))):
        values = composed(recipe, f"env={env}")
        assert (values.inference_model.max_tokens, values.optimizer.lr, values.optimizer.schedule,
                values.train.eval_frequency) == expected
        assert values.train.exp_name == env


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
    ("train", "seed", 2**32, "less than 4294967296"),
    ("eval", "seed", 2**64, "less than 4294967296"),
    ("train", "epochs", 0, "greater than or equal to 1"),
    ("train", "kl_to_ref_coeff", -0.1, "greater than or equal to 0"),
    ("train", "kl_to_inference_coeff", -0.1, "greater than or equal to 0"),
    ("train", "kl_estimator", "k4", "'k1', 'k2', 'k3' or 'unbiased_k3'"),
    ("train", "aggregation", "mean", "'token', 'sequence', 'prompt' or 'dr_grpo'"),
    ("train", "proximal", "old", "'sampled', 'current' or 'scored'"),
    ("train", "advantage_estimator", "gae", "'group_norm'"),
    ("train", "advantage_clip_percentile", 50, "less than 50"),
    ("train", "entropy_coeff", -0.1, "greater than or equal to 0"),
    ("train", "entropy_top_fraction", 1.0, "less than 1"),
    ("train", "off_policy_delta", -0.1, "greater than or equal to 0"),
    ("train", "overlong_buffer", 0, "greater than 0"),
    ("train", "overlong_factor", 0, "greater than 0"),
    ("train", "max_sampling_rounds", 1, "greater than or equal to 2"),
    ("kl_controller", "kind", "pid", "'horizon' or 'band'"),
    ("kl_controller", "target", 0, "greater than 0"),
    ("kl_controller", "band", 0.5, "greater than or equal to 1"),
    ("kl_controller", "factor", 1, "greater than 1"),
    ("entropy_controller", "target", 0, "greater than 0"),
    ("entropy_controller", "minimum", -1, "greater than or equal to 0"),
    ("maxent", "tau", -1, "greater than or equal to 0"),
    ("maxent", "q_epsilon", 1, "less than 1"),
    ("maxent", "tau_target", 0, "greater than 0"),
    ("distill", "reverse_kl_coeff", 0, "greater than 0"),
    ("distill", "topk", 0, "greater than or equal to 1"),
    ("distill", "temperature", 0, "greater than 0"),
    ("train", "packing", "perhaps", "valid boolean"),
    ("train", "keep_checkpoints", 0, "greater than or equal to 1"),
    ("train_model", "torch_dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
    ("train_model", "head", "triton", "'auto', 'fused', 'chunked' or 'logits'"),
    ("train_model", "head_chunk_size", 0, "greater than or equal to 1"),
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


@pytest.mark.parametrize(("key", "value"), [
    ("max_num_seqs", 4), ("gpu_memory_utilization", 0.5), ("kv_cache_memory_bytes", 1 << 20),
    ("enforce_eager", True), ("enforce_eager", False), ("engine", "process"),
    ("weight_sync", "reload"), ("weight_sync", "single_copy")])
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


@pytest.mark.parametrize(("env", "apart"), [
    ({"reward": "accuracy"}, True), ({"reward": "exact_match"}, False),
    ({"reward": "exact_match", "reward_processes": 0}, False),
    ({"reward": ["exact_match", "accuracy"], "reward_processes": 0}, True)])
def test_memory_of_processes_is_refused_where_no_reward_is_called_in_one(env, apart):
    config = load_config(small(env={**env, "reward_memory": 8.0}))
    check = partial(build.check, device=torch.device("cpu"), backend="transformers")
    if apart:
        return check(config, build.build_task(config))
    processes = env.get("reward_processes", "null")
    with pytest.raises(ConfigError, match=r"env.reward_memory=8.0 is not read because no reward .*"
                                          rf"\(env.reward_processes={processes}\); remove it"):
        check(config, build.build_task(config))
    config = config.changed(env={"reward_memory": 4.0})
    check(config, build.build_task(config))  # which was not asked for


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
    assert (config.iterations, config.optimizer_steps, config.total_turns) == (5, 30, 40)


def test_the_length_is_given_in_iterations_or_passes_over_the_problems_as_well():
    parts = {"dialog_turns_per_batch": 8, "optim_batch_size": 4, "epochs": 3,
             "total_dialog_turns": None}
    steps = load_config(small(train={**parts, "max_steps": 5}))
    assert (steps.iterations, steps.optimizer_steps, steps.total_turns) == (5, 30, 40)
    assert steps.for_problems(11) is steps
    passes = load_config(small(train={**parts, "data_epochs": 1.5}))
    with pytest.raises(ValueError, match=r"data_epochs=1.5 .*call config\.for_problems"):
        _ = passes.iterations
    assert passes.for_problems(11) == load_config(  # 16.5 problems, 4 a batch
        small(train={**parts, "max_steps": 5}))
    assert "5 iterations (train.max_steps), 30 optimizer steps, 40 completions (train.total_" \
        "dialog_turns), 1.82 passes over the training problems (train.data_epochs), seed 0" == (
            build.describe_length(steps, problems=11))


def test_a_recipe_leaves_the_unit_of_the_length_to_the_command_line():
    for name in ("grpo", "grpo_gsm8k", "grpo_async", "grpo_async_gsm8k"):
        schema = AsyncConfig if "async" in name else Config
        assert load_config(composed(name, "train.max_steps=3"), schema).iterations == 3
        passes = load_config(composed(name, "train.data_epochs=2"), schema)
        assert passes.for_problems(48).iterations == -(-96 // passes.env.num_envs)
    assert load_config(composed("grpo")).iterations == 360


def test_a_model_folder_without_a_model_is_named(tmp_path):
    config = load_config(small(model={"name": str(tmp_path)}))
    with pytest.raises(ConfigError, match="no config.json"):
        build.model_folder(config, build.build_task(config))


@pytest.mark.parametrize(("model", "dataset", "turns", "tokens"), [
    ("embedded", "gsm8k", 5 * 4, 128), ("some/model", "gsm8k", 100_000, 1024),
    ("embedded", "arithmetic", 92_160, 1024)])
def test_sizes_left_at_null_suit_the_model(model, dataset, turns, tokens):
    config = load_config({"model": {"name": model},
                          "env": {"dataset": dataset, "num_envs": 2, "repeats": 2}})
    assert (config.total_turns, config.max_tokens) == (turns, tokens)


# -- several training devices ---------------------------------------------------------------------

SEVERAL = {"train_model": {"num_devices": 2},
           "inference_model": {"backend": "vllm", "engine": "process", "max_tokens": 3}}


@pytest.mark.parametrize(("train_model", "inference", "sync", "ranks"), [
    *((keys, {"engine": "process", "weight_sync": way}, "transfer", 2)
      for keys in ({"num_devices": 2}, {"devices": [0, 1]}) for way in ("auto", "transfer")),
    *(({"num_devices": 2, "lora": {"enabled": True}}, {"engine": "process", "weight_sync": way},
       "lora", 2) for way in ("auto", "lora")),
    *((keys, {}, "single_copy", 1) for keys in ({}, {"num_devices": 1}, {"devices": [3]}))])
def test_several_training_devices_hand_over_what_they_train_and_one_shares_its_weights(
        train_model, inference, sync, ranks):
    config = load_config(small(train_model=train_model,
                               inference_model={"backend": "vllm", **inference}))
    assert (config.weight_sync, config.train_model.ranks) == (sync, ranks)
    assert config.shares_weights == (ranks == 1)


@pytest.mark.parametrize(("train_model", "inference", "parts"), [
    ({"lora": {"enabled": True}}, {"weight_sync": "transfer"},
     "weight_sync=transfer is not how adapters are gathered from them; use lora, or auto"),
    ({}, {"backend": "transformers"}, "use backend=vllm, or give inference_model devices"),
    ({}, {"engine": "in_process"}, "use engine=process, or auto, or train on one device"),
    ({}, {"engine": "server", "weight_sync": "restart"},
     "weight_sync=restart is not how weights are gathered from them; use transfer, or auto"),
    ({}, {"weight_sync": "single_copy"}, "weight_sync=single_copy is not how weights are"),
    ({}, {"weight_sync": "reload"}, "use transfer, or auto, or train on one device"),
    ({"devices": [1]}, {}, "num_devices=2 and train_model.devices=[1] contradict each other"),
    ({"devices": [1, 1]}, {}, "train_model.devices=[1, 1] names a GPU twice; name each once"),
])
def test_what_several_training_devices_cannot_work_with_is_named(train_model, inference, parts):
    values = small(train_model={**SEVERAL["train_model"], **train_model},
                   inference_model={**SEVERAL["inference_model"], **inference})
    assert parts in message(values)


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "adamw_cpu"])
def test_optimizers_that_step_whole_tensors_are_for_one_training_device(name):
    values = small(**SEVERAL, optimizer={"name": name})
    assert f"optimizer.name={name} steps whole tensors" in message(values)


def test_atropos_environments_refuse_several_training_devices():
    from grpo.config.atropos import AtroposConfig

    with pytest.raises(ConfigError, match="train_model.num_devices=2 is not read by atropos-grpo, "
                       "whose engine has one device; use env=atropos in grpo.py"):
        load_config({"train_model": {"num_devices": 2}, "inference_model": {"engine": "server"}},
                    AtroposConfig)


@pytest.mark.parametrize("env, expected", [
    ({"reward": ["a:b", "c:d"]}, {"a:b": 1.0, "c:d": 1.0}),
    ({"reward": ["a:b", "c:d"], "reward_weights": [0.5, -2]}, {"a:b": 0.5, "c:d": -2.0}),
    ({"reward": {"a:b": 3.0}}, {"a:b": 3.0}), ({}, {"own": 1.0})])
def test_several_rewards_and_their_weights(env, expected):
    assert load_config(small(env=env)).env.weighted_rewards("own") == expected


@pytest.mark.parametrize("env", [
    {"reward_weights": [1.0]}, {"reward": "a:b", "reward_weights": [1.0]},
    {"reward": {"a:b": 1.0}, "reward_weights": [1.0]},
    {"reward": ["a:b", "c:d"], "reward_weights": [1.0]}])
def test_a_weight_without_its_reward_is_refused(env):
    assert "give one weight for each" in message(small(env=env))


@pytest.mark.parametrize("names", [[], ["a:b", "a:b"]])
def test_a_list_of_rewards_names_each_once(names):
    assert "at least one reward, and none twice" in message(small(env={"reward": names}))


@pytest.mark.parametrize(("buffer", "tokens"), [(None, None), (2, 2), (0.5, 5), (0.01, 1), (1, 1)])
def test_the_overlong_buffer_is_tokens_or_a_share_of_the_limit(buffer, tokens):
    config = load_config(small(train={"overlong_buffer": buffer},
                               inference_model={"max_tokens": 10}))
    assert config.overlong_tokens == tokens


def test_what_needs_a_reference():
    def needed(**changes) -> bool:
        return load_config(small(**changes)).needs_reference

    assert not needed() and not needed(**MAXENT) and not needed(**MAXENT, maxent={"beta": 0.0})
    assert needed(train={"kl_to_ref_coeff": 0.0})
    assert needed(train={"kl_to_ref_coeff": 0.1, "kl_in_reward": True})
    assert needed(**MAXENT, maxent={"beta": 0.1})


def test_an_own_objective_of_whole_groups_is_given_advantages(monkeypatch):
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    registry.register_surrogate("mine", scope="group")(lambda tokens: -tokens.advantage_N)
    train = {"objective": "mine", "aggregation": "prompt", "advantage_estimator": "rloo"}
    advantage = build_objective.build_advantage(load_config(small(train=train)))
    assert advantage.estimator == "rloo"
    assert "train.aggregation=prompt" in message(small(train={**train, "aggregation": "token"}))
    assert "maxent.tau" in message(small(train=train, maxent={"tau": 0.5}))
