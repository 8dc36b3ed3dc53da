"""Earlier names of keys: accepted where they stood, printed with the new name, never ambiguous."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from grpo.config.aliases import ALIASES, REPLACED
from grpo.config.asynchronous import AsyncConfig
from grpo.config.keys import unknown_key
from grpo.config.schema import ConfigError, load_config
from grpo.run.cli.names import key_error

from .configs import composed

# For each earlier name a value, and what else its key needs to be read.
MAXENT = {"train": {"objective": "maxent_listwise", "aggregation": "prompt"}}
VALUES = {"iterations": 7, "num_train_epochs": 1.5,
          "init_kl_coeff": 0.1, "kl_target": 0.2, "kl_horizon": 50.0, "kl_ctl_step_size": 0.3,
          "maxent_tau": 0.5, "maxent_q_temperature": 2.0, "maxent_q_epsilon": 0.1,
          "maxent_length_normalize_ref": False,
          "dataset_mixture": {"datasets": [{"id": "org/sums"}]}, "system_prompt": "Add.",
          "chat_template": "{{ messages }}"}
CONTROLLED = {"init_kl_coeff": 0.1, "kl_target": 0.2, "kl_horizon": 50.0}


def config(given: dict, *, where: str, **sections):
    """A configuration with earlier names, and what makes their keys be read."""
    values = {name: dict(section) for name, section in sections.items()}
    (values if where == "top" else values.setdefault("train", {})).update(given)
    return values


def needed(name: str) -> tuple[dict, dict]:
    """The other earlier names and the sections without which ``name`` would not be read."""
    if name.startswith("maxent"):
        beta = {"maxent": {"beta": 0.1}} if name == "maxent_length_normalize_ref" else {}
        return {}, MAXENT | beta
    return (CONTROLLED if name.startswith("kl_") else {}), {}


def test_every_alias_is_tried_here():
    assert VALUES.keys() == ALIASES.keys()


@pytest.mark.parametrize("where", ["top", "train"])
@pytest.mark.parametrize("name", VALUES)
def test_an_earlier_name_sets_the_key_of_today_and_prints_it(name, where, capsys):
    others, sections = needed(name)
    loaded = load_config(config({**others, name: VALUES[name]}, where=where, **sections))
    section, key = ALIASES[name]
    assert getattr(getattr(loaded, section), key) == VALUES[name]
    former = name if where == "top" else f"train.{name}"
    assert f"{former} is now called {section}.{key}; using {VALUES[name]}\n" in (
        capsys.readouterr().out)


def test_the_earlier_controller_is_the_one_with_a_horizon_and_moves():
    loaded = load_config(config(CONTROLLED, where="train"))
    assert loaded.kl_controller.kind == "horizon"
    controller = loaded.kl_controller.controller(loaded.train.kl_to_ref_coeff)
    assert controller.update(10.0) > 0.1 > load_config(
        config(CONTROLLED, where="top")).kl_controller.controller(0.1).update(0.0)


def test_another_kind_of_controller_stays_and_says_what_it_does_not_read():
    with pytest.raises(ConfigError, match="horizon"):
        load_config(config(CONTROLLED, where="top", kl_controller={"kind": "band"}))


@pytest.mark.parametrize("name", VALUES)
def test_two_names_with_two_values_are_refused(name):
    others, sections = needed(name)
    section, key = ALIASES[name]
    values = config({**others, name: VALUES[name]}, where="top", **sections)
    values[section] = {**values.get(section, {}), key: True if key.startswith("length") else 9}
    with pytest.raises(ConfigError, match=rf"{name}=.* and {section}\.{key}=.*give one"):
        load_config(values)


def test_the_same_value_under_both_names_is_accepted():
    values = config({"init_kl_coeff": 0.1}, where="top", train={"kl_to_ref_coeff": 0.1})
    assert load_config(values).train.kl_to_ref_coeff == 0.1


def test_a_null_is_no_value(capsys):
    load_config(config(dict.fromkeys(ALIASES), where="train"))
    assert capsys.readouterr().out == ""


def test_a_section_of_the_wrong_type_is_reported_as_such():
    with pytest.raises(ConfigError, match="maxent"):
        load_config({"maxent": 3, "maxent_tau": 0.5})


KNOWN = composed("grpo_async")


@pytest.mark.parametrize("path", REPLACED)
def test_a_key_that_is_something_else_today_is_answered_with_what_to_write(path):
    below = f"{path}.num_cpus" if path.startswith("ray.") else path
    for given in {path, below}:
        assert REPLACED[path] in key_error(given, True, KNOWN, adds=False)
        assert REPLACED[path] in key_error(given, True, KNOWN, adds=True)
    assert REPLACED[path] in unknown_key(path, True, [])
    for key in re.findall(r"\b\w+\.\w+(?:\.\w+)*(?==|\b)", REPLACED[path]):
        assert key.endswith(".py") or OmegaConf.select(KNOWN, key, default="?") != "?", key


@pytest.mark.parametrize("path", [path for path in REPLACED if "quantization.enabled" not in path])
def test_a_file_with_such_a_key_gets_the_same_answer(path):
    section, _, key = path.rpartition(".")
    with pytest.raises(ConfigError, match=re.escape(REPLACED[path])):
        load_config({section: {key: True}} if section else {key: True}, AsyncConfig)


#: Keys of TorchRL's GRPO recipe in its files config/grpo_{gsm8k,ifeval,math,countdown,math_7b,
#: math_7b_sync}.yaml and config/mode/{sync,async}.yaml, of pytorch/rl at ae9719f1 (22 August 2026).
RECIPE = """
env: dataset num_envs repeats reasoning max_steps
model: name compile
train: exp_name mixed_precision total_dialog_turns packing dialog_turns_per_batch
 gradient_accumulation_steps checkpoint_frequency optim_batch_size kl_coef_in_loss use_kl_to_ref
 kl_to_ref_coeff kl_to_inference_coeff entropy_coeff logging_frequency empty_replay_buffer sync
 epochs buffer_size weight_update_frequency sync_iter
