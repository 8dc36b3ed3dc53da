"""The whole loop on a CPU: metrics, publishing, evaluation, and an exact resume."""

from __future__ import annotations

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo import data
from grpo.objectives import GroupAdvantage
from grpo.objectives.maxent import MaxEntWeights
from grpo.report.loggers import read_jsonl
from grpo.training.checkpoint import find_checkpoint, list_checkpoints
from grpo.training.rollout_metrics import advantage_counts, advantage_metrics, rollout_metrics
from grpo.weights.canary import StaleWeightsError
from grpo.weights.in_flight import PeriodicUpdates

from .runs import make_rollout, make_trainer, timeless, weights

# -- One iteration --------------------------------------------------------------------------------


def test_an_iteration_reports_every_phase_and_trains_on_policy(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    before = weights(trainer)
    metrics = trainer.iterate()
    assert not torch.equal(weights(trainer), before)
    assert {f"time/{phase}" for phase in ("step", "generate", "reward", "advantage", "train",
                                          "optimizer", "sync", "canary")} <= metrics.keys()
    assert {"loss/objective", "policy/entropy", "reward/mean", "reward/std",
            "reward/zero_variance_groups", "tokens/per_second", "tokens/response_mean",
            "train/lr"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    # Strictly on-policy: the trainer scores the tokens as the policy did when it drew them.
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/version"] == trainer.weights.version == 1
    assert metrics["policy/age_mean"] == metrics["policy/age_max"] == 0
    assert metrics["canary/max_abs_diff"] < 1e-4
    assert metrics["train/grad_norm"] > 0
    rollout = trainer.collector.collect()
    assert (rollout[data.POLICY_VERSION] == 1).all()
    assert (rollout[data.POLICY_VERSIONS][rollout[data.ASSISTANT_MASK]] == 1).all()


def test_a_canary_that_overlaps_compares_before_the_weights_change_again(
        make_config, tmp_path, monkeypatch):
    plain = make_trainer(make_config(), tmp_path / "plain")
    trainer = make_trainer(make_config(), tmp_path / "overlapping", overlap_canary=True)
    happened = []

    def noted(owner, name, what):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (happened.append(what), function(*a))[1])

    noted(trainer.canary, "start", "start")
    noted(trainer.canary, "finish", "finish")
    noted(trainer.learner.optimizer, "step", "step")
    for trained in (plain, trainer):
        for _ in range(3):
            metrics = trained.iterate()
    assert happened == ["step", "start", "finish",  # at first, there is nothing to overlap with
                        "step", "start", "finish", "step", "start"]
    assert torch.equal(weights(plain), weights(trainer))
    assert metrics["canary/max_abs_diff"] < 1e-4


def test_nothing_unproven_is_evaluated_or_saved(make_config, tmp_path):
    config = make_config(train={"checkpoint_frequency": 1})
    trainer = make_trainer(config, tmp_path, overlap_canary=True)
    trainer.iterate()
    trainer.iterate()
    assert not trainer._unproven


def test_the_reference_and_the_kl_to_it_enter_the_metrics_and_start_at_zero(make_config, tmp_path):
    trainer = make_trainer(make_config(train={"kl_to_ref_coeff": 0.1}), tmp_path)
    first, second = trainer.iterate(), trainer.iterate()
    assert first["policy/kl_to_ref"] == pytest.approx(0, abs=1e-6)
    assert second["policy/kl_to_ref"] > 1e-6
    assert second["loss/kl_to_ref"] == pytest.approx(0.1 * second["policy/kl_to_ref"], rel=1e-3)
    assert "time/reference" in second


@pytest.mark.parametrize("rows_per_step", [8, 1])
def test_failing_rewards_cost_their_rows_and_nothing_else(make_config, tmp_path, rows_per_step):
    config = make_config(reward="fails_sometimes", train={"optim_batch_size": rows_per_step})
    trainer = make_trainer(config, tmp_path)
    before = weights(trainer)
    metrics = trainer.iterate()
    assert 0 < metrics["reward/errors"] < 8
    assert metrics["reward/errors"] == trainer.collector.env.reward_errors
    assert 0 < metrics["reward/mean"] < 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert not torch.equal(weights(trainer), before)


def test_an_iteration_without_any_reward_changes_nothing_and_stops_the_run(make_config, tmp_path):
    trainer = make_trainer(make_config(reward="fails"), tmp_path)
    before = weights(trainer)
    with pytest.raises(RuntimeError, match="not one of 8 completions got a reward"):
        trainer.iterate()
    assert torch.equal(weights(trainer), before)


def test_stale_weights_stop_the_run(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    stale = copy.deepcopy(trainer.model)
    trainer.canary.policy._model = [stale]
    with pytest.raises(StaleWeightsError, match="policy version 1"):
        trainer.iterate()
    assert not list_checkpoints(tmp_path)


def test_what_no_canary_sees_stops_the_run_within_the_interval(make_config, tmp_path, monkeypatch):
    config = make_config(optimizer={"lr": 1e-7}, train={
        "checkpoint_frequency": 0, "proof_interval": 30})  # more than there are tensors
    trainer = make_trainer(config, tmp_path)
    trainer.eval_frequency = 0
    trainer.iterations = 100
    for _ in range(4):
        trainer.iterate()
    names = [name for name, _ in trainer.model.named_parameters()]
    held = [param.detach().clone() for param in trainer.model.parameters()]
    theirs = torch.nn.ParameterDict()
    monkeypatch.setattr(trainer.weights, "used", lambda: theirs)
    monkeypatch.setattr(theirs, "named_parameters", lambda: [
        (name, old if name == names[7] else param) for name, old, (_, param) in
        zip(names, held, trainer.model.named_parameters(), strict=True)])
    for _ in range(3):  # tensors 4, 5 and 6
        assert trainer.iterate()["canary/max_abs_diff"] < 1e-4
    with pytest.raises(StaleWeightsError, match=f"1 of the tensors compared differ.*{names[7]}"):
        trainer.iterate()


@pytest.mark.parametrize("due", ["eval_frequency", "checkpoint_frequency", "iterations"])
def test_all_is_compared_before_anything_is_evaluated_or_kept(make_config, tmp_path, due):
    config = make_config(train={"checkpoint_frequency": 0, "eval_frequency": 0})
    trainer = make_trainer(config, tmp_path)
    trainer.iterations, trainer.eval_frequency = 100, 0
    wholes = []
    trainer.proof.check = lambda *, whole: wholes.append(whole)
    setattr(trainer, due, 2)
    trainer._prove_start()
    trainer.iterate()
    trainer.iterate()
    assert wholes == [False, True]


def test_a_way_that_does_not_arrive_stops_the_run_before_its_first_step(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    theirs, before = copy.deepcopy(trainer.model), weights(trainer)
    trainer.weights.used = lambda: theirs
    with pytest.raises(StaleWeightsError, match="the self-test changed a few values"):
        trainer.fit()
    assert trainer.step == 0 and torch.equal(weights(trainer), before)


def test_the_reward_rises(make_config, tmp_path):
    config = make_config(iterations=25, reward="many_letters",
                         env={"num_envs": 4, "repeats": 8},
                         train={"total_dialog_turns": 25 * 32}, optimizer={"lr": 0.02})
    trainer = make_trainer(config, tmp_path)
    rewards = [trainer.iterate()["reward/mean"] for _ in range(25)]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.8


# -- The loop -------------------------------------------------------------------------------------


def test_evaluations_and_checkpoints_come_when_they_are_due(make_config, tmp_path, reports):
    trainer = make_trainer(make_config(iterations=5, train={"keep_checkpoints": 1}), tmp_path)
    trainer.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4, 5]
    assert [c.step for c in list_checkpoints(tmp_path)] == [5]  # the last one is always kept
    assert reports == [tmp_path]
    assert (trainer.first_accuracy, trainer.last_accuracy) == (rows[0]["eval/accuracy"],
                                                               rows[-1]["eval/accuracy"])
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [row["step"] for row in samples] == [0, 0, 2, 2, 4, 4, 5, 5]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final_model")
    assert torch.equal(torch.cat([p.flatten() for p in loaded.parameters()]), weights(trainer))


def test_frequencies_of_zero_leave_the_first_and_the_last_evaluation(make_config, tmp_path):
    config = make_config(iterations=2, train={"eval_frequency": 0, "checkpoint_frequency": 0})
    make_trainer(config, tmp_path).fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2]
    assert not list_checkpoints(tmp_path)


@pytest.mark.parametrize(("interval", "eval_frequency", "published", "evaluated"), [
    (3, 0, [3, 4], [4]), (9, 0, [4], [4]), (3, 2, [2, 4], [2, 4]), (2, 3, [2, 3, 4], [3, 4])])
def test_evaluations_are_of_their_steps_model_also_where_updates_wait(
        make_config, tmp_path, monkeypatch, interval, eval_frequency, published, evaluated):
    config = make_config(iterations=4, train={"eval_frequency": eval_frequency})
    trainer = make_trainer(config, tmp_path)
    weights = trainer.weights = PeriodicUpdates(trainer.weights, interval=interval)
    trainer.proof.weights = weights
    trainer.canary.weights = weights
    pending: list[int] = []
    run = trainer.evaluator.run
    monkeypatch.setattr(trainer.evaluator, "run", lambda: (pending.append(weights.pending),
                                                           run())[1])
    trainer.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    versions = [0] + [row["policy/version"] for row in rows]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == evaluated
    assert pending == [0] * (1 + len(evaluated))  # with those before any update
    assert [step for step in range(1, 5) if versions[step] > versions[step - 1]] == published
    assert [row["step"] for row in rows if row["canary/max_abs_diff"] is not None] == published


@pytest.mark.slow
def test_a_run_ends_with_its_report_on_disk_and_on_the_screen(make_config, tmp_path, capsys):
    make_trainer(make_config(iterations=1), tmp_path).fit()
    screen = "".join(capsys.readouterr().out.split())
    assert "held-outaccuracy" in screen
    reports = [path for path in tmp_path.iterdir() if path.name.startswith("report")]
    assert reports
    assert all(path.stat().st_size > 100 for path in reports)


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch it."""


@pytest.mark.parametrize("changes", [
    {},
    {"train": {"dialog_turns_per_batch": 16, "optim_batch_size": 4, "epochs": 2,
               "kl_to_ref_coeff": 0.05, "total_dialog_turns": 80, "aggregation": "dr_grpo"},
     "optimizer": {"lr": 0.01, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}},
    {"train": {"objective": "maxent_listwise", "aggregation": "prompt", "proximal": "scored",
               "optim_batch_size": 4, "kl_to_ref_coeff": 0.05, "entropy_coeff": 0.01,
               "max_sampling_rounds": 2, "total_dialog_turns": 40},
     "kl_controller": {"kind": "band", "target": 0.005},
     "entropy_controller": {"target": 3.0, "step": 0.01, "maximum": 0.1},
     "maxent": {"tau_target": 1.0, "tau_step": 1.0}},
], ids=["on-policy", "several steps and epochs", "all controllers"])
def test_a_killed_and_resumed_run_has_the_metrics_of_an_uninterrupted_one(
        make_config, tmp_path, changes):
    config = make_config(iterations=5, reward="by_text_and_chance", **changes)

    def seed(value):
        for seed_one in (random.seed, np.random.seed, torch.manual_seed):
            seed_one(value)

    seed(1)
    whole = make_trainer(config, tmp_path / "whole")
    whole.fit()

    seed(1)
    stopped = make_trainer(config, tmp_path / "stopped")
    log = stopped.reporter.step

    def killed_at_four(step, metrics):
        log(step, metrics)
        if step == 4:  # after the checkpoint of step 2, before that of step 4
            raise Killed

    stopped.reporter.step = killed_at_four
    with pytest.raises(Killed):
        stopped.fit()
    stopped.reporter.loggers.close()

    # Another process: other random numbers, nothing but the folder survives.
    seed(99)
    checkpoint = find_checkpoint("auto", root=tmp_path / "stopped", exp_name="grpo")
    assert checkpoint.step == 2
    resumed = make_trainer(config, checkpoint.run_dir, checkpoint)
    resumed.fit()

    expected = timeless(read_jsonl(tmp_path / "whole" / "metrics.jsonl"))
    assert len(expected) == 6
    for name in {name for name in expected[-1] if name.startswith("control/")}:
        assert len({row[name] for row in expected[1:]}) > 1  # it moves, so it had to be restored
    assert sum(name.startswith("control/") for name in expected[-1]) == sum(
        section in changes for section in ("kl_controller", "entropy_controller", "maxent"))
    assert timeless(read_jsonl(tmp_path / "stopped" / "metrics.jsonl")) == expected
    assert timeless(read_jsonl(tmp_path / "stopped" / "samples.jsonl")) == timeless(
        read_jsonl(tmp_path / "whole" / "samples.jsonl"))
    assert torch.equal(weights(resumed), weights(whole))
    assert (resumed.first_accuracy, resumed.last_accuracy) == (whole.first_accuracy,
                                                               whole.last_accuracy)


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(make_config, tmp_path):
    config = make_config(iterations=2)
    first = make_trainer(config, tmp_path)
    first.fit()
    checkpoint = find_checkpoint(str(tmp_path), root=tmp_path, exp_name="grpo")
    again = make_trainer(config, tmp_path, checkpoint)
    again.fit()
    assert again.step == 2
    assert torch.equal(weights(again), weights(first))
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


def test_a_resumed_run_keeps_the_checkpoint_that_its_engines_may_be_restarted_from(
        make_config, tmp_path):
    config = make_config(iterations=5, train={"keep_checkpoints": 1})
    first = make_trainer(config, tmp_path)
    first.iterate()
    saved = first.save()
    resumed = make_trainer(config, tmp_path, saved)
    resumed.fit()
    assert [found.step for found in list_checkpoints(tmp_path)] == [1, 5]


# -- Metrics --------------------------------------------------------------------------------------


def test_metrics_of_a_rollout_leave_rows_without_a_reward_out():
    metrics = rollout_metrics(make_rollout([1.0, 0.0, 9.0], [False, False, True],
                                           [True, False, False]))
    assert metrics == pytest.approx({
        "reward/errors": 1, "reward/mean": 0.5, "reward/std": 0.5, "reward/success_rate": 0.5,
        "tokens/response_mean": 2.0, "tokens/response_max": 3, "tokens/total": 9,
        "tokens/truncated_fraction": 1 / 3, "tokens/turns_mean": 1.0})


def test_groups_without_a_signal_are_counted():
    rollout = make_rollout([1.0, 0.0, 1.0, 1.0], [False] * 4, [False] * 4)
    rollout[data.GROUP_ID] = torch.tensor([70, 70, 71, 71])
    for estimator in ("group_norm", "global_norm"):
        GroupAdvantage(estimator=estimator)(rollout)
        assert advantage_metrics(rollout) == {"reward/zero_variance_groups": 0.5}


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_equal_rewards_are_no_signal_for_weights_either(size):
    rollout = make_rollout([0.3] * size, [False] * size, [False] * size)
    rollout[data.GROUP_ID] = torch.full((size,), 4)
    MaxEntWeights(tau=1.0)(rollout)
    assert advantage_metrics(rollout) == {
        "reward/zero_variance_groups": 1.0,
        "advantage/weight_entropy": pytest.approx(math.log(size))}


def test_shaped_rewards_and_rows_out_of_the_loss_are_reported_where_there_are_any():
    rollout = make_rollout([1.0, 0.0, 0.5, 0.5], [False, False, False, True],
                           [False, True, False, False])
    rollout[data.GROUP_ID] = torch.tensor([1, 1, 2, 2])
    rollout[data.SHAPED_REWARD] = torch.tensor([[0.5], [0.0], [-0.2], [9.0]])
    rollout[data.ROW_MASK] = torch.tensor([[True], [False], [False], [False]])
    assert advantage_metrics(rollout) == pytest.approx({
        "reward/zero_variance_groups": 0.5, "reward/shaped_mean": 0.1,
        "reward/rows_in_loss": 0.25})
    rollout[data.REWARD_ERROR] = torch.ones(4, 1, dtype=torch.bool)
    assert "reward/shaped_mean" not in advantage_metrics(rollout)


def test_a_group_of_equal_rewards_is_counted_though_their_kl_differs():
    rollout = make_rollout([1.0, 1.0], [False] * 2, [False] * 2)
    rollout[data.GROUP_ID] = torch.tensor([1, 1])
    rollout[data.SHAPED_REWARD] = torch.tensor([[0.9], [0.8]])
    assert advantage_metrics(rollout)["reward/zero_variance_groups"] == 1


def test_groups_of_one_reward_have_no_weights_to_share():
    rollout = make_rollout([1.0, 0.0], [False, True], [False, False])
    rollout[data.GROUP_ID] = torch.tensor([1, 1])
    MaxEntWeights(tau=1.0)(rollout)
    assert advantage_metrics(rollout) == {"reward/zero_variance_groups": 1.0}


@pytest.mark.parametrize(("advantage", "positive", "negative"), [
    ([[1.0], [-2.0], [0.0], [3.0]], 2, 1),
    ([[0.0, 1.0], [0.0, -1.0], [1.0, -1.0], [0.0, 0.0]], 1, 1)])
def test_rows_are_counted_by_the_sign_of_their_advantage(advantage, positive, negative):
    rollout = make_rollout([0.0] * 4, [False] * 4, [False] * 4)
    assert advantage_counts(rollout.exclude(data.ADVANTAGE)) == {}
    rollout[data.ADVANTAGE] = torch.tensor(advantage)
    assert advantage_counts(rollout) == {"advantage/zero_fraction": 0.25,
                                         "advantage/positive_rows": positive,
                                         "advantage/negative_rows": negative}


def test_without_an_evaluator_a_run_ends_with_its_model(make_config, tmp_path):
    trainer = make_trainer(make_config(), tmp_path)
    trainer.evaluator = None
    trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1 and not any("eval/accuracy" in row for row in rows)
    assert (tmp_path / "final_model" / "config.json").exists()
    assert set(trainer.state_dict()["calls"]) == {"train", "canary"}
