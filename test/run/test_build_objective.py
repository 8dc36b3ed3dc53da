"""From the configuration to the objective: what controllers move, and what the banner says."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from grpo.config.schema import load_config
from grpo.run import build_objective
from grpo.run.build_objective import (
    build_adaptations,
    build_advantage,
    build_loss,
    tau_warning,
)

MAXENT = {"train": {"objective": "maxent_weighted", "aggregation": "prompt"}}
KL = {"kl_controller": {"kind": "band", "target": 0.1}}
ENTROPY = {"entropy_controller": {"target": 0.5, "step": 0.1, "maximum": 1.0}}


def built(model, **sections):
    """Configuration, loss and advantage."""
    config = load_config({"env": {"num_envs": 2, "repeats": 4},
                          "inference_model": {"max_tokens": 8}, **sections})
    return (config, build_loss(config, model, SimpleNamespace(pad_token_id=0)),
            build_advantage(config))


def test_without_controllers_nothing_adapts(tiny_model):
    assert build_adaptations(*built(tiny_model, train={"kl_to_ref_coeff": 0.1,
                                                       "entropy_coeff": 0.2})) == []


@pytest.mark.parametrize("in_reward", [False, True])
def test_the_kl_controller_moves_the_term_of_the_loss_or_the_coefficient_in_the_reward(
        tiny_model, in_reward):
    config, loss, advantage = built(
        tiny_model, train={"kl_to_ref_coeff": 0.1, "kl_in_reward": in_reward}, **KL)

    def coefficients():
        both = [loss.terms.kl_to_ref_coeff, advantage.kl_in_reward_coeff]
        return both[::-1] if in_reward else both

    (adaptation,) = build_adaptations(config, loss, advantage)
    assert coefficients() == [0.1, None]
    assert adaptation.update({"policy/kl_to_ref": 5.0}) == {"control/kl_to_ref_coeff": 0.1}
    assert coefficients() == [0.2, None]


def test_the_entropy_controller_moves_the_bonus(tiny_model):
    config, loss, advantage = built(tiny_model, train={"entropy_coeff": 0.0}, **ENTROPY)
    (adaptation,) = build_adaptations(config, loss, advantage)
    assert loss.terms.entropy_coeff == 0.0
    assert adaptation.update({"policy/entropy": 0.2}) == {"control/entropy_coeff": 0.0}
    assert loss.terms.entropy_coeff == 0.1
    adaptation.update({"policy/entropy": 0.9})
    assert loss.terms.entropy_coeff == 0.0


def test_the_tau_controller_moves_the_temperature_of_the_weights(tiny_model):
    config, loss, advantage = built(tiny_model, **MAXENT, maxent={"tau": 2.0, "tau_target": 1.0})
    (adaptation,) = build_adaptations(config, loss, advantage)
    assert advantage.tau == 2.0
    assert adaptation.update({"advantage/weight_entropy": 1.2}) == {"control/tau": 2.0}
    assert advantage.tau < 2.0


def test_several_controllers_have_names_of_their_own(tiny_model):
    parts = built(
        tiny_model, **KL, **ENTROPY, maxent={"tau_target": 1.0},
        train={**MAXENT["train"], "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.0})
    assert [a.name for a in build_adaptations(*parts)] == ["kl_to_ref_coeff", "entropy_coeff",
                                                           "tau"]


@pytest.mark.parametrize(("train", "whole"), [
    ({}, False), ({"objective": "gspo"}, False), (MAXENT["train"], True)])
def test_the_learner_keeps_groups_whole_for_losses_that_compare_them(tiny_model, train, whole):
    config, loss, _ = built(tiny_model, train=train)
    assert build_objective.build_learner(config, loss).split["whole_groups"] is whole


@pytest.mark.parametrize(("sections", "expected"), [
    ({}, "ppo_clip, token aggregation, group_norm advantages"),
    (MAXENT, "maxent_weighted, prompt aggregation, MaxEnt weights"),
    ({"train": {"objective": "cispo", "advantage_estimator": "rloo", "proximal": "scored",
                "mismatch": {"tis": 2.0}, "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.2,
                "kl_to_inference_coeff": 0.3}},
     "cispo, token aggregation, rloo advantages, ratio to the scored policy, tis 2.0, KL to the "
     "reference x 0.1 in the loss, KL to the sampling policy x 0.3, entropy bonus x 0.2"),
    ({"train": {"kl_to_ref_coeff": 0.1, "kl_in_reward": True},
      "distill": {"teacher": "some/model", "topk_coeff": 1.0}},
     "ppo_clip, token aggregation, group_norm advantages, KL to the reference x 0.1 in the reward, "
     "teacher some/model"),
])
def test_the_loss_is_described_in_a_line(sections, expected):
    assert build_objective.describe_loss(load_config(sections)) == expected


def listwise(maxent: dict, objective: str = "maxent_listwise"):
    return load_config({"train": {"objective": objective, "aggregation": "prompt"},
                        "maxent": maxent})


@pytest.mark.parametrize(("maxent", "vocabulary", "said"), [
    ({"tau": 0.3}, 151_936, "maxent.tau=0.3.* 3.33 nats .* 11.9 .*; maxent.tau=0.05 fits"),
    ({"tau": 0.5}, 258, "maxent.tau=0.5.* 2 nats .* 5.55 .*; maxent.tau=0.1 fits"),
    ({}, 258, "maxent.tau=1 "),
    ({"tau": 0.05, "q_temperature": 2.0}, 151_936,
     "maxent.q_temperature=2 .*; maxent.tau=0.02 fits"),
    ({"tau": 0.05, "beta": 0.2}, 151_936,
     "maxent.beta=0.2 .*; maxent.tau=0.02 and maxent.beta=0.02 fit")])
def test_a_tau_whose_optimum_is_random_tokens_is_warned_of_with_one_that_fits(
        maxent, vocabulary, said):
    text = tau_warning(listwise(maxent), vocabulary)
    assert re.search(said, text) and "\n" not in text
    fits = {key: float(value) for key, value in re.findall(
        r"maxent\.(\w+)=([\d.]+)", text.rpartition(";")[2])}
    assert tau_warning(listwise(maxent | fits), vocabulary) is None


def test_other_objectives_and_a_small_tau_are_not_warned_of():
    assert tau_warning(listwise({"tau": 0.05}), 151_936) is None
    assert tau_warning(listwise({"tau": 0.5}, "maxent_weighted"), 151_936) is None
    assert tau_warning(load_config({}), 151_936) is None
