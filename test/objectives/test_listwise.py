"""The losses on maximum-entropy weights: their formulas, and which rows take part."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo.objectives.listwise import maxent_listwise, maxent_weighted
from grpo.objectives.maxent import listwise_weights
from grpo.objectives.registry import get_objective
from grpo.objectives.tokens import LossTokens

from .reference import maxent_loss

LOSSES = {"listwise": maxent_listwise, "weighted": maxent_weighted}
GROUPS = [4, 9, 4, 4, 9, -2, 4]  # unsorted, of sizes 4, 2 and 1


def make_tokens(log_probs_N, lengths, groups, seed=1):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossTokens(
        log_probs_N=log_probs_N, old_log_probs_N=log_probs_N.detach() + 0.4 * noise,
        advantage_N=torch.full((sum(lengths),), torch.nan), row_N=row, num_rows=len(lengths),
        group_R=None if groups is None else torch.tensor(groups))


def row_terms(form, tokens, weight_R, **options):
    """Terms ``[R]``, from those of tokens, whose mean over a prompt is the sum of its rows."""
    term_N = LOSSES[form](replace(tokens, listwise_weight_R=weight_R), **options)
    size_R = torch.stack([tokens.length_R[tokens.group_R == group].sum()
                          for group in tokens.group_R])
    return (tokens.row_sum(term_N.double()) / size_R).to(term_N.dtype)


def example(lengths, groups):
    """Log-probs with gradient, and float64 weights that sum to 1 in each group."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    weights = torch.rand(len(groups), generator=generator, dtype=torch.float64)
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group]
        weights[rows] /= weights[rows].sum()
    return log_probs.requires_grad_(), weights


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize("length_normalize", [True, False])
@pytest.mark.parametrize("clip", [{}, {"clip_coeff": 0.6, "clip_epsilon": (0.1, 0.25)}])
def test_losses_equal_the_reference_and_their_gradient_finite_differences(
        form, length_normalize, clip):
    lengths = [3, 1, 2, 4, 2, 3, 1]
    log_probs, weights = example(lengths, GROUPS)
    tokens = make_tokens(log_probs, lengths, GROUPS)
    options = {"length_normalize": length_normalize} | clip
    rows = [SimpleNamespace(group=group, log_p=new, listwise_weight=weight,
                            old=lambda proximal, before=before: before)
            for group, new, before, weight in zip(
                GROUPS, log_probs.split(lengths), tokens.old_log_probs_N.split(lengths),
                weights.tolist(), strict=True)]
    terms = row_terms(form, tokens, weights, **options)
    for group in set(GROUPS):
        loss = terms[tokens.group_R == group].sum()
        expected = maxent_loss([row for row in rows if row.group == group],
                               objective=f"maxent_{form}", **options)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)

    def total(values):
        return row_terms(form, replace(tokens, log_probs_N=values), weights, **options).sum()

    assert torch.autograd.gradcheck(total, (log_probs,))


