"""Log-probs, entropies and their gradients from hidden states, tile by tile."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.objectives.head import (
    CPU_CHUNK_BYTES,
    default_chunk_size,
    fused_loss,
    linear_log_probs,
    log_probs_from_logits,
)

from .batches import Largest

#: A tile is never narrower than this, so only a vocabulary above it has several.
NARROWEST = 256


def problem(*, count=5, vocab=9, width=3, seed=0, dtype=torch.float64, scale=1.0):
    """Hidden states, output matrix (both with gradient) and targets."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (scale * torch.randn(n, width, generator=generator, dtype=torch.float64)
                      for n in (count, vocab))
    targets = torch.randint(vocab, (count,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden, weight, targets, **options):
    return log_probs_from_logits(hidden @ weight.t(), targets, **options)


def a_loss(log_probs, entropy, start=0, stop=None):
    """Something whose gradient differs between tokens, and which is not linear in either."""
    place = torch.arange(start, start + len(log_probs), dtype=log_probs.dtype)
    return torch.stack([((place + 1) * log_probs.exp()).sum(), (place.cos() * entropy**2).sum()])


def fused(hidden, weight, targets, *, chunk_size, part_loss=a_loss, **options):
    borders = [*range(0, len(hidden), chunk_size), len(hidden)]
    return fused_loss(hidden, weight, targets, part_loss, borders=borders, **options)


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=True)


def assert_close(actual, expected, tolerance=1e-12):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -- From logits ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), temperature=st.floats(0.2, 3), scale=st.floats(0, 300))
def test_log_probs_and_entropy_are_those_of_the_softmax(seed, temperature, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(4, 9, generator=generator, dtype=torch.float64)
    targets = torch.randint(9, (4,), generator=generator)
    log_probs, entropy = log_probs_from_logits(logits, targets, temperature=temperature)
    expected = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(log_probs, expected.log_prob(targets))
    torch.testing.assert_close(entropy, expected.entropy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_raised_first(dtype):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.tensor([0, 7, 49])
    half, entropy = log_probs_from_logits(logits, targets, temperature=0.7)
    full, full_entropy = log_probs_from_logits(logits.float(), targets, temperature=0.7)
    assert half.dtype == entropy.dtype == torch.float32
    assert torch.equal(half, full) and torch.equal(entropy, full_entropy)


# -- Values and gradients --------------------------------------------------------------------------


ODD_SIZES = {"count": st.integers(0, 9), "vocab": st.sampled_from([1, 2, 7, 255, 257, 700]),
             "seed": st.integers(0, 99), "chunk_size": st.integers(1, 10),
             "temperature": st.floats(0.3, 3)}


@given(**ODD_SIZES, tile_bytes=st.integers(0, 20_000), kept_bytes=st.integers(0, 40_000))
def test_tiles_give_the_values_and_gradients_of_the_logits(
        count, vocab, seed, chunk_size, temperature, tile_bytes, kept_bytes):
    hidden, weight, targets = problem(count=count, vocab=vocab, seed=seed)
    expected = plain(hidden, weight, targets, temperature=temperature)
    actual = linear_log_probs(hidden, weight, targets, temperature=temperature,
                              chunk_size=chunk_size, tile_bytes=tile_bytes, kept_bytes=kept_bytes)
    assert_close(actual, expected)
    assert_close(gradients(a_loss(*actual).sum(), hidden, weight),
                 gradients(a_loss(*expected).sum(), hidden, weight))


@given(**ODD_SIZES)
def test_a_fused_loss_has_the_value_and_gradient_of_the_plain_one(
        count, vocab, seed, chunk_size, temperature):
    hidden, weight, targets = problem(count=count + 1, vocab=vocab, seed=seed)
    log_probs, entropy = plain(hidden, weight, targets, temperature=temperature)
    expected = a_loss(log_probs, entropy)
    terms, *values = fused(hidden, weight, targets, chunk_size=chunk_size,
                           temperature=temperature)
    assert_close([terms, *values], [expected, log_probs, entropy])
    assert_close(gradients(terms.sum(), hidden, weight),
                 gradients(expected.sum(), hidden, weight))


@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.6}, {"chunk_size": 2}, {"tile_bytes": 0}, {"kept_bytes": 10**6},
    {"chunk_size": 2, "tile_bytes": 0, "kept_bytes": 2 * NARROWEST * 8, "temperature": 1.7},
], ids=str)
def test_gradcheck_of_log_probs_and_entropy(options):
    hidden, weight, targets = problem(count=3, vocab=NARROWEST + 4, width=2, scale=0.7)
    # Both outputs, each with a gradient of its own: the entropy is differentiated as well.
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, **options), (hidden, weight), fast_mode=True)
    small, matrix, targets = problem(count=3, vocab=5, width=2)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, **options), (small, matrix))