train_model: gradient_checkpointing num_devices lora.enabled lora.r lora.alpha lora.dropout
 quantization.enabled attn_implementation torch_dtype
inference_model: backend num_devices quantization.enabled attn_implementation torch_dtype
 enable_fp32_lm_head disable_cuda_graph disable_piecewise_cuda_graph disable_overlap_schedule
 gpu_memory_utilization temperature top_p max_tokens include_stop_str_in_output enforce_eager
 enable_prefix_caching max_model_len
ref_model: gradient_checkpointing num_devices lora.enabled lora.r lora.alpha lora.dropout
 quantization.enabled attn_implementation torch_dtype
optimizer: name lr eps clip_grad_norm weight_decay
ray: init_config.num_cpus init_config.num_gpus init_config.runtime_env.working_dir
 init_config._temp_dir init_config._system_config.object_spilling_threshold
 collector_config.num_cpus train_handler_config.num_cpus replay_buffer_config.num_cpus
 replay_buffer_config.num_gpus
logging: experiment_name checkpoint_dir checkpoint_frequency
"""
RECIPE_KEYS = ["mode", *(f"{section}.{key}" for section, keys in re.findall(
    r"^(\w+): (.+(?:\n .+)*)$", RECIPE, re.MULTILINE) for key in keys.split())]


@pytest.mark.parametrize("recipe", ["grpo_gsm8k", "grpo_async_gsm8k"])
def test_every_key_of_torchrls_recipe_is_a_key_here_or_answered(recipe):
    assert len(RECIPE_KEYS) == 80
    known = composed(recipe)
    errors = {key: key_error(key, True, known, adds=False) for key in RECIPE_KEYS}
    assert not [error for error in errors.values() if error and "unknown key" in error]
    replaced = {path for path in REPLACED if any(
        key == path or key.startswith(f"{path}.") for key in RECIPE_KEYS)}
    assert replaced == REPLACED.keys()  # there is no answer to what nobody asks
    assert sum(error is None for error in errors.values()) == 37
