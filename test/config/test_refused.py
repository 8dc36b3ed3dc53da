"""Keys that would be ignored, and values that cannot work: errors that name key, value and fix."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from .configs import SECTIONS, message, small

LISTWISE = "train.objective=maxent_listwise train.aggregation=prompt"
#: What is given, and what the message says of it, in this order.
REFUSED = {
    "model.name=some/model model.warm_start_steps=5":
        "model.warm_start_steps=5 ... model.name=embedded ... remove it",
    "model.name=some/model model.warm_start_noise=0.5":
        "model.warm_start_noise=0.5 ... model.name=embedded ... remove it",
    "inference_model.gpu_memory_utilization=0.5 inference_model.kv_cache_memory_bytes=1000":
        "gpu_memory_utilization=0.5 and ... kv_cache_memory_bytes=1000 both ... give one",
    "train.gradient_accumulation_steps=2 train.max_tokens_per_micro_batch=64":
        "train.gradient_accumulation_steps ... train.max_tokens_per_micro_batch ... to null",
    "optimizer.final_lr_fraction=0.1":
        "optimizer.final_lr_fraction=0.1 ... schedule=constant ... choose linear or cosine",
    "logging.wandb_mode=offline":
        "logging.wandb_mode=offline ... logging.backends ... add it, or remove it",
    "train.keep_checkpoints=2 train.checkpoint_frequency=0":
        "train.keep_checkpoints=2 ... train.checkpoint_frequency is 0 ... remove it",
    "eval.benchmarks=[gsm8k] eval.at_checkpoints=true train.checkpoint_frequency=0":
        "eval.at_checkpoints=true ... train.checkpoint_frequency is 0 ... remove it",
    "train_model.head=logits train_model.head_chunk_size=64":
        "train_model.head_chunk_size=64 ... train_model.head=logits ... set head=auto",
    "train.proof_interval=2 inference_model.engine=server inference_model.weight_sync=restart":
        "train.proof_interval=2 ... inference_model.weight_sync=restart ... remove it",
    "train.rollout_timeout=9":
        "train.rollout_timeout=9.0 ... inference_model.engine=server ... num_devices, or remove it",
    "train.dialog_turns_per_batch=6":
        "train.dialog_turns_per_batch=6 ... multiple of env.num_envs * env.repeats = 4",
    "train.optim_batch_size=3": "train.optim_batch_size=3 ... must divide the 4",
    "train.total_dialog_turns=3":
        "train.total_dialog_turns=3 ... less than one batch of 4 ... train.max_steps",
    "train.total_dialog_turns=40 train.max_steps=9":
        "train.max_steps=9 and train.total_dialog_turns=40 ... give one ... to null",
    "train.total_dialog_turns=null train.data_epochs=0.5 train.max_sampling_rounds=4":
        "train.data_epochs=0.5 ... train.max_sampling_rounds=4 ... use train.max_steps",
    "ref_model.name=some/model":
        "ref_model.name=some/model ... train.kl_to_ref_coeff and maxent.beta are null ... set "
        "the coefficient",
    "train.kl_estimator=k1":
        "train.kl_estimator=k1 ... train.kl_to_ref_coeff ... train.kl_to_inference_coeff ... "
        "remove it",
    "env.max_steps=1": "env.max_steps=1 ... env.step is null ... remove it",
    "env.step=retry env.max_steps=1":
        "env.max_steps=1 ... the one turn of the model ... env.step=retry is never asked; set 2 or "
        "more, or env.step to null",
    "env.step=environment env.max_steps=0": "env.max_steps=0 ... greater than or equal to 1",
    "env.reward={}": "env.reward={} ... at least one reward ... null for the task's own",
    "env.reward=''": "env.reward='' ... at least one reward ... null for the task's own",
    "env.reward=[]": "env.reward=[] ... at least one reward ... null for the task's own",
    "env.reward=['',gsm8k]": "env.reward=['', 'gsm8k'] ... at least one reward",
    "train.kl_in_reward=true":
        "train.kl_in_reward=true ... train.kl_to_ref_coeff above 0 ... set it",
    "train.kl_in_reward=true train.kl_to_ref_coeff=0.0":
        "train.kl_in_reward=true ... train.kl_to_ref_coeff above 0 ... set it",
    "train.kl_in_reward=true train.kl_to_ref_coeff=0.1 train.kl_estimator=unbiased_k3":
        "train.kl_estimator='unbiased_k3' ... train.kl_in_reward=true ... k1, k2 or k3",
    "train.kl_in_reward=true train.kl_to_ref_coeff=0.1 train.kl_to_inference_coeff=0.1 "
    "train.kl_estimator=k2":
        "train.kl_estimator='k2' ... train.kl_to_inference_coeff ... remove it",
    "train.advantage_estimator=rloo train.advantage_eps=1e-06":
        "train.advantage_eps ... eps=1e-06 would be ignored ... 'rloo' ... leave it out",
    f"{LISTWISE} train.advantage_eps=0.0":
        "train.advantage_eps=0.0 ... section maxent ... remove it",
    "train.objective=gspo train.advantage_estimator=global_norm train.kl_to_ref_coeff=0.1 "
    "train.kl_in_reward=true":
        "train.kl_in_reward=true ... train.advantage_estimator=global_norm ... 'gspo' ... "
        "gspo_token",
    "train.advantage_estimator=maxrl train.overlong_buffer=2":
        "train.overlong_buffer=2.0 ... train.advantage_estimator=maxrl ... another estimator",
    "train.advantage_estimator=maxrl train.kl_to_ref_coeff=0.1 train.kl_in_reward=true":
        "train.kl_in_reward=true ... train.advantage_estimator=maxrl ... another estimator",
    "train.overlong_buffer=1.5": "train.overlong_buffer=1.5 ... whole number of tokens ... below 1",
    "train.overlong_buffer=3": "train.overlong_buffer=3 ... below inference_model.max_tokens=3",
    "train.overlong_factor=2.0":
        "train.overlong_factor=2.0 ... train.overlong_buffer ... remove it",
    "train.proximal=current train.epochs=2":
        "train.proximal='current' ... not 2 ... train.proximal=scored",
    "train.objective=maxent_listwise":
        "train.objective='maxent_listwise' ... whole groups ... set train.aggregation=prompt",
    f"{LISTWISE} train.entropy_top_fraction=0.2":
        "train.entropy_top_fraction=0.2 ... 'maxent_listwise' ... remove it",
    f"{LISTWISE} train.off_policy_delta=0.2":
        "off_policy_delta ... 'maxent_listwise' ... remove it",
    f"{LISTWISE} train.optim_batch_size=2 env.num_envs=2 env.repeats=4":
        "train.optim_batch_size=2 ... multiple of env.repeats=4 ... whole groups",
    "env.num_envs=2 env.repeats=4 train.aggregation=prompt train.optim_batch_size=2":
        "train.optim_batch_size=2 ... multiple of env.repeats=4 ... train.aggregation=prompt",
    f"{LISTWISE} distill.teacher=some/model distill.reverse_kl_coeff=0.1":
        "distill.reverse_kl_coeff=0.1 ... 'maxent_listwise' ... use distill.topk_coeff",
    f"{LISTWISE} maxent.tau=0.0": "maxent: tau=0.0 and beta=0.0 ... raise tau",
    f"{LISTWISE} maxent.length_normalize_ref=true":
        "maxent.length_normalize_ref=true ... maxent.beta ... remove it",
    f"{LISTWISE} maxent.tau_step=0.2":
        "maxent.tau_step=0.2 ... maxent.tau_target is null ... remove it",
    f"{LISTWISE} maxent.tau_target=2.0":
        "maxent.tau_* ... env.repeats ... target=2.0 ... group_size=2",
    f"{LISTWISE} maxent.tau=5.0 maxent.tau_target=0.5 maxent.tau_maximum=2.0":
        "maxent.tau_* ... init=5.0 ... maximum=2.0",
    "kl_controller.target=0.1":
        "kl_controller.target=0.1 ... kl_controller.kind is null ... remove it",
    "kl_controller.kind=band kl_controller.target=0.1":
        "kl_controller.kind='band' ... train.kl_to_ref_coeff above 0 ... set kind to null",
    "train.kl_to_ref_coeff=0.0 kl_controller.kind=band kl_controller.target=0.1":
        "kl_controller.kind='band' ... train.kl_to_ref_coeff above 0 ... set kind to null",
    "train.kl_to_ref_coeff=0.1 kl_controller.kind=band":
        "kl_controller: KL controller 'band' needs target ... add it",
    "train.kl_to_ref_coeff=0.1 kl_controller.kind=band kl_controller.target=0.1 "
    "kl_controller.horizon=10":
        "kl_controller: KL controller 'band' does not read horizon=10 ... remove it",
    "train.kl_to_ref_coeff=0.1 kl_controller.kind=horizon kl_controller.target=0.1 "
    "kl_controller.horizon=2 kl_controller.step=3":
        "kl_controller: step=3.0 ... below horizon=2.0",
    "entropy_controller.maximum=0.1":
        "entropy_controller.maximum=0.1 ... entropy_controller.target is null ... remove it",
    "train.entropy_coeff=0.0 entropy_controller.target=0.1 entropy_controller.maximum=0.1":
        "entropy_controller.target=0.1 ... needs entropy_controller.step ... add it",
    "train.entropy_coeff=0.0 entropy_controller.target=0.1 entropy_controller.step=0.1":
        "entropy_controller.target=0.1 ... needs entropy_controller.maximum ... add it",
    "entropy_controller.target=0.1 entropy_controller.step=0.1 entropy_controller.maximum=0.1":
        "entropy_controller.target=0.1 ... train.entropy_coeff ... set it",
    "train.entropy_coeff=0.2 entropy_controller.target=0.1 entropy_controller.step=0.1 "
    "entropy_controller.maximum=0.1":
        "entropy_controller ... init is train.entropy_coeff ... init=0.2 ... maximum=0.1",
    "distill.topk=5": "distill.topk=5 ... distill.teacher is null ... remove it",
    "distill.teacher=some/model":
        "distill.teacher='some/model' ... distill.reverse_kl_coeff or distill.topk_coeff",
    "distill.teacher=some/model distill.reverse_kl_coeff=0.1 distill.topk=5":
        "distill.topk=5 ... distill.topk_coeff ... remove it",
    "distill.teacher=some/model distill.reverse_kl_coeff=0.1 distill.temperature=2.0":
        "distill.temperature=2.0 ... distill.topk_coeff ... remove it",
    "train.objective=gspo distill.teacher=some/model distill.reverse_kl_coeff=0.1":
        "distill.reverse_kl_coeff=0.1 ... train.objective='gspo' ... use gspo_token",
    "device=tpu": "device='tpu' ... 'auto', 'cpu' or 'cuda'",
    "train=3": "train=3 ... dictionary",
    "policy=3": "policy=3 ... dictionary",
    "train.objective=ppo_clipp": "objective 'ppo_clipp' ... did you mean 'ppo_clip' ... known:",
    "train.clip_epsilon=[-0.1,0.2]": "clip_epsilon=(-0.1, 0.2) ... 0 <= low <= 1",
    "train.objective=reinforce train.clip_epsilon=0.2":
        "'reinforce' ... would ignore clip_epsilon=0.2",
    "train.objective_options.detla=3.0":
        "would ignore detla=3.0 ... 'delta' ... in objective_options",
    "train.objective_options.delta=1.1": "delta=1.1",
    "train.mismatch.tis=2.0": "mismatch={'tis': (0.0, 2.0)} ... proximal='sampled' ... 'scored'",
    "train.mismatch.cut=2.0 train.proximal=scored":
        "mismatch['cut'] is unknown ... geometric_reject",
    "train.mismatch.tis=2.0 train.mismatch.mis=2.0 train.proximal=scored":
        "mismatch combines tis and mis ... keep one",
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_key_that_would_be_ignored_or_cannot_work_is_an_error(given):
    text = message(small(**OmegaConf.to_container(OmegaConf.from_dotlist(given.split()))))
    assert "has 1 error" in text
    said = ".*".join(map(re.escape, REFUSED[given].split(" ... ")))
    assert re.search(said, text, re.DOTALL), text


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
