"""The gradient of an optimizer batch does not depend on how the batch is computed."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from grpo import GRPOLoss, total_loss
from grpo.data import split_rows, token_keys
from grpo.objectives import packed_attention

from ..objectives.batches import with_every_entry

CONFIGURATIONS = {
    "token": {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.01},
    "sequence": {"aggregation": "sequence", "objective": "reinforce",
                 "kl_to_inference_coeff": 0.1},
    "dr_grpo": {"aggregation": "dr_grpo", "constant_length": 5, "temperature": 0.7,
                "entropy_coeff": 0.1},
    "gspo": {"objective": "gspo", "aggregation": "sequence", "clip_epsilon": (0.1, 0.1)},
    "cispo of prompts": {"objective": "cispo", "aggregation": "prompt"},
    "strictly on-policy": {"proximal": "current", "mismatch": {"tis": 1.3}, "entropy_coeff": 0.01},
    "scored": {"proximal": "scored", "aggregation": "prompt",
               "mismatch": {"mis": (0.3, 3.0), "sequence_reject": (0.2, 5.0)}},
    "off-policy mask": {"off_policy_delta": 0.1, "objective": "dppo",
                        "objective_options": {"divergence": "kl"}},
    "unbiased kl": {"kl_to_ref_coeff": 0.2, "kl_estimator": "unbiased_k3", "objective": "sapo"},
    "high entropy": {"high_entropy_only": True, "objective": "gspo_token",
                     "clip_epsilon": (0.1, 0.1)},
    "listwise": {"objective": "maxent_listwise", "aggregation": "prompt",
                 "objective_options": {"clip_coeff": 0.5}},
    "distillation": {"distill_coeff": 0.5, "distill_temperature": 1.5, "temperature": 0.7},
}
SPLIT_PROMPTS = ["cispo of prompts", "scored"]

# Prompt and response length of each row.
LONGEST = 6
ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, LONGEST)), min_size=2,
                max_size=7).filter(lambda rows: any(response for _, response in rows))


@st.composite
def layouts(draw):
    """Arguments of ``make_batch``."""
    rows = draw(ROWS)
    prompts, responses = zip(*rows, strict=True)
    errors = draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
    return {"prompts": prompts, "responses": responses, "error_rows": errors,
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


def full_batch(model, make_batch, options, *, seed=0, token_level=False, **layout):
    by_token = token_level and options.get("objective") != "gspo"
    return with_every_entry(make_batch(model, seed=seed, token_level=by_token, **layout), seed=seed)


@pytest.fixture(params=CONFIGURATIONS)
def options(request):
    return CONFIGURATIONS[request.param]


def whole_batch(model, make_batch, options, layout):
    loss, batch = GRPOLoss(model, **options), full_batch(model, make_batch, options, **layout)
    return loss, batch, gradient(model, loss, [batch])


def compares_rows(options):
    return options.get("objective") == "maxent_listwise"


def fits(head, options):
    if "distill_coeff" in options:
        return head not in ("logits", "fused")
    return not (compares_rows(options) and head == "fused")


EXAMPLES = settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(("split", "most"), [("num_micro_batches", 8), ("max_tokens", 60)])
@EXAMPLES
@given(layout=layouts(), value=st.data())
def test_micro_batches(model, make_batch, options, layout, split, most, value):
    loss, batch, expected = whole_batch(model, make_batch, options, layout)
    parts = split_rows(batch, whole_groups=compares_rows(options),
                       **{split: value.draw(st.integers(1, most))})
    assert_same(gradient(model, loss, parts, loss.normalizer(batch)), expected)


@EXAMPLES
@given(layout=layouts(), order=st.randoms(use_true_random=False))
def test_row_order(model, make_batch, options, layout, order):
    loss, batch, expected = whole_batch(model, make_batch, options, layout)
    rows = list(range(len(batch)))
    order.shuffle(rows)
    assert_same(gradient(model, loss, [batch[rows]]), expected)


@EXAMPLES
@given(layout=layouts(), columns=st.integers(1, 9), filler=st.integers(0, 22))
def test_padding_columns(model, make_batch, options, layout, columns, filler):
    loss, batch, expected = whole_batch(model, make_batch, options, layout)
    wide = batch.copy()
    for key in token_keys(batch):
        value = batch[key]
        extra = value.new_full((len(batch), columns, *value.shape[2:]),
                               0 if "masks" in key else filler)
        wide[key] = torch.cat([value, extra], 1)
    assert wide["tokens", "full"].shape[1] > batch["tokens", "full"].shape[1]
    assert_same(gradient(model, loss, [wide]), expected)


@EXAMPLES
@given(layout=layouts(), head=st.sampled_from(["fused", "chunked", "logits"]))
def test_packing(model, make_batch, options, layout, head):
    _, batch, expected = whole_batch(model, make_batch, options, layout)
    loss = GRPOLoss(model, packing=True, head=head if fits(head, options) else "auto", **options)
    assert_same(gradient(model, loss, [batch]), expected)


@EXAMPLES
@given(layout=layouts(), chunk_size=st.integers(1, 30))
def test_heads_and_their_chunks(model, make_batch, options, layout, chunk_size):
    _, batch, expected = whole_batch(model, make_batch, options, layout)
    for head, size in (("auto", chunk_size), ("chunked", chunk_size), ("logits", None),
                       ("fused", max(chunk_size, LONGEST))):
        if fits(head, options):
            loss = GRPOLoss(model, head=head, head_chunk_size=size, **options)
            assert_same(gradient(model, loss, [batch]), expected)


@EXAMPLES
@given(layout=layouts(), packing=st.booleans())
def test_attention_implementation(model, make_batch, options, layout, packing):
    _, batch, expected = whole_batch(model, make_batch, options, layout)
    assert model.config._attn_implementation in ("sdpa", packed_attention.NAME)
    model.set_attn_implementation("eager")
    try:
        actual = gradient(model, GRPOLoss(model, packing=packing, **options), [batch])
    finally:
        model.set_attn_implementation("sdpa")
    # Eager attention takes its softmax in float32 whatever the model's type.
    assert_same(actual, expected, tolerance=TOLERANCE[torch.float32])


def ranks_gradient(model, options, parts):
    """Each rank has its own model and loss; only counts and gradients are exchanged."""
    ranks = []
    for part in parts:
        replica = copy.deepcopy(model)
        ranks.append((replica, GRPOLoss(replica, **options), part))
    normalizer = sum(loss.normalizer(part) for _, loss, part in ranks)
    return sum(gradient(replica, loss, [part], normalizer) for replica, loss, part in ranks)


@EXAMPLES
@given(layout=layouts(), cut=st.integers(1, 6))
def test_data_parallel_ranks(model, make_batch, options, layout, cut):
    _, batch, expected = whole_batch(model, make_batch, options, layout)
    if compares_rows(options):
        cut += cut % 2  # between prompts, which have two rows each
    parts = [part for part in (batch[:cut], batch[cut:]) if len(part)]
    assert_same(ranks_gradient(model, options, parts), expected)


@pytest.mark.parametrize("name", SPLIT_PROMPTS)
def test_a_prompt_on_two_ranks(model, make_batch, name):
    """Its sequences share one weight, though no rank sees all of its tokens."""
    options = CONFIGURATIONS[name]
    _, batch, expected = whole_batch(model, make_batch, options, {})
    batch["group_id"] = torch.tensor([7, 3, 7, 7])
    expected = gradient(model, GRPOLoss(model, **options), [batch])
    assert_same(ranks_gradient(model, options, [batch[:2], batch[2:]]), expected)
    replicas = [batch[:2].copy(), batch[2:].copy()]
    replicas[1]["group_id"] = torch.tensor([8, 8])  # another prompt: other weights
    other = ranks_gradient(model, options, replicas)
    assert (other - expected).norm() > 1e-3 * expected.norm()


def test_a_rank_without_any_valid_row_adds_nothing(model, make_batch, options):
    loss = GRPOLoss(model, **options)
    batch = full_batch(model, make_batch, options, error_rows=(2, 3))
    assert loss.normalizer(batch[2:]).count == 0
    assert total_loss(loss(batch[2:])) == 0
    expected = gradient(model, loss, [batch])
    normalizer = loss.normalizer(batch[:2]) + loss.normalizer(batch[2:])
    assert_same(gradient(model, loss, [batch[:2], batch[2:]], normalizer), expected)


def test_every_configuration_has_a_gradient_of_its_own(model, make_batch):
    """So that none of the tests above compares zeros, or one configuration with itself."""
    gradients = [whole_batch(model, make_batch, options, {"error_rows": (1,)})[2]
                 for options in CONFIGURATIONS.values()]
    for i, one in enumerate(gradients):
        for other in gradients[:i]:
            assert (one - other).norm() > 1e-3 * max(one.norm(), other.norm())
