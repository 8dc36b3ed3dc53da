"""Rows laid end to end that share their prompts: the numbers of padded rows, from fewer tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo import data
from grpo.objectives import GRPOLoss, TokenScorer, packed_attention, total_loss
from grpo.objectives.packing import pack
from grpo.policies.scoring import score_rollout

from .causal_classes import make_class

#: Of groups: the length of the prompt, and those of the responses; some are empty.
GROUPS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
                  min_size=1, max_size=3)
EXAMPLE = [(4, [3, 5, 0, 1]), (1, [2]), (3, [0, 4])]


def batch_of(groups, *, seed: int = 0, vocabulary: int = 23):
    """``(tokens_BT, attention_mask_BT, assistant_mask_BT)``; the rows of a group are apart."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(number, length, response) for number, (length, responses) in enumerate(groups)
            for response in responses]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator)]
    prompts = torch.randint(1, vocabulary, (len(groups), 5), generator=generator)
    T = max(length + response for _, length, response in rows) + 1
    tokens = torch.randint(1, vocabulary, (len(rows), T), generator=generator)
    columns, assistant = torch.arange(T), []
    attention = torch.stack([columns < length + response for _, length, response in rows])
    for row, (number, length, _) in enumerate(rows):
        tokens[row, :length] = prompts[number, :length]
        assistant.append((columns >= length) & attention[row])
    return tokens * attention, attention, torch.stack(assistant)


def scores_and_gradient(model, batch, **options):
    """Log-probs, and the gradient of a sum in which each of them has a weight of its own."""
    scorer = TokenScorer(model, **options)
    log_probs, _ = scorer(*batch)
    model.zero_grad()
    (log_probs * torch.arange(log_probs.numel()).cos().view_as(log_probs)).sum().backward()
    return scorer, log_probs.detach(), {name: param.grad.clone() for name, param
                                        in model.named_parameters() if param.grad is not None}


def assert_like_padded(model, batch, *, sharing: bool = True, atol: float = 1e-6) -> None:
    _, padded, expected = scores_and_gradient(model, batch)
    scorer, packed, actual = scores_and_gradient(model, batch, packing=True)
    assert scorer.shares_prompts == sharing
    torch.testing.assert_close(packed, padded, rtol=0, atol=atol)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=10 * atol, msg=name)


class TestPack:
    @given(groups=GROUPS, share=st.booleans())
    def test_each_token_is_there_once_and_found(self, groups, share):
        tokens, attention, assistant = batch_of(groups)
        packed = pack(tokens, attention, assistant if share else None)
        found = packed.tokens[0][packed.slots].view_as(tokens)
        assert torch.equal(found[attention], tokens[attention])
        places = packed.position_ids[0][packed.slots].view_as(tokens)
        assert torch.equal(places[attention], torch.arange(tokens.shape[1]).expand_as(tokens)
                           [attention])
        if not share:
            assert packed.tokens.numel() == attention.sum() and packed.segments.key_slots is None
            assert packed.slots.view_as(tokens)[attention].tolist() == list(range(attention.sum()))

    @given(groups=GROUPS)
    def test_a_prompt_is_kept_once(self, groups):
        tokens, attention, assistant = batch_of(groups)
        packed = pack(tokens, attention, assistant)
        starts = {tuple(row[:first].tolist()) for row, first in zip(
            tokens, data.first_scored(assistant, attention), strict=True)}
        assert packed.tokens.numel() == assistant.sum() + sum(map(len, starts))

    @given(groups=GROUPS)
    def test_a_row_attends_to_all_of_itself(self, groups):
        tokens, attention, assistant = batch_of(groups)
        packed = pack(tokens, attention, assistant)
        segments = packed.segments
        slots = segments.key_slots
        if slots is None:
            slots = torch.arange(packed.tokens.numel())
        lengths = segments.cu_seq_lens_k.diff().tolist()
        queries = segments.cu_seq_lens_q.diff().tolist()
        assert (max(queries), max(lengths)) == (segments.max_length_q, segments.max_length_k)
        for row, keys in enumerate(slots.split(lengths)):
            whole = tokens[row][attention[row]].tolist() if queries[row] else []
            assert packed.tokens[0, keys].tolist() == whole
        assert segments.cu_seq_lens_q.dtype == segments.cu_seq_lens_k.dtype == torch.int32


