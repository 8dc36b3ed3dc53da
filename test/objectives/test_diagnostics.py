"""Diagnostics: right, masked, exact over micro-batches, and never part of the gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from grpo import GRPOLoss, total_loss
from grpo.data import split_rows
from grpo.objectives.diagnostics import quantile, summarize
from grpo.objectives.surrogates import gspo, ppo_clip
from grpo.objectives.tokens import LossTokens

from .reference import score

CLIP = (0.1, 0.3)
OPTIONS = {"clip_epsilon": CLIP, "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1,
           "entropy_coeff": 0.01}


@pytest.fixture(scope="module")
def batch(model, make_batch):
    batch = make_batch(model, prompts=(2, 4, 1, 3, 2), responses=(5, 2, 6, 3, 0), error_rows=(3,),
                       noise=0.7)
    batch["advantage"] = torch.tensor([[1.0], [0.5], [-1.0], [2.0], [-2.0]])
    generator = torch.Generator().manual_seed(9)
    noise = 0.7 * torch.randn(batch["log_probs", "full"].shape, generator=generator)
    mask = batch["masks", "all_assistant_mask"]
    batch["log_probs", "proximal"] = (batch["log_probs", "full"] + noise) * mask
    return batch


def scalars(out):
    return {key: value.item() for key, value in out.items() if isinstance(value, torch.Tensor)
            and value.ndim == 0}


def token_stats(log_ratio, advantage=None, **more) -> TensorDict:
    """Flat statistics as the loss gives them."""
    if advantage is None:
        advantage = torch.ones_like(log_ratio)
    return TensorDict({"log_ratio": log_ratio, "advantage": advantage, **more},
                      batch_size=log_ratio.shape)


def test_equal_plain_formulas_over_the_masked_tokens(model, batch):
    out = GRPOLoss(model, **OPTIONS)(batch)
    with torch.no_grad():
        logits = model(input_ids=batch["tokens", "full"],
                       attention_mask=batch["masks", "all_attention_mask"]).logits
    log_p, A, sampled, ref, entropy = (
        np.concatenate([getattr(row, name).numpy() for row in score(logits, batch)])
        for name in ("log_p", "advantage", "sampled", "ref", "entropy"))
    w = np.exp(log_p - sampled)
    expected = {
        "ratio_min": w.min(), "ratio_p01": np.quantile(w, 0.01), "ratio_p50": np.median(w),
        "ratio_p99": np.quantile(w, 0.99), "ratio_max": w.max(), "ratio_mean": w.mean(),
        "clip_fraction_low": np.mean((w < 0.9) & (A < 0)),
        "clip_fraction_high": np.mean((w > 1.3) & (A > 0)),
        "clip_fraction": np.mean((w < 0.9) & (A < 0)) + np.mean((w > 1.3) & (A > 0)),
        "log_prob_mean": log_p.mean(), "log_prob_std": log_p.std(),
        "sampled_log_prob_mean": sampled.mean(), "sampled_log_prob_std": sampled.std(),
        "log_prob_diff_mean": (log_p - sampled).mean(),
        "log_prob_diff_abs_mean": np.abs(log_p - sampled).mean(),
        "log_prob_diff_abs_max": np.abs(log_p - sampled).max(),
        "kl_to_inference": np.mean(np.exp(sampled - log_p) - 1 - (sampled - log_p)),
        "kl_to_ref": np.mean(np.exp(ref - log_p) - 1 - (ref - log_p)),
        "entropy": np.mean(entropy),
        "ess": w.sum() ** 2 / (len(w) * (w**2).sum())}
    assert expected["clip_fraction_low"] > 0 and expected["clip_fraction_high"] > 0
    actual = {k: v for k, v in scalars(out).items() if not k.startswith("loss_")}
    assert actual == pytest.approx(expected, rel=1e-5)


def random_tokens(rows=32, length=8, scale=1.0):
    """Sequences of equal length whose log-probs have a gradient."""
    generator = torch.Generator().manual_seed(0)
    row_N = torch.arange(rows).repeat_interleave(length)
    gaps = scale * torch.randn(rows * length, generator=generator, dtype=torch.float64)
    return LossTokens(
        gaps.requires_grad_(), torch.zeros_like(gaps), num_rows=rows, row_N=row_N,
        advantage_N=torch.randn(rows, generator=generator, dtype=torch.float64)[row_N])


@pytest.mark.parametrize("surrogate", [ppo_clip, gspo])
def test_clip_fractions_count_the_gradients_that_vanish(surrogate):
    tokens = random_tokens()
    surrogate(tokens, clip_epsilon=CLIP).sum().backward()
    ratio_N = tokens.log_ratio_N.detach()
    stats = token_stats(ratio_N, tokens.advantage_N)
    if surrogate is gspo:  # it clips the ratio of the sequence
        stats["clipped_log_ratio"] = tokens.of_row(tokens.row_mean(ratio_N))
    out = summarize(stats, clip_epsilon=CLIP)
    for name, sign in (("low", -1), ("high", 1)):
        vanished = (tokens.log_probs_N.grad == 0) & (tokens.advantage_N.sign() == sign)
        assert out[f"clip_fraction_{name}"].item() == pytest.approx(vanished.double().mean().item())
        assert vanished.any()


@pytest.mark.parametrize("objective", ["ppo_clip", "cispo", "gspo", "gspo_token"])
def test_clip_fractions_are_of_the_ratio_that_the_objective_clips(model, batch, objective):
    out = GRPOLoss(model, objective=objective, clip_epsilon=(0.1, 0.1))(batch)
    stats, low, high = out["token_stats"], [], []
    for row in (1.0, 0.5, -1.0):  # advantages of the rows in the loss
        ratios = stats["log_ratio"][stats["advantage"] == row]
        if objective.startswith("gspo"):
            ratios = ratios.mean().expand_as(ratios)
        low += [bool(r < np.log(0.9)) and row < 0 for r in ratios.tolist()]
        high += [bool(r > np.log(1.1)) and row > 0 for r in ratios.tolist()]
    assert any(low) or any(high)
    assert out["clip_fraction_low"].item() == pytest.approx(np.mean(low))
    assert out["clip_fraction_high"].item() == pytest.approx(np.mean(high))


def test_the_ratio_is_taken_to_the_proximal_policy(model, batch):
    stats = {name: GRPOLoss(model, proximal=name)(batch)["token_stats"]
             for name in ("sampled", "scored", "current")}
    mask = batch["masks", "all_assistant_mask"].clone()
    mask[3] = False
    gap = (batch["log_probs", "proximal"] - batch["log_probs", "full"])[mask].double()
    assert torch.equal(stats["sampled"]["log_ratio"], stats["sampled"]["to_inference"])
    torch.testing.assert_close(stats["sampled"]["log_ratio"] - stats["scored"]["log_ratio"], gap,
                               rtol=0, atol=1e-6)
    assert not stats["current"]["log_ratio"].any()
    for one in stats.values():  # whatever it is, the engine is compared with the trainer
        assert torch.equal(one["to_inference"], stats["sampled"]["to_inference"])


def test_mismatch_and_off_policy_mask_report_what_they_did(model, batch):
    out = GRPOLoss(model, proximal="scored", mismatch={"tis": 1.5, "sequence_reject": (0.5, 30.0)},
                   off_policy_delta=0.05)(batch)
    stats = out["token_stats"]
    rho = stats["gap"].exp()
    weights, kept = [], []
    for row in (1.0, 0.5, -1.0):
        ours = stats["advantage"] == row
        inside = 0.5 <= rho[ours].prod() <= 30.0
        weights += [min(r, 1.5) * bool(inside) for r in rho[ours].tolist()]
        far = -stats["to_inference"][ours].mean() > 0.05
        kept += [not (row < 0 and far)] * int(ours.sum())
    order = torch.cat([(stats["advantage"] == row).nonzero()[:, 0] for row in (1.0, 0.5, -1.0)])
    weights, kept = (torch.tensor(x).double() for x in (weights, kept))
    torch.testing.assert_close(stats["gap_weight"][order], weights)
    torch.testing.assert_close(stats["off_policy_mask"][order], kept)
    expected = {
        "mismatch_kl_k1": -stats["gap"].mean(),
        "mismatch_kl_k3": (rho - 1 - stats["gap"]).mean(),
        "mismatch_ratio_min": rho.min(), "mismatch_ratio_mean": rho.mean(),
        "mismatch_ratio_max": rho.max(), "mismatch_weight_mean": weights.mean(),
        "mismatch_masked_fraction": (weights == 0).double().mean(),
        "mismatch_truncated_fraction": (weights == 1.5).double().mean(),
        "off_policy_fraction": 1 - kept.mean()}
    assert {k: out[k].item() for k in expected} == pytest.approx(
        {k: v.item() for k, v in expected.items()}, rel=1e-6)
    assert 0 < expected["mismatch_masked_fraction"] < 1
    assert expected["mismatch_truncated_fraction"] > 0 and expected["off_policy_fraction"] > 0


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
       q=st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]))
def test_quantile_is_that_of_numpy(values, q):
    actual = quantile(torch.tensor(values).double().sort().values, q)
    assert actual.item() == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-9)


@given(weights=st.lists(st.floats(0.01, 50), min_size=1, max_size=30))
def test_ess_is_one_for_equal_ratios_and_at_least_one_token(weights):
    w = torch.tensor(weights)
    ess = summarize(token_stats(w.log()), clip_epsilon=None)["ess"].item()
    assert ess == pytest.approx((w.sum() ** 2 / (len(w) * w.square().sum())).item(), rel=1e-4)
    assert 1 / len(w) - 1e-5 <= ess <= 1 + 1e-5


def test_ess_of_extreme_ratios_does_not_overflow():
    stats = token_stats(torch.tensor([60.0, 0.0]))
    assert summarize(stats, clip_epsilon=None)["ess"].item() == pytest.approx(0.5)


CONFIGURATIONS = {
    "kl and entropy": OPTIONS,
    "sequence": {"objective": "gspo", "clip_epsilon": (0.05, 0.05)},
    "mismatch": {"proximal": "scored", "mismatch": {"tis": 1.2, "geometric_reject": (0.5, 2.0)},
                 "off_policy_delta": 0.05},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@settings(max_examples=8)
@given(split=st.one_of(st.fixed_dictionaries({"num_micro_batches": st.integers(1, 5)}),
                       st.fixed_dictionaries({"max_tokens": st.integers(1, 40)})),
       aggregation=st.sampled_from(["token", "sequence", "prompt"]))
def test_micro_batches_give_the_values_of_the_whole_batch(model, batch, split, aggregation, name):
    # Rows without a token to train on make empty micro-batches here.
    loss = GRPOLoss(model, aggregation=aggregation, **CONFIGURATIONS[name])
    norm = loss.normalizer(batch)
    outputs = [loss(part, normalizer=norm) for part in split_rows(batch, **split)]
    whole = scalars(loss(batch))
    assert len(whole) > 10
    assert scalars(loss.diagnostics(outputs)) == pytest.approx(whole, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("head_chunk_size", [None, 3])
def test_no_gradient_or_fused_head_changes_them(model, batch, head_chunk_size):
    loss = GRPOLoss(model, head_chunk_size=head_chunk_size, **OPTIONS)
    with torch.no_grad():
        expected = scalars(loss(batch))
    assert scalars(loss(batch)) == pytest.approx(expected, rel=1e-9)
    unfused = GRPOLoss(model, head="chunked", **OPTIONS)
    assert scalars(unfused(batch)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@settings(max_examples=6)
@given(seed=st.integers(0, 99), junk=st.sampled_from([-50.0, 3.0, torch.nan, torch.inf]))
def test_what_is_not_trained_on_cannot_change_them(model, batch, seed, junk, name):
    loss = GRPOLoss(model, **CONFIGURATIONS[name])
    expected = scalars(loss(batch))
    noisy = batch.clone()
    ignored = ~batch["masks", "all_assistant_mask"]
    ignored[3] = True  # the row with a reward error
    for key in (("log_probs", "full"), ("log_probs", "proximal"),
                ("next", "ref_log_probs", "full")):
        noisy[key][ignored] = junk
    noisy["advantage"][3] = junk
    padding = ~batch["masks", "all_attention_mask"]
    tokens = torch.randint(23, padding.shape, generator=torch.Generator().manual_seed(seed))
    noisy["tokens", "full"][padding] = tokens[padding]
    assert scalars(loss(noisy)) == expected


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("head", ["auto", "chunked", "logits"])
def test_only_losses_carry_a_gradient(model, batch, name, head):
    loss = GRPOLoss(model, head=head, **CONFIGURATIONS[name])
    out = loss(batch)
    for key, value in out.items(True, True):
        assert value.requires_grad == (key in loss.out_keys), key
    assert total_loss(out) == sum(out[key] for key in loss.out_keys)


def test_values_exist_where_they_mean_something(model, batch):
    bare = GRPOLoss(model, objective="reinforce")(batch.exclude(("next", "ref_log_probs")))
    assert not {"clip_fraction_low", "clip_fraction_high", "kl_to_ref", "mismatch_kl_k1",
                "off_policy_fraction"} & set(bare.keys())
    assert "kl_to_ref" in GRPOLoss(model)(batch).keys()  # reported without its loss term
    assert "entropy" in bare.keys()  # as is the entropy


def test_a_batch_without_tokens_has_none(model, batch):
    out = GRPOLoss(model)(batch[3:])
    assert set(out.keys()) == {"loss_objective", "token_stats"}
    assert out["loss_objective"] == 0


def test_one_infinite_ratio_leaves_the_other_quantiles_and_the_kl_finite():
    log_ratio = torch.cat([torch.linspace(-0.1, 0.1, 400), torch.tensor([95.0])])
    out = summarize(token_stats(log_ratio, to_ref=log_ratio), clip_epsilon=CLIP)
    assert out["ratio_max"] == torch.inf  # raw, not the bounded one that is trained on
    for name in ("ratio_min", "ratio_p01", "ratio_p50", "ratio_p99", "kl_to_ref", "ess"):
        assert out[name].isfinite(), name
    out = summarize(token_stats(torch.full((3,), 95.0)), clip_epsilon=CLIP)
    assert all(out[name] == torch.inf for name in ("ratio_min", "ratio_p50", "ratio_p99"))
