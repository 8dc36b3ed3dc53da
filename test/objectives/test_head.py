"""The scorer's log-probs and entropies, and the models each head fits."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from grpo.objectives import TokenScorer
from grpo.objectives.head import chunked_log_probs, log_probs_from_logits


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def keys(batch):
    return (batch["tokens", "full"], batch["masks", "all_attention_mask"],
            batch["masks", "all_assistant_mask"])


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


@given(count=st.integers(0, 9), chunk_size=st.integers(1, 10))
def test_chunks_change_neither_values_nor_gradients(count, chunk_size):
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(7, (count,), generator=generator)
    results = [chunked_log_probs(hidden, weight, targets, temperature=0.7, chunk_size=chunk_size),
               log_probs_from_logits(hidden @ weight.t(), targets, temperature=0.7)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (torch.autograd.grad((lp * entropy).sum(), [hidden, weight])
                  for lp, entropy in results)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [
    {}, {"head": "logits"}, {"packing": True}, {"packing": True, "head": "logits"},
    {"chunk_size": 2}, {"packing": True, "chunk_size": 3}], ids=str)
def test_scores_are_those_of_each_row_alone(model, make_batch, options):
    batch = make_batch(model, prompts=(2, 1, 3), responses=(3, 1, 5))
    tokens, attention, mask = keys(batch)
    with torch.no_grad():
        log_probs, entropy = TokenScorer(model, temperature=0.7, **options)(tokens, attention, mask)
        for b in range(3):
            length = int(attention[b].sum())
            logits = model(input_ids=tokens[b : b + 1, :length]).logits[0, :-1] / 0.7
            rows = torch.distributions.Categorical(logits=logits)
            expected = rows.log_prob(tokens[b, 1:length]) * mask[b, 1:length]
            torch.testing.assert_close(log_probs[b, 1:length], expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(entropy[b, 1:length], rows.entropy() * mask[b, 1:length],
                                       rtol=1e-6, atol=1e-7)
    assert not log_probs[~mask].any() and not entropy[~mask].any()


class TestChoiceOfHead:
    def test_auto_takes_chunks_where_they_give_the_logits(self, model):
        assert TokenScorer(model).chunked
        assert TokenScorer(model, head="chunked").chunked
        assert not TokenScorer(model, head="logits").chunked

    @pytest.mark.parametrize(("change", "reason"), [
        (lambda m: setattr(m.config, "final_logit_softcapping", 30.0), "final_logit_softcapping"),
        (lambda m: setattr(m.config, "logit_scale", 0.1), "logit_scale"),
        (lambda m: setattr(m.config, "logits_scaling", 8.0), "logits_scaling"),
        (lambda m: setattr(m, "lm_head", nn.Linear(16, 23)), "bias"),
        (lambda m: setattr(m, "lm_head", nn.Identity()), "linear output embedding"),
    ])
    def test_logits_that_are_more_than_a_product(self, tiny_model, change, reason):
        change(tiny_model)
        assert not TokenScorer(tiny_model).chunked
        with pytest.raises(ValueError, match=reason):
            TokenScorer(tiny_model, head="chunked")

    def test_a_scale_of_one_does_not_matter(self, tiny_model):
        tiny_model.config.logit_scale = 1.0
        assert TokenScorer(tiny_model).chunked

    def test_any_module_with_logits_will_do(self, make_batch):
        class Uniform(nn.Module):
            def forward(self, input_ids, attention_mask):
                return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 23))

        model = Uniform()
        mask = keys(make_batch(model))[2]
        log_probs, entropy = TokenScorer(model)(*keys(make_batch(model)))
        torch.testing.assert_close(log_probs[mask].exp(), torch.full_like(log_probs[mask], 1 / 23))
        torch.testing.assert_close(entropy[mask].exp(), torch.full_like(entropy[mask], 23.0))

    def test_a_compiled_chunk_function_is_the_one_that_runs(self, model, make_batch, monkeypatch):
        compiled, calls = [], []

        def compile_(function):
            compiled.append(function)

            def run(*args):
                calls.append(args[0].shape[0])
                return function(*args)

            return run

        monkeypatch.setattr(torch, "compile", compile_)
        inputs = keys(make_batch(model))
        plain = TokenScorer(model, chunk_size=8)(*inputs)
        assert not compiled
        torch.testing.assert_close(
            TokenScorer(model, chunk_size=8, compile_head=True)(*inputs), plain)
        assert len(compiled) == 1 and calls == [8, 7]