class TestScores:
    def test_fewer_tokens_pass_through_the_model(self, tiny_model):
        batch, seen = batch_of(EXAMPLE), []
        scorer = TokenScorer(tiny_model, packing=True)
        assert scorer.shares_prompts
        tiny_model.model.layers[0].register_forward_pre_hook(
            lambda _, args: seen.append(args[0].shape[1]))
        scorer(*batch)
        assert seen == [batch[2].sum() + 4 + 1 + 3]

    @given(groups=GROUPS, seed=st.integers(0, 99))
    def test_of_groups_are_those_of_padded_rows(self, model, groups, seed):
        assert_like_padded(model, batch_of(groups, seed=seed))

    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral", "phi3", "qwen3_moe",
                                      "deepseek_v3", "gpt2", "starcoder2"])
    def test_of_other_classes(self, name):
        """Among them such as have sliding windows, values of another width, and no rotation."""
        assert_like_padded(make_class(name).eval(), batch_of(EXAMPLE, vocabulary=40), atol=1e-5)

    def test_of_a_window_that_ends_within_the_prompt(self):
        model = make_class("mistral", sliding_window=3).eval()
        assert model.config.sliding_window == 3
        assert_like_padded(model, batch_of([(4, [5, 5, 3])], vocabulary=40), atol=1e-5)

    def test_with_layers_that_are_computed_again(self, make_model):
        model = make_model().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_like_padded(model, batch_of(EXAMPLE))

    def test_of_adapters(self, make_model):
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(make_model(), peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        assert_like_padded(model, batch_of(EXAMPLE))

    def test_where_attention_is_eager_nothing_is_shared(self, make_model):
        model = make_model()
        model.set_attn_implementation("eager")
        assert_like_padded(model, batch_of(EXAMPLE), sharing=False)
        assert model.config._attn_implementation == "eager"

    def test_an_attention_that_is_changed_afterwards_is_refused(self, make_model):
        model = make_model()
        scorer = TokenScorer(model, packing=True)
        assert scorer.shares_prompts
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="build the loss anew"):
            scorer(*batch_of(EXAMPLE))

    def test_padded_rows_of_such_a_model_are_those_of_sdpa(self, make_model):
        model, batch = make_model(), batch_of(EXAMPLE)
        expected = TokenScorer(model)(*batch)
        packed_attention.install(model)
        assert all(map(torch.equal, TokenScorer(model)(*batch), expected))


def test_attention_that_the_kernels_lack_is_refused():
    segments = pack(*batch_of(EXAMPLE)).segments._asdict()
    states = torch.randn(1, 1, 8, 4)
    for option in ({"dropout": 0.1}, {"softcap": 30.0}, {"s_aux": torch.ones(1)}):
        with pytest.raises(ValueError, match="no kernel"):
            packed_attention.attend(None, states, states, states, None, **segments, **option)


def test_a_model_that_ignores_the_segments_shares_nothing(make_model, caplog):
    model = make_model()
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: attend(*args, **{
            key: value for key, value in kwargs.items() if not key.startswith(("cu_", "key_"))})
    assert_like_padded(model, batch_of(EXAMPLE), sharing=False)
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def group(tiny_model, make_batch):
    """Six completions of one prompt."""
    batch = make_batch(tiny_model, prompts=(3,) * 6, responses=(5, 1, 6, 3, 2, 4))
    batch["tokens", "full"][:, :3] = batch["tokens", "full"][:1, :3]
    batch["group_id"] = torch.zeros(6, dtype=torch.int64)
    return batch


def test_a_rollout_is_scored_alike_in_pieces_of_any_size(tiny_model, group):
    expected, _ = score_rollout(TokenScorer(tiny_model), group, max_tokens=100)
    scorer = TokenScorer(tiny_model, packing=True)
    for most in (1, 9, 12, 100):
        actual, _ = score_rollout(scorer, group, max_tokens=most)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_the_loss_of_micro_batches_has_the_gradient_of_padded_rows(tiny_model, group):
    def gradient(**options):
        loss = GRPOLoss(tiny_model, **options)
        normalizer = loss.normalizer(group)
        tiny_model.zero_grad()
        for piece in data.split_rows(group, max_tokens=12, packed=loss.scorer.shares_prompts):
            total_loss(loss(piece, normalizer=normalizer)).backward()
        return [param.grad.clone() for param in tiny_model.parameters()]

    for ours, theirs in zip(gradient(packing=True), gradient(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_that_cannot_be_tried_is_refused_unless_wrapped_for_data_parallel(tiny_model):
    class Recurrent(nn.Module):
        """Whose packed rows would see each other, as it reads no positions."""

        def forward(self, input_ids, attention_mask=None, **_):
            raise AssertionError

    with pytest.raises(ValueError, match=r"Recurrent.*get_input_embeddings.*packing=False"):
        TokenScorer(Recurrent(), packing=True)

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    assert TokenScorer(Wrapper(tiny_model), packing=True).packing
