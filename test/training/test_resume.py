"""What a run goes on from, and in which folder: its own, or as a branch in a new one."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import ExitStack
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo.config.asynchronous import AsyncConfig
from grpo.config.schema import ConfigError
from grpo.policies.handle import EngineError
from grpo.report.history import History
from grpo.report.loggers import read_jsonl
from grpo.run import resume
from grpo.run.identity import changed_keys, identity_changes, result_changes, with_defaults
from grpo.run.resume import PARENT_FILE
from grpo.training.checkpoint import find_checkpoint, list_checkpoints
from grpo.training.checkpoint_files import NotSavedError
from grpo.training.run_lock import LOCK_FILE
from grpo.training.stopping import Stopped
from grpo.weights.canary import StaleWeightsError
from grpo.weights.in_flight import PeriodicUpdates

from .runs import make_trainer, timeless


def open_run(config, run_dir):
    """As a process that ends at once."""
    with ExitStack() as at_end:
        return resume.open_run(config, run_dir, at_end)


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != LOCK_FILE}


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory):
    """A folder with the run ``outputs/first``: four steps, two checkpoints, at a rate of 0.01."""
    from grpo.config.schema import load_config

    from . import runs

    root = tmp_path_factory.mktemp("finished")

    def make(**sections):
        values = {"env": {"num_envs": 2, "repeats": 2, "reward": f"{runs.__name__}:by_text",
                          "task": {"max_operand": 9, "num_train": 15, "num_test": 5}},
                  "model": {"name": str(tiny_folder)},
                  "train": {"total_dialog_turns": 16, "eval_frequency": 0,
                            "checkpoint_frequency": 2},
                  "inference_model": {"backend": "transformers", "max_tokens": 2},
                  "optimizer": {"lr": 0.01}}
        for section, keys in sections.items():
            values[section] = {**values.get(section, {}), **keys} if isinstance(
                keys, dict) else keys
        return load_config(values)

    return root, make


@pytest.fixture
def first(finished, monkeypatch):
    root, make = finished
    monkeypatch.chdir(root)
    folder = root / "outputs" / "first"
    if not folder.exists():
        make_trainer(make(), folder).fit()
    before = files(folder)
    yield folder, make
    assert files(folder) == before  # whatever was resumed, it is as it was


def test_auto_goes_on_with_the_same_settings_and_with_others_that_change_no_result(first, tmp_path):
    folder, make = first
    for changes in ({}, {"train": {"keep_checkpoints": 9, "eval_frequency": 3}},
                    {"train": {"max_tokens_per_micro_batch": 512}},
                    {"train": {"total_dialog_turns": 64}},  # longer, at a constant rate
                    {"train": {"total_dialog_turns": None, "max_steps": 16}}):
        run_dir, checkpoint = open_run(make(resume="auto", **changes), tmp_path / "new")
        assert run_dir.resolve() == folder and checkpoint.step == 4


def test_auto_in_a_sweep_does_not_take_the_run_of_another_job(first, tmp_path, capsys):
    _, make = first
    for changes in ({"optimizer": {"lr": 0.02}}, {"train": {"clip_epsilon": [0.1, 0.1]}},
                    {"inference_model": {"temperature": 0.5}}):
        run_dir, checkpoint = open_run(make(resume="auto", **changes), tmp_path / "new")
        assert (run_dir, checkpoint) == (tmp_path / "new", None)
    shown = capsys.readouterr().out
    assert "optimizer.lr: 0.01 -> 0.02" in shown and "resume=PATH starts a branch" in shown


def test_a_longer_run_whose_rate_falls_towards_its_end_is_another(first, tmp_path):
    _, make = first
    assert open_run(make(resume="auto", optimizer={"schedule": "linear"}), tmp_path)[1] is None
    old = make(optimizer={"schedule": "linear"}).model_dump(mode="json")
    new = make(optimizer={"schedule": "linear"}, train={"total_dialog_turns": 64})
    assert result_changes(old, new.model_dump(mode="json")) == [
        "train.total_dialog_turns: 16 -> 64"]
    new = make(optimizer={"schedule": "linear"},
               train={"total_dialog_turns": None, "max_steps": 16})
    assert "train.max_steps: None -> 16" in result_changes(old, new.model_dump(mode="json"))


@pytest.mark.parametrize(("before", "after", "changes"), [
    ({}, {"reward_processes": 0}, ["env.reward_processes: None -> 0"]),
    ({}, {"reward_workers": 1}, ["env.reward_workers: 16 -> 1"]),
    ({"reward_processes": 0}, {"reward_processes": 0, "reward_workers": 1},
     ["env.reward_workers: 16 -> 1"]),
    ({"reward_processes": 2, "reward_workers": 1}, {"reward_processes": 4, "reward_workers": 1},
     []), ({}, {"reward_processes": 2, "reward_workers": 4}, [])])
def test_where_rewards_are_called_is_the_same_run_if_they_draw_the_same_numbers(
        finished, before, after, changes):
    old, new = (finished[1](env=env).model_dump(mode="json") for env in (before, after))
    assert result_changes(old, new) == changes


@pytest.mark.parametrize(("server", "changes"), [
    ("vllm", []), ("sglang", ["inference_model.server: vllm -> sglang"])])
def test_how_a_server_is_asked_and_how_often_it_is_proven_is_the_same_run(
        finished, server, changes):
    at_url = {"url": "http://127.0.0.1:8000", "backend": "vllm"}
    first = finished[1](inference_model=at_url | ({} if server == "vllm" else {"server": "vllm"}))
    again = finished[1](inference_model=at_url | {"server": server, "connections": 16},
                        train={"proof_interval": 1})
    assert result_changes(*(run.model_dump(mode="json") for run in (first, again))) == changes


@pytest.mark.parametrize(("where", "changes", "reason"), [
    ("outputs/first", {"optimizer": {"lr": 0.02}}, "optimizer.lr: 0.01 -> 0.02"),
    ("outputs/first", {"train": {"exp_name": "other"}}, "train.exp_name: grpo -> other"),
    ("outputs/first/checkpoints/step_000002", {}, "from step 2, while the run has got to step 4")])
def test_anything_else_is_a_branch_with_a_folder_of_its_own(first, tmp_path, where, changes,
                                                            reason):
    folder, make = first
    config = make(resume=where, **changes)
    run_dir, checkpoint = open_run(config, tmp_path / "branch")
    assert run_dir == tmp_path / "branch"
    parent = json.loads((run_dir / PARENT_FILE).read_text())
    assert parent == {"checkpoint": str(checkpoint.folder.absolute()), "step": checkpoint.step,
                      "changes": [reason]}
    earlier = [row for row in read_jsonl(folder / "metrics.jsonl")
               if row["step"] <= checkpoint.step]
    assert read_jsonl(run_dir / "metrics.jsonl") == earlier


def test_a_branch_is_trained_without_touching_its_parent_and_is_resumed_as_itself(first, tmp_path):
    folder, make = first
    config = make(resume=str(folder / "checkpoints" / "step_000002"), optimizer={"lr": 0.02})
    run_dir, checkpoint = open_run(config, tmp_path / "branch")
    make_trainer(config, run_dir, checkpoint).fit()
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert [found.step for found in list_checkpoints(run_dir)] == [4]
    ours, parents = (timeless(read_jsonl(path / "metrics.jsonl")) for path in (run_dir, folder))
    assert ours[:3] == parents[:3] and ours[3] != parents[3]
    again, newest = open_run(make(resume=str(run_dir), optimizer={"lr": 0.02}), tmp_path / "x")
    assert again == run_dir and newest.step == 4


@pytest.mark.parametrize("room", [True, False])
def test_a_branch_that_is_stopped_in_its_first_step_goes_on_as_it_says(
        first, tmp_path, monkeypatch, capsys, room):
    """``resume=auto`` takes no checkpoint of the parent, whose settings are others."""
    folder, make = first
    monkeypatch.chdir(tmp_path)
    parents, settings = folder / "checkpoints" / "step_000002", {"optimizer": {"lr": 0.02}}
    config = make(resume=str(parents), **settings)
    run_dir, checkpoint = open_run(config, tmp_path / "outputs" / "branch")
    branch = make_trainer(config, run_dir, checkpoint)
    branch.collector.env.step = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    if not room:
        branch.save = Mock(side_effect=NotSavedError("the disk is full"))
    with pytest.raises(Stopped):
        branch.fit()
    shown = "".join(capsys.readouterr().out.split())
    again, newest = open_run(make(resume="auto", **settings), tmp_path / "outputs" / "again")
    if room:
        assert again == run_dir and newest.step == 2
        assert f"theruncangoon:resume=auto,orresume={newest.folder}" in shown
    else:
        assert again != run_dir and newest is None
        assert f"theruncangoon:resume={parents}" in shown and "resume=auto" not in shown


def test_a_branch_is_not_written_over_another_run(first, tmp_path):
    folder, make = first
    config = make(resume=str(folder), optimizer={"lr": 0.02})
    with pytest.raises(ConfigError, match="holds a run already; give another hydra.run.dir"):
        open_run(config, folder)
    run_dir, _ = open_run(config, tmp_path / "branch")
    assert open_run(config, run_dir)[0] == run_dir  # it had not begun
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        open_run(config, run_dir)


def test_a_run_that_goes_on_somewhere_is_not_gone_on_with_here(first, tmp_path):
    folder, make = first
    with ExitStack() as at_end:
        resume.open_run(make(resume="auto"), tmp_path, at_end)
        for config, where in ((make(resume="auto"), tmp_path), (make(), folder)):
            with pytest.raises(ConfigError, match=f"{folder} is in use by process {os.getpid()} "):
                open_run(config, where)
    assert open_run(make(resume="auto"), tmp_path)[1].step == 4


def test_another_model_task_or_seed_is_refused(first, tmp_path):
    _, make = first
    with pytest.raises(ConfigError, match=r"belongs to another run \(train.seed: 0 -> 1\)"):
        open_run(make(resume="outputs/first", train={"seed": 1}), tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("then", [2, 0])
def test_a_run_that_was_not_evaluated_may_be_from_its_checkpoint_on(first, tmp_path, then):
    """What a checkpoint knows nothing of starts at its beginning, the first accuracy as well."""
    _, make = first
    train = {"total_dialog_turns": 8, "checkpoint_frequency": 1}
    silent = make_trainer(make(train=train | {"eval_frequency": "never"}), tmp_path)
    silent.iterate()
    silent.reporter.loggers.close()
    resumed = make_trainer(make(train=train | {"eval_frequency": then}), tmp_path, silent.saved)
    resumed.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [2]
    assert resumed.first_accuracy == resumed.last_accuracy == rows[-1]["eval/accuracy"]


# -- Evaluations that are owed --------------------------------------------------------------------


def seed(value: int) -> None:
    for seed_one in (random.seed, np.random.seed, torch.manual_seed):
        seed_one(value)


def fail() -> None:
    raise EngineError("the engine is gone")


@pytest.mark.parametrize("iterations", [4, 2])  # in its middle, and at its end
@pytest.mark.parametrize(("end", "error"), [
    (fail, EngineError), (lambda: os.kill(os.getpid(), signal.SIGTERM), Stopped)])
def test_an_evaluation_that_was_not_finished_is_made_up_when_the_run_goes_on(
        make_config, tmp_path, monkeypatch, iterations, end, error):
    config = make_config(iterations=iterations, reward="by_text_and_chance",
                         train={"checkpoint_frequency": 0})
    seed(1)
    whole = make_trainer(config, tmp_path / "whole")
    whole.fit()
    seed(1)
    stopped = make_trainer(config, tmp_path / "stopped")

    run, calls = stopped.evaluator.run, count(1)

    def ends_once(**options):
        found = run(**options)  # which has drawn numbers
        if next(calls) == 2:
            end()
        return found

    stopped.evaluator.run = ends_once
    with pytest.raises(error):
        stopped.fit()
    seed(99)  # another process
    checkpoint = find_checkpoint("auto", root=tmp_path / "stopped", exp_name="grpo")
    assert checkpoint.step == 2 and checkpoint.state()["evaluated"] == 0
    resumed = make_trainer(config, checkpoint.run_dir, checkpoint)
    headlines = []
    monkeypatch.setattr(resumed.reporter, "finish",
                        lambda *args, headline, **options: headlines.append(headline))
    resumed.fit()
    assert headlines == [f"held-out accuracy {whole.first_accuracy:.3f} -> "
                         f"{whole.last_accuracy:.3f} in {iterations} iterations"]
    ours, theirs = ((timeless(History.read(tmp_path / name).rows),
                     timeless(read_jsonl(tmp_path / name / "samples.jsonl")))
                    for name in ("stopped", "whole"))
    assert ours == theirs


def test_an_evaluation_is_made_up_once_however_often_the_run_ends_before_its_next_step(
        make_config, tmp_path):
    train = {"checkpoint_frequency": 0, "eval_frequency": 1}
    config, made = make_config(iterations=2, train=train), []
    trainer = make_trainer(config, tmp_path)
    run, calls = trainer.evaluator.run, count(1)
    trainer.evaluator.run = lambda: 1 / 0 if next(calls) == 2 else run()
    for _ in range(4):
        trainer.after_saving.append(lambda checkpoint: made.append(checkpoint.step))
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
        checkpoint, = list_checkpoints(tmp_path)
        trainer = make_trainer(config, tmp_path, checkpoint)
        trainer.collector.collect = lambda: 1 / 0
    assert made == [1, 1]  # without and with the evaluation
    make_trainer(config, tmp_path, checkpoint).fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 1, 2]


def test_a_checkpoint_that_does_not_say_what_was_evaluated_goes_on_as_before(
        make_config, tmp_path):
    trainer = make_trainer(make_config(iterations=2), tmp_path)
    trainer.fit()
    state = trainer.saved.state()
    assert state.pop("evaluated") == 2
    torch.save(state, trainer.saved.folder / "state.pt")
    again = make_trainer(make_config(iterations=2), tmp_path, trainer.saved)
    again.fit()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


# -- Comparing configurations ---------------------------------------------------------------------


def test_the_checkpoint_to_go_on_from_after_a_failed_proof_stays_while_later_ones_are_not_compared(
        make_config, tmp_path):
    """Where the engine gets the weights every few steps only."""
    train = {"checkpoint_frequency": 1, "eval_frequency": 0, "keep_checkpoints": 2}
    trainer = make_trainer(make_config(iterations=12, train=train), tmp_path)
    trainer.weights = trainer.proof.weights = PeriodicUpdates(trainer.weights, interval=5)
    kept = []
    trainer.after_saving = [lambda saved: kept.append(
        [found.step for found in list_checkpoints(tmp_path)])]
    trainer.weights.begin_differing = lambda part: lambda: (
        ["norm.weight"] if trainer.step == 10 else [])
    with pytest.raises(StaleWeightsError):
        trainer.fit()
    assert kept[3:] == [[3, 4], [4, 5], [5, 6], [5, 6, 7], [5, 7, 8], [5, 8, 9], [5, 9, 10]]
    assert trainer.compared == list_checkpoints(tmp_path)[0]


def test_changed_keys_name_both_values_at_any_depth():
    old = {"a": {"b": 1, "c": {"d": 2}}, "e": 3, "same": 0}
    new = {"a": {"b": 1, "c": {"d": 4}}, "f": 5, "same": 0}
    assert changed_keys(old, new) == ["a.c.d: 2 -> 4", "e: 3 -> None", "f: None -> 5"]


def test_where_the_reference_computes_is_no_other_run_but_another_reference_is():
    old = {"ref_model": {"name": "one", "num_devices": 1, "devices": None}}
    moved = {"ref_model": {"name": "one", "num_devices": None, "devices": [3]}}
    assert changed_keys(old, moved)
    assert not identity_changes(old, moved) and not result_changes(old, moved)
    assert identity_changes(old, {"ref_model": {"name": "two"}}) == ["ref_model.name: one -> two"]


def test_keys_that_have_come_since_stand_at_their_defaults(finished):
    _, make = finished
    settings = make().model_dump(mode="json")
    before = {**settings, "train": {key: value for key, value in settings["train"].items()
                                    if key != "epochs"}}
    filled = with_defaults(before, settings)
    assert not result_changes(filled, settings)
    assert result_changes(filled, make(train={"epochs": 2}).model_dump(mode="json")) == [
        "train.epochs: 1 -> 2"]


def test_a_run_of_another_script_is_another_run(finished):
    _, make = finished
    settings = make().model_dump(mode="json")
    defaults = AsyncConfig.model_construct().model_dump(mode="json")
    changes = result_changes(with_defaults(settings, defaults), with_defaults(defaults, settings))
    assert any(change.startswith("ray: None") for change in changes)


def test_the_sequences_of_an_atropos_step_are_part_of_it():
    def settings(pieces: int, **sections) -> dict:
        return {"train": {"gradient_accumulation_steps": pieces}, **sections}

    assert not result_changes(settings(1), settings(2))
    assert result_changes(settings(1, atropos={}), settings(2, atropos={}))
