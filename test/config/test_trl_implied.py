"""Keys that a name only brings along give way to a key of today; a value given twice does not."""

from __future__ import annotations

import pytest

from grpo.config.keys import ConfigError
from grpo.run.api import own_keys
from grpo.run.cli.trl_names import with_trl_names


@pytest.mark.parametrize("line, also", [
    ("dataset_name=my/d reward_funcs=[accuracy_reward] env.answer_column=answer",
     ["env.path=my/d", "env.reward=[accuracy]"]),
    ("dataset_name=my/d env.prompt_column=question", ["env.path=my/d", "env.task.chat=false"]),
    ("dataset_name=my/d env.task.chat=true", ["env.prompt_column=prompt"]),
    ("dataset_name=my/d env.system_prompt=hi", ["env.task.chat=true"]),
    ("dataset_name=my/d dataset_prompt_column=problem env.system_prompt=hi",
     ["env.task.chat=true", "env.prompt_column=problem"]),
    ("loss_type=dapo train.clip_epsilon=[0.2,0.3]", ["train.objective=ppo_clip"]),
    ("loss_type=cispo train.clip_epsilon=[1.0,4.0]", ["train.objective=cispo"]),
    ("loss_type=sapo train.objective_options={temperature_negative:1.2}",
     ["train.objective=sapo"]),
    ("beta=0.04 train.kl_estimator=k3", ["train.kl_to_ref_coeff=0.04"]),
    ("beta=0.04 importance_sampling_level=sequence train.kl_estimator=k3",
     ["train.objective=gspo"]),
    ("vllm_importance_sampling_mode=token_mask train.proximal=scored",
     ["train.mismatch={mis:3.0}"]),
    ("use_adaptive_entropy=true train.entropy_coeff=0.01", ["entropy_controller.target=0.2"]),
    ("use_adaptive_entropy=true entropy_controller.target=0.3", ["train.entropy_coeff=0.0"]),
    ("per_device_train_batch_size=8 env.repeats=4", ["env.num_envs=2"]),
    ("per_device_train_batch_size=8 train.epochs=2", ["env.num_envs=1", "env.repeats=8"]),
    ("vllm_mode=server inference_model.url=http://host:8001", ["inference_model.engine=server"]),
    ("kl_target=0.05 kl_controller.kind=band", ["kl_controller.target=0.05"]),
])
def test_what_nobody_typed_gives_way_to_a_key(line, also, capsys):
    found = with_trl_names(line.split())
    keys = [text.partition("=")[0] for text in found]
    assert len({*keys}) == len(keys)
    assert {*also, line.split()[-1]} <= {*found}


@pytest.mark.parametrize("line, key", [
    ("learning_rate=1e-5 optimizer.lr=1e-6", "optimizer.lr"),
    ("epsilon=0.2 train.clip_epsilon=[0.1,0.1]", "train.clip_epsilon"),
    ("dataset_name=my/d dataset_prompt_column=a env.prompt_column=b", "env.prompt_column"),
    ("dataset_name=my/d system_prompt=a env.system_prompt=b", "env.system_prompt"),
    ("beta=0.04 use_bias_correction_kl=true train.kl_estimator=k3", "train.kl_estimator"),
    ("loss_type=dapo train.objective=gspo", "train.objective"),
    ("use_adaptive_entropy=true entropy_target=0.2 entropy_controller.target=0.3",
     "entropy_controller.target"),
    ("use_adaptive_entropy=true entropy_coef=0.1 train.entropy_coeff=0.2", "train.entropy_coeff"),
    ("per_device_train_batch_size=8 num_generations=4 env.repeats=8", "env.repeats"),
    ("num_iterations=2 train.epochs=3", "train.epochs"),
    ("vllm_mode=server vllm_server_port=8001 inference_model.url=http://host:8002",
     "inference_model.url"),
])
def test_what_was_typed_twice_in_two_ways_is_refused(line, key):
    with pytest.raises(ConfigError, match=f"{key}=.* and {key}=.*the same setting; give one"):
        with_trl_names(line.split())


def test_what_won_is_said(capsys):
    with_trl_names("vllm_mode=server inference_model.url=http://host:8001".split())
    assert ("the key that is given wins: inference_model.url=http://host:8001\n"
            in capsys.readouterr().out)


def test_a_group_by_its_key_is_named_where_a_batch_is_no_multiple():
    with pytest.raises(ConfigError, match="no multiple of env.repeats=3"):
        with_trl_names(["per_device_train_batch_size=8", "env.repeats=3"])


def test_from_python_they_give_way_as_well(capsys):
    keys = own_keys({"per_device_train_batch_size": 8, "train": {"epochs": 2}})
    assert (keys["train.epochs"], keys["env.num_envs"]) == (2, 1)
    assert "the key that is given wins: train.epochs=2\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="train.kl_to_ref_coeff=0.1 and a name of TRL"):
        own_keys({"beta": 0.04, "train.kl_to_ref_coeff": 0.1})
