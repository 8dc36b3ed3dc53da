"""From the command line to the configuration: every flag, its default, and what refuses it."""

from __future__ import annotations

import argparse
import re
import shlex
from functools import reduce
from pathlib import Path
from typing import get_args

import pytest

from grpo.config.schema import ConfigError
from grpo.run import build
from grpo.run.cli import atropos, launch
from grpo.run.cli.flags import (
    FLAGS,
    ONE_PROCESS,
    Mode,
    choose_gpu,
    dtype,
    layer_indices,
    to_config,
)

REPO = Path(__file__).resolve().parents[2]
MODES = get_args(Mode)
# What is typed, and the value of the key; other flags that are needed.
GIVEN = {
    "model_name": ("some/model", "some/model"), "dtype": ("float32", "float32"),
    "device": ("cpu", "cpu"), "train_layer_indices": ("0-2,5", [0, 1, 2, 5]),
    "learning_rate": ("3e-6", 3e-6), "training_steps": ("7", 7), "batch_size": ("3", 3),
    "gradient_accumulation_steps": ("4", 4), "seq_len": ("99", 99), "warmup_steps": ("5", 5),
    "optimizer": ("adamw_8bit", "adamw_8bit"), "adafactor_scale_parameter": (None, True),
    "adafactor_relative_step": (None, True), "clip_eps": ("0.3", 0.3), "kl_coef": ("0.1", 0.1),
    "temperature": ("0.7", 0.7), "seed": ("3", 3), "resume": ("auto", "auto"),
    "save_path": ("here", "here"), "checkpoint_interval": ("0", 0), "vllm_port": ("9005", 9005),
    "forward_ports": ("9004,9005", [9004, 9005]), "vllm_gpu": ("1", 1),
    "gpu_memory_utilization": ("0.3", 0.3),
    "kv_cache_memory_bytes": ("1000", 1000), "max_model_len": ("3000", 3000),
    "vllm_restart_interval": ("5", 5), "vllm_config_path": ("a.json", "a.json"),
    "lora_r": ("8", 8), "lora_alpha": ("4", 4.0), "lora_dropout": ("0.2", 0.2),
    "lora_target_modules": ("q_proj v_proj", ["q_proj", "v_proj"]),
    "lora_layer_indices": ("28-29", [28, 29]), "distill_coef": ("0.5", 0.5),
    "distill_temperature": ("2", 2.0), "atropos_url": ("http://127.0.0.1:8123",) * 2,
    "group_timeout": ("60", 60.0), "max_staleness": ("2", 2), "wandb_project": ("p", "p"),
    "wandb_group": ("g", "g"), "wandb_run_name": ("n", "n"), "log_dir": ("l", "l"),
    "debug_loading": (None, True), "benchmark": (None, True), "dump_batch": (None, True),
    "eval_task": ("gsm8k", "gsm8k"), "eval_max_tokens": ("4", 4), "eval_interval": ("2", 2),
}
NEEDS = {"--eval-task": ["--eval-task", "arithmetic"]}


def parsed(*argv: str, command=atropos):
    model = [] if {"--model", "--model-name"} & set(argv) else ["--model-name", "m"]
    return command.parser().parse_intermixed_args([*model, *argv])


def config_of(*argv: str, command=atropos):
    return to_config(parsed(*argv, command=command))


def typed(flag) -> list[str]:
    text, _ = GIVEN[flag.dest]
    return [flag.names[0], *([] if text is None else text.split())]


def value_at(config, key: str):
    return reduce(getattr, key.split("."), config)


def context(flag) -> list[str]:
    """The other flags with which a flag is read."""
    mode = ["--weight-bridge-mode", flag.modes[0]] if flag.modes else []
    if flag.dest.startswith("adafactor"):
        mode += ["--optimizer", "adafactor"]
    return mode + (NEEDS.get(flag.needs, [flag.needs]) if flag.needs else [])


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.dest)
def test_every_flag_and_alias_changes_its_key(flag):
    text, expected = GIVEN[flag.dest]
    before = config_of(*context(flag))
    for name in flag.names:
        after = config_of(*context(flag), name, *([] if text is None else text.split()))
        assert value_at(after, flag.key) == expected
        assert value_at(before, flag.key) != expected


