"""``python -m grpo.run.evaluate``: what it finds, which models it takes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch

from grpo import data
from grpo.config.keys import ConfigError
from grpo.config.schema import Config
from grpo.envs.embedded import EmbeddedSpec, small_qwen2
from grpo.envs.prompts import digest
from grpo.policies.base import Sampling
from grpo.policies.inprocess import start_engine
from grpo.policies.openai_server import OpenAIPolicy
from grpo.policies.vllm import VLLMPolicy
from grpo.report import eval_page, paired
from grpo.report.eval_file import TaskScores
from grpo.report.loggers import read_jsonl
from grpo.report.paired import compare
from grpo.run import build
from grpo.run.evaluate.__main__ import main
from grpo.run.evaluate.options import split_options
from grpo.run.evaluate.source import find_source

from ..policies.real_stock import vllm_server
from ..training import runs

SMALL = ("env.task={max_operand: 9, num_train: 15, num_test: 6}", "device=cpu",
         f"env.reward={runs.__name__}:by_text")
TRANSFORMERS = "inference_model.backend=transformers"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    return runs.save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, seed=0)


@pytest.fixture
def evaluate(tiny, tmp_path, monkeypatch):
    """The record of an evaluation; its page is drawn where that is asked for."""
    monkeypatch.setattr(eval_page, "write_page", lambda folder, *rest: folder)

    def run(*keys: str, name=tiny, out="out", own=(*SMALL, TRANSFORMERS)) -> dict:
        main([f"model.name={name}", *own, f"out={tmp_path / out}", *keys])
        (path,) = (tmp_path / out / "metrics").glob("eval_iter_*.json")
        return json.loads(path.read_text())

    return run


def timeless(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in ("seconds", "model")}


def test_greedy_and_samples_of_several_tasks_side_by_side(
        evaluate, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    record = evaluate("eval.samples=4", "eval.k=[1,4]", "completions=true",
                      "eval.benchmarks={arithmetic: {task: {max_operand: 5, num_train: 9, "
                      "num_test: 3}}}")
    rows = read_jsonl(tmp_path / "out" / "completions.jsonl")
    own = [row for row in rows if row["task"] == "arithmetic"]
    assert len(own) == 6 * (1 + 4) and len(rows) == len(own) + 3 * (1 + 4)
    greedy = [row["success"] for row in own if row["sample"] is None]
    assert record["accuracy"] == np.mean(greedy)
    right = np.array([row["success"] for row in own if row["sample"] is not None]).reshape(6, 4)
    assert record["pass@4"] == right.any(1).mean()
    assert record["pass@1"] == pytest.approx(right.mean())
    assert [row["sample"] for row in own if row["sample"] is not None] == [0, 1, 2, 3] * 6
    interval = record["tasks"]["arithmetic"]["estimates"]["pass@1"]
    assert interval["low"] <= interval["value"] <= interval["high"]
    assert list(record["tasks"]) == ["arithmetic", "arithmetic_2"]
    shown = capsys.readouterr().out
    assert "arithmetic: 6 problems, 4 samples each at temperature 1" in shown
    assert "coverage@k" in shown
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<svg" in page and "arithmetic_2: 3 problems" in page
    assert (tmp_path / "out" / "pass_at_k.png").stat().st_size > 5_000


@pytest.mark.slow
def test_the_result_is_the_same_again_and_another_with_another_seed(evaluate):
    first, again, other = (evaluate("eval.samples=4", f"eval.seed={seed}", out=f"out{number}")
                           for number, seed in enumerate((0, 0, 1)))
    assert timeless(first) == timeless(again)
    samples = [one["tasks"]["arithmetic"]["samples"] for one in (first, other)]
    assert samples[0] != samples[1]
    assert first["accuracy"] == other["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_what_a_run_wrote_is_as_good_as_the_run_said(
        evaluate, make_config_of, tmp_path, lora):
    config = make_config_of(train_model={"lora": {"enabled": lora, "r": 2}} if lora else {})
    trainer = runs.make_trainer(config, tmp_path / "run")
    trainer.fit()
    said = {row["step"]: row["eval/accuracy"] for row in read_jsonl(
        tmp_path / "run" / "metrics.jsonl") if "eval/accuracy" in row}
    for number, (name, step) in enumerate([
            ("", 2), ("final_adapter" if lora else "final_model", 2),
            ("checkpoints/step_000001", 1)]):
        record = evaluate("eval.samples=null", name=tmp_path / "run" / name, out=f"out{number}")
        assert (record["iteration"], record["accuracy"]) == (step, said[step])
        assert record["replicates"] == 0


@pytest.fixture
def make_config_of(tiny):
    from grpo.config.schema import load_config

    def make(**sections):
        return load_config({
            "env": {"num_envs": 2, "repeats": 4, "reward": f"{runs.__name__}:by_text",
                    "task": {"max_operand": 9, "num_train": 15, "num_test": 6}},
            "model": {"name": str(tiny)}, "device": "cpu", "optimizer": {"lr": 0.05},
            "train": {"max_steps": 2, "eval_frequency": 1, "checkpoint_frequency": 1},
            "inference_model": {"backend": "transformers", "max_tokens": 4}, **sections})

    return make


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("grpo.report.reporter.write_report",
                        lambda run_dir, **kwargs: run_dir / "none")


@pytest.fixture
def a_run(make_config_of, tiny, tmp_path):
    """The folder of a run, without training."""
    run, config = tmp_path / "run", make_config_of().model_dump(mode="json")
    shutil.copytree(tiny, run / "final_model")
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "info.json").write_text(json.dumps({"config": config}))
    return run


@pytest.mark.parametrize("part", ["", "final_model"])
def test_a_run_is_asked_the_problems_that_it_holds_out(evaluate, a_run, part):
    own = ("device=cpu", TRANSFORMERS, "eval.samples=null")
    env = evaluate(own=own, name=a_run / part)["tasks"]["arithmetic"]["env"]
    assert env["task"] == {"max_operand": 9, "num_train": 15, "num_test": 6}
    assert env["reward"].endswith("by_text")
    record = evaluate("env.task.num_test=4", own=own, name=a_run / part, out="less")
    assert record["tasks"]["arithmetic"]["env"] == {**env, "task": {**env["task"], "num_test": 4}}
    assert record["num_ids"] == 4
    record = evaluate("env=arithmetic", "env.task.num_test=3", own=own, name=a_run, out="typed")
    assert record["tasks"]["arithmetic"]["env"]["reward"] is None


def test_what_a_run_was_trained_on_is_left_out_of_its_evaluation(evaluate, a_run, caplog):
    other = "{max_operand: 9, num_train: 9, num_test: 30, seed: 1}"
    record = evaluate(f"env.task={other}", f"eval.benchmarks={{arithmetic: {{task: {other}}}}}",
                      "eval.samples=null", own=("device=cpu", TRANSFORMERS), name=a_run)
    own, benchmark = record["tasks"].values()
    assert 0 < len(own["ids"]) < 30 and own["ids"] == benchmark["ids"]
    assert caplog.text.count(f"{30 - len(own['ids'])} of 30 problems are among the run's") == 2


def test_a_run_whose_problems_are_gone_is_evaluated_with_a_warning(evaluate, a_run, caplog):
    info = a_run / "checkpoints" / "step_000001" / "info.json"
    saved = json.loads(info.read_text())
    saved["config"]["env"] |= {"dataset": "gsm8k", "data_path": "gone", "task": {}}
    info.write_text(json.dumps(saved))
    evaluate("env=arithmetic", own=(*SMALL, TRANSFORMERS), name=a_run)
    assert "which problems the run was trained on is not known" in caplog.text


def test_two_results_are_compared_problem_by_problem(evaluate, tmp_path, tokenizer, capsys):
    other = runs.save_tiny(tmp_path / "other", tokenizer, seed=1)
    first, second = evaluate(out="a"), evaluate(name=other, out="b")
    files = [str(tmp_path / name / "metrics" / "eval_iter_000.json") for name in "ab"]
    capsys.readouterr()
    main(["compare", *files, f"out={tmp_path / 'c'}"])
    (found,) = json.loads((tmp_path / "c" / "compare.json").read_text())["tasks"]
    bits = [[one == "1" for one in record["tasks"]["arithmetic"]["greedy"]]
            for record in (first, second)]
    both = sum(a and b for a, b in zip(*bits, strict=True))
    assert (found["both"], found["only_first"], found["only_second"]) == (
        both, sum(bits[0]) - both, sum(bits[1]) - both)
    assert found["differences"]["accuracy"]["value"] == pytest.approx(
        second["accuracy"] - first["accuracy"])
    assert found["differences"]["pass@8"]["value"] == pytest.approx(
        second["pass@8"] - first["pass@8"])
    assert "McNemar's exact p" in capsys.readouterr().out


def test_models_are_compared_at_the_k_and_with_the_seed_that_are_given(
        evaluate, tiny, tmp_path, monkeypatch):
    evaluate("eval.samples=8", out="a")
    (result,) = (tmp_path / "a" / "metrics").iterdir()
    seeds, real = [], paired.estimates
    monkeypatch.setattr(paired, "estimates", lambda found, *, seed: (
        seeds.append(seed) or real(found, seed=seed)))

    def compared(*keys: str) -> set[str]:
        main(["compare", str(tiny), str(result), *SMALL, TRANSFORMERS, "eval.samples=16", *keys,
              f"out={tmp_path / 'c'}"])
        (task,) = json.loads((tmp_path / "c" / "compare.json").read_text())["tasks"]
        return {name for name in task["differences"] if name.startswith("pass")}

    assert compared() == {"pass@1", "pass@8"}  # of which both have as many samples
    assert compared("eval.k=[2,4,16]", "eval.seed=7") == {"pass@2", "pass@4"}
    assert seeds == [0, 7]


@pytest.mark.slow
def test_two_models_are_evaluated_and_compared(evaluate, tiny, tmp_path, capsys):
    main(["compare", str(tiny), str(tiny), *SMALL, TRANSFORMERS, f"out={tmp_path / 'c'}"])
    (found,) = json.loads((tmp_path / "c" / "compare.json").read_text())["tasks"]
    assert (found["only_first"], found["only_second"], found["p_value"]) == (0, 0, 1.0)
    assert all(value == {"value": 0.0, "low": 0.0, "high": 0.0}
               for value in found["differences"].values())


@pytest.mark.slow
def test_a_run_and_its_model_are_compared_on_what_the_run_was_not_trained_on(
        a_run, evaluate, tiny, tmp_path):
    other = "{arithmetic: {task: {max_operand: 9, num_train: 9, num_test: 30, seed: 1}}}"
    main(["compare", str(tiny), str(a_run), "device=cpu", TRANSFORMERS, "eval.samples=null",
          f"eval.benchmarks={other}", f"out={tmp_path / 'c'}"])
    own, benchmark = json.loads((tmp_path / "c" / "compare.json").read_text())["tasks"]
    assert own["problems"] == 6 and 0 < benchmark["problems"] < 30
    assert own["p_value"] == benchmark["p_value"] == 1.0


@pytest.mark.parametrize(("second", "message"), [
    ("{tmp}/none", "error: compare SECOND={tmp}/none: there is no such folder; give a folder"),
    ("no-such-org/none", "error: compare SECOND=no-such-org/none: there is no such folder"),
    ("{tmp}/none.json", "error: {tmp}/none.json is no result of an evaluation"),
    ("{tmp}", "error: compare SECOND={tmp} is a run that has no final_model/ yet")])
def test_both_that_are_compared_are_looked_for_before_one_is_evaluated(
        tiny, tmp_path, monkeypatch, second, message):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("grpo.run.evaluate.evaluate.evaluate", lambda *given, **more: 1 / 0)
    with pytest.raises(SystemExit, match=re.escape(message.format(tmp=tmp_path))):
        main(["compare", str(tiny), second.format(tmp=tmp_path), *SMALL, f"out={tmp_path / 'c'}"])


def test_results_on_other_problems_are_not_compared(evaluate, tmp_path):
    evaluate(out="a")
    evaluate("env.task.num_test=5", out="b")
    files = [str(tmp_path / name / "metrics" / "eval_iter_000.json") for name in "ab"]
    with pytest.raises(SystemExit, match=r"asked other problems \(6 and 5"):
        main(["compare", *files])


@pytest.mark.parametrize(("key", "message"), [
    ("env.system_prompt=Add.", "other problems under the same ids, 6 of 6, such as arithmetic/"),
    ("eval.temperature=0.3", "temperature is 0.3 of the one and 1.0 of the other"),
    ("inference_model.max_tokens=3", "max_tokens is 3 of the one and 5 of the other"),
    pytest.param("env.reward=exact_match", "reward is {'exact_match': 1.0} of the one",
                 marks=pytest.mark.slow),
    pytest.param("env.step=retry", "step is retry of the one and null of the other",
                 marks=pytest.mark.slow),
])
def test_results_of_other_questions_under_the_same_ids_are_not_compared(
        evaluate, tmp_path, key, message):
    small = "inference_model.max_tokens=5"
    evaluate(small, key, out="a")
    record = evaluate(small, out="b")
    assert record["tasks"]["arithmetic"]["env"]["task"]["num_test"] == 6
    files = [str(tmp_path / name / "metrics" / "eval_iter_000.json") for name in "ab"]
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(["compare", *files])


def test_problems_of_other_options_with_the_same_ids_are_other_problems():
    config = Config(env={"dataset": "sat", "task": {"num_test_seeds": 3, "num_train_seeds": 3}})

    def scores(difficulty: int) -> TaskScores:
        task = build.build_task(config.changed(env={"task": {
            **config.env.task, "difficulty": difficulty}}))
        problems = task.split("test")
        return TaskScores("sat", [problem.id for problem in problems], [True] * 3,
                          asked={"hashes": [*map(digest, problems)]})

    assert scores(0).ids == scores(5).ids
    compare({"sat": scores(0)}, {"sat": scores(0)})
    with pytest.raises(ConfigError, match="other problems under the same ids, 3 of 3"):
        compare({"sat": scores(0)}, {"sat": scores(5)})


@pytest.mark.parametrize(("keys", "message"), [
    (["optimizer.lr=1"], "optimizer.lr=1 is not read by an evaluation"),
    (["env.num_envs=4"], "env.num_envs=4 is not read"),
    (["url=http://h", "device=cpu"], "device=cpu is not read by an evaluation with url"),
    (["send=text"], "send=text is not read without url"),
    (["batch_size=0"], "batch_size=0: Input should be greater than or equal to 1"),
])
def test_what_an_evaluation_would_not_read_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        split_options(keys)


@pytest.mark.parametrize(("argv", "message"), [
    (["eval.samples=4", "eval.k=[8]"], r"eval.k=\[8\] has 8, and eval.samples=4"),
    (["compare", "a.json"], "compare takes two results or two models, not 1"),
    (["compare", "a.json", "b.json", "device=cpu"], "device=cpu is not read where two results"),
    *((["compare", "a.json", "b.json", key], f"{key} is not read where two results") for key in (
        "eval.samples=80", "eval.samples=8", "batch_size=256")),
    (["--config-name", "grpo_gsm8k", "compare", "a.json", "b.json"],
     "--config-name grpo_gsm8k is not read where two results"),
    (["compare", "a.json", "b.json"], "a.json is no result of an evaluation"),
    (["compare", "a", "b", "model.name=c"], "model.name is not read by compare"),
    (["model.nam=x"], "model.nam"),
    (["embedded"], "embedded: has no value"),
    (["eval.batch_size=3"], "eval.batch_size=3 is not read by an evaluation"),
    (["url=localhost", SMALL[0]], "url=localhost: must begin with http"),
    (["env=atropos", "env.task={}"], "env=atropos needs to know|steps_per_eval"),
])
def test_bad_input_is_said_in_a_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(argv)


def test_a_run_without_a_result_names_its_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    with pytest.raises(ConfigError, match="give one of its checkpoints"):
        find_source(str(tmp_path))


# -- vLLM's own server -----------------------------------------------------------------------------


@pytest.fixture
def talkative(tmp_path, tokenizer):
    """A model whose greedy completions differ from prompt to prompt."""
    model, folder = small_qwen2(EmbeddedSpec(), len(tokenizer)), tmp_path / "talkative"
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.mul_(8.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def served(talkative, tmp_path):
    """The address of vLLM's OpenAI server with the model."""
    pytest.importorskip("vllm")
    with vllm_server(talkative, tmp_path / "server.log", "--max-model-len", "64") as url:
        yield url


