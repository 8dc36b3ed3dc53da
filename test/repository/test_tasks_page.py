"""Every command and program of docs/tasks.md runs, and its table has every task."""

from __future__ import annotations

import json
import shlex

import pytest

from grpo.envs.tasks import base

from ..support import (
    BENCHMARKS,
    REPO,
    blocks,
    code_in,
    commands,
    environment,
    several_runs,
    table_rows,
)

PAGE = (REPO / "docs" / "tasks.md").read_text()
SCRIPT = "sota-implementations/grpo/grpo.py"
COMMANDS = [line for line in commands(PAGE) if line.startswith(f"python {SCRIPT}")]
SMALLER = ["env.num_envs=2", "env.repeats=2", "inference_model.max_tokens=4",
           "train.total_dialog_turns=8", "train.checkpoint_frequency=1",
           "inference_model.backend=transformers"]
# Of a task each, so that evaluations are short.
FEW = {"ifeval": ["env.task.num_test=4"], "sat": ["env.task.num_test_seeds=4"],
       "countdown": ["env.task.num_test_seeds=4"]}


def test_no_command_is_left_out():
    assert len(COMMANDS) == len(commands(PAGE)) > 5


def test_the_table_has_every_task_and_configuration():
    rows = {code_in(row[0])[0] for row in table_rows(PAGE, "Which there are")}
    assert rows == {path.stem for path in (REPO / "config" / "env").glob("*.yaml")}
    assert rows - {"atropos"} <= set(base.task_names())


def test_the_scorers_agree_as_often_as_was_measured():
    result = json.loads((BENCHMARKS / "results" / "scorer_agreement_cpu.json").read_text())
    assert result["complete"] and "`results/scorer_agreement_cpu.json`" in PAGE
    page, others, ifeval = " ".join(PAGE.split()), result["gsm8k"], result["ifeval"]
    same, texts = result["sentences"]["all"]
    strict, flexible, verify = (others[name]["all"] for name in (
        "strict", "flexible", "math-verify"))
    assert strict[0] == strict[1] and result["sentences"]["most_apart"] == 1
    for figures in (
            f"On {flexible[1]:,} responses", f"with its flexible one on {flexible[0]:,}",
            f"on {verify[0]:,} of {verify[1]:,}", "{:,} of {:,} are those".format(*ifeval["all"]),
            f"lm-eval {result['lm_eval_versions']['lm-eval']}",
            f"with {ifeval['responses_per_row']} responses each",
            f"{100 * same / texts:.1f} % of {texts:,} texts"):
        assert figures in page
    apart = {name for name, found in ifeval.items() if ":" in name and found[0] != found[1]}
    assert apart == {"keywords:letter_frequency, of no letter",
                     "length_constraints:number_sentences"}


def test_the_programs_run(monkeypatch):
    monkeypatch.setattr(base, "_TASKS", dict(base._TASKS))
    for source in blocks("python", PAGE):
        exec(compile(source, "docs/tasks.md", "exec"), {"__name__": "page"})
    assert base.make_task("parity").test[3].answer == "odd"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path, cache, model_folder):
    pytest.importorskip("langdetect", reason="needs the extra ifeval")
    write_files(tmp_path)
    runs = []
    for command in COMMANDS:
        command = command.replace("Qwen/Qwen2.5-1.5B-Instruct", str(model_folder))
        for name in ("sums.jsonl", "more.csv", "my_template.jinja"):
            command = command.replace(name, str(tmp_path / name))
        arguments = shlex.split(command)[2:]
        few = next((more for name, more in FEW.items() if name in command), [])
        embedded = not any(argument.startswith("model.name=") for argument in arguments)
        runs.append([*arguments, *SMALLER, *few, *["model.warm_start_steps=5"] * embedded,
                     *[f"env.data_path={tmp_path}"] * ("ifeval" in command)])
    output = "".join(several_runs([[str(REPO / SCRIPT), *run] for run in runs], tmp_path,
                                  environment(cache, PYTHONPATH=str(tmp_path)), seconds=550.0))
    assert output.count("held-out accuracy") == len(runs) > 0
    assert "got no reward" not in output


def write_files(folder):
    """What the page's commands name."""
    verifier = next(block for block in blocks("python", PAGE) if "def close" in block)
    (folder / "my_verifier.py").write_text(verifier)
    (folder / "my_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}")
    rows = [{"question": f"{n}+1?", "answer": n + 1, "chat": [
        {"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": str(n + 1)}]}
        for n in range(130)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "more.csv").write_text(
        "question,answer\n" + "".join(f"{n}+2?,{n + 2}\n" for n in range(40)))
    (folder / "input_data.jsonl").write_text("".join(json.dumps({
        "key": n, "prompt": f"Write about {n}.", "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}]}) + "\n" for n in range(12)))
