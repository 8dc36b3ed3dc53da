"""What ``python -m grpo.run.evaluate`` says before it samples anything."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from grpo.config.atropos import AtroposConfig
from grpo.config.keys import ConfigError
from grpo.config.schema import Config, load_config
from grpo.report import eval_file, eval_page
from grpo.run.evaluate import evaluate as work
from grpo.run.evaluate.__main__ import main
from grpo.run.evaluate.engine import check
from grpo.run.evaluate.evaluate import _trained_on
from grpo.run.evaluate.options import EvaluateOptions

EMBEDDED = ["model.name=embedded", "device=cpu", "inference_model.backend=transformers"]


@pytest.fixture
def sampled(monkeypatch):
    """Folders that evaluations got, of which nothing is sampled."""
    folders = []

    def evaluate(config, options, folder, **more):
        folders.append(folder)
        return work.Result([], {"model": config.model.name}, 0, {})

    monkeypatch.setattr(work, "evaluate", evaluate)
    monkeypatch.setattr(eval_page, "write_page", lambda folder, *rest: folder)
    monkeypatch.setattr(eval_page, "screen_tables", lambda record: ["the table"])
    return folders


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# -- the folder of the result ----------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "named"), [
    ([*EMBEDDED, "out=file/result"], "out=file/result"),
    (EMBEDDED, "out=outputs/evaluations"),
    (["compare", "embedded", "embedded", *EMBEDDED[1:], "out=file/result"], "out=file/result")])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(sampled, argv, named):
    Path("file").touch()
    Path("outputs").touch()
    with pytest.raises(SystemExit, match=f"error: {named}: .*cannot be written there .*; give"):
        main(argv)
    assert not sampled


def test_a_refused_evaluation_leaves_no_folder(sampled):
    with pytest.raises(SystemExit, match="eval.k"):
        main([*EMBEDDED, "eval.samples=4", "eval.k=[8]"])
    assert not [*Path().iterdir()]


def test_evaluations_of_one_second_have_a_folder_each(sampled, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01_00-00-00")
    main(EMBEDDED)
    main(EMBEDDED)
    written = [*Path("outputs", "evaluations").glob("2026-01-01_*/metrics/eval_iter_000.json")]
    assert sorted(path.parents[1] for path in written) == sorted(sampled)
    assert len({*sampled}) == 2


def test_the_sides_of_a_comparison_share_a_new_folder(sampled, monkeypatch):
    monkeypatch.setattr("grpo.report.paired.compare", lambda first, second, **_: [])
    main(["compare", "embedded", "embedded", *EMBEDDED[1:]])
    (result,) = Path("outputs", "evaluations").glob("*/compare.json")
    assert sampled == [result.parent / "first", result.parent / "second"]


@pytest.mark.parametrize("argv", [
    [*EMBEDDED, "out=run"], ["compare", "embedded", "embedded", *EMBEDDED[1:], "out=both"]])
def test_a_run_keeps_its_report_and_metrics(sampled, argv):
    out = argv[-1].removeprefix("out=")
    run = Path(out if out == "run" else "both/second")
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    with pytest.raises(SystemExit, match=(
            f"error: out={out}: {run} is the folder of a run .*; give .*out={run}/evaluation")):
        main(argv)
    assert not sampled and len([*run.iterdir()]) == 1


def test_the_table_is_shown_also_where_the_result_cannot_be_written(sampled, monkeypatch, capsys):
    def full(*given):
        raise OSError("No space left on device")

    monkeypatch.setattr(eval_file, "write_record", full)
    with pytest.raises(SystemExit, match="No space left"):
        main(EMBEDDED)
    assert "the table" in capsys.readouterr().out


# -- runs on Atropos environments ------------------------------------------------------------------


@pytest.fixture(params=["atropos-grpo", "grpo.py env=atropos"])
def atropos_run(request):
    """A run's folder with a checkpoint, whose problems Atropos environments chose."""
    return a_run(AtroposConfig() if request.param == "atropos-grpo" else Config(
        env={"dataset": "atropos", "environment": "x.py"}))


