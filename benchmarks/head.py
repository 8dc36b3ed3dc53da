"""Forward and backward of the log-prob head: time, memory and error of several ways, in one run.

    python benchmarks/head.py --out benchmarks/results/head_h200.json      # one GPU

Hidden states ``[tokens, hidden]`` and an output matrix ``[vocabulary, hidden]`` in bfloat16; every
way computes log-probs (and entropies) of given tokens and the gradients by both inputs. Where TRL
and Liger are installed, their heads run in the same loop. The ways take turns, because a GPU slows
down as it gets warm. Memory is what a pass allocates beyond its inputs, gradients included; errors
are those of the first ``--checked`` tokens, relative to float64.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from machine import Recording

import torch  # isort: skip
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo.objectives.head import fused_loss, linear_log_probs, log_probs_from_logits

#: A way: ``(hidden, weight, targets, grad_log_prob, grad_entropy)`` to ``(log_probs, entropy)``
#: (None where it has none to show), after the backward pass.
Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]


def bare_products(hidden, weight, targets, g, e):
    """The three matrix products that nobody can avoid."""
    logits = hidden.detach() @ weight.detach().t()
    hidden.grad, weight.grad = logits @ weight.detach(), logits.t() @ hidden.detach()
    return None, None


def bare_products_recomputed(hidden, weight, targets, g, e):
    """The same with the logits computed a second time for the backward pass."""
    del targets, g, e
    logits = hidden.detach() @ weight.detach().t()
    del logits
    return bare_products(hidden, weight, None, None, None)


def plain(hidden, weight, targets, g, e):
    log_probs, _ = log_probs_from_logits(hidden @ weight.t(), targets, entropy_gradient=False)
    log_probs.backward(g)
    return log_probs, None


def plain_entropy(hidden, weight, targets, g, e):
    out = log_probs_from_logits(hidden @ weight.t(), targets)
    torch.autograd.backward(out, [g, e])
    return out


def _compiled_chunk(hidden, weight, targets):
    return log_probs_from_logits(hidden @ weight.t(), targets)


def compiled_chunks(hidden, weight, targets, g, e, chunk=2048):
    """Chunks of tokens, compiled and checkpointed."""
    function = _compiled(_compiled_chunk)
    parts = [checkpoint(function, h, weight, t, use_reentrant=False)
             for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    out = [torch.cat(part) for part in zip(*parts, strict=True)]
    torch.autograd.backward(out, [g, e])
    return out


def _compiled(function, cache={}):  # noqa: B006  one compilation for all calls
    return cache.setdefault(function, torch.compile(function, dynamic=False))


def ours(hidden, weight, targets, g, e):
    """linear_log_probs: any loss, most logits computed twice."""
    out = linear_log_probs(hidden, weight, targets)
    torch.autograd.backward(out, [g, e])
    return out


def ours_log_probs(hidden, weight, targets, g, e):
    """The same without the entropy's gradient."""
    log_probs, entropy = linear_log_probs(hidden, weight, targets, entropy_gradient=False)
    log_probs.backward(g)
    return log_probs, entropy


def ours_fused(chunk: int) -> Way:
    """fused_loss: a token-local loss, parts of ``chunk`` tokens, each logit computed once."""
    def way(hidden, weight, targets, g, e):
        def part_loss(log_probs, entropy, start, stop):
            return torch.stack([(log_probs * g[start:stop]).sum(),
                                (entropy * e[start:stop]).sum()])

        borders = [*range(0, len(hidden), chunk), len(hidden)]
        terms, log_probs, entropy = fused_loss(hidden, weight, targets, part_loss, borders=borders)
        terms.sum().backward()
        return log_probs, entropy
    return way


def ours_fused_sequences(hidden, weight, targets, g, e, length=512):
    """fused_loss with a loss of whole sequences (GSPO's ratio), parts of 8192 tokens."""
    def part_loss(log_probs, entropy, start, stop):
        ratio = (log_probs - log_probs.detach()).view(-1, length).mean(1).exp()
        loss = -(ratio * g[start:stop:length]).sum() - 1e-3 * (entropy * e[start:stop]).sum()
        return loss[None]

    borders = [*range(0, len(hidden), 8192), len(hidden)]
    terms, _, _ = fused_loss(hidden, weight, targets, part_loss, borders=borders)
    terms.sum().backward()
    return None, None


def trl_way(entropy: bool) -> Way | None:
    """TRL's chunked Triton head, with the tile width its trainers use."""
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as width
    except ImportError as error:
        print(f"without TRL: {error}", file=sys.stderr)
        return None

    def way(hidden, weight, targets, g, e):
        out = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, width, None, 1.0,
                                           ("entropy",))
        log_probs, entropies = out[:2]
        if entropy:
            torch.autograd.backward([log_probs, entropies], [g, e])
        else:
            log_probs.backward(g)
        return log_probs, entropies
    return way


