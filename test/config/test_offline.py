"""The offline trainer's keys: what each is in those of ``grpo.py``, and what is refused."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from grpo.config.offline import (
    KEYS,
    OfflineConfig,
    in_offline_keys,
    notes,
    translate,
)
from grpo.config.schema import Config, ConfigError, load_config
from grpo.config.unread import value_at
from grpo.run.cli.offline import with_one_length

from ..keys.watching import keys_of
from .configs import FOLDER, composed


def translated(**sections) -> Config:
    return translate(load_config(sections, OfflineConfig))


def refused(**sections) -> str:
    with pytest.raises(ConfigError) as error:
        translated(**sections)
    return str(error.value)


def with_value(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


#: Key, a value, and what it is then: keys of grpo.py and their values.
REACHES = {
    "iterations": (3, {"train.max_steps": 3}), "seed": (7, {"train.seed": 7, "eval.seed": 7}),
    "resume": ("auto", {"resume": "auto"}),
    "model.train_id": ("org/model", {"model.name": "org/model"}),
    "model.ref_id": ("org/other", {"ref_model.name": "org/other"}),
    "model.device": ("cpu", {"device": "cpu"}),
    "generation.backend": ("sglang_server", {"inference_model.server": "sglang"}),
    "generation.base_url": ("http://10.0.0.2:8123/v1", {
        "inference_model.url": "http://10.0.0.2:8123", "inference_model.engine": "server"}),
    "generation.batch_size": (2, {"inference_model.connections": 2}),
    "generation.max_new_tokens": (9, {"inference_model.max_tokens": 9}),
    "generation.temperature": (1.5, {"inference_model.temperature": 1.5, "eval.temperature": 1.5}),
    "train.iterations": (4, {"train.max_steps": 4}),
    "train.batch_size": (2, {"train.optim_batch_size": 2, "train.gradient_accumulation_steps": 1}),
    "train.grad_accum_steps": (2, {"train.optim_batch_size": 16,
                                   "train.gradient_accumulation_steps": 2}),
    "train.lr": (3e-6, {"optimizer.lr": 3e-6}),
    "train.grad_clip": (0.5, {"optimizer.clip_grad_norm": 0.5}),
    "train.kl_coef": (0.0, {"train.kl_to_ref_coeff": None}),
    "train.kl_target": (0.1, {"kl_controller.kind": "horizon", "kl_controller.target": 0.1}),
    "train.entropy_coef": (0.01, {"train.entropy_coeff": 0.01}),
    "train.clip_epsilon": (0.1, {"train.clip_epsilon": 0.1}),
    "train.variant": ("bnpo", {"train.aggregation": "token", "train.clip_epsilon": None}),
    "train.ratio": ("sequence", {"train.objective": "gspo", "train.aggregation": "sequence"}),
    "train.advantage_clip_percentile": (5.0, {"train.advantage_clip_percentile": 5.0}),
    "data.dataset": ("countdown", {"env.dataset": "countdown"}),
    "data.difficulty": (2, {"env.task": {
        "train_seed_start": 1000, "num_train_seeds": 64, "test_seed_start": 5000,
        "num_test_seeds": 16, "difficulty": 2}}),
    "data.problems_per_iteration": (2, {"env.num_envs": 2}),
    "data.rollouts_per_problem": (8, {"env.repeats": 8}),
    "data.train_seed_start": (10, {"env.task": {
        "train_seed_start": 10, "num_train_seeds": 64, "test_seed_start": 5000,
        "num_test_seeds": 16}}),
    "data.num_train_seeds": (5, {"env.task": {
        "train_seed_start": 1000, "num_train_seeds": 5, "test_seed_start": 5000,
        "num_test_seeds": 16}}),
    "eval.enabled": (False, {"train.eval_frequency": "never", "eval.samples": None}),
    "eval.interval": (3, {"train.eval_frequency": 3}),
    "eval.batch_size": (2, {"eval.batch_size": 2}),
    "eval.replicates": (2, {"eval.samples": 2}),
    "eval.num_ids": (5, {"env.task": {
        "train_seed_start": 1000, "num_train_seeds": 64, "test_seed_start": 5000,
        "num_test_seeds": 5}}),
    "eval.id_seed_start": (9000, {"env.task": {
        "train_seed_start": 1000, "num_train_seeds": 64, "test_seed_start": 9000,
        "num_test_seeds": 16}}),
    "eval.do_sample": (False, {"eval.samples": None}),
    "eval.temperature": (0.3, {"eval.temperature": 0.3}),
    "eval.k": ([2], {"eval.k": [2]}),
    "checkpoint.save_interval": (2, {"train.checkpoint_frequency": 2}),
    "checkpoint.keep_last_k": (1, {"train.keep_checkpoints": 1}),
    "logging.wandb": (True, {"logging.backends": ["wandb"]}),
    "run": ({"train_model": {"lora": {"enabled": True}}}, {"train_model.lora.enabled": True}),
}
#: Keys that name what another says, or are only read beside others; each has a test below.
ELSEWHERE = {"eval.backend", "eval.base_url", "generation.top_p", "generation.top_k",
             "generation.repetition_penalty", "data.path", "train.kl_horizon", "logging.project",
             "logging.run_name"}


def test_every_key_is_covered():
    assert set(keys_of(OfflineConfig)) == REACHES.keys() | ELSEWHERE


@pytest.mark.parametrize("key", REACHES)
def test_each_key_is_one_of_grpo_py(key):
    value, expected = REACHES[key]
    before, config = translated(), translated(**with_value(key, value))
    assert {path: value_at(config, path) for path in expected} == expected
    assert any(value_at(before, path) != value for path, value in expected.items())


def test_defaults_are_the_earlier_trainers_but_for_what_a_line_says():
    config = translated()
    assert OfflineConfig() == load_config(composed("offline_grpo"), OfflineConfig)
    assert (config.iterations, config.optimizer_steps, config.turns_per_batch) == (10, 20, 16)
    assert (config.inference_model.url, config.weight_sync) == ("http://127.0.0.1:8000", "reload")
    (line,) = notes(OfflineConfig())
    assert "0.95, 50 and 1.1" in line


def test_the_recipe_without_a_server_is_valid_and_has_comments_for_every_key():
    config = translate(load_config(composed("offline_smoke"), OfflineConfig))
    assert config.inference_model.backend == "transformers" and config.device == "cpu"
    assert set(OmegaConf.load(FOLDER / "offline_grpo.yaml")) - {"defaults", "hydra"} == set(
        OfflineConfig.model_fields)


@pytest.mark.parametrize("typed", ["iterations", "train.iterations"])
@pytest.mark.parametrize("recipe", ["offline_smoke", "offline_grpo"])
def test_a_length_is_typed_by_either_name_whatever_the_recipe_says(recipe, typed):
    cfg = composed(recipe, f"{typed}=5")
    assert translate(load_config(with_one_length(cfg, [f"{typed}=5"]), OfflineConfig)
                     ).iterations == 5
    both = ["iterations=10", "train.iterations=5"]
    with pytest.raises(ConfigError, match="iterations=10 and train.iterations=5 .*give one"):
        load_config(with_one_length(composed(recipe, *both), both), OfflineConfig)


@pytest.mark.parametrize("key, value", [
    ("top_p", 0.95), ("top_k", 50), ("repetition_penalty", 1.1)])
def test_sampling_that_is_not_what_is_trained_is_refused_with_the_reason(key, value):
    said = refused(generation={key: value})
    assert f"generation.{key}={value}" in said and "every ratio would be biased" in said
    assert "generation.temperature" in said
    translated(generation={"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0})


@pytest.mark.parametrize("sections, parts", [
    ({"eval": {"base_url": "http://127.0.0.1:1"}}, ["eval.base_url", "generation.base_url"]),
    ({"eval": {"backend": "sglang_server"}}, ["eval.backend", "generation.backend"]),
    ({"iterations": 3, "train": {"iterations": 4}}, ["iterations=3", "train.iterations=4"]),
    ({"train": {"batch_size": 5}}, ["train.batch_size=5", "16 completions"]),
    ({"train": {"kl_coef": 0.0}, "model": {"ref_id": "x"}}, ["model.ref_id=x", "train.kl_coef"]),
    ({"train": {"kl_coef": 0.0, "kl_target": 1.0}}, ["train.kl_target", "train.kl_coef"]),
    ({"train": {"kl_horizon": 1.0}}, ["train.kl_horizon", "train.kl_target"]),
    ({"train": {"ratio": "sequence", "variant": "dapo"}}, ["train.variant=dapo", "train.ratio"]),
    ({"eval": {"enabled": False, "interval": 2}}, ["eval.interval=2", "eval.enabled=false"]),
    ({"eval": {"do_sample": False, "replicates": 2}}, ["eval.replicates=2", "eval.do_sample"]),
    ({"eval": {"k": [8]}}, ["eval.k=[8]", "eval.replicates=4"]),
    ({"checkpoint": {"save_interval": 0, "keep_last_k": 1}}, ["keep_last_k=1", "save_interval"]),
    ({"logging": {"project": "p"}}, ["logging.project=p", "logging.wandb"]),
    ({"data": {"path": "x"}}, ["data.path=x", "data.dataset=sat"]),
    ({"data": {"dataset": "gsm8k", "difficulty": 1}}, ["data.difficulty=1", "gsm8k"]),
    ({"generation": {"backend": "transformers", "batch_size": 2}}, ["generation.batch_size=2"]),
    ({"generation": {"backend": "vllm", "base_url": "http://a:1"}}, ["generation.base_url"]),
    ({"run": {"optimizer": {"lr": 1.0}}}, ["run.optimizer.lr=1.0", "train.lr; give that"]),
    ({"run": {"env": {"task": {"num_train_seeds": 1}}}}, ["data.num_train_seeds; give that"]),
    ({"run": {"train": {"sead": 1}}}, ["run.train.sead: unknown key"]),
    ({"run": {"train_model": 1}}, ["write run.SECTION.KEY"]),
    ({"seed": 2**32}, ["seed=4294967296", "less than 4294967296"]),
    ({"trian": {}}, ["trian: unknown key"])])
def test_what_would_not_be_read_or_cannot_be_is_refused_in_the_trainers_own_keys(sections, parts):
    said = refused(**sections)
    assert all(part in said for part in parts), said


def test_engines_of_this_process_and_of_this_librarys_server():
    assert translated(generation={"backend": "vllm", "batch_size": 6}
                      ).inference_model.max_num_seqs == 6
    own = translated(generation={"backend": "grpo_server"})
    assert (own.inference_model.server, own.weight_sync) == ("own", "single_copy")
    same = translated(eval={"backend": "vllm_server", "base_url": "http://127.0.0.1:8000/v1"})
    assert same == translated()


def test_the_variants_of_the_loss():
    dapo, dr = (translated(train={"variant": name}).train for name in ("dapo", "dr_grpo"))
    assert (dapo.aggregation, dapo.clip_epsilon) == ("token", (0.2, 0.28))
    assert (dr.aggregation, dr.advantage_estimator) == ("dr_grpo", "group_mean")
    own = translated(train={"variant": "dapo", "clip_epsilon": 0.1}).train
    assert own.clip_epsilon == 0.1


def test_keys_that_are_read_beside_others():
    config = translated(train={"kl_target": 0.1, "kl_horizon": 20.0}, logging={
        "wandb": True, "project": "p", "run_name": "r"}, data={"dataset": "gsm8k", "path": "x"})
    assert config.kl_controller.horizon == 20.0
    assert (config.logging.wandb_project, config.logging.wandb_run_name) == ("p", "r")
    assert config.env.data_path == "x" and config.env.task == {
        "train_start": 1000, "num_train": 64, "test_start": 5000, "num_test": 16}


def test_a_batch_that_is_more_than_an_iteration_is_one_step_and_a_line_says_so():
    offline = load_config({"train": {"batch_size": 32, "grad_accum_steps": 2}}, OfflineConfig)
    assert translate(offline).rows_per_optimizer_step == 16
    assert "one step takes all of them" in [*notes(offline)][1]


def test_messages_of_the_run_are_put_into_the_trainers_keys():
    known = set(keys_of(OfflineConfig)) | {"seed", "iterations", "resume"}
    assert set(KEYS.values()) <= known
    assert in_offline_keys("inference_model.url=x: lower optimizer.lr, or device=cpu") == (
        "generation.base_url=x: lower train.lr, or model.device=cpu")
    assert in_offline_keys("metrics/train.json and train_model.lora.r=2") == (
        "metrics/train.json and run.train_model.lora.r=2")
