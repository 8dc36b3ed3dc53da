"""A model is tried before it is trained: what is found, and that nothing of the model changes."""

from __future__ import annotations

import pytest
import torch

from grpo.objectives import GRPOLoss, TokenScorer
from grpo.objectives.agreement import SAME_MODEL, Gap, Trial, say_once

from .batches import keys
from .causal_classes import make_class
from .test_causal_classes import batch_of


class TestGap:
    def test_of_logits_that_differ_by_a_constant_is_nothing(self):
        logits = torch.randn(3, 7)
        assert Gap.between(logits + 5, logits).within(1e-5)

    def test_is_relative_to_the_logits(self):
        logits = torch.randn(3, 7)
        gap = Gap.between(1.1 * logits, logits)
        assert gap.relative == pytest.approx(0.1, rel=1e-3) and gap.nats > 0

    def test_of_the_worst_position(self):
        logits = torch.randn(4, 50)
        ours = logits.clone()
        ours[2] *= 2
        assert Gap.between(ours, logits, worst=True).relative == pytest.approx(1, rel=1e-3)
        assert Gap.between(ours, logits).relative < 0.8

    def test_of_what_is_not_a_number_is_not_rounding(self):
        assert not Gap.between(torch.full((1, 3), torch.nan), torch.zeros(1, 3)).within(1e9)


class TestWhatATrialLeaves:
    def test_random_numbers_modes_and_hooks_stay(self):
        model = make_class("llama")
        model.train()
        model.model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        TokenScorer(model, packing=True).measure()
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == modes
        assert not model.lm_head._forward_pre_hooks
        assert all(param.grad is None for param in model.parameters())

    def test_a_failure_leaves_the_model_as_it_was(self):
        model = make_class("gemma2").train()
        with pytest.raises(ValueError, match="head='fused'"):
            TokenScorer(model, head="fused").measure()
        assert model.training and not model.lm_head._forward_pre_hooks
        assert model.model.layers[0].self_attn.attn_logit_softcapping == 0.1

    def test_compiled_layers_are_not_compiled_for_it(self, tiny_model):
        compiled = []

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        for layer in tiny_model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=backend)
        TokenScorer(tiny_model).measure()
        assert not compiled


def test_it_is_tried_once_and_before_the_first_batch():
    model = make_class("llama")
    batch, calls = batch_of(model), []
    model.register_forward_hook(lambda *_: calls.append(1))
    scorer = TokenScorer(model)
    scorer(*keys(batch))
    assert (first := len(calls)) > 0
    scorer(*keys(batch))
    assert len(calls) == first  # tiles ask the base model only


def test_a_model_without_values_is_tried_once_it_has_some():
    with torch.device("meta"):
        model = make_class("llama")
    scorer = TokenScorer(model, packing=True)
    assert scorer.chunked
    scorer.model = make_class("gemma2")
    assert not scorer.chunked


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) for name in ("llama", "gpt2", "mixtral", "gemma3_text", "qwen3_moe",
                                          "mamba")),
    ("llama", torch.float64), ("mamba", torch.float64), ("llama", torch.float16)], ids=str)
def test_other_dtypes_are_not_refused_for_rounding(name, dtype):
    model = make_class(name, dtype=dtype)
    packing = name != "mamba"
    assert TokenScorer(model, packing=packing, head="chunked").chunked


def test_under_autocast_rounding_is_that_of_the_dtype_it_computes_in():
    trial = Trial(make_class("llama", dtype=torch.float32))
    assert trial.dtype == torch.float32 and trial.allowed(SAME_MODEL) == SAME_MODEL[torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        assert trial.allowed(SAME_MODEL) == SAME_MODEL[torch.bfloat16]


@pytest.mark.parametrize(("name", "options", "reason"), [
    ("falcon_h1", {"head": "fused"}, "head='fused'.*more than hidden states.*head='auto'"),
    ("recurrent_gemma", {"head": "chunked"}, "head='chunked'.*more than hidden states"),
    ("qwen3_5_text", {"packing": True}, "packing=True.*change with the tokens of another.*"
                                        "train.packing=false"),
    ("gemma2", {"fp32_head": True}, "fp32_head=True.*train_model.fp32_head=false"),
    ("bert", {}, "sees the tokens that it should predict.*is_decoder=True")])
def test_half_precision_does_not_hide_what_is_wrong(name, options, reason):
    encoder = {"is_decoder": False} if name == "bert" else {}
    model = make_class(name, dtype=torch.bfloat16, **encoder)
    with pytest.raises(ValueError, match=reason):
        TokenScorer(model, **options).measure()


def test_a_choice_is_said_once(caplog):
    say_once.cache_clear()
    for _ in range(2):
        assert not GRPOLoss(make_class("gemma2")).scorer.chunked
    said = [r.message for r in caplog.records if "head='auto'" in r.message]
    assert len(said) == 1 and "Gemma2ForCausalLM" in said[0] and "nats" in said[0]
    assert [r for r in caplog.records if "caps attention scores at 0.1" in r.message]


def head_errors(model, **options):
    """Greatest error of the log-probs, against a head in float64 on the same hidden states."""
    tokens, attention, mask = keys(batch_of(make_class("llama")))
    with torch.no_grad():
        log_probs, _ = TokenScorer(model, **options)(tokens, attention, mask)
        hidden = model.model(tokens, attention).last_hidden_state
        logits = hidden[:, :-1].double() @ model.lm_head.weight.double().t()
    expected = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]
    return (log_probs[:, 1:] - expected).abs().max()


def test_a_float32_head_on_half_precision_is_kept():
    model = make_class("llama", dtype=torch.bfloat16)
    model.lm_head.float()
    assert head_errors(model, head="fused") < 1e-5


def test_float32_logits_of_half_precision():
    model = make_class("llama", dtype=torch.bfloat16)
    assert head_errors(model, fp32_head=True) < 1e-5 < head_errors(model)


def test_float32_logits_are_ours_alone():
    with pytest.raises(ValueError, match="fp32_head=True is not read by head='logits'"):
        TokenScorer(make_class("llama"), fp32_head=True, head="logits")