class Repeatable(torch.autograd.Function):
    """The fused loss, computed anew for each backward pass: gradcheck asks for several."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, options):
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options = options
        return fused(hidden, weight, targets, **options)[0].sum()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
            loss = grad * fused(*inputs, targets, **ctx.options)[0].sum()
        return *gradients(loss, *inputs), None, None


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradcheck_of_a_fused_loss(chunk_size, temperature):
    hidden, weight, targets = problem(count=5, vocab=7)
    options = {"chunk_size": chunk_size, "temperature": temperature}
    assert torch.autograd.gradcheck(
        lambda h, w: Repeatable.apply(h, w, targets, options), (hidden, weight))


@pytest.mark.parametrize("kept_bytes", [0, 10**6])
@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(needs, kept_bytes):
    inputs = problem()
    expected = gradients(a_loss(*plain(*inputs)).sum(), *inputs[:2])
    for compute in (
            lambda *x: a_loss(*linear_log_probs(*x, chunk_size=2, kept_bytes=kept_bytes)).sum(),
            lambda *x: fused(*x, chunk_size=2)[0].sum()):
        part = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=False)]
        compute(*part, inputs[2]).backward()
        for x, need, grad in zip(part, needs, expected, strict=True):
            if need:
                torch.testing.assert_close(x.grad, grad)
            else:
                assert x.grad is None


def test_without_any_gradient_the_values_are_the_same():
    hidden, weight, targets = problem()
    expected = linear_log_probs(hidden, weight, targets)
    with torch.no_grad():
        values = linear_log_probs(hidden, weight, targets, kept_bytes=10**6)
        terms, *of_fused = fused(hidden, weight, targets, chunk_size=2)
    assert not any(v.requires_grad for v in (*values, terms))
    assert_close(values, expected)
    assert_close(of_fused, expected)


def test_no_tokens():
    hidden, weight, targets = problem(count=0)
    log_probs, entropy = linear_log_probs(hidden, weight, targets)
    assert log_probs.shape == entropy.shape == (0,)
    of_hidden, of_weight = gradients(log_probs.sum() + entropy.sum(), hidden, weight)
    assert of_hidden.shape == (0, 3) and torch.equal(of_weight, torch.zeros_like(weight))


class TestEntropyGradient:
    def test_without_it_the_entropy_is_a_constant(self):
        hidden, weight, targets = problem()
        for compute in (plain, linear_log_probs):
            log_probs, entropy = compute(hidden, weight, targets, entropy_gradient=False)
            assert log_probs.requires_grad and not entropy.requires_grad
            torch.testing.assert_close(entropy, compute(hidden, weight, targets)[1])
            actual = gradients(a_loss(log_probs, entropy).sum(), hidden, weight)
            log_probs, entropy = plain(hidden, weight, targets)
            assert_close(actual, gradients(a_loss(log_probs, entropy.detach()).sum(), hidden,
                                           weight))

    def test_nor_has_that_of_a_fused_loss(self):
        hidden, weight, targets = problem()
        terms, _, entropy = fused(hidden, weight, targets, chunk_size=2, entropy_gradient=False)
        assert not entropy.requires_grad
        log_probs, entropy = plain(hidden, weight, targets)
        expected = a_loss(log_probs, entropy.detach())
        torch.testing.assert_close(terms, expected)
        assert_close(gradients(terms.sum(), hidden, weight),
                     gradients(expected.sum(), hidden, weight))

    def test_of_the_entropy_alone(self):
        hidden, weight, targets = problem()
        actual, expected = (gradients(compute(hidden, weight, targets)[1].sum(), hidden, weight)
                            for compute in (linear_log_probs, plain))
        assert_close(actual, expected)


class TestFusedLoss:
    def test_a_common_factor_scales_the_gradient(self):
        hidden, weight, targets = problem()
        expected = gradients(fused(hidden, weight, targets, chunk_size=2)[0].sum(), hidden, weight)
        terms = fused(hidden, weight, targets, chunk_size=2)[0]
        actual = gradients(-2.5 * terms.sum(), hidden, weight)
        assert_close(actual, [-2.5 * grad for grad in expected])

    @pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 0.0)])
    def test_terms_with_different_weights_are_refused(self, weights):
        hidden, weight, targets = problem()
        terms = fused(hidden, weight, targets, chunk_size=2)[0]
        with pytest.raises(RuntimeError, match="equal weights, not.*head='chunked'"):
            (terms * torch.tensor(weights)).sum().backward()
        assert hidden.grad is None

    def test_a_second_backward_is_refused(self):
        hidden, weight, targets = problem()
        loss = fused(hidden, weight, targets, chunk_size=2)[0].sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiated once.*head='chunked'"):
            loss.backward()

    def test_log_probs_and_entropies_are_values_only(self):
        _, log_probs, entropy = fused(*problem(), chunk_size=2)
        assert not log_probs.requires_grad and not entropy.requires_grad

    def test_each_part_is_seen_once_and_in_order(self):
        seen = []

        def part_loss(log_probs, entropy, start, stop):
            assert len(log_probs) == len(entropy) == stop - start
            seen.append((start, stop))
            return log_probs.sum()[None]

        hidden, weight, targets = problem(count=7)
        fused_loss(hidden, weight, targets, part_loss, borders=[0, 1, 5, 7])
        assert seen == [(0, 1), (1, 5), (5, 7)]

    def test_a_part_whose_loss_reads_nothing_has_no_gradient(self):
        hidden, weight, targets = problem(count=4)
        terms = fused(hidden, weight, targets, chunk_size=2,
                      part_loss=lambda lp, entropy, start, stop: (lp * start).sum()[None])[0]
        of_hidden, _ = gradients(terms.sum(), hidden, weight)
        assert not of_hidden[:2].any() and of_hidden[2:].all()


@pytest.mark.parametrize("change", [
    lambda h, w, t: (h, w[:, 1:], t), lambda h, w, t: (h, w, t[1:]),
    lambda h, w, t: (h[None], w, t), lambda h, w, t: (h, w[0], t),
    lambda h, w, t: (h, w, t[:, None])])
def test_shapes_that_do_not_fit_are_errors(change):
    inputs = change(*(x.detach() for x in problem()))
    for compute in (linear_log_probs, lambda *x: fused(*x, chunk_size=2)):
        with pytest.raises(ValueError, match=r"hidden \[N, D\], weight \[V, D\]"):
            compute(*inputs)


# -- Numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit", [300.0, -300.0])
def test_extreme_logits_stay_finite(dtype, logit):
    """One token is certain, or impossible, and the others are equal."""
    vocab = NARROWEST + 44
    hidden = torch.ones(2, 1, dtype=dtype).requires_grad_()
    weight = torch.zeros(vocab, 1, dtype=dtype)
    weight[7] = logit
    weight.requires_grad_()
    targets = torch.tensor([7, vocab - 1])
    log_probs, entropy = linear_log_probs(hidden, weight, targets, tile_bytes=0, chunk_size=1)
    certain = logit > 0
    others = torch.tensor(vocab - 1.0).log().item()
    expected = [0.0, -logit] if certain else [logit - others, -others]
    assert log_probs.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.0 if certain else others] * 2, abs=1e-4)
    terms = fused(hidden, weight, targets, chunk_size=1,
                  part_loss=lambda lp, entropy, start, stop: (lp + entropy).sum()[None])[0]
    for loss in ((log_probs + entropy).sum(), terms.sum()):
        for grad in gradients(loss, hidden, weight):
            assert grad.isfinite().all()


def relative_errors(grads, exact):
    return [((g.double() - e).norm() / e.norm()).item() for g, e in zip(grads, exact, strict=True)]


@pytest.mark.parametrize("chunk_size", [100, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_no_worse_than_those_of_the_logits(dtype, chunk_size):
    """Measured against float64 at the very same rounded inputs."""
    hidden, weight, targets = problem(count=50, vocab=600, width=16, dtype=dtype, scale=0.5)
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]

    def loss(log_probs, entropy, start=0, stop=None):
        place = torch.arange(start, start + len(log_probs), device=log_probs.device)
        return ((place.cos() * log_probs).sum() + 0.1 * entropy.sum())[None]

    exact = gradients(loss(*plain(*exact_inputs, targets)), *exact_inputs)
    usual = relative_errors(gradients(loss(*plain(hidden, weight, targets)), hidden, weight), exact)
    tiled = linear_log_probs(hidden, weight, targets, chunk_size=chunk_size, tile_bytes=0)
    terms = fused(hidden, weight, targets, chunk_size=chunk_size, part_loss=loss)[0]
    for result in (loss(*tiled), terms):
        grads = gradients(result, hidden, weight)
        assert all(grad.dtype == dtype for grad in grads)
        for error, reference in zip(relative_errors(grads, exact), usual, strict=True):
            assert 0 < error <= 1.05 * reference


def test_values_of_half_precision_inputs_are_float32():
    hidden, weight, targets = problem(dtype=torch.bfloat16, vocab=300)
    values = linear_log_probs(hidden, weight, targets, tile_bytes=0)
    assert_close(values, plain(hidden, weight, targets), tolerance=1e-6)
    assert all(v.dtype == torch.float32 for v in values)


def test_autocast_computes_logits_in_its_type():
    hidden, weight, targets = problem(dtype=torch.float32, count=6, vocab=300)
    lower = [x.detach().bfloat16() for x in (hidden, weight)]
    expected = linear_log_probs(*lower, targets)
    with torch.autocast("cpu", torch.bfloat16):
        values = linear_log_probs(hidden, weight, targets, chunk_size=4)
        terms, *of_fused = fused(hidden, weight, targets, chunk_size=4)
    assert_close(values, expected, tolerance=1e-6)
    assert_close(of_fused, expected, tolerance=1e-6)
    exact = gradients(a_loss(*plain(hidden, weight, targets)).sum(), hidden, weight)
    for loss in (a_loss(*values).sum(), terms.sum()):
        grads = gradients(loss, hidden, weight)
        assert all(g.dtype == torch.float32 for g in grads)
        assert max(relative_errors(grads, exact)) < 0.02


# -- Memory ----------------------------------------------------------------------------------------


def numel(tensor):
    """Elements of a tensor, or of the memory that it is a view of."""
    return max(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)


class TestMemory:
    COUNT, VOCAB, WIDTH, CHUNK = 96, 2048, 4, 8

    def largest(self, compute, dtype=torch.float32):
        hidden, weight, targets = problem(count=self.COUNT, vocab=self.VOCAB, width=self.WIDTH,
                                          dtype=dtype)
        with Largest(numel) as largest:
            compute(hidden, weight, targets).backward()
        assert hidden.grad is not None and weight.grad is not None
        return largest.size

    def test_the_logits_exist_in_full_without_tiles(self):
        assert self.largest(lambda *x: a_loss(*plain(*x)).sum()) >= self.COUNT * self.VOCAB

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_log_probs_need_one_tile(self, dtype):
        largest = self.largest(lambda *x: a_loss(*linear_log_probs(
            *x, chunk_size=self.CHUNK, tile_bytes=0)).sum(), dtype)
        assert largest == max(self.CHUNK * NARROWEST, self.VOCAB * self.WIDTH)

    def test_without_chunks_a_tile_has_all_tokens_and_few_columns(self):
        largest = self.largest(lambda *x: a_loss(*linear_log_probs(
            *x, tile_bytes=self.COUNT * NARROWEST * 4)).sum())
        assert largest == self.COUNT * NARROWEST

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_fused_loss_needs_the_logits_of_one_part(self, dtype):
        largest = self.largest(lambda *x: fused(*x, chunk_size=self.CHUNK)[0].sum(), dtype)
        assert largest == self.CHUNK * self.VOCAB

    def test_kept_logits_are_within_their_limit(self):
        """The limit is a total: exactly as many tiles are not computed again as fit in it."""
        products = []

        class CountProducts(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                # The products with hidden states on the left and a new tile as their result.
                if function is torch.ops.aten.mm.out:
                    products.append(kwargs["out"].shape)
                return function(*args, **(kwargs or {}))

        tiles = self.COUNT // self.CHUNK * self.VOCAB // NARROWEST
        for kept in (0, 3, tiles):
            hidden, weight, targets = problem(count=self.COUNT, vocab=self.VOCAB, width=self.WIDTH,
                                              dtype=torch.float32)
            products.clear()
            with CountProducts():
                a_loss(*linear_log_probs(
                    hidden, weight, targets, chunk_size=self.CHUNK, tile_bytes=0,
                    kept_bytes=kept * self.CHUNK * NARROWEST * 4 + 5)).sum().backward()
            assert len(products) == 2 * tiles - kept

    @settings(max_examples=10)
    @given(vocab=st.integers(2, 100_000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def test_chunks_by_default_fit_on_a_cpu(self, vocab, dtype):
        hidden, weight = torch.empty(1, 1, dtype=dtype), torch.empty(vocab, 1, dtype=dtype)
        size = default_chunk_size(hidden, weight)
        assert size * vocab * dtype.itemsize <= max(CPU_CHUNK_BYTES, 16 * vocab * dtype.itemsize)
        assert (size + 1) * vocab * dtype.itemsize > CPU_CHUNK_BYTES


class TestFloat32Logits:
    """Half precision inputs, logits that are not rounded to it."""

    @pytest.fixture
    def inputs(self):
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(20, 32, generator=generator).bfloat16()
        weight = (3 * torch.randn(300, 32, generator=generator)).bfloat16()
        return hidden, weight, torch.randint(300, (20,), generator=generator)

    @staticmethod
    def exact(hidden, weight, targets):
        """From float64 copies of the same inputs: log-probs, entropies, gradients of both sums."""
        h, w = (x.double().requires_grad_() for x in (hidden, weight))
        log_probs, entropy = log_probs_from_logits(h @ w.t(), targets)
        return log_probs, entropy, *torch.autograd.grad((log_probs + entropy).sum(), [h, w])

    @staticmethod
    def ours(head, hidden, weight, targets, **options):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        if head == "fused":
            terms, log_probs, entropy = fused_loss(
                h, w, targets, lambda lp, e, start, stop: (lp + e).sum()[None],
                borders=[0, 8, 20], **options)
        else:
            log_probs, entropy = linear_log_probs(h, w, targets, chunk_size=8, tile_bytes=4096,
                                                  **options)
            terms = (log_probs + entropy).sum()
        return log_probs, entropy, *torch.autograd.grad(terms.sum(), [h, w])

    @pytest.mark.parametrize("head", ["chunked", "fused"])
    def test_are_those_of_float64(self, inputs, head):
        expected, actual = self.exact(*inputs), self.ours(head, *inputs, float32_logits=True)
        rounded = self.ours(head, *inputs)
        for values in range(2):
            error = (actual[values] - expected[values]).abs().max()
            assert error < 1e-4 < (rounded[values] - expected[values]).abs().max()
        for grad, truth in zip(actual[2:], expected[2:], strict=True):
            assert grad.dtype == torch.bfloat16
            torch.testing.assert_close(grad.double(), truth, rtol=2**-8, atol=1e-3)

    @pytest.mark.parametrize("head", ["chunked", "fused"])
    def test_a_float32_matrix_is_not_rounded(self, inputs, head):
        hidden, weight, targets = inputs
        weight = weight.float() + 1e-3  # nothing that bfloat16 could hold
        expected, actual = self.exact(hidden, weight, targets), self.ours(head, hidden, weight,
                                                                          targets)
        for values in range(2):
            assert (actual[values] - expected[values]).abs().max() < 1e-4
        assert (actual[2].dtype, actual[3].dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(actual[3].double(), expected[3], rtol=1e-4, atol=1e-4)

    def test_autocast_leaves_them(self, inputs):
        expected = self.exact(*inputs)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = self.ours("fused", *inputs, float32_logits=True)[0]
        assert (actual - expected).abs().max() < 1e-4
