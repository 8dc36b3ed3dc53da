"""What the scripts say of their command line, before PyTorch is imported."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import grpo
from grpo.run.cli import console

from .warm import COMMANDS, REPO, SCRIPTS

GRPO = [str(SCRIPTS / "grpo.py")]
ASYNC = [str(SCRIPTS / "grpo-async.py")]
OFFLINE = [str(SCRIPTS / "grpo-offline.py")]
# Every command of the library, as it is typed.
LINES = {name: [str(target)] if isinstance(target, Path) else ["-m", target]
         for name, target in COMMANDS.items()}
CONSOLE = LINES.pop("grpo")
OF_CONSOLE = {f"grpo {name}": [*CONSOLE, name] for name in console.COMMANDS}
LINES |= {name: OF_CONSOLE[name] for name in ("grpo train", "grpo train-async", "grpo atropos")}
SERVERS = {module: ["-m", module] for module in ("grpo.server.serve", "grpo.atropos.hub_server")}


def is_hydras(name: str) -> bool:
    return name.endswith(".py") or name.startswith(("grpo train", "grpo offline"))


def computing(command: list[str], **where) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a command of Python's; its CPU seconds, and what it said."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, **where)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done


@pytest.fixture
def quick(tmp_path):
    """Run a command where PyTorch cannot be imported, in less than two seconds of computing.

    Where the libraries that every command needs take longer than 0.3 s, the machine is slow or
    busy, and the limit grows as they do.
    """
    for name in ("torch", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}"}}

    def start(command: list[str], *arguments: str, seconds: float = 2.0,
              ) -> subprocess.CompletedProcess[str]:
        spent, done = computing([*command, *arguments], **where)
        if spent >= seconds:  # A burst of other work may have ended by now: both once more.
            spent = min(spent, computing([*command, *arguments], **where)[0])
            needed, _ = computing(["-c", "import hydra, omegaconf, pydantic"], **where)
            assert spent < seconds * max(1.0, needed / 0.3)
        return done

    return start


@pytest.mark.parametrize("script, key", [(GRPO, "num_envs: 32"), (ASYNC, "staleness: 1")])
def test_help_shows_every_key_at_once(quick, script, key):
    done = quick(script, "--help")
    assert done.returncode == 0, done.stderr
    assert key in done.stdout and "--config-name NAME" in done.stdout
    assert f"{Path(script[0]).name} [" in done.stdout


def test_the_commands_are_all_there_are():
    installed = re.findall(r'"([\w-]+) = ([\w.]+):main"', (REPO / "setup.py").read_text())
    scripts = [(path.name, path) for path in SCRIPTS.glob("*.py")]
    assert dict([*installed, *scripts]) == COMMANDS


@pytest.mark.parametrize(
    "name", [*LINES, *SERVERS, *(name for name in OF_CONSOLE if name not in LINES)])
def test_help_comes_at_once(quick, name):
    done = quick((LINES | SERVERS | OF_CONSOLE)[name], "--help")
    assert done.returncode == 0, done.stderr
    shown = "train.lr=" if "offline" in name else "train.seed="
    assert (shown if is_hydras(name) else "--") in done.stdout
    if name in OF_CONSOLE:
        assert done.stdout.lower().startswith(f"usage: {name} [")


@pytest.mark.parametrize("given", [["--help"], []], ids=" ".join)
def test_the_help_of_grpo_comes_in_half_a_second_and_lists_all_commands(quick, given):
    done = quick(CONSOLE, *given, seconds=0.5)
    assert done.returncode == 0, done.stderr
    for name, command in console.COMMANDS.items():
        assert re.search(rf"^  {name} +{command.help}$", done.stdout, re.MULTILINE)


def test_grpo_says_its_version(quick):
    assert quick(CONSOLE, "--version").stdout == f"torchrl-grpo {grpo.__version__}\n"


@pytest.mark.parametrize("given, expected", [
    ("trian", "error: trian: unknown command; did you mean train? (grpo --help lists all)"),
    ("atropos_run", "did you mean atropos-run?"),
    ("xyz", "error: xyz: unknown command (grpo --help lists all)"),
    ("train.seed=1", "a command comes first, such as grpo train train.seed=1"),
    ("--config-name", "a command comes first, such as grpo train --config-name")])
def test_a_misspelt_command_is_answered_with_the_near_one(quick, given, expected):
    done = quick(CONSOLE, given)
    assert done.returncode == 2 and expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_to_type_is_said_as_it_was_typed(quick):
    done = quick(CONSOLE, "compare", "first")
    assert done.returncode == 1 and "write grpo compare FIRST SECOND" in done.stderr
    done = quick(CONSOLE, "plan", "--see")
    assert done.returncode == 2 and "(grpo plan --help lists all)" in done.stderr


@pytest.mark.parametrize("name", [name for name in LINES if name != "grpo-offline.py"])
def test_a_misspelt_key_is_explained_at_once_by_every_command(quick, name):
    model = [] if is_hydras(name) else ["--model-name", "m"]
    done = quick(LINES[name], *model, "optimizer.warmup_step=1", "model.nam=m")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the configuration has 2 errors:")
    assert "optimizer.warmup_step: unknown key (given 1); did you mean 'warmup_steps'?" in (
        done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name, given, expected", [
    *((name, "--see", "--see: unknown flag; did you mean --seed?")
      for name in ("atropos-grpo", "atropos-grpo-run")),
    *((name, "--config-fame", "--config-fame: unknown flag; did you mean --config-name?")
      for name in ("grpo.py", "grpo-async.py")),
    ("grpo.py", "--learning_rat", "--learning_rat: unknown flag; did you mean --learning_rate?"),
    ("grpo.server.serve", "--modell", "the following arguments are required: --model"),
    ("grpo.atropos.hub_server", "--prot", "--prot: unknown flag; did you mean --port?")])
def test_a_misspelt_flag_is_explained_at_once(quick, name, given, expected):
    done = quick((LINES | SERVERS)[name], given, "1")
    assert done.returncode == 2 and expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script, given, expected", [
    (OFFLINE, ["train.lrr=1"], "train.lrr: unknown key (given 1); did you mean 'lr'?"),
    (OFFLINE, ["optimizer.lr=1"], "optimizer.lr: unknown key (given 1); did you mean 'train.lr'?"),
    (OFFLINE, ["learning_rate=1"], "learning_rate: unknown key (given 1); write train.lr"),
    (OFFLINE, ["top_p=0.9"], "top_p: unknown key (given 0.9); tokens are sampled from the dist"),
    (OFFLINE, ["optimizer.eps=1"], "optimizer.eps: unknown key (given 1); did you mean 'run.opt"),
    (OFFLINE, ["run.train.sead=1"], "run.train.sead: unknown key (given 1); did you mean 'seed'?"),
    (OFFLINE, ["--config-name", "grpo_x"], "known: offline_grpo, offline_smoke;"),
    (GRPO, ["train.sead=1"], "train.sead: unknown key (given 1); did you mean 'seed'?"),
    (ASYNC, ["train.stalenes=1"], "unknown key (given 1); did you mean 'staleness'?"),
    (GRPO, ["train.staleness=1"], "train.staleness: unknown key (given 1); start grpo-async.py"),
    (GRPO, ["train.lr=0.1"], "did you mean 'optimizer.lr'?"),
    (GRPO, ["trian.seed=1"], "trian: unknown key (given 1); did you mean 'train'?"),
    (GRPO, ["+optimizer.beta=1"], "optimizer.beta: unknown key (given 1); did you mean 'betas'?"),
    (GRPO, ["train_model.lora.rank=4"], "train_model.lora.rank: unknown key (given 4); known"),
    (GRPO, ["-m", "train.sead=0,1"], "train.sead: unknown key (given '0,1'); did you mean"),
    (GRPO, ["train.sead=1", "env.repeat=2"], "the configuration has 2 errors:\n  train.sead"),
    (GRPO, ["num_generation=4"], "num_generation: unknown key (given 4); did you mean 'num_gene"),
    (GRPO, ["maxent_taux=4"], "maxent_taux: unknown key (given 4); did you mean 'maxent_tau'?"),
    (GRPO, ["=1"], "=1: has no key; write KEY=1"),
    (GRPO, ["top_p=0.9"], "top_p=0.9: tokens are sampled from the distribution that is trained"),
    (GRPO, ["learning_rate=1", "optimizer.lr=2"], "are the same setting; give one"),
    (GRPO, ["--config", "no.yaml"], "--config no.yaml: there is no such file; give a path, or one"),
    (GRPO, ["train.objective_options.delta=3"], "write 'train.objective_options={delta: 3}'"),
    (GRPO, ["env.dataset=gsm8k", "env.task.max_operand=9"],
     "env.task.max_operand: unknown key (given 9); known keys of env.task: num_train, num_test"),
    (GRPO, ["env=arithmetic", "env.dataset=gsm8k"], "task 'gsm8k' has no option 'max_operand'"),
    (GRPO, ["env.dataset=gsmk8"], "env.dataset=gsmk8: unknown task 'gsmk8'; known tasks: arith"),
    (GRPO, ["--config-name", "gsm8k"], "--config-name gsm8k: there is no such recipe; known: grpo, "
     "grpo_async, grpo_async_gsm8k, grpo_async_ifeval, grpo_gsm8k, grpo_ifeval"),
    (GRPO, ["--config-name", "grpo_async_gsm8k"], "--config-name grpo_async_gsm8k is a recipe of "
     "another command; start grpo train-async, or grpo-async.py, with it"),
    (GRPO, ["--config-name", "offline_grpo"], "start grpo offline, or grpo-offline.py, with it"),
    (OFFLINE, ["--config-name", "grpo_gsm8k"], "start grpo train, or grpo.py, with it"),
    (GRPO, ["env=reasoning_gym", "env.task.options.max_terms=2"],
     "write 'env.task.options={max_terms: 2}'"),
    (GRPO, ["env=gsmk8"], "env=gsmk8: there is no group 'gsmk8' of env; did you mean env=gsm8k? "
     "Known: arithmetic, atropos, chat_env, countdown, dataset, gsm8k, ifeval, reasoning_gym, sat"),
    (GRPO, ["preset=zzz"], "preset=zzz: there is no group 'zzz' of preset; known: cispo, dapo, "),
    (GRPO, ["-m", "preset=dapo,zzz"], "preset=zzz: there is no group 'zzz' of preset; known: "),
    (GRPO, ["optimizer=adafactor"], "optimizer=adafactor: it is a name; write optimizer.name=ada"),
    (GRPO, ["model=gpt2"], "model=gpt2: model is a section; write model.KEY=VALUE, such as model."),
    (GRPO, ["objective=zzz"], "objective: unknown key (given 'zzz'); did you mean 'train.objec"),
    (GRPO, ["train.seed=1", "--config-name", "grpo_gsm8k", "env.task.max_operand=3"],
     "known keys of env.task: num_train, num_test"),
])
def test_a_wrong_name_is_explained_at_once(quick, script, given, expected):
    done = quick(script, *given)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and expected in done.stderr
    assert "Traceback" not in done.stderr and "+train" not in done.stderr
    assert "Config search path" not in done.stderr


@pytest.mark.parametrize("command, given", [
    (GRPO, ["model.name=no-such-org/no-such-model"]),
    (GRPO, ["ref_model.name=no-such-org/no-such-model"]),
    (OF_CONSOLE["grpo evaluate"], ["model.name=no-such-org/no-such-model"]),
    (ASYNC, ["model.name=no-such-org/no-such-model"]),
    (OFFLINE, ["model.train_id=no-such-org/no-such-model"]),
    (SERVERS["grpo.server.serve"], ["--port", "0", "--model=no-such-org/no-such-model"])])
def test_a_model_that_is_not_there_is_named_at_once(quick, command, given):
    done = quick(command, *given)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {given[-1]}: there is no such")
    assert "HF_HUB_OFFLINE=1" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("given", [
    ["train.seed=1", "--config-name", "grpo_gsm8k", "+env.task.system_prompt=hello"],
    ["--multirun", "preset=dapo,gspo", "train.clip_epsilon=[0.2,0.3]", "optimizer.lr=1e-5,1e-6"],
    ["train.maxent_tau=1", "hydra.run.dir=x", "~env.task.seed", "env.reward={a: 1.0}",
     "train.mismatch={tis: 2.0}", "optimizer=adamw"],
    ["preset=maxent_listwise", "maxent_tau=0.3", "+kl_target=0.1"],
    ["--config", "gsm8k_grpo.yaml", "--learning_rate", "1e-6", "num_generations=8", "--use_vllm",
     "model.name=embedded"],
    ["--multirun", "learning_rate=1e-5,1e-6", "seed=1,2"],
    ["--multirun", "env.dataset=gsm8k,ifeval", "env.task.num_test=5,6"],
    ["env=reasoning_gym", "env.name={countdown: 2, chain_sum: 1}", "env.task.system_prompt=null",
     "env.task.options={chain_sum: {max_terms: 2}}", "env.task.level=1", "preset=dapo"],
])
def test_right_names_go_on_to_the_run(quick, given):
    assert "torch was imported" in quick(GRPO, *given).stderr


@pytest.mark.parametrize("given", [["train.lr=1e-6"], ["-m", "train.lr=1e-6,1e-5"]])
def test_the_offline_trainer_finds_a_folder_for_its_run(quick, given):
    assert "torch was imported" in quick(OFFLINE, *given).stderr


@pytest.mark.parametrize("given", [
    ["env.dataset=gsm8k"],
    *(pytest.param([f"env.dataset={path.stem}", *more], marks=pytest.mark.slow)
      for path in sorted((REPO / "config" / "env").glob("*.yaml"))
      for more in ([], ["--config-name", "grpo_gsm8k"]))], ids=" ".join)
def test_a_data_set_by_its_name_brings_all_that_its_group_does(quick, given):
    typed = ["env.repeats=3", "inference_model.max_tokens=7", "--cfg", "job"]
    by_name, by_group = (quick(GRPO, *arguments, *typed).stdout for arguments in (
        given, [text.replace("env.dataset=", "env=") for text in given]))
    assert by_name == by_group
    assert f"dataset: {given[0].partition('=')[2]}\n" in by_name
    assert "repeats: 3\n" in by_name and "max_tokens: 7\n" in by_name


def test_a_sweep_that_is_to_be_shown_is_refused_in_a_line(quick):
    done = quick(GRPO, "-m", "train.seed=0,1", "--cfg", "job")
    assert done.returncode == 2 and "--multirun and --cfg" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_keys_of_the_offline_trainer_are_not_taken_for_those_of_others(quick):
    """``seed`` and ``train.kl_target`` are also names of TRL and of MaxEnt's trainers."""
    done = quick(OFFLINE, "seed=7", "iterations=3", "train.kl_target=0.1", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "seed: 7" in done.stdout and "iterations: 3" in done.stdout
    assert "kl_target: 0.1" in done.stdout and "is now called" not in done.stdout


def test_what_would_run_is_shown_wherever_the_option_stands(quick):
    done = quick(GRPO, "train.seed=7", "--cfg", "job", "optimizer.lr=0.5")
    assert done.returncode == 0 and "seed: 7" in done.stdout and "lr: 0.5" in done.stdout


@pytest.mark.parametrize("script, name", [(GRPO, "grpo train"), (ASYNC, "grpo train-async")])
def test_grpo_train_would_run_what_the_script_does(quick, script, name):
    """With the same log, folders and sweeps, which are Hydra's."""
    typed = ["train.seed=7", "--cfg", "all"]
    of_script, of_console = quick(script, *typed), quick(OF_CONSOLE[name], *typed)
    assert of_console.returncode == 0 and "seed: 7" in of_console.stdout
    assert of_console.stdout == of_script.stdout


def test_a_python_without_the_packages_is_told_which_environment(tmp_path):
    bare = [sys.executable, "-I", "-S", *GRPO]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "source .venv/bin/activate" in done.stderr
    assert "Traceback" not in done.stderr
