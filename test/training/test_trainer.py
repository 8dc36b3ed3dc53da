"""The whole loop on a CPU: metrics, publishing, evaluation, and an exact resume."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo import build, data
from grpo.collectors import SyncCollector
from grpo.config import load_config
from grpo.evaluation import Evaluator
from grpo.objectives import GroupAdvantage
from grpo.rewards import RewardResult
from grpo.training import Trainer
from grpo.training.checkpoint import find_checkpoint, list_checkpoints
from grpo.training.console import Console
from grpo.training.loggers import make_loggers, read_jsonl
from grpo.training.reporter import Reporter
from grpo.training.trainer import advantage_metrics, rollout_metrics
from grpo.weights import Canary, StaleWeightsError


def by_text(completion: str, problem) -> RewardResult:
    """Something that differs between completions of a random model."""
    return RewardResult(sum(map(ord, completion)) % 7 / 7, len(completion) > 2)


def by_text_and_chance(completion: str, problem) -> RewardResult:
    """A reward that draws from every generator of the process, as a sampling judge may."""
    chance = random.random() + np.random.rand() + torch.rand(()).item()
    return RewardResult(by_text(completion, problem).reward + chance, chance > 1.5)


def fails_sometimes(completion: str, problem) -> RewardResult:
    if sum(map(ord, completion)) % 3 == 0:
        raise RuntimeError("no verifier")
    return by_text(completion, problem)


def fails(completion: str, problem) -> None:
    return None


def many_letters(completion: str, problem) -> float:
    return sum(character.isalpha() for character in completion) / 4


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory, tokenizer):
    """A model that is small enough for many iterations a second, on disk."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.3, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def reports(monkeypatch, request):
    """Folders a report was asked for; drawing it takes seconds, so only one test does."""
    asked = []
    if "slow" not in request.keywords:
        monkeypatch.setattr("grpo.training.reporter.write_report",
                            lambda run_dir, **kwargs: asked.append(run_dir) or run_dir / "none")
    return asked


@pytest.fixture
def make_config(tiny_folder):
    def make(*, iterations: int = 5, reward: str = "by_text", **changes):
        values = {
            "env": {"num_envs": 2, "repeats": 4, "reward": f"{__name__}:{reward}",
                    "task": {"max_operand": 9, "num_train": 15, "num_test": 5}},
            "model": {"name": str(tiny_folder)},
            "train": {"total_dialog_turns": 8 * iterations, "eval_frequency": 2,
                      "checkpoint_frequency": 2},
            "inference_model": {"backend": "transformers", "max_tokens": 4},
            "optimizer": {"lr": 0.01},
        }
        for section, keys in changes.items():
            values[section] = {**values.get(section, {}), **keys}
        return load_config(values)

    return make


def make_trainer(config, run_dir, checkpoint=None) -> Trainer:
    """The parts of a run, as the script builds them."""
    device, dtype = torch.device("cpu"), torch.float32
    base = config.model.name
    path = str(checkpoint.model_folder) if checkpoint else base
    task, tokenizer = build.build_task(config), build.load_tokenizer(path)
    prompts = build.build_prompts(config, task, tokenizer, path)
    actor = build.build_actor(config, path, tokenizer, prompts, device=device, dtype=dtype,
                              backend="transformers")
    loss = build.build_loss(config, actor.model, tokenizer)
    settings = config.model_dump(mode="json")
    loggers = make_loggers([], run_dir=run_dir, config=settings,
                           resume_step=checkpoint.step if checkpoint else None)
    trainer = Trainer(
        collector=SyncCollector(build.build_env(config, task, prompts, tokenizer, actor.policy),
                                actor.policy, turns_per_batch=config.turns_per_batch),
        advantage=GroupAdvantage(estimator=config.train.advantage_estimator),
        learner=build.build_learner(config, loss),
        weights=actor.weights,
        canary=Canary(actor.policy, loss.scorer, actor.weights,
                      prompts=[prompt.tokens for prompt in prompts.test[:4]]),
        evaluator=Evaluator(build.build_eval_env(config, task, prompts, tokenizer, actor.policy),
                            actor.policy),
        reporter=Reporter(Console(config.iterations), loggers, tokenizer, run_dir=run_dir,
                          num_samples=2),
        tokenizer=tokenizer, run_dir=run_dir, config=settings, iterations=config.iterations,
        eval_frequency=config.train.eval_frequency,
        checkpoint_frequency=config.train.checkpoint_frequency,
        keep_checkpoints=config.train.keep_checkpoints or 3,
        reference=build.build_reference(config, task, device=device, dtype=dtype))
    if checkpoint:
        trainer.restore(checkpoint)
    return trainer


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items()
             if not key.startswith("time") and key != "tokens/per_second"} for row in rows]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


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
    assert metrics["canary/max_abs_diff"] < 1e-4
    assert metrics["train/grad_norm"] > 0
    rollout = trainer.collector.collect()
    assert (rollout[data.POLICY_VERSION] == 1).all()


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


def test_the_reward_rises(make_config, tmp_path):
    config = make_config(iterations=25, reward="many_letters",
                         env={"num_envs": 4, "repeats": 8, "reward": f"{__name__}:many_letters"},
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
], ids=["on-policy", "several steps and epochs"])
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


# -- Metrics --------------------------------------------------------------------------------------


def make_rollout(rewards, errors, truncated):
    rows = len(rewards)
    mask = torch.arange(6) < torch.arange(2, 2 + rows)[:, None]
    return TensorDict({
        "masks": {"all_attention_mask": mask, "all_assistant_mask": mask & (torch.arange(6) > 0)},
        "next": {"reward": torch.tensor(rewards)[:, None],
                 "reward_error": torch.tensor(errors)[:, None],
                 "success": torch.tensor(rewards)[:, None] > 0.5,
                 "truncated": torch.tensor(truncated)[:, None]}}, [rows])


def test_metrics_of_a_rollout_leave_rows_without_a_reward_out():
    metrics = rollout_metrics(make_rollout([1.0, 0.0, 9.0], [False, False, True],
                                           [True, False, False]))
    assert metrics == pytest.approx({
        "reward/errors": 1, "reward/mean": 0.5, "reward/std": 0.5, "reward/success_rate": 0.5,
        "tokens/response_mean": 2.0, "tokens/response_max": 3, "tokens/total": 9,
        "tokens/truncated_fraction": 1 / 3})


def test_groups_without_a_signal_are_counted():
    rollout = make_rollout([1.0, 0.0, 1.0, 1.0], [False] * 4, [False] * 4)
    rollout[data.GROUP_ID] = torch.tensor([70, 70, 71, 71])
    GroupAdvantage()(rollout)
    assert advantage_metrics(rollout) == {"reward/zero_variance_groups": 0.5}
