"""``env=atropos`` in the scripts' configuration, and what it stands for."""

from __future__ import annotations

import pytest

from grpo.config.atropos_script import as_atropos
from grpo.config.keys import ConfigError
from grpo.config.sent import load_sent

from .configs import composed_like

URL = "env.url=http://127.0.0.1:8123"


def made(tmp_path, *overrides: str, script: str = "grpo.py"):
    config = composed_like(["env=atropos", URL, "train.max_steps=5", *overrides], script=script)
    return as_atropos(config, tmp_path, port=9123, url=config.env.url)


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_the_group_leaves_out_what_environments_do_themselves(script):
    config = composed_like(["env=atropos", URL], script=script)
    assert config.inference_model.max_tokens is None
    others = composed_like([], script=script)
    assert (others.inference_model.max_tokens, others.train.eval_frequency) == (4, 20)


@pytest.mark.parametrize("override", [
    "inference_model.max_tokens=4", "train.eval_frequency=5", "train.data_epochs=1",
    "env.reward=exact_match", "train.overlong_buffer=2",
    "train.max_sampling_rounds=2", "env.max_prompt_tokens=9", "env.step=retry"])
def test_keys_that_do_not_apply_are_refused_with_what_is_used_instead(override):
    with pytest.raises(ConfigError, match=rf"{override.split('=')[0]}=.* is not read with env=at"):
        composed_like(["env=atropos", URL, override])


@pytest.mark.parametrize("given", ["server=vllm", "server=sglang", "connections=8"])
def test_a_server_that_is_none_of_this_library_answers_no_environments(given):
    attached = ["env=atropos", URL, "inference_model.url=http://127.0.0.1:9001"]
    with pytest.raises(ConfigError, match=rf"inference_model.{given} is not read with env=atropos, "
                                          "whose engine is a server of this library; start one "
                                          r"\(python -m grpo.server.serve\), and remove it"):
        composed_like([*attached, f"inference_model.{given}"])
    assert composed_like([*attached, "inference_model.server=own"]).engine == "server"


@pytest.mark.parametrize("override", ["train.group_deadline=5", "train.oversample=0.5"])
def test_groups_that_environments_begin_have_no_deadline_here(override):
    with pytest.raises(ConfigError, match="max_num_workers of the environment"):
        composed_like(["env=atropos", URL, override], script="grpo-async.py")


def test_flags_are_for_an_environment_that_is_started_and_nothing_else_is():
    with pytest.raises(ConfigError, match="not read without env.environment"):
        composed_like(["env=atropos", URL, "env.task.flags={env: {max_num_workers: 3}}"])
    with pytest.raises(ConfigError, match="env.task has level, but with env=atropos it has flags"):
        composed_like(["env=atropos", URL, "+env.task.level=3"])


def test_somewhere_groups_must_come_from():
    with pytest.raises(ConfigError, match="give env.environment=path/to/env.py, .* or env.url="):
        composed_like(["env=atropos"])


@pytest.mark.parametrize("override", [URL, "env.environment=env.py", "env.port=9123"])
def test_other_environments_refuse_its_keys(override):
    with pytest.raises(ConfigError, match="is not read by env.dataset=arithmetic; use env=atropos"):
        composed_like([override])


def test_the_keys_of_the_scripts_are_those_of_the_commands(tmp_path):
    config = made(tmp_path, "env.num_envs=3", "env.repeats=4", "env.forward_ports=[9004]",
                  "inference_model.max_model_len=96", "train.gradient_accumulation_steps=5")
    own = config.atropos
    assert (own.url, own.vllm_port, own.forward_ports) == ("http://127.0.0.1:8123", 9123, [9004])
    assert (config.turns_per_batch, config.iterations, own.seq_len) == (12, 5, 96)
    assert config.optimizer_steps == 5 and own.save_path == str(tmp_path)


@pytest.mark.parametrize("script, overrides, engine, bridge, workers, bound", [
    ("grpo.py", [], "in_process", True, False, None),
    ("grpo.py", ["train_model.num_devices=2"], "process", True, False, None),
    ("grpo.py", ["inference_model.engine=server"], "server", False, False, None),
    ("grpo.py", ["inference_model.num_devices=2"], "in_process", True, True, None),
    ("grpo.py", ["ref_model.num_devices=1", "train.kl_to_ref_coeff=0.1"], "in_process", True, True,
     None),
    ("grpo-async.py", ["train.staleness=2"], "in_process", True, True, 2),
    ("grpo-async.py", ["train.staleness=0"], "in_process", True, True, 0)])
def test_who_answers_and_how_old_groups_may_be(
        tmp_path, script, overrides, engine, bridge, workers, bound):
    config = made(tmp_path, *overrides, script=script)
    assert (config.engine, config.atropos.bridge) == (engine, bridge)
    assert (config.has_workers, config.atropos.max_staleness) == (workers, bound)
    assert load_sent(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("script", ["grpo.py", "grpo-async.py"])
def test_groups_are_waited_for_as_long_as_the_scripts_say(tmp_path, script):
    assert made(tmp_path, script=script).atropos.timeout == 1800
    assert made(tmp_path, "train.rollout_timeout=9", script=script).atropos.timeout == 9


def test_a_batch_is_divided_into_whole_optimizer_steps(tmp_path):
    with pytest.raises(ConfigError, match="train.optim_batch_size=5 must divide"):
        made(tmp_path, "env.num_envs=3", "env.repeats=4", "train.optim_batch_size=5")
