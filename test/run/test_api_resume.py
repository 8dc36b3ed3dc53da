"""What a run from Python goes on with: the rows and the model that it began with, wherever its
folder is."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from grpo.config.keys import ConfigError
from grpo.report.loggers import read_jsonl
from grpo.run import api
from grpo.run.api import train
from grpo.run.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
OTHERS = [{"prompt": f"{n}-1=", "answer": str(n - 1)} for n in range(40)]


class Trained:
    """Leaves what a run of four steps leaves, from where it goes on."""

    def __init__(self, config, run_dir, checkpoint, at_end):
        self.config, self.run_dir, self.checkpoint = config, run_dir, checkpoint
        self.first = read_jsonl(run_dir / "dataset/train.jsonl")[0]["prompt"]
        assert config.env.path == str((run_dir / "dataset").absolute())

    def fit(self):
        for step in range((self.checkpoint.step if self.checkpoint else 0) + 1, 5):
            folder = self.run_dir / "checkpoints" / f"step_{step:06d}"
            folder.mkdir(parents=True)
            info = {"step": step, "config": self.config.model_dump(mode="json")}
            (folder / "info.json").write_text(json.dumps(info))
            (folder / "state.pt").touch()
            with (self.run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
        (self.run_dir / "final_model").mkdir(exist_ok=True)


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The runs that began, in a folder of their own."""
    begun = []

    def assemble(*given):
        begun.append(Trained(*given))
        return begun[-1]

    monkeypatch.setattr(api, "assemble", assemble)
    monkeypatch.chdir(tmp_path)
    return begun


def run(run_dir=None, rows=ROWS, held_out=None, **keys):
    return train({"train.max_steps": 4, "model.name": "embedded"} | {
        key.replace("__", "."): value for key, value in keys.items()},
        dataset=rows, eval_dataset=held_out, run_dir=run_dir)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "run.lock"}


@pytest.mark.parametrize("resume", ["auto", "run", "run/checkpoints/step_000002"])
@pytest.mark.parametrize("rows, message", [
    (OTHERS, r"\(dataset: row 0: .*0\+1=.* -> .*0-1=.*\); set"),
    (ROWS + ROWS[:1], r"\(dataset: 40 rows -> 41\); set"),
    (ROWS[1::-1] + ROWS[2:], r"\(dataset: row 0: ")])
def test_other_rows_are_another_run_whose_files_stay(runs, tmp_path, rows, message, resume):
    run("run")
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        run("run" if resume == "auto" else "branch", rows, resume=resume)
    assert files(tmp_path / "run") == before and len(runs) == 1
    run("run", iter([dict(reversed(row.items())) for row in ROWS]), resume="auto")
    assert runs[-1].checkpoint.step == 4


def test_other_held_out_rows_are_another_run_too(runs):
    run("run", held_out=OTHERS[:5])
    with pytest.raises(ConfigError, match=r"\(eval_dataset: 5 rows -> 6\)"):
        run("run", held_out=OTHERS[:6], resume="auto")
    with pytest.raises(ConfigError, match="env.task.test_split"):
        run("run", resume="auto")


def test_rows_of_a_run_that_never_began_are_not_left(runs, tmp_path):
    (tmp_path / "run/dataset").mkdir(parents=True)
    (tmp_path / "run/dataset/test.jsonl").write_text('{"prompt": "a"}\n')
    run("run")
    run("run", resume="auto")
    assert runs[-1].checkpoint.step == 4


def test_a_run_whose_rows_are_gone_says_so(runs, tmp_path):
    run("run")
    (tmp_path / "run/dataset/train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"\(dataset: .*train.jsonl is not there.*\)"):
        run("run", resume="auto")


def test_a_branch_from_an_earlier_step_or_with_other_settings_has_a_folder_of_its_own(
        runs, tmp_path):
    run("run")
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match="give another run_dir"):
        run("run", resume="run/checkpoints/step_000002")
    for folder, given, step in (("early", {"resume": "run/checkpoints/step_000002"}, 2),
                                ("slow", {"resume": "run", "optimizer__lr": 1e-7}, 4),
                                (None, {"resume": "run/checkpoints/step_000002"}, 2)):
        result = run(folder, **given)
        assert (runs[-1].checkpoint.step, runs[-1].first) == (step, "0+1=")
        assert result.run_dir.resolve() != tmp_path / "run"
        assert result.config.env.path == str((result.run_dir / "dataset").absolute())
    assert files(tmp_path / "run") == before
    assert run("early", resume="auto").run_dir.resolve() == tmp_path / "early"
    assert runs[-1].checkpoint.run_dir.resolve() == tmp_path / "early"


