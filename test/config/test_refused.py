"""The configuration of the objective: combinations without effect are errors that say so."""

from __future__ import annotations

import pytest

from grpo.config.schema import load_config

from .configs import MAXENT, SECTIONS, message, small

IGNORED = {
    "reference without its coefficient": (
        {"ref_model": {"name": "some/model"}},
        ["ref_model.name=some/model", "train.kl_to_ref_coeff and maxent.beta are null",
         "set the coefficient"]),
    "KL estimator without a KL": (
        {"train": {"kl_estimator": "k1"}},
        ["train.kl_estimator=k1", "train.kl_to_ref_coeff", "train.kl_to_inference_coeff",
         "remove it"]),
    "KL in the reward without its coefficient": (
        {"train": {"kl_in_reward": True}},
        ["train.kl_in_reward=true", "train.kl_to_ref_coeff above 0", "set it"]),
    "KL in the reward with a coefficient of 0": (
        {"train": {"kl_in_reward": True, "kl_to_ref_coeff": 0.0}},
        ["train.kl_in_reward=true", "train.kl_to_ref_coeff above 0", "set it"]),
    "an estimator with a ratio in the reward": (
        {"train": {"kl_in_reward": True, "kl_to_ref_coeff": 0.1, "kl_estimator": "unbiased_k3"}},
        ["train.kl_estimator='unbiased_k3'", "train.kl_in_reward=true", "k1, k2 or k3"]),
    "one estimator for two KLs": (
        {"train": {"kl_in_reward": True, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1,
                   "kl_estimator": "k2"}},
        ["train.kl_estimator='k2'", "train.kl_to_inference_coeff", "remove it"]),
    "an eps beside nothing that is divided by": (
        {"train": {"advantage_estimator": "rloo", "advantage_eps": 1e-6}},
        ["train.advantage_eps", "eps=1e-06 would be ignored", "'rloo'", "leave it out"]),
    "MaxEnt with an eps of advantages": (
        {"train": {**MAXENT["train"], "advantage_eps": 0.0}},
        ["train.advantage_eps=0.0", "section maxent", "remove it"]),
    "a return of each token for the ratio of a sequence": (
        {"train": {"objective": "gspo", "advantage_estimator": "global_norm",
                   "kl_to_ref_coeff": 0.1, "kl_in_reward": True}},
        ["train.kl_in_reward=true", "train.advantage_estimator=global_norm", "'gspo'",
         "gspo_token"]),
    "a fraction of a token": (
        {"train": {"overlong_buffer": 1.5}},
        ["train.overlong_buffer=1.5", "whole number of tokens", "below 1"]),
    "a buffer as long as the response": (
        {"train": {"overlong_buffer": 3}},
        ["train.overlong_buffer=3", "below inference_model.max_tokens=3"]),
    "overlong_factor without its buffer": (
        {"train": {"overlong_factor": 2.0}},
        ["train.overlong_factor=2.0", "train.overlong_buffer", "remove it"]),
    "the current policy as the proximal one of several steps": (
        {"train": {"proximal": "current", "epochs": 2}},
        ["train.proximal='current'", "not 2", "train.proximal=scored"]),
    "a MaxEnt loss that is no mean over prompts": (
        {"train": {"objective": "maxent_listwise"}},
        ["train.objective='maxent_listwise'", "whole groups", "set train.aggregation=prompt"]),
    "MaxEnt with a share of the tokens": (
        {"train": {**MAXENT["train"], "entropy_top_fraction": 0.2}},
        ["train.entropy_top_fraction=0.2", "'maxent_listwise'", "remove it"]),
    "MaxEnt with a correction of single tokens": (
        {"train": {**MAXENT["train"], "off_policy_delta": 0.2}},
        ["off_policy_delta", "'maxent_listwise'", "remove it"]),
    "MaxEnt and batches that cut groups": (
        {**MAXENT, "env": {"num_envs": 2, "repeats": 4},
         "train": {**MAXENT["train"], "optim_batch_size": 2}},
        ["train.optim_batch_size=2", "multiple of env.repeats=4", "whole groups"]),
    "a mean over prompts and steps that cut groups": (
        {"env": {"num_envs": 2, "repeats": 4},
         "train": {"aggregation": "prompt", "optim_batch_size": 2}},
        ["train.optim_batch_size=2", "multiple of env.repeats=4", "train.aggregation=prompt"]),
    "MaxEnt with the advantage of a teacher": (
        {**MAXENT, "distill": {"teacher": "some/model", "reverse_kl_coeff": 0.1}},
        ["distill.reverse_kl_coeff=0.1", "'maxent_listwise'", "use distill.topk_coeff"]),
    "MaxEnt weights without any temperature": (
        {**MAXENT, "maxent": {"tau": 0.0}}, ["maxent: tau=0.0 and beta=0.0", "raise tau"]),
    "a reference score without a reference": (
        {**MAXENT, "maxent": {"length_normalize_ref": True}},
        ["maxent.length_normalize_ref=true", "maxent.beta", "remove it"]),
    "a tau that has nothing to follow": (
        {**MAXENT, "maxent": {"tau_step": 0.2}},
        ["maxent.tau_step=0.2", "maxent.tau_target is null", "remove it"]),
    "an entropy that a group cannot have": (
        {**MAXENT, "maxent": {"tau_target": 2.0}},
        ["maxent.tau_*", "target=2.0", "group_size=2", "env.repeats"]),
    "a tau outside its bounds": (
        {**MAXENT, "maxent": {"tau": 5.0, "tau_target": 0.5, "tau_maximum": 2.0}},
        ["maxent.tau_*", "init=5.0", "maximum=2.0"]),
    "an option of a KL controller that is not there": (
        {"kl_controller": {"target": 0.1}},
        ["kl_controller.target=0.1", "kl_controller.kind is null", "remove it"]),
    "a KL controller without a start": (
        {"kl_controller": {"kind": "band", "target": 0.1}},
        ["kl_controller.kind='band'", "train.kl_to_ref_coeff above 0", "set kind to null"]),
    "a KL controller that would start at 0": (
        {"train": {"kl_to_ref_coeff": 0.0}, "kl_controller": {"kind": "band", "target": 0.1}},
        ["kl_controller.kind='band'", "train.kl_to_ref_coeff above 0", "set kind to null"]),
    "a KL controller without a target": (
        {"train": {"kl_to_ref_coeff": 0.1}, "kl_controller": {"kind": "band"}},
        ["kl_controller: KL controller 'band' needs target", "add it"]),
    "an option of the other KL controller": (
        {"train": {"kl_to_ref_coeff": 0.1},
         "kl_controller": {"kind": "band", "target": 0.1, "horizon": 10}},
        ["kl_controller: KL controller 'band' does not read horizon=10", "remove it"]),
    "a horizon that could end at 0": (
        {"train": {"kl_to_ref_coeff": 0.1},
         "kl_controller": {"kind": "horizon", "target": 0.1, "horizon": 2, "step": 3}},
        ["kl_controller: step=3.0", "below horizon=2.0"]),
    "an option of an entropy controller that is not there": (
        {"entropy_controller": {"maximum": 0.1}},
        ["entropy_controller.maximum=0.1", "entropy_controller.target is null", "remove it"]),
    "an entropy controller without a step": (
        {"train": {"entropy_coeff": 0.0}, "entropy_controller": {"target": 0.1, "maximum": 0.1}},
        ["entropy_controller.target=0.1", "needs entropy_controller.step", "add it"]),
    "an entropy controller without a bound": (
        {"train": {"entropy_coeff": 0.0}, "entropy_controller": {"target": 0.1, "step": 0.1}},
        ["entropy_controller.target=0.1", "needs entropy_controller.maximum", "add it"]),
    "an entropy controller without a start": (
        {"entropy_controller": {"target": 0.1, "step": 0.1, "maximum": 0.1}},
        ["entropy_controller.target=0.1", "train.entropy_coeff", "set it"]),
    "an entropy controller that starts outside its bounds": (
        {"train": {"entropy_coeff": 0.2},
         "entropy_controller": {"target": 0.1, "step": 0.1, "maximum": 0.1}},
        ["entropy_controller", "init is train.entropy_coeff", "init=0.2", "maximum=0.1"]),
    "an option of a teacher that is not there": (
        {"distill": {"topk": 5}}, ["distill.topk=5", "distill.teacher is null", "remove it"]),
    "a teacher that teaches nothing": (
        {"distill": {"teacher": "some/model"}},
        ["distill.teacher='some/model'", "distill.reverse_kl_coeff or distill.topk_coeff"]),
    "top-k without its term": (
        {"distill": {"teacher": "some/model", "reverse_kl_coeff": 0.1, "topk": 5}},
        ["distill.topk=5", "distill.topk_coeff", "remove it"]),
    "a temperature without its term": (
        {"distill": {"teacher": "some/model", "reverse_kl_coeff": 0.1, "temperature": 2.0}},
        ["distill.temperature=2.0", "distill.topk_coeff", "remove it"]),
    "advantages of tokens with the ratio of a sequence": (
        {"train": {"objective": "gspo"},
         "distill": {"teacher": "some/model", "reverse_kl_coeff": 0.1}},
        ["distill.reverse_kl_coeff=0.1", "train.objective='gspo'", "use gspo_token"]),
}


