"""The objective in the loop: frozen models, adapted coefficients, sampling rounds, distillation."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from grpo import data
from grpo.objectives import GroupAdvantage
from grpo.objectives.maxent import listwise_weights
from grpo.report.loggers import read_jsonl
from grpo.training.checkpoint import find_checkpoint
from grpo.training.trainer import Trainer

from .runs import make_trainer

# -- Frozen models, adapted coefficients ----------------------------------------------------------


def with_rollouts(trainer: Trainer) -> list[TensorDict]:
    """The rollouts the learner will be given, as it is given them."""
    update, rollouts = trainer.learner.update, []

    def recorded(rollout, *, iteration):
        rollouts.append(rollout.clone())
        return update(rollout, iteration=iteration)

    trainer.learner.update = recorded
    return rollouts


def row_sum(rollout: TensorDict, values_BT: torch.Tensor) -> torch.Tensor:
    return (values_BT * rollout[data.ASSISTANT_MASK]).sum(-1, keepdim=True)


def test_frozen_models_speak_before_the_advantage_and_each_is_timed(
        make_config, tmp_path, teacher_folder):
    trainer = make_trainer(make_config(
        train={"kl_to_ref_coeff": 0.1},
        distill={"teacher": str(teacher_folder), "reverse_kl_coeff": 0.1, "topk_coeff": 0.1},
    ), tmp_path)
    order = []
    for name, scorer in trainer.frozen.items():
        trainer.frozen[name] = lambda rollout, name=name, scorer=scorer: (
            order.append(name), scorer(rollout))
    trainer.advantage.register_forward_pre_hook(lambda *_: order.append("advantage"))
    metrics = trainer.iterate()
    assert order == ["reference", "teacher", "advantage"]
    assert {"time/reference", "time/teacher", "loss/distill", "loss/kl_to_ref"} <= metrics.keys()


def test_what_nothing_is_compared_with_costs_no_time(make_config, tmp_path):
    metrics = make_trainer(make_config(), tmp_path).iterate()
    assert not {"time/reference", "time/teacher", "time/proximal"} & metrics.keys()
    assert not any(name.startswith(("control/", "sampling/", "mismatch")) for name in metrics)


def test_the_kl_in_the_reward_is_taken_from_it_and_from_nothing_else(make_config, tmp_path):
    trainer = make_trainer(make_config(train={"kl_to_ref_coeff": 0.5, "kl_in_reward": True}),
                           tmp_path)
    rollouts = with_rollouts(trainer)
    first, second = trainer.iterate(), trainer.iterate()
    assert first["reward/shaped_mean"] == pytest.approx(first["reward/mean"], abs=1e-5)
    assert "loss/kl_to_ref" not in second and second["policy/kl_to_ref"] > 1e-6
    rollout = rollouts[1]
    gap = row_sum(rollout, rollout[data.LOG_PROBS] - rollout[data.REF_LOG_PROBS])
    assert gap.abs().max() > 1e-3
    shaped = rollout[data.REWARD] - 0.5 * gap
    torch.testing.assert_close(rollout[data.SHAPED_REWARD], shaped, rtol=1e-5, atol=1e-5)
    assert second["reward/shaped_mean"] == pytest.approx(shaped.mean().item(), abs=1e-5)
    expected = GroupAdvantage()(TensorDict({
        data.REWARD: shaped, data.GROUP_ID: rollout[data.GROUP_ID]}, [8]))[data.ADVANTAGE]
    torch.testing.assert_close(rollout[data.ADVANTAGE], expected, rtol=1e-3, atol=1e-3)


KL_CONTROLLERS = {
    "horizon": {"kind": "horizon", "target": 0.005, "horizon": 2, "step": 0.5},
    "band": {"kind": "band", "target": 0.005, "band": 1.2, "factor": 3.0},
}


@pytest.mark.parametrize("in_reward", [False, True])
@pytest.mark.parametrize("kind", KL_CONTROLLERS)
def test_the_kl_coefficient_follows_the_kl(make_config, tmp_path, kind, in_reward):
    config = make_config(train={"kl_to_ref_coeff": 0.1, "kl_in_reward": in_reward},
                         kl_controller=KL_CONTROLLERS[kind])
    trainer = make_trainer(config, tmp_path)
    rollouts = with_rollouts(trainer)
    rows = [trainer.iterate() for _ in range(5)]
    used = [row["control/kl_to_ref_coeff"] for row in rows]
    controller = config.kl_controller.controller(0.1)
    assert used == [0.1] + [controller.update(row["policy/kl_to_ref"]) for row in rows[:-1]]
    assert used[1] < used[0] and max(used[2:]) > min(used[1:])  # down at a KL of 0, up above it
    for row, rollout, coeff in zip(rows, rollouts, used, strict=True):
        if not in_reward:  # the value that is reported is the one in the loss
            assert row["loss/kl_to_ref"] == pytest.approx(coeff * row["policy/kl_to_ref"], rel=1e-3,
                                                          abs=1e-8)
            continue
        gap = row_sum(rollout, rollout[data.LOG_PROBS] - rollout[data.REF_LOG_PROBS])
        torch.testing.assert_close(rollout[data.SHAPED_REWARD], rollout[data.REWARD] - coeff * gap,
                                   rtol=1e-4, atol=1e-5)


def test_the_entropy_bonus_follows_the_entropy(make_config, tmp_path):
    config = make_config(train={"entropy_coeff": 0.05})
    entropy = make_trainer(config, tmp_path / "a").iterate()["policy/entropy"]
    # A target between the entropies of the first iterations, so that it is met and missed.
    config = make_config(
        train={"entropy_coeff": 0.05}, optimizer={"lr": 0.03},
        entropy_controller={"target": entropy - 0.05, "step": 0.02, "maximum": 0.1})
    trainer = make_trainer(config, tmp_path / "b")
    rows = [trainer.iterate() for _ in range(6)]
    used = [row["control/entropy_coeff"] for row in rows]
    controller = config.entropy_controller.controller(0.05)
    assert used == [0.05] + [controller.update(row["policy/entropy"]) for row in rows[:-1]]
    assert used[1] == 0.0  # above the target there is no bonus
    assert max(used[2:]) > 0.0
    for row, coeff in zip(rows, used, strict=True):
        assert row["loss/entropy"] == pytest.approx(-coeff * row["policy/entropy"], rel=1e-4)


def test_tau_follows_the_entropy_of_the_weights(make_config, tmp_path):
    config = make_config(train={"objective": "maxent_listwise", "aggregation": "prompt"},
                         maxent={"tau": 0.2, "tau_target": 1.2, "tau_step": 2.0})
    trainer = make_trainer(config, tmp_path)
    rollouts = with_rollouts(trainer)
    rows = [trainer.iterate() for _ in range(4)]
    used = [row["control/tau"] for row in rows]
    controller = config.maxent.controller(group_size=4)
    assert used == [0.2] + [controller.update(row["advantage/weight_entropy"])
                            for row in rows[:-1]]
    assert len(set(used)) == 4
    for rollout, tau in zip(rollouts, used, strict=True):
        expected = listwise_weights(rollout[data.REWARD].flatten(), None, rollout[data.GROUP_ID],
                                    tau=tau)
        assert torch.equal(rollout[data.LISTWISE_WEIGHT].flatten(), expected)
    errors = [abs(row["advantage/weight_entropy"] - 1.2) for row in rows]
    assert errors[-1] < errors[0]


def test_a_controller_that_is_new_in_a_resumed_run_starts_at_its_beginning(make_config, tmp_path):
    old = make_config(iterations=2, train={"kl_to_ref_coeff": 0.1})
    make_trainer(old, tmp_path).fit()
    config = make_config(iterations=4, train={"kl_to_ref_coeff": 0.1},
                         kl_controller=KL_CONTROLLERS["band"])
    checkpoint = find_checkpoint(str(tmp_path), root=tmp_path, exp_name="grpo")
    trainer = make_trainer(config, tmp_path, checkpoint)
    used = [trainer.iterate()["control/kl_to_ref_coeff"] for _ in range(2)]
    assert used[0] == 0.1 != used[1]


@pytest.mark.parametrize(("part", "method", "call"), [
    ("weights", "publish", 4), ("canary", "check", 3)])  # two and one of them before the first step
def test_a_controller_has_followed_an_update_that_was_saved_but_not_delivered(
        make_config, tmp_path, part, method, call):
    config = make_config(
        iterations=3, train={"kl_to_ref_coeff": 0.1, "eval_frequency": 0},
        kl_controller=KL_CONTROLLERS["horizon"])
    make_trainer(config, tmp_path / "whole").fit()
    cut = make_trainer(config, tmp_path / "cut")
    owner, calls = getattr(cut, part), count(1)
    function = getattr(owner, method)

    def fails_once(**options):
        if next(calls) == call:
            raise RuntimeError("the engine died")
        return function(**options)

    setattr(owner, method, fails_once)
    with pytest.raises(RuntimeError, match="the engine died"):
        cut.fit()
    assert cut.step == 2
    checkpoint = find_checkpoint(str(tmp_path / "cut"), root=tmp_path, exp_name="grpo")
    make_trainer(config, tmp_path / "cut", checkpoint).fit()
    whole, cut = ([row.get("control/kl_to_ref_coeff") for row in read_jsonl(
        tmp_path / name / "metrics.jsonl")] for name in ("whole", "cut"))
    assert cut == whole and len(set(whole)) == 4


def test_dynamic_sampling_reports_what_it_took(make_config, tmp_path):
    config = make_config(reward="always_the_same", train={"max_sampling_rounds": 2})
    metrics = make_trainer(config, tmp_path).iterate()
    assert metrics["sampling/rounds"] == 2
    assert metrics["sampling/informative_fraction"] == 0
    assert metrics["sampling/reward_mean"] == metrics["reward/mean"] == 0.5
    assert metrics["reward/zero_variance_groups"] == 1


# -- Distillation ---------------------------------------------------------------------------------


PROMPTS = ["3+4=", "1+1=", "7+2="]


def divergence(one: torch.nn.Module, other: torch.nn.Module, tokenizer) -> float:
    """KL of the next-token distributions after some prompts and one sampled-like token, nats."""
    inputs = tokenizer([prompt + letter for prompt in PROMPTS for letter in ("", "a", "9")],
                       return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad():
        p, q = (model(input_ids=inputs["input_ids"]).logits.log_softmax(-1)
                for model in (one, other))
    mask = inputs["attention_mask"].bool()
    mask[:, : len(PROMPTS[0]) - 1] = False  # only what follows a whole prompt
    return (p.exp() * (p - q)).sum(-1)[mask].mean().item()


@pytest.fixture
def distilling(make_config, tmp_path, teacher_folder, tokenizer):
    """Trains for some iterations where all rewards are equal; KLs before and after."""

    def run(*, forward: bool, iterations: int = 10, **distill):
        config = make_config(
            iterations=iterations, reward="always_the_same",
            env={"num_envs": 4, "repeats": 8},
            train={"total_dialog_turns": 32 * (iterations + 1), "eval_frequency": 0,
                   "checkpoint_frequency": 0},
            optimizer={"lr": 0.03},
            distill=distill and {"teacher": str(teacher_folder), **distill})
        trainer = make_trainer(config, tmp_path)
        teacher = AutoModelForCausalLM.from_pretrained(teacher_folder)

        def measure() -> float:
            pair = (teacher, trainer.model) if forward else (trainer.model, teacher)
            return divergence(*pair, tokenizer)

        before = measure()
        rows = [trainer.iterate() for _ in range(iterations)]
        return before, measure(), rows

    return run


def test_without_teacher_equal_rewards_teach_nothing(distilling):
    before, after, rows = distilling(forward=True, iterations=2)
    assert before == after > 1
    assert all(row["train/grad_norm"] == 0 for row in rows)
    assert all(row["reward/zero_variance_groups"] == 1 for row in rows)


def test_the_reverse_kl_alone_moves_the_student_towards_the_teacher(distilling):
    before, after, rows = distilling(forward=False, reverse_kl_coeff=1.0)
    assert after < 0.75 * before
    # The rewards are still equal, whatever the teacher says.
    assert all(row["reward/zero_variance_groups"] == 1 for row in rows)
    assert "loss/distill" not in rows[0]


def test_the_tokens_of_the_teacher_alone_move_the_student_towards_it(distilling):
    before, after, rows = distilling(forward=True, topk_coeff=1.0, topk=50)
    assert after < 0.7 * before
    losses = [row["loss/distill"] for row in rows]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert all(abs(row["loss/objective"]) < 1e-6 for row in rows)


def test_a_run_warns_of_its_tau_before_its_first_step(make_config, tmp_path, capsys):
    own = {"objective": "maxent_listwise", "aggregation": "prompt"}
    make_trainer(make_config(train=own, maxent={"tau": 0.5}), tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: maxent.tau=0.5" in said and "maxent.tau=0.1 fits" in said
    make_trainer(make_config(train=own, maxent={"tau": 0.05}), tmp_path / "other")
    assert "maxent.tau" not in capsys.readouterr().out