def test_the_clip_takes_the_gradient_only_where_it_is_the_minimum():
    log_ratio = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    weights = torch.tensor([0.9, 0.1, 0.9, 0.1], dtype=torch.float64)
    log_probs = (log_ratio - 1).requires_grad_()
    tokens = LossTokens(log_probs, torch.full((4,), -1.0).double(), torch.zeros(4),
                        torch.arange(4), 4, torch.tensor([0, 0, 1, 1]))
    without, with_clip = (
        torch.autograd.grad(row_terms("weighted", tokens, weights, **options).sum(), log_probs)[0]
        for options in ({}, {"clip_coeff": 2.0}))
    # A = 0.4 above the range and A = -0.4 below it are cut off.
    expected = -2.0 * torch.tensor([0.0, -0.4, 0.4, 0.0]) * log_ratio.exp()
    torch.testing.assert_close(with_clip - without, expected.double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("form", LOSSES)
def test_rows_without_tokens_take_no_part(form):
    lengths = [3, 1, 0, 0, 2, 0, 2]
    kept = [i for i, length in enumerate(lengths) if length]
    log_probs, _ = example(lengths, GROUPS)
    tokens = make_tokens(log_probs, lengths, GROUPS)
    utility, groups = torch.tensor([1.0, 0.0, 3.0, 2.0, 1.5, 0.0, 0.5]), tokens.group_R
    weights = listwise_weights(utility, None, groups, tau=0.8)
    terms = row_terms(form, tokens, weights, clip_coeff=0.5)
    # The same sequences as if the others had never been sampled.
    alone = make_tokens(log_probs, [lengths[i] for i in kept], groups[kept].tolist())
    expected = row_terms(form, alone, listwise_weights(utility[kept], None, groups[kept], tau=0.8),
                         clip_coeff=0.5)
    torch.testing.assert_close(terms[kept], expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(*(torch.autograd.grad(term.nansum(), log_probs)[0]
                                 for term in (terms[kept], expected)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", LOSSES)
def test_a_group_whose_weight_is_all_left_out_gives_no_gradient(form):
    log_probs = torch.tensor([-1.0, -0.5], requires_grad=True)
    terms = row_terms(form, make_tokens(log_probs, [1, 0, 1], [0, 0, 0]),
                      torch.tensor([0.0, 1.0, 0.0]), clip_coeff=1.0)
    terms.sum().backward()
    assert terms.tolist() == [0, 0, 0] and log_probs.grad.tolist() == [0, 0]


@pytest.mark.parametrize("form", LOSSES)
def test_losses_follow_a_permutation_of_the_rows(form):
    lengths = [3, 1, 2, 4, 2, 3, 1]
    log_probs, weights = example(lengths, GROUPS)
    tokens = make_tokens(log_probs, lengths, GROUPS)
    order = [5, 0, 6, 2, 4, 1, 3]
    pick = torch.cat([(tokens.row_N == i).nonzero()[:, 0] for i in order])
    moved = LossTokens(log_probs[pick], tokens.old_log_probs_N[pick], tokens.advantage_N[pick],
                       torch.arange(7).repeat_interleave(torch.tensor(lengths)[order]), 7,
                       tokens.group_R[order])
    for options in ({}, {"clip_coeff": 0.3, "length_normalize": False}):
        torch.testing.assert_close(row_terms(form, moved, weights[order], **options),
                                   row_terms(form, tokens, weights, **options)[order])


def test_at_infinite_tau_the_listwise_loss_is_the_cross_entropy_with_uniform():
    log_probs, _ = example([2, 2, 2, 2], [0] * 4)
    tokens = make_tokens(log_probs, [2, 2, 2, 2], [0] * 4)
    weights = listwise_weights(torch.tensor([1.0, 0.0, 0.0, 0.2]), None, tokens.group_R, tau=1e12)
    expected = -tokens.row_mean(log_probs).log_softmax(0).sum() / 4
    torch.testing.assert_close(row_terms("listwise", tokens, weights).sum(), expected)


@pytest.mark.parametrize("form", LOSSES)
def test_switching_the_weights_on_changes_the_gradient(form):
    log_probs, _ = example([2, 3, 2], [0] * 3)
    tokens = make_tokens(log_probs, [2, 3, 2], [0] * 3)
    utility = torch.tensor([1.0, 0.0, 0.0])
    grads = [torch.autograd.grad(
        row_terms(form, tokens, listwise_weights(utility, None, tokens.group_R, tau=tau)).sum(),
        log_probs)[0] for tau in (0.5, math.inf)]
    # More weight than 1/3 pulls the rewarded sequence up, less pushes the others.
    assert (grads[0][:2] < grads[1][:2]).all() and (grads[0][2:] > grads[1][2:]).all()


def test_only_the_listwise_loss_pushes_low_weights_down():
    log_probs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = make_tokens(log_probs, [1, 1, 1, 1], [0] * 4)
    weights = torch.tensor([0.7, 0.1, 0.15, 0.05], dtype=torch.float64)
    listwise, weighted = (torch.autograd.grad(row_terms(form, tokens, weights).sum(), log_probs)[0]
                          for form in LOSSES)
    torch.testing.assert_close(listwise, 0.25 - weights)  # softmax of equal scores, minus w
    assert (listwise[1:] > 0).all() and listwise[0] < 0
    torch.testing.assert_close(weighted, -weights)


def test_weights_carry_no_gradient():
    log_probs, weights = example([2, 2], [0, 0])
    weights.requires_grad_()
    tokens = make_tokens(log_probs, [2, 2], [0, 0])
    row_terms("listwise", tokens, weights, clip_coeff=1.0).sum().backward()
    assert weights.grad is None and log_probs.grad.abs().sum() > 0


def test_float32_scores_of_long_sequences_are_summed_without_loss():
    generator = torch.Generator().manual_seed(0)
    log_probs = -4 * torch.rand(40_000, generator=generator)
    tokens = make_tokens(log_probs, [20_000, 20_000], [0, 0])
    terms = row_terms("listwise", tokens, torch.tensor([0.5, 0.5]), length_normalize=False)
    exact = -0.5 * log_probs.double().view(2, -1).sum(1).log_softmax(0)
    assert terms.dtype == torch.float32
    torch.testing.assert_close(terms, exact.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", LOSSES)
def test_the_groups_of_the_sequences_are_needed(form):
    with pytest.raises(ValueError, match="group_R=None"):
        LOSSES[form](make_tokens(torch.zeros(2), [1, 1], None))


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.parametrize(("clip_epsilon", "options", "message"), [
    (None, {"clip_coeff": -1.0}, "clip_coeff=-1.0"),
    (None, {"clip_coeff": math.inf}, "clip_coeff=inf"),
    ((1.5, 0.2), {"clip_coeff": 1.0}, r"clip_epsilon=\(1.5, 0.2\)"),
    ((0.2, -0.1), {"clip_coeff": 1.0}, r"clip_epsilon=\(0.2, -0.1\)"),
    ((0.1, 0.1), {}, "would be ignored at clip_coeff=0")])
def test_options_out_of_range_are_errors(form, clip_epsilon, options, message):
    with pytest.raises(ValueError, match=message):
        get_objective(f"maxent_{form}").resolve(clip_epsilon, options)