@pytest.mark.parametrize(("values", "parts"), IGNORED.values(), ids=IGNORED)
def test_a_key_that_would_be_ignored_or_cannot_work_is_an_error(values, parts):
    text = message(small(**values))
    assert "has 1 error" in text
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("key", "value"), [
    ("advantage_estimator", "group_norm"), ("advantage_clip_percentile", 5.0),
    ("zero_variance_filter", True), ("mask_truncated", True), ("overlong_buffer", 2.0),
    ("kl_in_reward", True)])
@pytest.mark.parametrize("objective", ["maxent_listwise", "maxent_weighted"])
def test_what_shapes_advantages_is_refused_by_objectives_with_weights(objective, key, value):
    train = {"objective": objective, "aggregation": "prompt", key: value}
    if key == "kl_in_reward":
        train["kl_to_ref_coeff"] = 0.1
    text = message(small(train=train))
    given = "true" if value is True else value
    assert f"train.{key}={given} is not read by train.objective={objective}" in text
    assert "remove it" in text


@pytest.mark.parametrize("key", sorted(SECTIONS["maxent"].model_fields))
def test_the_section_of_maxent_is_refused_by_other_objectives(key):
    text = message(small(maxent={key: True if key == "length_normalize_ref" else 0.5}))
    assert f"maxent.{key}=" in text
    assert "is not read by train.objective=ppo_clip, but by maxent_listwise" in text
    assert "remove it" in text