def liger_way(length: int = 512) -> Way | None:
    """Liger's fused linear GRPO loss (no entropy)."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        print(f"without Liger: {error}", file=sys.stderr)
        return None

    def way(hidden, weight, targets, g, e):
        rows = len(hidden) // length
        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
        out = loss(hidden.view(rows, length, -1), weight, targets.view(rows, length),
                   torch.ones(rows, length, device=hidden.device), g[::length])
        out[0].backward()
        return None, None
    return way


def measure(ways: dict[str, Way], inputs: tuple, *, rounds: int, repeats: int,
            record: Callable[[dict[str, dict]], None]) -> None:
    """Median time (ms) and peak memory (GiB) of each way; they take turns, and what was found so
    far is recorded after each."""
    hidden, weight = inputs[:2]
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = {}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            slow = name.startswith("liger")
            for repeat in range(1 if slow else repeats):
                hidden.grad = weight.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                way(*inputs)
                stop.record()
                torch.cuda.synchronize()
                if turn and (repeat or slow):  # the first of each turn finds foreign caches
                    times[name].append(start.elapsed_time(stop))
                peaks[name] = torch.cuda.max_memory_allocated() - before
            hidden.grad = weight.grad = None
            gc.collect()
            torch.cuda.empty_cache()
        if turn:
            record({name: {"ms": round(statistics.median(times[name]), 2),
                           "ms_min": round(min(times[name]), 2),
                           "gib": round(peaks[name] / 2**30, 3)} for name in ways})


def errors(ways: dict[str, Way], inputs: tuple, *, count: int) -> dict[str, dict]:
    """Relative error of log-probs, entropies and gradients of some tokens against float64."""
    hidden, weight, targets, g, e = inputs
    exact = [t.detach()[:count].double().requires_grad_() for t in (hidden,)]
    exact += [weight.detach().double().requires_grad_(), targets[:count], g[:count].double(),
              e[:count].double()]
    expected = plain_entropy(*exact)

    def error(actual: Tensor | None, wanted: Tensor) -> float | None:
        if actual is None:
            return None
        return ((actual.double() - wanted).norm() / wanted.norm()).item()

    out = {}
    for name, way in ways.items():
        part = [hidden.detach()[:count].clone().requires_grad_(),
                weight.detach().clone().requires_grad_(), targets[:count], g[:count], e[:count]]
        log_probs, entropy = way(*part)
        out[name] = {"log_prob": error(log_probs, expected[0].detach()),
                     "entropy": error(entropy, expected[1].detach()),
                     "grad_hidden": error(part[0].grad, exact[0].grad),
                     "grad_weight": error(part[1].grad, exact[1].grad)}
        del part, log_probs, entropy
        torch.cuda.empty_cache()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--checked", type=int, default=512)
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark times kernels on a GPU; benchmarks/loss_memory.py needs none")
    torch.manual_seed(0)
    device = torch.device("cuda")
    inputs = (
        torch.randn(args.tokens, args.hidden, device=device).bfloat16().requires_grad_(),
        (torch.randn(args.vocabulary, args.hidden, device=device) * 0.02).bfloat16()
        .requires_grad_(),
        torch.randint(args.vocabulary, (args.tokens,), device=device),
        torch.randn(args.tokens, device=device), 0.1 * torch.randn(args.tokens, device=device))
    ways = {
        "bare products": bare_products,
        "bare products, logits twice": bare_products_recomputed,
        "plain logits": plain,
        "plain logits, entropy": plain_entropy,
        "compiled chunks, entropy": compiled_chunks,
        "trl, log-prob": trl_way(entropy=False),
        "trl, entropy": trl_way(entropy=True),
        "liger grpo": liger_way(),
        "linear_log_probs": ours_log_probs,
        "linear_log_probs, entropy": ours,
        "fused_loss, entropy": ours_fused(8192),
        "fused_loss, entropy, 2048 tokens": ours_fused(2048),
        "fused_loss, sequences": ours_fused_sequences,
    }
    ways = {name: way for name, way in ways.items() if way is not None}
    with_entropy = ("plain logits, entropy", "trl, entropy", "linear_log_probs, entropy",
                    "fused_loss, entropy", "fused_loss, entropy, 2048 tokens")
    compared = {name: ways[name] for name in with_entropy if name in ways}
    recording = Recording(
        "head", args.out,
        work=f"{args.tokens} tokens x {args.vocabulary} vocabulary x {args.hidden} hidden, "
             "bfloat16, forward + backward")
    recording.describe_machine(also=("triton", "trl", "liger-kernel"))
    measure(ways, inputs, rounds=args.rounds, repeats=args.repeats,
            record=lambda found: recording.add(ways=found))
    recording.finish(errors=errors(compared, inputs, count=args.checked))


if __name__ == "__main__":
    main()
