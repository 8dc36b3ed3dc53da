"""Every command in the second columns of docs/commands.md runs to its end: those of the scripts
here, those that have others beside them in test_commands_served.py, those of the offline trainer in
test_commands_offline.py."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import setuptools

from grpo.config.asynchronous import with_workers
from grpo.config.schema import Config
from grpo.report.loggers import read_jsonl
from grpo.run.cli import console
from grpo.run.placement import plan_devices

from ..config.configs import composed_like
from ..config.test_trl_names import OPEN_R1
from ..support import REPO, environment, finished, several_runs
from .commands_page import (
    ASYNC,
    HEADER,
    KINDS,
    OFFLINE,
    SERVER,
    STOCK,
    SYNC,
    Line,
    Row,
    devices,
    rows,
)

PAGE = (REPO / "docs" / "commands.md").read_text()
ROWS = rows(PAGE)
MODES = ("lora_only", "lora_restart", "shared_vllm", "none", "--nodes=2")
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"

#: Appended to every run: the same code on less work.
SMALLER = ("device=cpu", "env.num_envs=2", "env.repeats=2", "inference_model.max_tokens=4",
           "train.total_dialog_turns=8", "train.checkpoint_frequency=1")


def of_kind(*kinds: str) -> list[Row]:
    return [row for row in ROWS if row.kind in kinds]


def named(row: Row) -> str:
    """The program, and what tells its rows apart."""
    words = Line.of(row.here[-1]).words
    return " ".join([Path(words[0]).name, *(word for word in words if word in MODES),
                     *Line.of(row.here[-1]).variables][:3])


RUNS = {row.here[0]: Line.of(row.here[0]).words[1:] for row in of_kind("run")}


def of_own(arguments: list[str]) -> list[str]:
    """With a recipe file for the reader's own."""
    return [word.replace("path/to/recipe.yaml", str(OPEN_R1)) for word in arguments]


def configured(words: list[str]) -> Config:
    return composed_like(of_own(words[1:]), script=words[0])


def with_workers_on_ray(words: list[str]) -> bool:
    return configured(words).has_workers or words[0].endswith("grpo-async.py")


# Real processes for each role take most of a minute of both cores.
ALL_ROLES = [words for words in RUNS.values() if "train.kl_to_ref_coeff=0.01" in words and all(
    f"{role}.num_devices=2" in words for role in ("train_model", "ref_model", "inference_model"))]
WORKERS = [words for words in RUNS.values()
           if with_workers_on_ray(words) and words not in ALL_ROLES]
OF_TRL = [RUNS[row.here[0]] for row in of_kind("run") if row.section.startswith("TRL")]
ALONE = [words for words in RUNS.values()
         if not with_workers_on_ray(words) and words not in OF_TRL]


