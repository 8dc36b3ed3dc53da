"""The gradient of an optimizer batch does not depend on how the batch is computed."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from grpo import GRPOLoss, total_loss
from grpo.data import split_rows, token_keys

CONFIGURATIONS = [
    {"aggregation": "token", "kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01},
    {"aggregation": "sequence", "objective": "reinforce", "kl_to_inference_coeff": 0.1},
    {"aggregation": "dr_grpo", "constant_length": 5, "temperature": 0.7, "entropy_coeff": 0.1},
]

# Prompt and response length of each row.
ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=2, max_size=7).filter(
    lambda rows: any(response for _, response in rows))


@st.composite
def cases(draw):
    """Options of the loss and arguments of ``make_batch``."""
    rows = draw(ROWS)
    prompts, responses = zip(*rows, strict=True)
    errors = draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
    return draw(st.sampled_from(CONFIGURATIONS)), {
        "prompts": prompts, "responses": responses, "error_rows": errors,
        "seed": draw(st.integers(0, 1000)), "token_level": draw(st.booleans())}


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["f64", "f32"])
def model(request, make_model):
    # At the usual scale of fresh weights. With larger ones the terms of tokens cancel, and the
    # float32 gradient of the whole batch is itself further than 1e-6 from its float64 value.
    return make_model(dtype=request.param, initializer_range=0.02)


def gradient(model, loss, pieces, normalizer=None):
    """Gradient of all parameters, flat, summed over ``pieces``."""
    model.zero_grad()
    for piece in pieces:
        total_loss(loss(piece, normalizer=normalizer)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


#: Of the gradient's norm.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def assert_same(actual, expected, tolerance=None):
    tolerance = tolerance or TOLERANCE[expected.dtype]
    assert (actual - expected).norm() <= tolerance * expected.norm()


def whole_batch(model, make_batch, case):
    options, layout = case
    loss, batch = GRPOLoss(model, **options), make_batch(model, **layout)
    return loss, batch, gradient(model, loss, [batch])


@settings(max_examples=12)
@given(case=cases(), pieces=st.integers(1, 8))
def test_micro_batches(model, make_batch, case, pieces):
    loss, batch, expected = whole_batch(model, make_batch, case)
    parts = split_rows(batch, num_micro_batches=pieces)
    assert_same(gradient(model, loss, parts, loss.normalizer(batch)), expected)


@settings(max_examples=12)
@given(case=cases(), max_tokens=st.integers(1, 60))
def test_token_budget(model, make_batch, case, max_tokens):
    loss, batch, expected = whole_batch(model, make_batch, case)
    parts = split_rows(batch, max_tokens=max_tokens)
    assert_same(gradient(model, loss, parts, loss.normalizer(batch)), expected)


@settings(max_examples=12)
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_row_order(model, make_batch, case, order):
    loss, batch, expected = whole_batch(model, make_batch, case)
    rows = list(range(len(batch)))
    order.shuffle(rows)
    assert_same(gradient(model, loss, [batch[rows]]), expected)


@settings(max_examples=12)
@given(case=cases(), columns=st.integers(1, 9), filler=st.integers(0, 22))
def test_padding_columns(model, make_batch, case, columns, filler):
    loss, batch, expected = whole_batch(model, make_batch, case)
    wide = batch.copy()
    for key in token_keys(batch):
        extra = batch[key].new_full((len(batch), columns), filler)
        wide[key] = torch.cat([batch[key], extra * ("masks" not in key)], 1).to(batch[key].dtype)
    assert_same(gradient(model, loss, [wide]), expected)


@settings(max_examples=12)
@given(case=cases(), head=st.sampled_from(["chunked", "logits"]))
def test_packing(model, make_batch, case, head):
    _, batch, expected = whole_batch(model, make_batch, case)
    loss = GRPOLoss(model, packing=True, head=head, **case[0])
    assert_same(gradient(model, loss, [batch]), expected)


@settings(max_examples=12)
@given(case=cases(), chunk_size=st.integers(1, 30))
def test_head_chunks(model, make_batch, case, chunk_size):
    _, batch, expected = whole_batch(model, make_batch, case)
    for options in ({"head": "chunked", "head_chunk_size": chunk_size}, {"head": "logits"}):
        loss = GRPOLoss(model, **options, **case[0])
        assert_same(gradient(model, loss, [batch]), expected)


@settings(max_examples=12)
@given(case=cases(), packing=st.booleans())
def test_attention_implementation(model, make_batch, case, packing):
    _, batch, expected = whole_batch(model, make_batch, case)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    try:
        actual = gradient(model, GRPOLoss(model, packing=packing, **case[0]), [batch])
    finally:
        model.set_attn_implementation("sdpa")
    # Eager attention takes its softmax in float32 whatever the model's type.
    assert_same(actual, expected, tolerance=TOLERANCE[torch.float32])


@settings(max_examples=12)
@given(case=cases(), cut=st.integers(1, 6))
def test_data_parallel_ranks(model, make_batch, case, cut):
    """Each rank has its own model and loss; only counts and gradients are exchanged."""
    _, batch, expected = whole_batch(model, make_batch, case)
    ranks = []
    for part in (batch[:cut], batch[cut:]):
        if len(part):
            replica = copy.deepcopy(model)
            ranks.append((replica, GRPOLoss(replica, **case[0]), part))
    normalizer = sum(loss.normalizer(part) for _, loss, part in ranks)
    actual = sum(gradient(replica, loss, [part], normalizer) for replica, loss, part in ranks)
    assert_same(actual, expected)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=lambda o: o["aggregation"])
def test_a_rank_without_any_valid_row_adds_nothing(model, make_batch, options):
    loss, batch = GRPOLoss(model, **options), make_batch(model, error_rows=(2, 3))
    assert loss.normalizer(batch[2:]) == 0
    assert total_loss(loss(batch[2:])) == 0
    expected = gradient(model, loss, [batch])
    normalizer = loss.normalizer(batch[:2]) + loss.normalizer(batch[2:])
    assert_same(gradient(model, loss, [batch[:2], batch[2:]], normalizer), expected)