def a_run(config: Config) -> Path:
    checkpoint = Path("run", "checkpoints", "step_000003")
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model" / "config.json").write_text("{}")
    (checkpoint / "info.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
    return checkpoint


@pytest.mark.parametrize("keys", [[], ["eval.samples=2"]])
def test_a_run_on_atropos_environments_needs_another_env(sampled, atropos_run, keys):
    with pytest.raises(SystemExit, match=re.escape(
            f"error: model.name={atropos_run} was trained with env=atropos: environments of "
            "Atropos evaluate themselves, see steps_per_eval; choose another env")):
        main([f"model.name={atropos_run}", *keys])
    main([f"model.name={atropos_run}", "env=arithmetic"])
    assert len(sampled) == 1


def test_of_two_a_run_on_atropos_environments_is_named(sampled, atropos_run):
    with pytest.raises(SystemExit, match=f"{atropos_run} was trained with env=atropos: .*choose"):
        main(["compare", "embedded", str(atropos_run)])
    assert not sampled


@pytest.mark.parametrize("keys", [[], ["eval.samples=null"]])
def test_env_atropos_is_refused_as_such(sampled, keys):
    with pytest.raises(SystemExit, match="error: env=atropos: .*see steps_per_eval; choose"):
        main(["env=atropos", *keys])


def test_a_run_on_atropos_that_measures_a_task_is_measured_on_it(sampled, monkeypatch):
    seen = []
    evaluate = work.evaluate
    monkeypatch.setattr(work, "evaluate", lambda config, *given, **more: (
        seen.append(config), evaluate(config, *given, **more))[1])
    name = a_run(AtroposConfig(atropos={"evaluate": True}, env={"task": {"num_test": 7}}))
    main([f"model.name={name}"])
    assert seen[0].env.task["num_test"] == 7


def test_what_atropos_environments_asked_is_not_known(atropos_run, caplog):
    assert not _trained_on(str(atropos_run), Config(), task=None)
    assert "is not known (environments of Atropos chose them)" in caplog.text


# -- options of an engine that is not used ---------------------------------------------------------


@pytest.mark.parametrize(("backend", "key", "value", "message"), [
    ("transformers", "fp32_head", True, "train_model.fp32_head=true: .*use backend=vllm, or set"),
    ("vllm", "attn_implementation", "eager", "train_model.attn_implementation=eager is not read "
     ".*vLLM.*; use inference_model.backend=transformers, or remove it")])
def test_what_the_engine_does_not_read_is_refused(backend, key, value, message):
    def checked(backend: str, **options) -> None:
        check(load_config({"train_model": {"torch_dtype": "bfloat16", key: value},
                           "inference_model": {"backend": backend}}),
              EvaluateOptions(**options), torch.device("cpu"))

    with pytest.raises(ConfigError, match=message):
        checked(backend)
    checked("vllm" if backend == "transformers" else "transformers")
    checked(backend, url="http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize(("key", "engine"), [
    ("train_model.attn_implementation=eager", "transformers"),
    ("train_model.fp32_head=true", "vllm")])
def test_a_small_model_goes_to_the_engine_that_reads_the_keys(
        key, engine, model_folder, monkeypatch, capsys):
    pytest.importorskip("vllm")
    monkeypatch.setattr(work, "open_policy", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([f"model.name={model_folder}", "device=cpu", "train_model.torch_dtype=bfloat16", key])
    assert f"engine {engine}," in capsys.readouterr().out


# -- names with an equals sign ---------------------------------------------------------------------


def test_folders_with_an_equals_sign_are_compared(sampled, model_folder, monkeypatch):
    monkeypatch.setattr("grpo.report.paired.compare", lambda first, second, **_: [])
    names = ["lr=1", "lr=2"]
    for name in names:
        Path(name).symlink_to(model_folder)
    main(["compare", *names, *EMBEDDED[1:]])
    (path,) = Path("outputs").glob("evaluations/*/compare.json")
    found = json.loads(path.read_text())
    assert [found["first"], found["second"]] == names
    records = path.parent.glob("*/metrics/eval_iter_000.json")
    assert {json.loads(one.read_text())["model"] for one in records} == {*names}


@pytest.mark.parametrize("key", ["~optimizer.lr=1", f"optimizer.lr={'1' * 300}"])
def test_keys_that_no_file_can_be_called_are_keys(sampled, key):
    with pytest.raises(SystemExit, match=f"error: {re.escape(key)} "):
        main(["compare", "embedded", "embedded", key])


def test_a_path_with_an_equals_sign_is_a_path_only_for_compare(sampled, model_folder):
    Path("model.name=embedded").mkdir()
    main(EMBEDDED)
    assert len(sampled) == 1