@pytest.fixture
def setup_arguments(monkeypatch):
    """What setup.py hands to setuptools."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(REPO / "setup.py"))
    return given


# -- the page --------------------------------------------------------------------------------------


def test_every_row_is_run_by_a_test():
    kinds = {row.kind for row in ROWS}
    assert kinds == {*KINDS, "served", "offline_served"}
    assert all(not row.here[:-1] or row.kind in ("trainer", "served", "offline_served")
               for row in ROWS)
    assert all(" ".join(Line.of(text).words).startswith((f"{SERVER} ", f"{STOCK} "))
               for row in ROWS for text in row.here[:-1])
    assert len(ALL_ROLES + WORKERS + ALONE + OF_TRL) == len(RUNS) == len(of_kind("run"))
    assert [words[0] for words in ALL_ROLES] == [SYNC.split()[1], ASYNC.split()[1]]
    # Each trainer has one of the APIs and one of the environments beside it.
    for kind in ("api", "environment"):
        assert 0 < len(of_kind(kind)) <= len(of_kind("trainer"))


@pytest.mark.parametrize("line, message", [
    ("| `a` | `b` |", "not three cells"), ("| `a` | `b` | c | d |", "not three cells"),
    ("| `a` | `b` | c", "not three cells"), ("| `a` | `b | c` | d |", "not three cells"),
    ("| a | `b` | c |", "no row of commands"), ("| `a` | b | c |", "no row of commands"),
    ("| `a` | `b` and `c` | d |", "no row of commands"), ("| `a` | `b` | |", "no row of commands"),
    ("| `x` | `b` | c |", "two rows for")])
def test_a_row_that_is_malformed_is_an_error(line, message):
    table = f"## Section\n| {' | '.join(HEADER)} |\n|---|---|---|\n| `x` | the same | y |\n"
    assert rows(table)[0] == Row("Section", ("x",), ("x",), "y")
    with pytest.raises(ValueError, match=message):
        rows(table + line)


def test_a_table_without_its_header_is_an_error():
    with pytest.raises(ValueError, match="below there | here | what differs"):
        rows("## Section\n| `x` | the same | y |\n")


def test_a_row_that_nobody_runs_is_an_error():
    with pytest.raises(ValueError, match="nobody has said how .* runs 'verl train'"):
        assert Row("Section", ("x",), ("verl train",), "y").kind


def test_short_forms_are_those_of_the_console_script(setup_arguments):
    short = dict(re.findall(r"`grpo ([\w-]+)`\s+for\s+`([^`]+)`", PAGE.partition("\n## ")[0]))
    assert len(short) == 7
    scripts = setup_arguments["entry_points"]["console_scripts"]
    programs = dict(line.split(" = ") for line in scripts)
    for name, long in short.items():
        function = console.COMMANDS[name].function
        if long.startswith("python -m "):
            assert function == f"{long.removeprefix('python -m ')}:main"
        elif long in programs:
            assert function == programs[long]
        else:  # run from the wheel by test_wheel.py
            assert long == {"train": SYNC, "train-async": ASYNC, "offline": OFFLINE}[name]


# -- runs of grpo.py and grpo-async.py -------------------------------------------------------------


def test_gpus_of_each_role_are_as_many_as_the_line_says():
    checked = 0
    for words in RUNS.values():
        config = configured(words)
        if not with_workers_on_ray(words):
            assert config.train_model.ranks == 1
            continue
        plan = plan_devices(with_workers(config), kind="cuda", available=8)
        train, reference, engines = (devices(words, f"{role}_model")
                                     for role in ("train", "ref", "inference"))
        assert len(plan.train) == (train or 1)
        assert len(plan.reference) == (reference if config.needs_reference else 0)
        size = config.inference_model.tensor_parallel_size
        assert [len(engine) for engine in plan.engines] == [size] * ((engines or 1) // size)
        own = len(plan.train) + len(plan.reference) + size * len(plan.engines)
        assert len(plan.roles()) == own or len(plan.roles()) == 1 < own
        checked += 1
    assert checked == len(ALL_ROLES + WORKERS) > 0


def on_less_work(words: list[str], model: Path, problems: Path, *smaller: str) -> list[str]:
    """Script and arguments of a row, with the reader's model and data, and devices that a CPU has:
    processes without numbers, and engines of one."""
    numbered = not all(f"{role}_model.devices=[0]" in words for role in ("train", "inference"))
    script, *arguments = (word.replace(MODEL, str(model)) for word in words)
    for place, word in enumerate(arguments):
        key, _, value = word.partition("=")
        if key == "inference_model.tensor_parallel_size":
            arguments[place] = f"{key}=1"
        elif numbered and key.endswith("_model.devices"):
            role = key.removesuffix(".devices")
            arguments[place] = f"{role}.num_devices={devices(words, role)}"
    if "--config" in arguments:
        return [str(REPO / script), *of_own(arguments), *SMALLER, *smaller, f"model.name={model}",
                *with_rows(arguments, problems)]
    if "--dataset_name" in arguments:  # batches have either TRL's names or those of today
        for name, value in (("per_device_train_batch_size", "4"), ("num_generations", "2")):
            arguments[arguments.index(f"--{name}") + 1] = value
        return [str(REPO / script), *arguments, *(word for word in SMALLER if "env." not in word),
                f"env.data_path={problems}", *smaller]
    more = few_problems(arguments, problems)
    if not any(word.startswith("model.name=") for word in arguments):
        more.append("model.warm_start_steps=5")
    return [str(REPO / script), *arguments, *SMALLER, *more, *smaller]


def few_problems(arguments: list[str], problems: Path) -> list[str]:
    """Rows of our own in the place of the hub's, and few to be evaluated on."""
    if "env.dataset=countdown" in arguments:
        return ["env.task.num_test_seeds=4"]
    if not {"env.dataset=ifeval", "grpo_ifeval"} & {*arguments}:
        return [f"env.data_path={problems}"] if "--config-name" in arguments else [
            "env.task.num_test=8"]
    rows = problems / "ifeval.jsonl"
    rows.write_text("".join(json.dumps({
        "key": n, "prompt": f"Write about {n} without commas.",
        "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}) + "\n"
        for n in range(40)))
    return [f"env.data_path={rows}", "env.task.num_test=4"]


def with_rows(arguments: list[str], problems: Path) -> list[str]:
    """Local rows in the place of a recipe's data set of the hub."""
    if "gsm8k_grpo.yaml" in arguments:
        return [f"env.data_path={problems}", "env.task.num_test=2"]
    rows = problems / "with_solutions.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{n}+1=", "solution": str(n + 1)}) + "\n"
                            for n in range(20)))
    return [f"dataset_name={rows}", "env.task.num_test=2", "system_prompt=Add.", "report_to=none"]


