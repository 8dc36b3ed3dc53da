"""``--name value`` is read as TRL's scripts read it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.config.keys import ConfigError
from grpo.run.cli.trl_flags import read_words
from grpo.run.cli.trl_names import with_trl_names

from .configs import composed_like


@pytest.mark.parametrize("words, key, value", [
    (["--report_to", "wandb,tensorboard"], "logging.backends", ["wandb", "tensorboard"]),
    (["--report_to", "wandb", "tensorboard"], "logging.backends", ["wandb", "tensorboard"]),
    (["--report_to=[wandb,tensorboard]"], "logging.backends", ["wandb", "tensorboard"]),
    (["-m", "--report_to", "wandb,tensorboard"], "logging.backends", ["wandb", "tensorboard"]),
    (["--report_to", "none"], "logging.backends", []),
    (["--reward_funcs", "accuracy,format"], "env.reward", ["accuracy", "format"]),
    (["--reward_funcs", "accuracy", "format", "--reward_weights", "1.0", "0.5"],
     "env.reward_weights", [1.0, 0.5]),
    (["--use_peft", "--lora_target_modules", "q_proj,v_proj"],
     "train_model.lora.target_modules", ["q_proj", "v_proj"]),
    (["--benchmarks", "countdown"], "eval.benchmarks", ["countdown"]),
    (["--benchmarks", '{"lm_eval:a": {"limit": 3}}'], "eval.benchmarks",
     {"lm_eval:a": {"limit": 3}}),
    *((["--system_prompt", text], "env.system_prompt", text) for text in (
        "Think first, then answer.", "Reply in (short) form", "it's {x}: [y]", "[Think]", "42",
        'say "so"', "answer=42", "-- so", "true", "# As a list", "")),
    (["--chat_template={{ x }}\n\"y\""], "env.chat_template", '{{ x }}\n"y"'),
    (["-m", "--system_prompt", "first, then"], "env.system_prompt", "first, then"),
    (["--run_name", "first, with (some) changes"], "train.exp_name", "first, with (some) changes"),
    (["--run_name", "no: 'quotes'"], "train.exp_name", "no: 'quotes'"),
    (["--beta", "1e-3"], "train.kl_to_ref_coeff", 1e-3), (["--seed", "3"], "train.seed", 3),
    (["--max_steps", "-1"], "train.max_steps", None),
    (["--run_name", "train.seed=3"], "train.exp_name", "train.seed=3"),
    (["--run_name", "lr=1e-6", "train.seed=3"], "train.seed", 3),
    (["--bf16", "train.seed=3"], "train.seed", 3),
    (["--reward_funcs", "accuracy", "format", "length", "--reward_weights", "1.0", "-0.5", "-.1"],
     "env.reward_weights", [1.0, -0.5, -0.1]),
    (["--reward_funcs", "accuracy", "format", "--reward_weights", "-1.0", "0.5"],
     "env.reward_weights", [-1.0, 0.5]),
    (["--reward_funcs", "accuracy", "format", "--reward_weights", "-1.0,-1e-2"],
     "env.reward_weights", [-1.0, -0.01]),
    *((["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", text],
       "optimizer.final_lr_fraction", 0.1) for text in (
        '{"min_lr_rate": 0.1}', "{min_lr_rate: 0.1}", "{min_lr_rate:0.1}",
        "{'min_lr_rate': 0.1}")),
])
def test_a_flag_means_what_it_means_to_trl(words, key, value):
    found = composed_like(words)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("words, found", [
    (["--model_name_or_path", "multirun/lr=0.1/final_model"],
     ['model.name="multirun/lr=0.1/final_model"']),
    (["--output_dir", "runs/lr=1e-6", "--bf16"],
     ['train_model.torch_dtype=auto', 'hydra.run.dir="runs/lr=1e-6"']),
    (["--use_peft", "train.seed=3"], ["train.seed=3", "train_model.lora.enabled=true"]),
    (["--resume_from_checkpoint", "train.seed=3"], ["train.seed=3", "resume=auto"]),
    (["--beta", "-m"], None), (["--reward_weights", "1.0", "-cd", "mine"], ["-cd", "mine",
                                                                          "env.reward_weights=[1.0]"]),
])
def test_a_word_with_an_equals_sign_is_the_value_of_a_name_that_needs_one(words, found):
    if found is None:
        with pytest.raises(ConfigError, match="beta=true: expected a number"):
            with_trl_names(words)
    else:
        assert with_trl_names(words) == found


def test_commas_are_a_sweep_with_multirun_alone():
    assert with_trl_names(["-m", "--learning_rate", "1e-5,1e-6"]) == [
        "-m", "optimizer.lr=1e-5,1e-6"]
    with pytest.raises(ConfigError, match="--loss_type grpo,dapo: its values say several keys"):
        with_trl_names(["-m", "--loss_type", "grpo,dapo"])
    with pytest.raises(ConfigError, match="lr='1e-5,1e-6': .*valid number"):
        composed_like(["--learning_rate", "1e-5,1e-6"])


@given(st.text(max_size=20))
def test_any_text_is_read(text):
    assert read_words("system_prompt", [text]) == text
    read_words("run_name", [text])