@pytest.mark.parametrize("mode", MODES)
def test_in_each_mode_every_flag_changes_its_key_or_is_refused_by_name(mode):
    """What becomes of the key in that mode: ``test/keys``."""
    before = config_of("--weight-bridge-mode", mode)
    for flag in FLAGS:
        text, expected = GIVEN[flag.dest]
        argv = typed(flag)
        try:
            after = config_of("--weight-bridge-mode", mode, *argv)
        except ConfigError as error:
            assert flag.names[0] in str(error), flag
            continue
        if flag.unread(parsed(*argv), mode):
            assert flag.idle and after == before, flag
        else:
            assert value_at(after, flag.key) == expected != value_at(before, flag.key), flag


@pytest.mark.parametrize("command", [atropos, launch])
def test_every_option_stands_for_a_key_or_is_a_switch_of_several(command):
    switches = {"help", "weight_bridge_mode", "distill_enabled", "use_wandb", "overrides"}
    switches |= {name.removeprefix("--").replace("-", "_") for name in ONE_PROCESS}
    started = {"env", "env_python", "env_flag", "hub_journal"}  # see test_atropos_run.py
    assert {action.dest for action in command.parser()._actions} == (
        {flag.dest for flag in FLAGS} | switches | (started if command is launch else set()))


def test_the_promised_defaults():
    config = config_of()
    assert (config.iterations, config.turns_per_batch) == (10, 64)
    promised = {
        "optimizer.lr": 1e-5, "atropos.batch_size": 2, "train.gradient_accumulation_steps": 32,
        "atropos.seq_len": 2048, "optimizer.warmup_steps": 0, "optimizer.name": "adamw",
        "atropos.save_path": "trained_model_checkpoints", "train.checkpoint_frequency": 3,
        "train.clip_epsilon": 0.2, "train.kl_to_inference_coeff": None, "atropos.vllm_port": 9001,
        "weight_sync": "single_copy", "logging.backends": []}
    assert {key: value_at(config, key) for key in promised} == promised
    lora = config_of("--weight-bridge-mode", "lora_only").train_model.lora
    assert (lora.r, lora.alpha, lora.dropout) == (16, 32, 0.05)
    assert config_of("--distill-enabled").distill.topk_coeff == 1.0


@pytest.mark.parametrize(("argv", "sync", "adapters", "bridge", "interval"), [
    (["shared_vllm"], "single_copy", False, False, None),
    (["lora_only"], "lora", True, False, None),
    (["lora_restart"], "restart", True, False, 3),
    (["none"], "restart", False, False, 3),
    (["none", "--vllm-restart-interval", "0"], "reload", False, False, None),
    (["bridge"], "single_copy", False, True, None)])
def test_each_mode_is_a_way_for_the_weights(argv, sync, adapters, bridge, interval):
    config = config_of("--weight-bridge-mode", *argv)
    assert config.weight_sync == sync
    assert config.train_model.lora.enabled is adapters
    assert config.atropos.bridge is bridge and config.atropos.restart_interval == interval
    assert (config.engine == "server") is not bridge


def answered(flag, why: str, *argv: str, caplog) -> None:
    """A flag that is not read is refused, or where it is idle ignored with a warning."""
    if flag.idle is None:
        with pytest.raises(ConfigError, match=f"{flag.names[0]} {why}"):
            config_of(*argv, *typed(flag))
        return
    caplog.clear()
    assert config_of(*argv, *typed(flag)) == config_of(*argv)
    [warning] = caplog.messages
    assert warning == f"{flag.names[0]} {why}; it is ignored: {flag.idle}" or (
        warning.startswith(f"{flag.names[0]} {why}, but") and warning.endswith(flag.idle))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.modes], ids=lambda f: f.dest)
def test_a_mode_that_does_not_read_a_flag_names_it(flag, caplog):
    for mode in set(MODES) - set(flag.modes):
        answered(flag, f"is not read with --weight-bridge-mode {mode}", "--weight-bridge-mode",
                 mode, caplog=caplog)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.needs], ids=lambda f: f.dest)
def test_a_flag_is_named_without_the_one_that_switches_it_on(flag, caplog):
    answered(flag, f"is not read without {flag.needs}", caplog=caplog)


def test_a_key_switches_wandb_on_as_its_flag_does(caplog):
    config = config_of("--wandb-project", "p", "logging.backends=[tensorboard,wandb]")
    assert config.logging.wandb_project == "p" and not caplog.messages
    assert config.logging.backends == ["tensorboard", "wandb"]