@pytest.mark.slow
@pytest.mark.vllm
def test_our_engine_and_vllms_own_server_say_the_same_token_for_token(
        served, evaluate, talkative, tokenizer, prompts, tmp_path):
    options = {"pad_token_id": 0, "eos_token_ids": (1,)}
    greedy = Sampling(max_tokens=12, temperature=0.0)
    here = VLLMPolicy(start_engine(
        str(talkative), device=torch.device("cpu"), dtype=torch.float32, max_model_len=64),
        greedy, **options)
    there = OpenAIPolicy(served, greedy, tokenizer=tokenizer, max_model_len=64, **options)
    asked = [prompt.tokens for prompt in prompts]
    ours, theirs = (policy.generate_from_ids(asked)[data.RESPONSE_TOKENS]
                    for policy in (here, there))
    assert torch.equal(ours, theirs)
    assert len({tuple(row) for row in ours.tolist()}) > 10
    here.close()

    problems = SMALL[:1] + SMALL[2:]
    by_engine = evaluate("eval.samples=null", "completions=true", name=talkative, out="here",
                         own=(*SMALL, TRANSFORMERS))
    by_server = evaluate("eval.samples=null", "completions=true", f"url={served}",
                         name=talkative, out="there", own=problems)
    assert by_server["tasks"] == by_engine["tasks"]
    said = [read_jsonl(tmp_path / out / "completions.jsonl") for out in ("here", "there")]
    assert said[0] == said[1]
