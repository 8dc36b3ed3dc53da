"""The two operations on a tile of logits: statistics, and the gradient in place."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives.head import log_probs_from_logits
from grpo.objectives.head_tiles import Statistics, fold, grad_


def folded(logits, targets, pieces, *, dtype=torch.float64, temperature=1.0):
    """``(log_prob, entropy, log_normaliser)`` from the columns ``(left, right)`` of the pieces."""
    statistics = Statistics.empty(len(logits), dtype=dtype, device=logits.device)
    for left, right in pieces:
        fold(logits[:, left:right].clone(), targets, statistics, column=left,
             inverse_temperature=1 / temperature)
    return statistics.finish()


def gradient_by_tiles(logits, targets, pieces, *, temperature=1.0, **values):
    tiles = []
    for left, right in pieces:
        tiles.append(logits[:, left:right].clone())
        grad_(tiles[-1], targets, column=left, inverse_temperature=1 / temperature, **values)
    return torch.cat(tiles, 1)


@st.composite
def cuts(draw):
    """Where the columns of 11 logits are cut."""
    inner = draw(st.sets(st.integers(1, 10)))
    return list(itertools.pairwise([0, *sorted(inner), 11]))


@given(pieces=cuts(), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1.0, 300.0]),
       temperature=st.floats(0.3, 3), order=st.randoms(use_true_random=False))
def test_statistics_do_not_depend_on_how_the_columns_are_cut(
        pieces, seed, scale, temperature, order):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(4, 11, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (4,), generator=generator)
    order.shuffle(pieces)
    cut, whole = (folded(logits, targets, ranges, temperature=temperature)
                  for ranges in (pieces, [(0, 11)]))
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-10)
    expected = log_probs_from_logits(logits, targets, temperature=temperature)
    torch.testing.assert_close(cut[:2], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cut[2], (logits / temperature).logsumexp(-1))


@pytest.mark.parametrize("with_entropy", [False, True])
@given(pieces=cuts(), seed=st.integers(0, 99), temperature=st.floats(0.3, 3))
def test_the_gradient_of_a_tile_is_that_of_autograd(with_entropy, pieces, seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits, (of_log_prob, of_entropy) = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 11), (2, 4)))
    targets = torch.randint(11, (4,), generator=generator)
    logits.requires_grad_()
    log_probs, entropy = log_probs_from_logits(logits, targets, temperature=temperature)
    loss = (of_log_prob * log_probs + with_entropy * of_entropy * entropy).sum()
    expected = torch.autograd.grad(loss, logits)[0]
    actual = gradient_by_tiles(
        logits.detach(), targets, pieces, temperature=temperature, entropy_n=entropy.detach(),
        log_normaliser_n=(logits.detach() / temperature).logsumexp(-1), grad_log_prob_n=of_log_prob,
        grad_entropy_n=of_entropy if with_entropy else None)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_a_half_precision_tile_is_overwritten_in_its_own_type():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets, ones = torch.tensor([0, 3, 49, 9]), torch.ones(4)
    statistics = Statistics.empty(4, dtype=torch.float32, device=logits.device)
    before = logits.clone()
    fold(logits, targets, statistics, column=0, inverse_temperature=1.0)
    assert torch.equal(logits, before)
    _, entropy, log_normaliser = statistics.finish()
    grad_(logits, targets, log_normaliser_n=log_normaliser, entropy_n=entropy,
          grad_log_prob_n=ones, grad_entropy_n=None, column=0, inverse_temperature=1.0)
    expected = torch.nn.functional.one_hot(targets, 50) - before.float().softmax(-1)
    assert torch.equal(logits, expected.bfloat16())


def ruled_out(dtype):
    """Logits of which some, whole tiles among them, are -inf, and targets that are not."""
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1), dtype=dtype)
    logits[0, 2] = logits[1, 4:] = logits[2, :6] = logits[3, ::2] = -torch.inf
    return logits, torch.tensor([0, 3, 8, 5, 10])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [[(0, 11)], [(0, 4), (4, 6), (6, 11)]])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_entries_that_a_model_rules_out_have_no_part_in_entropy_and_gradient(
        dtype, pieces, with_entropy):
    logits, targets = ruled_out(dtype)
    exact = logits.clone().double().requires_grad_()
    known = [row[row > -torch.inf].log_softmax(0) for row in exact]
    expected = torch.stack([-(row.exp() * row).sum() for row in known])
    log_probs = (exact - exact.logsumexp(-1, keepdim=True)).gather(1, targets[:, None])[:, 0]
    of_entropy = torch.tensor([3.0, -2.0, 1.0, 0.0, 0.5])
    loss = log_probs.sum() + with_entropy * (of_entropy * expected).sum()
    of_logits = torch.autograd.grad(loss, exact)[0]

    sums = torch.float64 if dtype == torch.float64 else torch.float32
    _, entropy, log_normaliser = folded(logits, targets, pieces, dtype=sums)
    torch.testing.assert_close(entropy, expected.to(sums), rtol=1e-5, atol=1e-6)
    actual = gradient_by_tiles(
        logits, targets, pieces, log_normaliser_n=log_normaliser, entropy_n=entropy,
        grad_log_prob_n=torch.ones(5, dtype=sums),
        grad_entropy_n=of_entropy.to(sums) if with_entropy else None)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5,
                                                                             "atol": 1e-6}
    torch.testing.assert_close(actual, of_logits.to(dtype), **tolerance)

    logits.requires_grad_()
    of_head = log_probs_from_logits(logits, targets, temperature=1.0)
    torch.testing.assert_close(of_head[1], expected.to(sums), rtol=1e-5, atol=1e-6)
    loss = of_head[0].sum() + with_entropy * (of_entropy * of_head[1]).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], of_logits.to(dtype),
                               **tolerance)


INTERPRETED = """
import torch
from grpo.objectives import head_tiles, head_triton

torch.manual_seed(0)
tile, targets, (g, e) = torch.randn(12, 5003), torch.randint(5003, (12,)), torch.randn(2, 12)
kept = tile.gather(1, targets[:, None])
tile[:, 5::7] = tile[::3, :1500] = -torch.inf
tile.scatter_(1, targets[:, None], kept)
for of_entropy in (e, None):
    results = []
    for way in (head_triton, head_tiles):
        out, statistics = tile.clone(), head_tiles.Statistics.empty(
            12, dtype=torch.float32, device=tile.device)
        for left in range(0, 5003, 1000):
            way.fold(out[:, left : left + 1000], targets, statistics, column=left,
                     inverse_temperature=1 / 0.7)
        log_probs, entropy, log_normaliser = statistics.finish()
        way.grad_(out, targets, log_normaliser_n=log_normaliser, entropy_n=entropy,
                  grad_log_prob_n=g, grad_entropy_n=of_entropy, column=0,
                  inverse_temperature=1 / 0.7)
        results.append((log_probs, entropy, out))
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_the_triton_kernels_agree_where_they_are_interpreted():
    """Without a GPU: Triton runs kernels on the CPU where its interpreter is asked for."""
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], check=True, timeout=300,
                   env={**os.environ, "TRITON_INTERPRET": "1"})
