"""docs/evaluation.md: its commands run, and its table is that of the measures."""

from __future__ import annotations

import json
import shlex

import pytest

from grpo.report.at_k import MEASURES
from grpo.run.evaluate.__main__ import main

from ..policies.test_openai_server import Server
from ..support import (
    REPO,
    benchmark,
    code_in,
    commands,
    environment,
    several_runs,
    table_rows,
)
from ..training import runs

PAGE = (REPO / "docs" / "evaluation.md").read_text()
EVALUATE = [line for line in commands(PAGE) if line.startswith("python -m grpo.run.evaluate")]
SCRIPTS = [line for line in commands(PAGE) if line.startswith("python sota")]
ON_LESS = ["env.task.num_test=3", "inference_model.max_tokens=3"]
HERE = ["device=cpu", "inference_model.backend=transformers"]


def test_no_command_is_left_out():
    assert len(EVALUATE) + len(SCRIPTS) == len(commands(PAGE)) > 0


def test_the_table_has_each_measure():
    names = [code_in(row[0])[0] for row in table_rows(PAGE, "What is measured")]
    assert names == [f"{name}@k" for name in MEASURES]


def test_the_table_of_maxent_is_that_of_the_result():
    maxent = benchmark("maxent_coverage")
    result = json.loads(maxent.RESULT.read_text())
    assert maxent.table(result) in PAGE and result["complete"]
    assert result["command"].split(" --work")[0] in PAGE


@pytest.fixture(scope="module")
def a_run(tmp_path_factory, model_folder):
    """The folder of a run of two iterations."""
    from unittest import mock

    from grpo.config.schema import load_config

    folder = tmp_path_factory.mktemp("runs") / "run"
    config = load_config({
        "env": {"num_envs": 2, "repeats": 2, "reward": f"{runs.__name__}:by_text",
                "task": {"num_test": 3}},
        "model": {"name": str(model_folder)}, "device": "cpu",
        "train": {"max_steps": 2, "eval_frequency": 1, "checkpoint_frequency": 1},
        "inference_model": {"backend": "transformers", "max_tokens": 3}})
    with mock.patch("grpo.report.reporter.write_report", lambda run_dir, **_: run_dir / "none"):
        runs.make_trainer(config, folder).fit()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", EVALUATE)
def test_a_command_runs(
        command, a_run, model_folder, gsm8k_rows, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "lm_eval:" in command:
        pytest.skip("its test is test/run/test_lm_eval.py, with a task")
    with Server(owned_by="vllm", max_model_len=512) as server:
        words = [word.replace("path/to/run", str(a_run))
                 .replace("Qwen/Qwen2.5-1.5B-Instruct", str(model_folder))
                 .replace("path/to/gsm8k", str(gsm8k_rows))
                 .replace("http://127.0.0.1:8000", server.url) for word in shlex.split(command)]
        more = [*ON_LESS, *([] if "url=" in command else HERE)]
        if "grpo_gsm8k" in command:
            more.append(f"env.data_path={gsm8k_rows}")
        if "gsm8k: {" in command:  # three problems of the benchmark, too
            words = [word.replace("256", "4") for word in words]
        main([*words[3:], *([] if ".json" in command else more)])
    shown = capsys.readouterr().out
    assert ("McNemar" if "compare" in command else "greedy") in shown
    if "compare" not in command:
        assert [*tmp_path.glob("outputs/evaluations/*/metrics/eval_iter_*.json")]


@pytest.mark.slow
def test_the_commands_of_training_run(cache, gsm8k_rows, tmp_path):
    smaller = ["model.warm_start_steps=5", "env.num_envs=2", "env.repeats=2", *ON_LESS,
               "train.max_steps=1", "train.checkpoint_frequency=1", *HERE]
    outputs = several_runs(
        [[*shlex.split(line.replace("path/to/gsm8k", str(gsm8k_rows))
                       .replace("python ", f"python {REPO}/", 1))[1:], *smaller]
         for line in SCRIPTS], tmp_path, environment(cache))
    assert all("held-out accuracy" in output for output in outputs) and len(outputs) == len(SCRIPTS)
