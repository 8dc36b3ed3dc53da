"""docs/trl.md and docs/verl.md: commands and programs run, and the tables are what the code has."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from omegaconf import OmegaConf

from grpo.config.trl_names import translate
from grpo.run.cli.trl_names import with_trl_names

from ..config.configs import composed, composed_like
from ..support import REPO, blocks, code_in, commands, environment, finished, several_runs
from .test_commands import SMALLER, with_rows
from .trl_page import PAGE, TABLES, table, written

TRL, VERL = PAGE.read_text(), (REPO / "docs" / "verl.md").read_text()
KNOWN = composed("grpo_async", "env=dataset")
LINES = [shlex.split(line)[1:] for page in (TRL, VERL) for line in commands(page)]
#: In the place of the reader's, in programs.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def rows_of(page: str, heading: str) -> list[list[str]]:
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def known(key: str) -> bool:
    return key.startswith("hydra.") or OmegaConf.select(KNOWN, key, default="?") != "?"


# -- the tables ------------------------------------------------------------------------------------


def test_the_tables_of_names_are_those_of_the_code():
    assert written(TRL) == TRL, "python -m test.repository.trl_page writes them"
    for heading, fields in TABLES.items():
        section = TRL.split(f"\n### {heading}\n")[1].split("\n### ")[0]
        assert table(fields) in section
        assert {name for name in fields} <= set(code_in(section))


def test_a_table_that_lags_behind_is_written_anew():
    assert written(TRL.replace("| `learning_rate` | `1e-06` |", "| `learning_rate` | `1` |")) == TRL


def test_each_kind_of_loss_is_what_the_page_says():
    found = 0
    for there, here in rows_of(TRL, "The loss"):
        keys = dict(word.split("=") for word in re.findall(r"train\.\w+=\w+", here))
        for name in code_in(there):
            if not keys:
                with pytest.raises(ValueError, match=f"loss_type={name}"):
                    translate({"loss_type": name})
                continue
            done = translate({"loss_type": name} | (
                {"epsilon_high": 5.0} if name == "cispo" else {})).keys
            assert {key: done[key] for key in keys} == keys
            found += 1
    assert found == 6


@pytest.mark.parametrize("page", [TRL, VERL], ids=["trl", "verl"])
def test_every_key_on_the_page_is_one(page):
    text = page.split("### GRPOConfig")[0]
    keys = set(re.findall(
        r"\b((?:env|model|train|train_model|inference_model|ref_model|optimizer|logging|eval|ray|"
        r"kl_controller|hydra)\.[a-z][\w.]*\w)", text))
    verls = {"model.path", "model.enable_gradient_checkpointing", "model.use_remove_padding",
             "model.lora_rank"}
    assert len(keys) > 5
    assert all(known(key) for key in keys - verls), [k for k in keys - verls if not known(k)]


# -- commands and programs -------------------------------------------------------------------------


def test_every_command_is_a_configuration_that_works():
    assert len(LINES) == 7
    for script, *arguments in LINES:
        assert composed_like([word for word in arguments if word != "--multirun"
                              and "1e-4,1e-5" not in word], script=script)


@pytest.mark.slow
def test_the_commands_run(tmp_path, cache, model_folder, gsm8k_rows):
    runs = []
    for script, *arguments in LINES:
        if "--multirun" in arguments:
            continue
        more = ["inference_model.backend=transformers"]
        if "--config" in arguments:
            more += [f"model.name={model_folder}", *with_rows(arguments, gsm8k_rows)]
        elif "--config-name" in arguments:
            arguments = [word.replace("Qwen/Qwen2.5-1.5B-Instruct", str(model_folder)) for word in
                         arguments]
            more += [f"env.data_path={gsm8k_rows}", "train.optim_batch_size=2"]
        else:
            more += ["model.warm_start_steps=5", "env.task.num_test=8"]
        smaller = [word for word in SMALLER
                   if "env.repeats" not in word or "num_generations=4" not in arguments]
        runs.append([str(REPO / script), *arguments, *smaller, *more])
    said = several_runs(runs, tmp_path, environment(cache, COLUMNS="100"))
    assert len(said) == len(runs) and all("held-out accuracy" in one for one in said)


@pytest.mark.slow
def test_the_mixture_runs(tmp_path, cache, model_folder, gsm8k_rows):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"problem": "{n}+1=", "prompt": "{n}+2=", "solution": "{n}"}}\n'
                            for n in range(40)))
    mixture = (f"{{datasets: [{{id: {rows}, weight: 0.5}}, "
               f"{{id: {rows}, prompt_column: prompt}}], test_split_size: 4}}")
    said = finished(
        [sys.executable, REPO / "sota-implementations/grpo/grpo.py", "--config",
         "mixture_dr_grpo.yaml", f"dataset_mixture={mixture}", "system_prompt=Add.",
         "max_completion_len=4", "soft_punish_cache=2", f"model.name={model_folder}", *SMALLER,
         "train.optim_batch_size=2", "inference_model.backend=transformers"],
        tmp_path, environment(cache))
    assert "dr_grpo aggregation" in said and "training and 4 held-out problems" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["GRPOTrainer", "train"])
def test_the_ten_lines_run(number, tmp_path, cache, model_folder):
    programs = blocks("python", TRL)
    assert len(programs) == 2
    program = programs[number].replace(MODEL, str(model_folder))
    assert "max_steps" in program and str(model_folder) in program
    program = re.sub(r"max_steps(\W+)20", r"max_steps\g<1>2", program)
    # What the reader's GPU does: a CPU gets less work.
    small = '"device": "cpu", "inference_model.backend": "transformers"'
    if number == 0:
        program = program.replace("max_steps=2,", "max_steps=2, max_completion_length=4, "
                                  f"overrides={{{small}}},")
    else:
        program = program.replace('"train.max_steps": 2,', '"train.max_steps": 2, '
                                  '"inference_model.max_tokens": 4, "env.num_envs": 2, '
                                  f'"env.repeats": 2, {small},')
    assert small in program
    (tmp_path / "program.py").write_text(program)
    said = finished([sys.executable, "program.py"], tmp_path, environment(cache))
    assert "held-out accuracy" in said
    if number == 0:
        assert (tmp_path / "outputs/ten_lines/model/model.safetensors").is_file()
    else:
        assert "final_model" in said.splitlines()[-1]


def test_a_sweep_on_the_page_is_one():
    line = next(words for words in LINES if "--multirun" in words)
    assert with_trl_names(line[1:]) == ["--multirun", "optimizer.lr=1e-4,1e-5"]