@pytest.mark.parametrize(("section", "switch"), [
    ("kl_controller", "kind"), ("entropy_controller", "target"), ("distill", "teacher")])
def test_no_key_of_a_section_is_read_without_its_switch(section, switch):
    for key in set(SECTIONS[section].model_fields) - {switch}:
        text = message(small(**{section: {key: 2}}))
        assert f"{section}.{key}=2" in text and f"{section}.{switch} is null; set that" in text


@pytest.mark.parametrize(("buffer", "tokens"), [(None, None), (2, 2), (0.5, 5), (0.01, 1), (1, 1)])
def test_the_overlong_buffer_is_tokens_or_a_share_of_the_limit(buffer, tokens):
    config = load_config(small(train={"overlong_buffer": buffer},
                               inference_model={"max_tokens": 10}))
    assert config.overlong_tokens == tokens


def test_what_needs_a_reference():
    def needed(**changes) -> bool:
        return load_config(small(**changes)).needs_reference

    assert not needed() and not needed(**MAXENT) and not needed(**MAXENT, maxent={"beta": 0.0})
    assert needed(train={"kl_to_ref_coeff": 0.0})
    assert needed(train={"kl_to_ref_coeff": 0.1, "kl_in_reward": True})
    assert needed(**MAXENT, maxent={"beta": 0.1})