def test_flags_that_change_what_is_trained_are_never_ignored():
    assert {flag.dest for flag in FLAGS if flag.idle} == {
        "vllm_gpu", "vllm_restart_interval", "vllm_config_path", "wandb_project", "wandb_group",
        "wandb_run_name"}


def test_one_process_trains_whatever_is_said_of_others(caplog):
    argv = ["--trainer-rank", "0", "--world-size", "1", "--init-method", "env://",
            "--num-inference-nodes", "0"]
    assert config_of(*argv) == config_of()
    assert [said.split()[0] for said in caplog.messages] == argv[::2]
    with pytest.raises(ConfigError, match="--world-size 2 is not read: one process trains here"):
        config_of("--world-size", "2")


@pytest.mark.parametrize(("argv", "parts"), [
    (["--lr", "-1"], "optimizer.lr (--learning-rate)=-1.0"),
    (["--lr", "1e-5", "optimizer.lr=1e-6"], "optimizer.lr=1e-06 and its flag (--learning-rate) "
     "1e-05 are the same setting; give one"),
    (["--adafactor-scale-parameter"], "is not read by optimizer.name (--optimizer)=adamw"),
    (["--optimizer", "adafactor", "--adafactor-relative-step", "--lr", "1e-3"],
     "optimizer.lr (--learning-rate)=0.001 is not read by optimizer.relative_step "
     "(--adafactor-relative-step)=true"),
    (["--seq-len", "600", "--max-model-len", "512"], "atropos.seq_len (--seq-len)=600 is more"),
    (["--distill-enabled", "distill.teacher=t"], "groups bring its tokens"),
    (["env.dataset=gsm8k"], "environments bring problems"),
    (["train.total_dialog_turns=9"], "use atropos.steps"),
    (["train.max_steps=9"], "use atropos.steps"),
    (["train.data_epochs=2"], "(--training-steps), because environments choose"),
    (["inference_model.max_tokens=7"], "inference_model.max_tokens=7 is not read with Atropos "
     "environments; use the environments' own max_tokens"),
    (["train.objective=maxent_listwise", "train.aggregation=prompt"], "groups of one size"),
    (["--eval-task", "arithmetic", "env.num_envs=3"], "env.num_envs=3 is not read with Atropos"),
    (["--eval-task", "arithmetic", "env.repeats=3"], "env.repeats=3 is not read with Atropos"),
    (["train.eval_frequency=3"], "train.eval_frequency (--eval-interval)=3 is not read without"),
    (["logging.num_samples=3"], "logging.num_samples=3 is not read without atropos.evaluate=true"),
    (["inference_model.ignore_eos=true"], "inference_model.ignore_eos=true is not read with"),
    (["optimizer.warmup_step=1"], "did you mean 'warmup_steps'"),
    (["--weight-bridge-mode", "bridge", "inference_model.engine=server"], "does not go with"),
])
def test_what_cannot_work_names_key_flag_and_fix(argv, parts):
    with pytest.raises(ConfigError) as error:
        config_of(*argv)
    assert parts in str(error.value)


@pytest.mark.parametrize(("argv", "key", "value"), [
    (["train.objective=reinforce"], "train.clip_epsilon", None),
    (["--weight-bridge-mode", "none", "inference_model.weight_sync=reload"],
     "atropos.restart_interval", None),
    (["inference_model.max_model_len=512"], "atropos.seq_len", 512),
    (["--optimizer", "adafactor", "optimizer.relative_step=true"], "optimizer.lr", 1e-5)])
def test_no_default_of_a_flag_is_refused_where_another_key_leaves_it_unread(argv, key, value):
    assert value_at(config_of(*argv), key) == value


@pytest.mark.parametrize("where", [
    ["--weight-bridge-mode", "bridge"], ["inference_model.url=http://127.0.0.1:9001"]])
def test_a_folder_for_logs_that_nobody_writes_is_refused(where, capsys):
    with pytest.raises(SystemExit) as end:
        atropos.main(["--model-name", "m", "--log-dir", "here", *where])
    assert "atropos.log_dir (--log-dir)=here is not read by atropos-grpo" in str(end.value)
def test_one_setting_has_one_name(capsys):
    with pytest.raises(SystemExit):
        config_of("--lr", "1", "--learning-rate", "2")
    assert "--lr 1.0 and --learning-rate 2.0 are the same setting; give one" in (
        capsys.readouterr().err)
    # What a Makefile gives can be given again, and equal values are no quarrel.
    assert config_of("--lr", "1e-5", "--lr", "2e-5").optimizer.lr == 2e-5
    assert config_of("--lr", "1e-5", "--learning-rate", "1e-5", "optimizer.lr=1e-5")