@pytest.mark.parametrize("resume", ["auto", "moved"])
def test_a_folder_may_be_moved(runs, tmp_path, resume):
    run("run")
    shutil.move("run", "moved")
    assert run("moved", resume=resume).run_dir.resolve() == tmp_path / "moved"
    assert runs[-1].checkpoint.step == 4


def test_without_a_folder_a_run_is_found_where_runs_are(runs, tmp_path):
    """As the last line of one that was stopped says: by auto, or by its path."""
    first = run().run_dir
    for resume in ("auto", str(first), str(first / "checkpoints/step_000004")):
        assert run(resume=resume).run_dir.resolve() == first.resolve()
        assert runs[-1].checkpoint.step == 4
    other = run(rows=OTHERS, resume="auto").run_dir
    assert other.resolve() != first.resolve() and runs[-1].checkpoint is None
    assert run(resume="auto").run_dir.resolve() == first.resolve()
    assert len([*tmp_path.glob("outputs/*/*/metrics.jsonl")]) == 2


def test_auto_in_the_folder_of_a_run_with_other_settings_says_which(runs):
    run("run")
    with pytest.raises(ConfigError, match=r"resume=auto: run holds .*\(optimizer.lr: .*1e-09\); "
                                          "set these back, or give another run_dir; .*resume=run"):
        run("run", resume="auto", optimizer__lr=1e-9)
    with pytest.raises(FileExistsError, match="run_dir=run .* but no checkpoint that resume=auto"):
        run("run", resume="auto", train__exp_name="other")


@pytest.mark.slow
def test_a_moved_run_is_trained_to_its_end(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    small = {"device": "cpu", "inference_model__backend": "transformers",
             "model__warm_start_steps": 5, "inference_model__max_tokens": 4, "env__num_envs": 2,
             "env__repeats": 2, "train__checkpoint_frequency": 1}
    first = run(**small, train__max_steps=2)
    shutil.move(first.run_dir, "moved")
    result = run("moved", **small, train__max_steps=3, resume="auto")
    assert [row["step"] for row in result.history] == [0, 1, 2, 3]
    branch = run(**small, train__max_steps=3, resume="moved/checkpoints/step_000001")
    assert [row["step"] for row in branch.history] == [0, 1, 2, 3]
    assert branch.run_dir.is_relative_to("outputs") and branch.history[-1] != result.history[-1]


# -- a model that is no name -----------------------------------------------------------------------


def text_length(completion, problem):
    return float(len(completion))


def trainer(model, folder, rows=ROWS, processing_class=None):
    return GRPOTrainer(model, text_length, GRPOConfig(
        folder, max_steps=4, lr_scheduler_type="constant"), rows,
        processing_class=processing_class)


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder)


def test_another_model_or_other_rows_are_refused_by_the_trainer(runs, model, tmp_path):
    trainer(model, "out").train()
    before = files(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"\(train_dataset: row 0: "):
        trainer(model, "out", OTHERS).train(resume_from_checkpoint=True)
    trainer(model, "out").train(resume_from_checkpoint=True)
    assert runs[-1].checkpoint.step == 4
    next(model.parameters()).data[0] += 1
    for resume in (True, "out"):
        with pytest.raises(ConfigError, match=r"\(model: .* differs from .*start_model\)"):
            trainer(model, "out").train(resume_from_checkpoint=resume)
    assert files(tmp_path / "out") == before and len(runs) == 2


def test_another_chat_template_is_refused_by_the_trainer(runs, model, tokenizer):
    first, other = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages }}"
    trainer(model, "out", processing_class=first).train()
    trainer(model, "out", processing_class=first).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"processing_class.chat_template: .* -> '\{\{ mess"):
        trainer(model, "out", processing_class=other).train(resume_from_checkpoint=True)


def test_a_trainer_with_a_model_branches_and_may_be_moved(runs, model, tmp_path):
    trainer(model, "out").train()
    early = trainer(model, "early").train(resume_from_checkpoint="out/checkpoints/step_000002")
    assert early.config.model.name == str(tmp_path / "early/start_model")
    assert AutoModelForCausalLM.from_pretrained(early.config.model.name)
    shutil.move("out", "moved")
    moved = trainer(model, "moved").train(resume_from_checkpoint=True)
    assert moved.config.model.name == str(tmp_path / "moved/start_model")
    assert runs[-1].checkpoint.step == 4
