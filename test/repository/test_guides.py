"""The short guides of docs/: commands work, programs print what stands below them, and every key,
preset, flag and metric that they name is one."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

from grpo.config.aliases import REPLACED
from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import Config, load_config
from grpo.run.cli.flags import FLAGS
from grpo.run.plan.__main__ import main as plan

from ..config.configs import FOLDER, composed_like
from ..support import REPO, blocks, code_in, commands, environment, several_runs
from .schema_keys import KEYS, named_keys, unknown_keys

PAGES = {name: (REPO / "docs" / f"{name}.md").read_text() for name in (
    "install", "choosing", "memory", "several-gpus", "from-torchrl", "from-atropos")}
SCRIPTS = {"python sota-implementations/grpo/grpo.py": Config,
           "python sota-implementations/grpo/grpo-async.py": AsyncConfig}
PLAN = "python -m grpo.run.plan "
SMALLER = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2", "env.task.num_test=8",
           "inference_model.max_tokens=4", "train.total_dialog_turns=8",
           "train.checkpoint_frequency=0", "inference_model.backend=transformers"]


def script_of(line: str) -> str | None:
    return next((script for script in SCRIPTS if line.startswith(f"{script} ")), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_known_and_every_key_is_one(page):
    for line in commands(PAGES[page]):
        if script := script_of(line):
            name = shlex.split(script)[1].rpartition("/")[2]
            found = composed_like(shlex.split(line)[2:], script=name)
            assert isinstance(found, SCRIPTS[script]) and found != SCRIPTS[script]()
        else:
            assert line.startswith(PLAN) or page == "install", line
    # What stands on the left of a migration page is another system's.
    text = re.sub(r"^\| `[^|]*\|", "", PAGES[page], flags=re.M) if "from" in page else PAGES[page]
    assert not unknown_keys(text)


@pytest.mark.parametrize("page", ["memory", pytest.param("several-gpus", marks=pytest.mark.slow)])
def test_plans_are_what_the_page_shows(page, capsys):
    lines = [line for line in commands(PAGES[page]) if line.startswith(PLAN)]
    assert len(lines) == 1
    plan(shlex.split(lines[0])[3:])
    printed = capsys.readouterr().out.rstrip()
    assert "recommended" in printed
    assert page != "memory" or printed in PAGES[page]


def test_the_ledger_is_what_the_program_prints():
    (source,) = blocks("python", PAGES["memory"])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/memory.md", "exec"), {"__name__": "page"})
    assert f"```text\n{printed.getvalue()}```" in PAGES["memory"]


def test_every_preset_is_a_choice_once():
    table = PAGES["choosing"].partition("```")[0]
    assert sorted(re.findall(r"\| `preset=(\w+)` \|", table)) == sorted(
        path.stem for path in (FOLDER / "preset").glob("*.yaml") if path.stem != "none")


def test_metrics_that_decide_are_logged():
    known = {node.value for path in (REPO / "grpo").rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    metrics = {code for code in code_in(PAGES["choosing"])
               if re.fullmatch(r"(?:policy|reward|advantage)/\w+", code)}
    # Those of the loss are logged under policy/ by their own name.
    missing = {name for name in metrics
               if name not in known and name.removeprefix("policy/") not in known}
    assert len(metrics) > 4 and not missing


@pytest.mark.slow
def test_the_commands_for_objectives_run(tmp_path, cache):
    runs = [[str(REPO / shlex.split(line)[1]), *shlex.split(line)[2:], *SMALLER]
            for line in commands(PAGES["choosing"])]
    for run in runs:
        if "train.optim_batch_size=128" in run:  # half a batch
            run.append("train.optim_batch_size=2")
    output = "".join(several_runs(runs, tmp_path, environment(cache)))
    assert output.count("held-out accuracy") == len(runs) == 3


def test_set_up_of_a_gpu_host_is_what_make_does():
    look, make, check = commands(PAGES["install"])
    assert look == "nvidia-smi" and make == "GRPO_DEVICE=cuda make setup"
    planned = subprocess.run(
        ["make", "--dry-run", "setup"], cwd=REPO, capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "GRPO_DEVICE": "cuda"}).stdout
    assert "tools/setup_env.py" in planned or (REPO / ".venv/ready-cuda").exists()
    source = shlex.split(check)[2]
    ast.parse(source)
    assert "torch.cuda.is_available()" in source


@pytest.mark.slow
@pytest.mark.vllm
def test_the_check_of_a_set_up_prints_versions():
    pytest.importorskip("vllm")
    source = shlex.split(commands(PAGES["install"])[2])[2]
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True,
                          timeout=280, env=environment())
    assert done.returncode == 0 and re.search(r"^\d\S+ \d\S+ (True|False)$", done.stdout, re.M)


# -- coming from elsewhere -------------------------------------------------------------------------


def test_the_flags_are_those_of_the_command_with_their_keys():
    rows = re.findall(r"^\| (`--[^|]*) \| `([^|]*)` \|$", PAGES["from-atropos"], re.M)
    assert [(tuple(code_in(names)), key) for names, key in rows] == [
        (flag.names, flag.key) for flag in FLAGS]


def test_keys_of_the_recipe_that_are_the_same_are_keys_here_and_others_are_refused():
    there = [line.split("|")[1] for line in PAGES["from-torchrl"].splitlines()
             if line.startswith("| `")]
    for key in set().union(*map(named_keys, there)) - KEYS:
        with pytest.raises(ValueError, match=re.escape(key.rpartition(".")[0])):
            load_config(_nested(key))  # a run that is given it says so
    listed = set(code_in(" ".join(there)))
    assert {"mode", "train.sync_iter", "train.use_kl_to_ref",
            "train_model.quantization.enabled"} <= listed & set(REPLACED)


def _nested(key: str) -> dict:
    value: object = 1
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def test_files_that_the_guides_name_are_there():
    for page in PAGES.values():
        for path in re.findall(r"`((?:examples|benchmarks|sota-implementations)/[\w./-]+)`", page):
            assert (REPO / path).exists(), path
