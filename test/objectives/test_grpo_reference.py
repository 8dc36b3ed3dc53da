"""``GRPOLoss`` against a float64 reference that loops over rows and tokens in plain Python."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo import GRPOLoss, total_loss

CLIP = (0.2, 0.3)
CONSTANT_LENGTH = 7

CHOICES = {
    "objective": ["ppo_clip", "reinforce"],
    "aggregation": ["token", "sequence", "dr_grpo"],
    "kl_ref": [None, 0.1],
    "kl_inf": [None, 0.05],
    "estimator": ["k1", "k2", "k3"],
    "entropy_coeff": [0.0, 0.01],
    "temperature": [1.0, 0.7],
}
GRID = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


class Logits(nn.Module):
    """A "model" whose parameters are the logits, so that gradients are compared one by one."""

    def __init__(self, rows: int, width: int, vocab_size: int = 23) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(rows, width, vocab_size, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter(table)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table)


def reference_loss(logits, batch, *, objective, aggregation, kl_ref, kl_inf, estimator,
                   entropy_coeff, temperature):
    """The total loss from logits ``[B, T, V]``, one token at a time."""
    tokens = batch["tokens", "full"].tolist()
    attention = batch["masks", "all_attention_mask"].tolist()
    assistant = batch["masks", "all_assistant_mask"].tolist()
    sampled = batch["log_probs", "full"].tolist()
    ref = batch["next", "ref_log_probs", "full"].tolist()
    errors = batch["next", "reward_error"].tolist()
    advantages = batch["advantage"].tolist()

    def kl(log_p, other):
        d = log_p - other
        return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]

    rows = []
    for b in range(len(tokens)):
        terms = []
        for t in range(1, len(tokens[b])):
            if errors[b][0] or not attention[b][t] or not assistant[b][t]:
                continue
            z = logits[b, t - 1] / temperature
            p = z.exp() / z.exp().sum()
            log_p = p[tokens[b][t]].log()
            A = advantages[b][t if len(advantages[b]) > 1 else 0]
            ratio = (log_p - sampled[b][t]).exp()
            if objective == "ppo_clip" and A > 0 and ratio > 1 + CLIP[1]:
                ratio = 1 + CLIP[1]
            if objective == "ppo_clip" and A < 0 and ratio < 1 - CLIP[0]:
                ratio = 1 - CLIP[0]
            term = -ratio * A
            if kl_ref is not None:
                term = term + kl_ref * kl(log_p, ref[b][t])
            if kl_inf is not None:
                term = term + kl_inf * kl(log_p, sampled[b][t])
            terms.append(term - entropy_coeff * -(p * p.log()).sum())
        if terms:
            rows.append(terms)
    if aggregation == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "sequence":
        return sum(sum(terms) / len(terms) for terms in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * CONSTANT_LENGTH)


def loss_of(model, options):
    return GRPOLoss(
        model, objective=options["objective"], aggregation=options["aggregation"],
        constant_length=CONSTANT_LENGTH if options["aggregation"] == "dr_grpo" else None,
        clip_epsilon=CLIP if options["objective"] == "ppo_clip" else None,
        kl_to_ref_coeff=options["kl_ref"],
        kl_to_inference_coeff=options["kl_inf"], kl_estimator=options["estimator"],
        entropy_coeff=options["entropy_coeff"], temperature=options["temperature"])


def odd_batch(make_batch, model, *, token_level, error_rows, temperature):
    """A batch with what a tidy one lacks: an empty response, turns, tokens without context."""
    batch = make_batch(model, prompts=(2, 0, 1, 3, 2), responses=(5, 3, 6, 0, 4), seed=3, noise=0.5,
                       token_level=token_level, error_rows=error_rows, temperature=temperature)
    batch["masks", "all_assistant_mask"][2, 3:5] = False  # a tool's output between two turns
    batch["masks", "all_assistant_mask"][4] = True  # prompt and padding too
    return batch


@pytest.fixture(scope="module")
def model():
    return Logits(rows=5, width=9)


@pytest.mark.parametrize("error_rows", [(), (0,)], ids=["valid", "errors"])
@pytest.mark.parametrize("token_level", [False, True], ids=["sequence_A", "token_A"])
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(map(str, o.values())))
def test_value_and_gradient(model, make_batch, options, token_level, error_rows):
    batch = odd_batch(make_batch, model, token_level=token_level, error_rows=error_rows,
                      temperature=options["temperature"])
    expected = reference_loss(model.table, batch, **options)
    expected_grad, = torch.autograd.grad(expected, model.table)

    actual = total_loss(loss_of(model, options)(batch))
    grad, = torch.autograd.grad(actual, model.table)

    assert expected_grad.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)

    single = Logits(*model.table.shape).float()
    actual = total_loss(loss_of(single, options)(batch))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_reference_batch_is_clipped_on_both_sides(model, make_batch):
    batch = odd_batch(make_batch, model, token_level=True, error_rows=(), temperature=1.0)
    out = GRPOLoss(model, clip_epsilon=CLIP)(batch)
    assert out["clip_fraction_low"] > 0 and out["clip_fraction_high"] > 0


@pytest.mark.parametrize("objective", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "dr_grpo"])
@pytest.mark.parametrize("head", ["chunked", "logits"])
def test_value_and_gradient_of_a_language_model(tiny_model, make_batch, objective, aggregation,
                                                head):
    options = {"objective": objective, "aggregation": aggregation, "kl_ref": 0.1, "kl_inf": 0.05,
               "estimator": "k3", "entropy_coeff": 0.01, "temperature": 0.7}
    batch = odd_batch(make_batch, tiny_model, token_level=False, error_rows=(2,), temperature=0.7)
    logits = tiny_model(input_ids=batch["tokens", "full"],
                        attention_mask=batch["masks", "all_attention_mask"]).logits
    expected = reference_loss(logits, batch, **options)
    parameters = list(tiny_model.parameters())
    expected_grads = torch.autograd.grad(expected, parameters)

    loss = loss_of(tiny_model, options)
    loss.scorer.chunked = head == "chunked"
    actual = total_loss(loss(batch))
    grads = torch.autograd.grad(actual, parameters)

    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-9)