def test_the_model_must_be_named():
    with pytest.raises(ConfigError, match="--model-name is missing"):
        to_config(atropos.parser().parse_args([]))


def test_any_other_key_can_be_given():
    config = config_of("--lr", "1e-4", "train.aggregation=sequence", "train.epochs=2")
    assert (config.train.aggregation, config.train.epochs, config.optimizer.lr) == (
        "sequence", 2, 1e-4)


def test_the_length_of_sequences_follows_a_shorter_context():
    assert config_of("--max-model-len", "512").atropos.seq_len == 512


def test_both_commands_know_the_same_flags():
    args = ["--weight-bridge-mode", "lora_only", "--lora-r", "4", "--benchmark"]
    assert config_of(*args, command=launch) == config_of(*args)


def test_every_command_of_the_guide_and_the_makefile_is_a_configuration():
    guide = (REPO / "examples/atropos/README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:atropos-grpo(?:-run)?|\S+ -m grpo\.run\.cli\.\w+) (.*)$", guide,
                       re.MULTILINE)
    make = (REPO / "Makefile").read_text().replace("\\\n", " ")
    lines += re.findall(r"-m grpo\.run\.cli\.launch (.*) \$\(ARGS\)", make)
    assert len(lines) == 5
    for line in lines:
        to_config(launch.parser().parse_intermixed_args(shlex.split(line)))


@pytest.mark.parametrize("command", [atropos, launch])
def test_the_help_can_be_shown(command):
    text = command.parser().format_help()
    assert all(name in text for flag in FLAGS for name in flag.names)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1"])
def test_wrong_layers_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no range of layers"):
        layer_indices(text)


def test_float16_is_refused_with_the_reason():
    with pytest.raises(argparse.ArgumentTypeError, match="small gradients vanish"):
        dtype("float16")


@pytest.fixture
def chosen(monkeypatch):
    """The GPUs that were made this process' own, on a machine with two of them and vLLM."""
    numbers: list[int] = []
    monkeypatch.setattr(build, "vllm_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", numbers.append)

    def choose(*argv: str) -> list[int]:
        args = atropos.parser().parse_intermixed_args(["--model-name", "m", *argv])
        choose_gpu(args, to_config(args))
        return numbers

    return choose


@pytest.mark.parametrize(("argv", "numbers"), [
    ([], []), (["--device", "cuda"], []), (["--device", "cuda:1"], [1]),
    (["--device", "cuda:0", "--weight-bridge-mode", "bridge"], [0]),
    (["--device", "cuda:1", "--weight-bridge-mode", "bridge",
      "inference_model.backend=transformers"], [1])])
def test_the_gpu_of_this_process_is_that_of_the_flag(chosen, argv, numbers):
    assert chosen(*argv) == numbers


@pytest.mark.parametrize(("visible", "name"), [("", "1"), ("4,6", "6")])
def test_another_gpu_than_that_of_vllm_in_process_is_refused(chosen, monkeypatch, visible, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=f"start the command with CUDA_VISIBLE_DEVICES={name} "
                                          "and --device cuda"):
        chosen("--device", "cuda:1", "--weight-bridge-mode", "bridge")
    with pytest.raises(ConfigError, match="--device cuda:2: this machine shows 2 GPUs"):
        chosen("--device", "cuda:2")


def test_variables_of_the_process_stand_for_flags(monkeypatch):
    monkeypatch.setenv("LOGDIR", "of-variable")
    monkeypatch.setenv("VLLM_BRIDGE_CONFIG_PATH", "variable.json")
    config = config_of().atropos
    assert (config.log_dir, config.bridge_config) == ("of-variable", "variable.json")
    config = config_of("--log-dir", "l", "--vllm-config-path", "a.json").atropos
    assert (config.log_dir, config.bridge_config) == ("l", "a.json")
    assert config_of("atropos.log_dir=key").atropos.log_dir == "key"
    # Another mode does not read the file, and a variable is not refused there as a flag is.
    assert config_of("--weight-bridge-mode", "bridge").atropos.bridge_config is None
    monkeypatch.setenv("LOGDIR", "")
    assert config_of().atropos.log_dir == "logs"
