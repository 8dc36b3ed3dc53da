"""Tasks of lm-eval on our engines: the numbers are those of its own model."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest

from grpo.config.evaluation import EvalConfig
from grpo.config.schema import load_config
from grpo.report.loggers import read_jsonl
from grpo.run.evaluate.__main__ import main

from ..training import runs

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
GENERATE = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["7"], max_gen_toks: 70}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},
              {metric: acc_norm, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
NAMES = ("sums", "sums_choice", "sums_text")
ASKED = f"eval.benchmarks={json.dumps([f'lm_eval:{name}' for name in NAMES])}"
SMALL = ("env.task={max_operand: 9, num_train: 15, num_test: 6}", "device=cpu",
         f"env.reward={runs.__name__}:by_text")


@pytest.fixture(scope="module")
def theirs(model_folder):
    """lm-eval's own model of the same folder."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model_folder), device="cpu", dtype="float32", batch_size=8)


@pytest.fixture(scope="module")
def tasks(theirs, tmp_path_factory):
    """A folder of tasks, of which half of the questions are answered right."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [f"{a}+{b}=" for a in range(5, 9) for b in range(3)]
    said = theirs.generate_until([SimpleNamespace(args=(question, {
        "until": ["7"], "max_gen_toks": 70})) for question in questions])
    assert len({*said}) > 1
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({
        "question": question, "answer": answer if number % 2 else "nothing", "right": number % 3,
        "choices": [str(number), f"{number}1", "x"]}) + "\n"
        for number, (question, answer) in enumerate(zip(questions, said, strict=True))))
    for name, kind, rest in zip(
            NAMES, ("generate_until", "multiple_choice", "loglikelihood_rolling"),
            (GENERATE, CHOOSE, PERPLEXITY), strict=True):
        (folder / f"{name}.yaml").write_text(
            TASK.format(name=name, kind=kind, rows=rows) + rest)
    return folder


def theirs_of(model, tasks) -> dict:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model, tasks=list(NAMES), task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0)
    return found["results"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_each_metric_is_that_of_lm_evals_own_model(
        theirs, tasks, model_folder, tmp_path, capsys, backend):
    expected = theirs_of(theirs, tasks)
    main([f"model.name={model_folder}", *SMALL, f"inference_model.backend={backend}",
          "eval.samples=null", f"out={tmp_path}", ASKED, f"eval.lm_eval_path={tasks}"])
    record = json.loads((tmp_path / "metrics" / "eval_iter_000.json").read_text())["lm_eval"]
    for name in NAMES:
        ours = record[f"lm_eval:{name}"]
        assert ours["problems"] == 12
        metrics = [key.partition(",")[0] for key in expected[name]
                   if "," in key and "_stderr" not in key]
        assert [*ours["metrics"]] == metrics and metrics
        for metric in metrics:
            assert ours["metrics"][metric]["value"] == pytest.approx(
                expected[name][f"{metric},none"], rel=1e-5)
    exact = record["lm_eval:sums"]["metrics"]["exact_match"]
    assert exact["value"] == 0.5 and exact["stderr"] == pytest.approx((0.25 / 11) ** 0.5)
    shown = capsys.readouterr().out
    assert "lm_eval:sums: 12 problems" in shown and "acc_norm" in shown
    assert "lm_eval:sums_choice" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_asks_them_beside_training(tasks, model_folder, tmp_path):
    config = load_config({
        "env": {"num_envs": 2, "repeats": 2, "reward": f"{runs.__name__}:by_text",
                "task": {"num_test": 3}},
        "model": {"name": str(model_folder)}, "device": "cpu", "train": {"max_steps": 1},
        "eval": {"benchmarks": {"lm_eval:sums": {"limit": 4},
                                "lm_eval:sums_choice": {"num_fewshot": 0}},
                 "lm_eval_path": str(tasks)},
        "inference_model": {"backend": "transformers", "max_tokens": 3}})
    runs.make_trainer(config, tmp_path / "run").fit()
    first, last = (row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")
                   if "eval/accuracy" in row)
    assert first["eval/lm_eval:sums/exact_match"] == 0.5
    assert "eval/lm_eval:sums_choice/acc_stderr" in last
    record = json.loads((tmp_path / "run" / "metrics" / "eval_iter_001.json").read_text())
    assert record["lm_eval"]["lm_eval:sums"]["problems"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [
    ("lm_eval:sumz", "lm-eval has no task 'sumz'"),
    ("lm_eval:sums_beams", "num_beams=3, which the engine here does not have")])
def test_what_cannot_be_asked_is_refused(tasks, model_folder, tmp_path, name, said):
    (tasks / "beams.yaml").write_text((tasks / "sums.yaml").read_text().replace(
        "task: sums", "task: sums_beams").replace("max_gen_toks: 70", "num_beams: 3"))
    with pytest.raises(SystemExit) as ended:
        main([f"model.name={model_folder}", *SMALL, "inference_model.backend=transformers",
              f"out={tmp_path}", f'eval.benchmarks=["{name}"]', f"eval.lm_eval_path={tasks}"])
    assert said in str(ended.value)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="it is installed")
def test_without_the_package_a_message_says_how_to_get_it(model_folder, tmp_path):
    with pytest.raises(SystemExit, match="pip install 'lm-eval>=0.4.13,<0.5', or the"):
        main([f"model.name={model_folder}", *SMALL, "inference_model.backend=transformers",
              f"out={tmp_path}", ASKED])


def test_options_of_a_task_are_checked_before_anything_is_loaded():
    with pytest.raises(ValueError, match="lm_eval:sums: num_shots=3: .* known are num_fewshot"):
        EvalConfig(benchmarks={"lm_eval:sums": {"num_shots": 3}})
