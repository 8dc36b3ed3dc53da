"""``TokenScorer``: the tokens of a batch scored, and the models each head fits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grpo.objectives import TokenScorer

from .batches import keys


@pytest.mark.parametrize("layout", [
    {"prompts": (2, 1, 3), "responses": (3, 1, 5)},
    {"prompts": (2, 2, 2), "responses": (4, 4, 4)},  # no padding: no attention mask
    {"prompts": (2, 1), "responses": (0, 0)},
], ids=["ragged", "equal", "empty"])
@pytest.mark.parametrize("options", [
    {}, {"head": "logits"}, {"packing": True}, {"packing": True, "head": "logits"},
    {"chunk_size": 2}, {"packing": True, "chunk_size": 3}, {"head": "chunked"},
    {"head": "fused", "chunk_size": 3}], ids=str)
def test_scores_are_those_of_each_row_alone(model, make_batch, options, layout):
    batch = make_batch(model, **layout)
    tokens, attention, mask = keys(batch)
    with torch.no_grad():
        log_probs, entropy = TokenScorer(model, temperature=0.7, **options)(tokens, attention, mask)
        for b in range(len(batch)):
            length = int(attention[b].sum())
            logits = model(input_ids=tokens[b : b + 1, :length]).logits[0, :-1] / 0.7
            rows = torch.distributions.Categorical(logits=logits)
            expected = rows.log_prob(tokens[b, 1:length]) * mask[b, 1:length]
            torch.testing.assert_close(log_probs[b, 1:length], expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(entropy[b, 1:length], rows.entropy() * mask[b, 1:length],
                                       rtol=1e-6, atol=1e-7)
    assert not log_probs[~mask].any() and not entropy[~mask].any()


def test_predictions_are_of_the_chosen_tokens(model, make_batch):
    tokens, attention, mask = keys(make_batch(model))
    for head, width in (("chunked", 16), ("logits", 23)):
        predictions = TokenScorer(model, head=head).predict(tokens, attention, mask)
        assert torch.equal(predictions.targets_N, tokens[mask])
        assert torch.equal(predictions.index_N, mask.flatten().nonzero()[:, 0])
        assert predictions.states.shape == (int(mask.sum()), width)


@pytest.mark.parametrize("head", ["chunked", "logits"])
def test_predictions_can_be_scored_at_another_temperature(model, make_batch, head):
    inputs = keys(make_batch(model))
    scorer = TokenScorer(model, temperature=0.7, head=head)
    predictions = scorer.predict(*inputs)
    for temperature in (None, 1.3):
        expected = TokenScorer(model, temperature=temperature or 0.7, head=head)
        for one, other in zip(scorer.score(predictions, temperature=temperature),
                              expected.score(predictions), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("head", ["chunked", "logits"])
def test_the_entropy_has_a_gradient_on_demand(model, make_batch, head):
    inputs = keys(make_batch(model))
    scorer = TokenScorer(model, head=head)
    assert scorer(*inputs)[1].requires_grad
    scorer.entropy_gradient = False
    log_probs, entropy = scorer(*inputs)
    assert log_probs.requires_grad and not entropy[inputs[2]].requires_grad


def test_a_fused_loss_has_the_gradient_of_the_scores(model, make_batch):
    inputs = keys(make_batch(model))
    scorer = TokenScorer(model, temperature=0.7)
    log_probs, entropy = scorer.score(scorer.predict(*inputs))
    loss = (log_probs.exp() + entropy).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    terms, *values = scorer.fused_loss(
        scorer.predict(*inputs), lambda lp, entropy, start, stop: (lp.exp() + entropy).sum()[None],
        borders=[0, 4, len(log_probs)])
    actual = torch.autograd.grad(terms.sum(), list(model.parameters()))
    for one, other in zip([terms.sum(), *values, *actual], [loss, log_probs, entropy, *expected],
                          strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def soft_cap(module, args, out):
    out.logits = 30 * (out.logits / 30).tanh()
    return out


def add_one(module, args, kwargs, out):
    """What a causal model might do between its base model and its head."""
    if kwargs.get("use_cache") is not False:
        out.last_hidden_state = out.last_hidden_state + 1
    return out


class TestChoiceOfHead:
    def test_auto_takes_tiles_where_they_give_the_logits(self, model):
        assert TokenScorer(model).chunked
        assert TokenScorer(model, head="chunked").chunked
        assert TokenScorer(model, head="fused").chunked
        assert not TokenScorer(model, head="logits").chunked

    @pytest.mark.parametrize("head", ["chunked", "fused"])
    @pytest.mark.parametrize(("change", "reason"), [
        (lambda m: m.register_forward_hook(soft_cap), "more than hidden states times"),
        (lambda m: m.base_model.register_forward_hook(add_one, with_kwargs=True),
         "changes the hidden states of its base model"),
        (lambda m: setattr(m, "lm_head", nn.Linear(16, 23)), "bias"),
        (lambda m: setattr(m, "lm_head", nn.Identity()), "linear output embedding"),
        (lambda m: setattr(m.base_model, "lm_head", nn.Linear(16, 23)), "of its own"),
    ])
    def test_logits_that_are_more_than_a_product(self, tiny_model, change, reason, head):
        change(tiny_model)
        assert not TokenScorer(tiny_model).chunked
        with pytest.raises(ValueError, match=f"head='{head}'.*{reason}.*head='auto'"):
            TokenScorer(tiny_model, head=head).measure()

    def test_what_the_model_does_not_do_does_not_matter(self, tiny_model):
        tiny_model.config.logit_scale = 0.1
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


@pytest.mark.parametrize(("option", "value"), [
    ("head", "dense"), ("temperature", 0.0), ("temperature", -1.0), ("temperature", float("nan")),
    ("chunk_size", 0), ("chunk_size", -3)])
def test_a_wrong_value_is_an_error_that_names_option_and_value(model, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        TokenScorer(model, **{option: value})
