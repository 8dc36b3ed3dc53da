"""TransformersPolicy against plain forward passes of the same model."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grpo import data
from grpo.policies.base import Sampling
from grpo.policies.transformers import TransformersPolicy

EOS, PAD = 1, 0
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [14, 15, 16, 17]]


def make_policy(model, *, max_tokens=6, temperature=1.0, seed=0, eos=(EOS,), max_model_len=64,
                **options) -> TransformersPolicy:
    return TransformersPolicy(
        model, Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed),
        pad_token_id=PAD, eos_token_ids=eos, max_model_len=max_model_len, **options)


def rows(batch):
    """Prompt, response and log-probs of each row, without padding."""
    for i in range(batch.batch_size[0]):
        real, mask = batch[data.ATTENTION_MASK][i], batch[data.ASSISTANT_MASK][i]
        yield (batch[data.TOKENS][i][real & ~mask].tolist(), batch[data.TOKENS][i][mask].tolist(),
               batch[data.LOG_PROBS][i][mask])


@torch.no_grad()
def next_logits(model, tokens: list[int]) -> torch.Tensor:
    """An independent forward pass: one row, no padding, no cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def expected_log_probs(model, prompt, response, temperature=1.0) -> torch.Tensor:
    logits = next_logits(model, prompt + response)[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_an_independent_forward_pass(byte_model, temperature):
    batch = make_policy(byte_model, temperature=temperature).generate_from_ids(PROMPTS * 3)
    lengths = set()
    for prompt, response, log_probs in rows(batch):
        expected = expected_log_probs(byte_model, prompt, response, temperature)
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
        lengths.add(len(prompt))
    assert lengths == {1, 3, 4, 5}
    # Log-probs of samples vary; a constant would not have been a comparison.
    assert batch[data.LOG_PROBS][batch[data.ASSISTANT_MASK]].std() > 0.1


def test_padding_does_not_shift_the_positions_of_a_model_that_learned_them():
    # Rotary positions are relative and would forgive a shift; GPT-2's are absolute.
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=32, n_embd=16, n_layer=1,
                                       n_head=2, initializer_range=0.5, bos_token_id=None,
                                       eos_token_id=EOS)).eval()
    for prompt, response, log_probs in rows(make_policy(model).generate_from_ids(PROMPTS)):
        torch.testing.assert_close(log_probs, expected_log_probs(model, prompt, response),
                                   atol=1e-5, rtol=0)


def test_greedy_decoding_takes_the_most_likely_token(byte_model):
    batch = make_policy(byte_model, temperature=0.0).generate_from_ids(PROMPTS)
    for prompt, response, log_probs in rows(batch):
        logits = next_logits(byte_model, prompt + response)[len(prompt) - 1 : -1]
        assert response == logits.argmax(-1).tolist()
        torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values, atol=1e-5,
                                   rtol=0)


def test_a_row_does_not_depend_on_the_rows_beside_it(byte_model):
    policy = make_policy(byte_model, temperature=0.0)
    together = list(rows(policy.generate_from_ids(PROMPTS)))
    for prompt, (_, response, log_probs) in zip(PROMPTS, together, strict=True):
        (_, alone, alone_log_probs), = rows(policy.generate_from_ids([prompt]))
        assert alone == response
        torch.testing.assert_close(alone_log_probs, log_probs, atol=1e-5, rtol=0)


def test_the_end_token_is_kept_and_ends_the_row(byte_model):
    # Ends are rare in a random model, so several tokens count as one.
    ends = tuple(range(100, 130))
    batch = make_policy(byte_model, eos=ends).generate_from_ids(PROMPTS * 8)
    ended = []
    for (_, response, _), reason, row in zip(rows(batch), batch[data.FINISH_REASON],
                                             batch[data.RESPONSE_TOKENS], strict=True):
        assert not any(token in ends for token in response[:-1])
        ended.append(response[-1] in ends)
        assert reason == (data.FINISH_STOP if ended[-1] else data.FINISH_LENGTH)
        assert len(response) == 6 or ended[-1]
        assert (row[len(response):] == PAD).all()
    assert 0 < sum(ended) < len(ended)


