"""Every command in the second columns of docs/commands.md runs to its end: those of the scripts
here, those that have others beside them in test_commands_served.py, those of the offline trainer in
test_commands_offline.py."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import setuptools

from grpo.config.asynchronous import with_workers
from grpo.report.loggers import read_jsonl
from grpo.run.cli import console
from grpo.run.placement import plan_devices

from ..config.configs import composed_like
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


def with_workers_on_ray(words: list[str]) -> bool:
    asynchronous = words[0].endswith("grpo-async.py")
    return composed_like(words[1:], script=words[0]).has_workers or asynchronous


# Real processes for each role take most of a minute of both cores.
ALL_ROLES = [words for words in RUNS.values() if "train.kl_to_ref_coeff=0.01" in words and all(
    f"{role}.num_devices=2" in words for role in ("train_model", "ref_model", "inference_model"))]
WORKERS = [words for words in RUNS.values()
           if with_workers_on_ray(words) and words not in ALL_ROLES]
ALONE = [words for words in RUNS.values() if not with_workers_on_ray(words)]


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
    assert len(ALL_ROLES + WORKERS + ALONE) == len(RUNS) == len(of_kind("run"))
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
        config = composed_like(words[1:], script=words[0])
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
    more = [f"env.data_path={problems}"] if "--config-name" in arguments else [
        "env.task.num_test=8"]
    if not any(word.startswith("model.name=") for word in arguments):
        more.append("model.warm_start_steps=5")
    return [str(REPO / script), *arguments, *SMALLER, *more, *smaller]


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


def test_rows_in_one_process_run(run_rows):
    run_rows(ALONE)


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