def check_run(folder: Path, *, iterations: int = 2) -> list[dict]:
    """The metrics of each iteration of a run that has left all that it should."""
    trained = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in trained] == [*range(1, iterations + 1)]
    assert all(row["canary/max_abs_diff"] < 1e-3 for row in trained)
    assert len(list((folder / "checkpoints").glob("step_*"))) == iterations
    assert any((folder / f"final_{kind}").is_dir() for kind in ("model", "adapter"))
    return trained


def run_all(commands: list[list[str]], folder: Path, cache: Path, model: Path,
            problems: Path) -> None:
    """Run script rows in one process; each says who computes, and leaves what a run leaves."""
    pytest.importorskip("ray")
    outputs = several_runs(
        [on_less_work(words, model, problems, "inference_model.backend=transformers")
         for words in commands], folder, environment(cache, COLUMNS="100"))
    assert len(outputs) == len(commands) > 0
    for number, (words, said) in enumerate(zip(commands, outputs, strict=True)):
        assert "held-out accuracy" in said, words
        trained = check_run(folder / f"run{number}")
        if not with_workers_on_ray(words):
            continue
        train, engines = (devices(words, f"{role}_model") or 1 for role in ("train", "inference"))
        assert f"CPU, {train} ranks" in said or train == 1
        assert f"{engines} workers on Ray" in said or engines == 1
        reference = "train.kl_to_ref_coeff=0.01" in words
        assert all(("async/reference_idle" in row) == reference for row in trained)
        assert ("stays idle" in said) == (not reference and devices(words, "ref_model") > 0)


@pytest.fixture
def run_rows(tmp_path, cache, model_folder, gsm8k_rows) -> Callable[[list[list[str]]], None]:
    return lambda commands: run_all(commands, tmp_path, cache, model_folder, gsm8k_rows)


@pytest.mark.slow
def test_rows_in_one_process_run(run_rows):
    run_rows(ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("row", of_kind("sweep"), ids=lambda row: row.here[0].split()[-1])
def test_each_job_of_a_sweep_runs(row, tmp_path, cache, model_folder, gsm8k_rows):
    pytest.importorskip("ray")
    words = Line.of(row.here[0]).words[1:]
    finished([sys.executable, *on_less_work(
        words, model_folder, gsm8k_rows, "inference_model.backend=transformers",
        "hydra.sweep.dir=sweep")], tmp_path, environment(cache))
    jobs = prod(word.count(",") + 1 for word in words[2:])
    folders = sorted((tmp_path / "sweep").glob("[0-9]*"))
    assert len(folders) == jobs > 1
    for folder in folders:
        check_run(folder)


@pytest.mark.slow
def test_rows_with_names_of_trl_run(run_rows):
    run_rows(OF_TRL)


@pytest.mark.parametrize("words", ALL_ROLES, ids=lambda words: Path(words[0]).name)
def test_each_script_runs_with_two_devices_for_each_role(words, run_rows):
    run_rows([words])


@pytest.mark.slow
def test_rows_with_workers_run(run_rows):
    run_rows(WORKERS)


def test_a_row_that_does_not_run_fails(tmp_path, cache):
    words = Line.of(f"{SYNC} train_model.num_device=2").words[1:]
    with pytest.raises(AssertionError, match="train_model.num_device: unknown key"):
        finished([sys.executable, *on_less_work(words, tmp_path, tmp_path)], tmp_path,
                 environment(cache))