def test_with_ignored_ends_every_row_has_all_its_tokens(byte_model):
    ends = tuple(range(100, 130))
    batch = make_policy(byte_model, eos=ends, ignore_eos=True).generate_from_ids(PROMPTS * 4)
    assert (batch[data.ASSISTANT_MASK].sum(-1) == 6).all()
    assert (batch[data.FINISH_REASON] == data.FINISH_LENGTH).all()
    assert torch.isin(batch[data.RESPONSE_TOKENS][:, :-1], torch.tensor(ends)).any()


def test_no_row_outgrows_the_context(byte_model):
    batch = make_policy(byte_model, eos=(), max_model_len=7).generate_from_ids(PROMPTS)
    sizes = [len(response) for _, response, _ in rows(batch)]
    assert sizes == [min(6, 7 - len(prompt)) for prompt in PROMPTS] == [2, 6, 4, 3]
    assert (batch[data.FINISH_REASON] == data.FINISH_LENGTH).all()
    # The rows that still had room went on with the right positions.
    for prompt, response, log_probs in rows(batch):
        torch.testing.assert_close(log_probs, expected_log_probs(byte_model, prompt, response),
                                   atol=1e-5, rtol=0)


def test_seed_and_number_of_the_call_decide_the_tokens(byte_model):
    def draws(count, **options):
        policy = make_policy(byte_model, **options)
        return [policy.generate_from_ids(PROMPTS)[data.TOKENS] for _ in range(count)]

    first, again, other = draws(2), draws(2), draws(1, seed=1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    resumed = make_policy(byte_model)
    resumed.calls = 1
    assert torch.equal(resumed.generate_from_ids(PROMPTS)[data.TOKENS], first[1])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_restored(byte_model, training):
    byte_model.train(training)
    modes = []
    byte_model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    make_policy(byte_model).generate_from_ids(PROMPTS)
    assert set(modes) == {False}
    assert byte_model.training is training


def test_the_mode_is_restored_when_generation_fails(byte_model):
    byte_model.train()
    with pytest.raises(IndexError):
        make_policy(byte_model).generate_from_ids([[10_000]])
    assert byte_model.training


def test_the_policy_owns_no_parameter_and_leaves_no_gradient(byte_model):
    policy = make_policy(byte_model)
    policy.generate_from_ids(PROMPTS)
    assert not list(policy.parameters())
    assert all(param.grad is None for param in byte_model.parameters())


def test_new_weights_are_in_use_at_once(byte_model):
    policy = make_policy(byte_model, temperature=0.0)
    before = policy.generate_from_ids(PROMPTS)[data.TOKENS]
    with torch.no_grad():
        for param in byte_model.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    assert not torch.equal(policy.generate_from_ids(PROMPTS)[data.TOKENS], before)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_drawn_from_the_softmax(tiny_model, temperature):
    count = 4000
    policy = make_policy(tiny_model, max_tokens=1, temperature=temperature, seed=11)
    batch = policy.generate_from_ids([[5, 6]] * count)
    observed = batch[data.RESPONSE_TOKENS][:, 0].bincount(minlength=23).double()
    expected = count * (next_logits(tiny_model, [5, 6])[-1] / temperature).softmax(-1)
    chi_square = ((observed - expected).square() / expected).sum().item()
    # Mean and variance of chi-square with 22 degrees of freedom are 22 and 44.
    assert chi_square < 22 + 4 * math.sqrt(44)
    # The test would notice: a wrong temperature is far outside.
    wrong = count * (next_logits(tiny_model, [5, 6])[-1] / (0.8 * temperature)).softmax(-1)
    assert ((observed - wrong).square() / wrong).sum() > 22 + 8 * math.sqrt(44)
