"""On a GPU: the Triton head computes what the PyTorch head computes."""

from __future__ import annotations

import pytest
import torch

from grpo import GRPOLoss, total_loss
from grpo.objectives import head_tiles
from grpo.objectives.head import fused_loss, linear_log_probs, log_probs_from_logits

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = sorted(TOLERANCE, key=str)


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    # Products in TF32 would differ more from each other than the kernels do.
    torch.backends.cuda.matmul.allow_tf32 = False


def inputs(dtype, *, tokens=300, vocabulary=5003, hidden=64, scale=0.3):
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda"}
    return (torch.randn(tokens, hidden, **options).to(dtype).requires_grad_(),
            (scale * torch.randn(vocabulary, hidden, **options)).to(dtype).requires_grad_(),
            torch.randint(vocabulary, (tokens,), **options), torch.randn(tokens, **options),
            torch.randn(tokens, **options))


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("ruled_out", [False, True])
def test_tiles_equal_those_of_pytorch(dtype, entropy, ruled_out, monkeypatch):
    hidden, weight, targets, g, e = (t.detach() for t in inputs(dtype))
    tile = hidden @ weight.t()
    if ruled_out:  # logits of -inf: in every row some, in some all of the first columns
        kept = tile.gather(1, targets[:, None])
        tile[:, 5::7] = tile[::3, :1500] = -torch.inf
        tile.scatter_(1, targets[:, None], kept)

    def run(on_triton):
        if not on_triton:
            monkeypatch.setattr(head_tiles, "_use_triton", lambda tile: False)
        statistics = head_tiles.Statistics.empty(len(tile), dtype=torch.float32,
                                                 device=tile.device)
        out = tile.clone()
        for left in range(0, tile.shape[1], 1000):
            head_tiles.fold(out[:, left : left + 1000], targets, statistics, column=left,
                            inverse_temperature=1 / 0.7)
        log_probs, entropies, log_z = statistics.finish()
        head_tiles.grad_(out, targets, log_normaliser_n=log_z, entropy_n=entropies,
                         grad_log_prob_n=g, grad_entropy_n=e if entropy else None, column=0,
                         inverse_temperature=1 / 0.7)
        return log_probs, entropies, out

    assert head_tiles._use_triton(tile)
    assert all(value.isfinite().all() for value in run(True))
    for actual, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [
    {}, {"tile_bytes": 2**18}, {"tile_bytes": 2**18, "kept_bytes": 0}, {"chunk_size": 77},
    {"chunk_size": 77, "tile_bytes": 1, "kept_bytes": 2**20}], ids=str)
def test_values_and_gradients_are_no_worse_than_those_of_plain_logits(dtype, options):
    hidden, weight, targets, g, e = inputs(dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = log_probs_from_logits(exact[0] @ exact[1].t(), targets, temperature=0.7)
    torch.autograd.backward(expected, [g.double(), e.double()])
    plain = log_probs_from_logits(hidden @ weight.t(), targets, temperature=0.7)
    plain_grads = torch.autograd.grad(plain, [hidden, weight], [g, e])
    actual = linear_log_probs(hidden, weight, targets, temperature=0.7, **options)
    grads = torch.autograd.grad(actual, [hidden, weight], [g, e])
    wanted = [*expected, exact[0].grad, exact[1].grad]
    for ours, theirs, truth in zip([*actual, *grads], [*plain, *plain_grads], wanted, strict=True):
        assert relative(ours, truth) <= 1.02 * relative(theirs, truth) + 1e-6


@pytest.mark.parametrize("borders", [[0, 300], [0, 1, 130, 300]], ids=str)
def test_the_fused_gradient_is_that_of_the_unfused_one(borders):
    hidden, weight, targets, g, e = inputs(torch.float32)
    log_probs, entropy = linear_log_probs(hidden, weight, targets)
    expected = torch.autograd.grad((log_probs * g).sum() + (entropy * e).sum(), [hidden, weight])
    terms, _, _ = fused_loss(
        hidden, weight, targets, lambda lp, h, a, b: ((lp * g[a:b]) + (h * e[a:b])).sum()[None],
        borders=borders)
    actual = torch.autograd.grad(terms.sum(), [hidden, weight])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo"])
def test_every_head_gives_the_loss_the_same_gradient(make_model, make_batch, objective):
    model = make_model(dtype=torch.float32).cuda()
    batch = make_batch(model.cpu(), prompts=(2, 3, 1), responses=(5, 4, 6)).to("cuda")
    model.cuda()
    gradients = []
    for head in ("logits", "chunked", "fused"):
        model.zero_grad()
        loss = GRPOLoss(model, objective=objective, head=head, entropy_coeff=0.1)
        total_loss(loss(batch)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)
