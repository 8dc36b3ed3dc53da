"""The loss and its gradient, of TRL's names, beside TRL's own trainer: of an optimizer step."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from grpo import data
from grpo.config.schema import Config
from grpo.config.trl_names import FIELDS, translate
from grpo.objectives import total_loss
from grpo.run.api import compose
from grpo.run.build_objective import build_advantage, build_loss

trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
pytestmark = pytest.mark.slow

MOST = 6  # max_completion_length
PROMPTS, RESPONSES = (2, 4, 1, 3), (5, 1, 6, 3)
NAMES = {
    "dapo": {}, "grpo": {"loss_type": "grpo"}, "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo of one micro-batch": {"loss_type": "bnpo"}, "sapo": {
        "loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05,
             "epsilon_high": 0.1},
    "sequence ratios with a mean over tokens": {"importance_sampling_level": "sequence"},
    "higher clip": {"epsilon_high": 0.28}, "delta": {"delta": 1.3},
    "weighted KL": {"beta": 0.3}, "KL": {"beta": 0.3, "use_bias_correction_kl": False},
    "no scale": {"scale_rewards": "none"},
    "off-policy mask": {"use_vllm": True, "vllm_importance_sampling_correction": False,
                        "off_policy_mask_threshold": 0.0},
    **{mode: {"use_vllm": True, "vllm_importance_sampling_mode": mode,
              "vllm_importance_sampling_clip_max": 1.1}
       for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "band": {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask",
             "vllm_importance_sampling_clip_max": 1.4, "vllm_importance_sampling_clip_min": 0.8},
}
#: Two optimizer steps of one generation, so that the policy has moved away from the old one.
BATCH = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 2,
         "max_completion_length": MOST, "max_steps": 4}


def configured(names: dict) -> Config:
    keys = translate(names | BATCH, whole=True).keys
    return compose(keys | {"train.exp_name": "peer"})


def ours(names: dict, model, batch) -> torch.Tensor:
    config = configured(names)
    assert config.train.proximal == "scored" and config.rows_per_optimizer_step == 4
    rows = build_advantage(config)(batch.clone())
    loss = total_loss(build_loss(config, model, SimpleNamespace(pad_token_id=0))(rows))
    loss.backward()
    return loss.detach()


def theirs(names: dict, model, batch) -> torch.Tensor:
    """What TRL computes of the same rows, in its own layout: prompts to the left, completions to
    the right."""
    given = defaultdict(lambda: None, {name: one.default for name, one in FIELDS.items()}) | names
    # Filled as GRPOConfig and GRPOTrainer do.
    high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
    scale = given["scale_rewards"]
    tokens, mask = batch[data.TOKENS], batch[data.ASSISTANT_MASK]
    P, R = max(PROMPTS), max(RESPONSES)

    def prompt_of(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat([values.new_zeros(P - n), row[:n]])
                            for n, row in zip(PROMPTS, values, strict=True)])

    def completion_of(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cat([row[n:n + r], values.new_zeros(R - r)])
                            for n, r, row in zip(PROMPTS, RESPONSES, values, strict=True)])

    completion_mask = completion_of(mask.long())
    old, sampled = (completion_of(batch[key]) for key in (data.PROXIMAL_LOG_PROBS, data.LOG_PROBS))
    grouped = batch[data.REWARD].view(-1, 2)
    advantages = grouped - grouped.mean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (grouped.std(1, keepdim=True) + 1e-4)
    inputs = {
        "prompt_ids": prompt_of(tokens), "prompt_mask": prompt_of(torch.ones_like(tokens)),
        "completion_ids": completion_of(tokens), "completion_mask": completion_mask,
        "advantages": advantages.flatten(), "old_per_token_logps": old,
        "sampling_per_token_logps": sampled if given["use_vllm"] else old,
        "ref_per_token_logps": completion_of(batch[data.REF_LOG_PROBS]),
        # Of the whole generation, of which this is the half of one step.
        "num_items_in_batch": 2 * completion_mask.sum(),
        "importance_sampling_ratio": importance(given, (old - sampled) * completion_mask)}

    def log_probs(model, ids, attention, keep, **_):
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return found[:, -keep:], torch.zeros_like(found[:, -keep:]), None

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=log_probs, aux_loss_enabled=False, model=model,
        top_entropy_quantile=1.0, off_policy_mask_threshold=given["off_policy_mask_threshold"],
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask, use_vllm=given["use_vllm"],
        importance_sampling_level=given["importance_sampling_level"], beta=given["beta"],
        loss_type=given["loss_type"], epsilon_low=given["epsilon"], epsilon_high=high,
        vllm_importance_sampling_correction=given["vllm_importance_sampling_correction"],
        max_completion_length=MOST,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, autocast=nullcontext,
                                    reduce=lambda x, reduction="sum": x),
        args=SimpleNamespace(steps_per_generation=2, delta=given["delta"],
                             use_bias_correction_kl=given["use_bias_correction_kl"],
                             sapo_temperature_pos=given["sapo_temperature_pos"],
                             sapo_temperature_neg=given["sapo_temperature_neg"]))
    model.train()
    loss = trl.GRPOTrainer._compute_loss(trainer, model, inputs)
    loss.backward()
    return loss.detach()


def importance(given: dict, gap: torch.Tensor) -> torch.Tensor:
    """``vllm_importance_sampling_ratio`` of TRL's ``_generate_and_score_completions``."""
    mode, low = given["vllm_importance_sampling_mode"], given["vllm_importance_sampling_clip_min"]
    high = given["vllm_importance_sampling_clip_max"]
    ratio = (gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=high)
    return ratio.masked_fill((ratio > high) | (ratio < (low or 0.0)), 0.0)


def gradient(model) -> torch.Tensor:
    return torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_an_optimizer_step_has_trls_loss_and_gradient(names, make_model, make_batch):
    model = make_model()
    batch = make_batch(model, prompts=PROMPTS, responses=RESPONSES)
    del batch[data.ADVANTAGE]
    old = make_batch(model, prompts=PROMPTS, responses=RESPONSES, seed=0, noise=0.3)
    batch[data.PROXIMAL_LOG_PROBS] = old[data.REF_LOG_PROBS]
    mine = ours(names, model, batch)
    found = gradient(model)
    model.zero_grad()
    other = theirs(names, model, batch)
    wanted = gradient(model)
    assert wanted.norm() > 0
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_the_names_differ_in_their_gradients(make_model, make_batch):
    model = make_model()
    batch = make_batch(model, prompts=PROMPTS, responses=RESPONSES)
    del batch[data.ADVANTAGE]
    batch[data.PROXIMAL_LOG_PROBS] = make_batch(
        model, prompts=PROMPTS, responses=RESPONSES, noise=0.3)[data.REF_LOG_PROBS]
    found = {}
    for name, names in NAMES.items():
        model.zero_grad()
        ours(names, model, batch)
        found[name] = gradient(model)
    same = [(one, other) for one in found for other in found if one < other
            and torch.allclose(found[one], found[other], rtol=1e-3)]
    assert same == [("bnpo of one micro-batch", "dapo")], same
