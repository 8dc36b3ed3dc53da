"""Diagnostics: right, masked, exact over micro-batches, and never part of the gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from grpo import GRPOLoss, total_loss
from grpo.data import split_rows
from grpo.objectives.diagnostics import quantile, summarize, token_stats
from grpo.objectives.surrogates import ppo_clip

CLIP = (0.1, 0.3)
OPTIONS = {"clip_epsilon": CLIP, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1,
           "entropy_coeff": 0.01}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def batch(model, make_batch):
    batch = make_batch(model, prompts=(2, 4, 1, 3, 2), responses=(5, 1, 6, 3, 0), error_rows=(3,),
                       noise=0.7)
    batch["advantage"] = torch.tensor([[1.0], [0.5], [-1.0], [2.0], [-2.0]])
    return batch


def scalars(out):
    return {key: value.item() for key, value in out.items() if isinstance(value, torch.Tensor)
            and value.ndim == 0}


def test_equal_plain_formulas_over_the_masked_tokens(model, batch):
    out = GRPOLoss(model, **OPTIONS)(batch)
    with torch.no_grad():
        logits = model(input_ids=batch["tokens", "full"],
                       attention_mask=batch["masks", "all_attention_mask"]).logits
    log_p, A, sampled, ref, entropy = [], [], [], [], []
    for b, row in enumerate(batch):
        for t in range(1, logits.shape[1]):
            if b != 3 and row["masks", "all_assistant_mask"][t]:
                scores = logits[b, t - 1].log_softmax(-1).numpy()
                log_p.append(scores[row["tokens", "full"][t]])
                entropy.append(-(np.exp(scores) * scores).sum())
                sampled.append(row["log_probs", "full"][t].item())
                ref.append(row["next", "ref_log_probs", "full"][t].item())
                A.append(row["advantage"].item())
    log_p, A, sampled, ref = map(np.array, (log_p, A, sampled, ref))
    w = np.exp(log_p - sampled)
    expected = {
        "ratio_min": w.min(), "ratio_p01": np.quantile(w, 0.01), "ratio_p50": np.median(w),
        "ratio_p99": np.quantile(w, 0.99), "ratio_max": w.max(),
        "clip_fraction_low": np.mean((w < 0.9) & (A < 0)),
        "clip_fraction_high": np.mean((w > 1.3) & (A > 0)),
        "kl_to_inference": np.mean(np.exp(sampled - log_p) - 1 - (sampled - log_p)),
        "kl_to_ref": np.mean(np.exp(ref - log_p) - 1 - (ref - log_p)),
        "entropy": np.mean(entropy),
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    assert expected["clip_fraction_low"] > 0 and expected["clip_fraction_high"] > 0
    actual = {k: v for k, v in scalars(out).items() if not k.startswith("loss_")}
    assert actual == pytest.approx(expected, rel=1e-5)


def test_clip_fractions_count_the_gradients_that_vanish():
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(8, 16, generator=generator).mul_(0.4).requires_grad_()
    advantage, mask = torch.randn(8, 1, generator=generator), torch.ones(8, 16).bool()
    ppo_clip(log_ratio, advantage, clip_epsilon=CLIP).sum().backward()
    out = summarize(token_stats(mask, log_ratio=log_ratio, advantage=advantage), clip_epsilon=CLIP)
    for name, sign in (("low", -1), ("high", 1)):
        vanished = (log_ratio.grad == 0) & (advantage.sign() == sign)
        assert out[f"clip_fraction_{name}"].item() == pytest.approx(vanished.double().mean().item())
        assert vanished.any()


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
       q=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]))
def test_quantile_is_that_of_numpy(values, q):
    actual = quantile(torch.tensor(values).double().sort().values, q)
    assert actual.item() == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-9)


@given(weights=st.lists(st.floats(0.01, 50), min_size=1, max_size=30))
def test_ess_is_one_for_equal_ratios_and_at_least_one_token(weights):
    w = torch.tensor(weights)
    ess = summarize(token_stats(torch.ones(1, len(w)).bool(), log_ratio=w.log()[None],
                                advantage=torch.ones(1, 1)), clip_epsilon=None)["ess"].item()
    assert ess == pytest.approx((w.sum() ** 2 / (len(w) * w.square().sum())).item(), rel=1e-4)
    assert 1 / len(w) - 1e-5 <= ess <= 1 + 1e-5


def test_ess_of_extreme_ratios_does_not_overflow():
    stats = token_stats(torch.ones(1, 2).bool(), log_ratio=torch.tensor([[60.0, 0.0]]),
                        advantage=torch.ones(1, 1))
    assert summarize(stats, clip_epsilon=None)["ess"].item() == pytest.approx(0.5)


@settings(max_examples=10)
@given(split=st.one_of(st.fixed_dictionaries({"num_micro_batches": st.integers(1, 5)}),
                       st.fixed_dictionaries({"max_tokens": st.integers(1, 40)})),
       aggregation=st.sampled_from(["token", "sequence"]))
def test_micro_batches_give_the_values_of_the_whole_batch(model, batch, split, aggregation):
    # Rows without a token to train on make empty micro-batches here.
    loss = GRPOLoss(model, aggregation=aggregation, **OPTIONS)
    norm = loss.normalizer(batch)
    outputs = [loss(part, normalizer=norm) for part in split_rows(batch, **split)]
    assert scalars(loss.diagnostics(outputs)) == pytest.approx(scalars(loss(batch)), rel=1e-6)


@settings(max_examples=10)
@given(seed=st.integers(0, 99), junk=st.sampled_from([-50.0, 3.0, torch.nan, torch.inf]))
def test_what_is_not_trained_on_cannot_change_them(model, batch, seed, junk):
    loss = GRPOLoss(model, **OPTIONS)
    expected = scalars(loss(batch))
    noisy = batch.clone()
    ignored = ~batch["masks", "all_assistant_mask"]
    ignored[3] = True  # the row with a reward error
    for key in (("log_probs", "full"), ("next", "ref_log_probs", "full")):
        noisy[key][ignored] = junk
    noisy["advantage"][3] = junk
    padding = ~batch["masks", "all_attention_mask"]
    tokens = torch.randint(23, padding.shape, generator=torch.Generator().manual_seed(seed))
    noisy["tokens", "full"][padding] = tokens[padding]
    assert scalars(loss(noisy)) == expected


def test_only_losses_carry_a_gradient(model, batch):
    loss = GRPOLoss(model, **OPTIONS)
    out = loss(batch)
    for key, value in out.items(True, True):
        assert value.requires_grad == (key in loss.out_keys), key
    assert total_loss(out) == sum(out[key] for key in loss.out_keys)


def test_values_exist_where_they_mean_something(model, batch):
    bare = GRPOLoss(model, objective="reinforce")(batch.exclude(("next", "ref_log_probs")))
    assert not {"clip_fraction_low", "clip_fraction_high", "kl_to_ref"} & set(bare.keys())
    assert "kl_to_ref" in GRPOLoss(model)(batch).keys()  # reported without its loss term


def test_a_batch_without_tokens_has_none(model, batch):
    out = GRPOLoss(model)(batch[3:])
    assert set(out.keys()) == {"loss_objective", "token_stats"}
    assert out["loss_objective"] == 0
