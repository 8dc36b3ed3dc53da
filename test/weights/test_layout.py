"""Places of Hugging Face parameters in an engine's fused tensors, and what does not fit."""

from __future__ import annotations

import re

import pytest
import torch

from grpo.weights.layout import LayoutError, Place, engine_layout, view

WIDTH, QUERY, KEY, HIDDEN, VOCABULARY = 4, 6, 2, 5, 10
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def trainer_params() -> dict[str, torch.Tensor]:
    """Names and shapes of a Qwen2 layer, each tensor filled with its own number."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        ATTENTION + "q_proj.weight": (QUERY, WIDTH), ATTENTION + "q_proj.bias": (QUERY,),
        ATTENTION + "k_proj.weight": (KEY, WIDTH), ATTENTION + "k_proj.bias": (KEY,),
        ATTENTION + "v_proj.weight": (KEY, WIDTH), ATTENTION + "v_proj.bias": (KEY,),
        ATTENTION + "o_proj.weight": (WIDTH, QUERY),
        MLP + "gate_proj.weight": (HIDDEN, WIDTH), MLP + "up_proj.weight": (HIDDEN, WIDTH),
        MLP + "down_proj.weight": (WIDTH, HIDDEN),
        "model.norm.weight": (WIDTH,),
    }
    return {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}


def engine_params() -> dict[str, torch.Tensor]:
    ours = trainer_params()
    cat = {ATTENTION + "qkv_proj": ("q_proj", "k_proj", "v_proj"),
           MLP + "gate_up_proj": ("gate_proj", "up_proj")}
    out = {name: tensor for name, tensor in ours.items()
           if not re.search(r"(q|k|v|gate|up)_proj", name)}
    for fused, parts in cat.items():
        prefix = fused.rsplit(".", 1)[0] + "."
        for suffix in (".weight", ".bias"):
            if prefix + parts[0] + suffix in ours:
                out[fused + suffix] = torch.cat([ours[prefix + p + suffix] for p in parts])
    return out


def problems(ours, theirs) -> list[str]:
    with pytest.raises(LayoutError) as error:
        engine_layout(ours, theirs)
    assert "parameters do not match" in str(error.value)
    return str(error.value).split("\n  ")[1:]


def test_every_parameter_is_a_view_of_its_rows_of_the_engine():
    ours, theirs = trainer_params(), engine_params()
    places = engine_layout(ours, theirs)
    assert places.keys() == ours.keys()
    for name, param in ours.items():
        assert torch.equal(view(places[name], theirs), param), name
    assert places[ATTENTION + "v_proj.bias"] == Place(ATTENTION + "qkv_proj.bias", 8, 10)
    assert places[MLP + "up_proj.weight"] == Place(MLP + "gate_up_proj.weight", 5, 10)


def test_a_write_through_a_view_reaches_the_engine_and_nothing_else():
    theirs = engine_params()
    place = engine_layout(trainer_params(), theirs)[ATTENTION + "k_proj.weight"]
    before = {name: tensor.clone() for name, tensor in theirs.items()}
    view(place, theirs).fill_(-1.0)
    fused = before.pop(ATTENTION + "qkv_proj.weight")
    fused[QUERY : QUERY + KEY] = -1.0
    assert torch.equal(theirs[ATTENTION + "qkv_proj.weight"], fused)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in before.items())


def test_a_padded_vocabulary_is_accepted_and_its_padding_has_no_owner():
    theirs = engine_params()
    theirs["model.embed_tokens.weight"] = torch.zeros(64, WIDTH)
    place = engine_layout(trainer_params(), theirs)["model.embed_tokens.weight"]
    assert place == Place("model.embed_tokens.weight", 0, VOCABULARY)


def test_padding_of_a_whole_block_or_of_anything_else_is_an_error():
    theirs = engine_params()
    theirs["model.embed_tokens.weight"] = torch.zeros(VOCABULARY + 64, WIDTH)
    theirs["model.norm.weight"] = torch.zeros(WIDTH + 1)
    assert problems(trainer_params(), theirs) == [
        "model.embed_tokens.weight: 10 of the engine's 74 rows have a counterpart in the trainer",
        "model.norm.weight: 4 of the engine's 5 rows have a counterpart in the trainer"]


def test_a_tensor_the_engine_does_not_have_is_named():
    theirs = engine_params()
    del theirs["model.norm.weight"]
    assert problems(trainer_params(), theirs) == [
        "model.norm.weight: the engine has no tensor model.norm.weight"]


@pytest.mark.parametrize("missing", ["q_proj", "k_proj", "v_proj"])
def test_a_part_the_trainer_does_not_have_leaves_rows_uncovered(missing):
    ours = trainer_params()
    size = len(ours.pop(ATTENTION + missing + ".bias"))
    assert problems(ours, engine_params()) == [
        f"{ATTENTION}qkv_proj.bias: {10 - size} of the engine's 10 rows have a counterpart in the "
        "trainer"]


def test_an_engine_tensor_without_any_counterpart_is_named():
    theirs = {**engine_params(), "lm_head.weight": torch.zeros(VOCABULARY, WIDTH)}
    assert problems(trainer_params(), theirs) == [
        "lm_head.weight: 0 of the engine's 10 rows have a counterpart in the trainer"]


def test_another_dtype_is_named_for_each_parameter():
    theirs = engine_params()
    theirs[MLP + "gate_up_proj.weight"] = theirs[MLP + "gate_up_proj.weight"].bfloat16()
    assert problems(trainer_params(), theirs) == [
        f"{MLP}{part}.weight: dtype torch.float32 here, torch.bfloat16 in the engine"
        for part in ("gate_proj", "up_proj")]


def test_another_shape_is_named_with_both_shapes():
    ours = trainer_params()
    ours["model.norm.weight"] = torch.zeros(WIDTH + 2)
    ours[MLP + "down_proj.weight"] = torch.zeros(WIDTH, HIDDEN + 1)
    found = problems(ours, engine_params())
    assert f"{MLP}down_proj.weight: shape (4, 6) does not fit rows 0:4 of {MLP}down_proj.weight " \
           "(4, 5)" in found
    assert "model.norm.weight: shape (6,) does not fit rows 0:6 of model.norm.weight (4,)" in found


def test_a_feed_forward_layer_without_a_gate_keeps_its_own_up_projection():
    params = {MLP + "up_proj.weight": torch.zeros(HIDDEN, WIDTH)}
    assert engine_layout(params, params) == {
        MLP + "up_proj.weight": Place(MLP + "up_proj.weight", 0, HIDDEN)}
