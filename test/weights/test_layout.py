"""Places of Hugging Face parameters in an engine's fused tensors, and what does not fit."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.weights.layout import (
    LayoutError,
    Place,
    engine_layout,
    hf_names,
    view,
)

WIDTH, QUERY, KEY, HIDDEN, VOCABULARY = 4, 6, 2, 5, 10
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
    theirs = {**engine_params(), ATTENTION + "q_norm.weight": torch.zeros(VOCABULARY)}
    assert problems(trainer_params(), theirs) == [
        f"{ATTENTION}q_norm.weight: 0 of the engine's 10 rows have a counterpart in the trainer"]


def with_head(params, head: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """``params`` and a head: of its own, or one tensor with the embedding."""
    return {**params, HEAD: params[EMBEDDING] if head is None else head}


@pytest.mark.parametrize("listed_here", [False, True])
@pytest.mark.parametrize("listed_there", [False, True])
def test_a_tied_head_is_found_under_any_of_its_names(listed_here, listed_there):
    ours, theirs = trainer_params(), engine_params()
    places = engine_layout(with_head(ours) if listed_here else ours,
                           with_head(theirs) if listed_there else theirs)
    assert places[EMBEDDING] == Place(EMBEDDING, 0, VOCABULARY)
    assert places.get(HEAD) == (places[EMBEDDING] if listed_here else None)


def test_two_views_of_the_same_memory_are_one_tensor():
    """As an engine in another process hands its tensors over."""
    theirs = engine_params()
    places = engine_layout(trainer_params(), with_head(theirs, theirs[EMBEDDING].view(-1, WIDTH)))
    assert HEAD not in places
    assert {place.name for place in places.values()} == theirs.keys()


def test_the_order_of_tied_names_does_not_matter():
    ours, theirs = trainer_params(), engine_params()
    places = engine_layout({HEAD: ours[EMBEDDING], **ours}, {HEAD: theirs[EMBEDDING], **theirs})
    assert places[HEAD] == places[EMBEDDING] == Place(EMBEDDING, 0, VOCABULARY)


def test_an_untied_head_has_a_place_of_its_own():
    head = torch.zeros(VOCABULARY, WIDTH)
    places = engine_layout(with_head(trainer_params(), head),
                           with_head(engine_params(), torch.zeros(64, WIDTH)))
    assert places[HEAD] == Place(HEAD, 0, VOCABULARY)
    assert places[EMBEDDING] == Place(EMBEDDING, 0, VOCABULARY)


@pytest.mark.parametrize("listed", [False, True])
def test_a_head_that_only_one_side_ties_is_an_error_that_says_which(listed):
    head = torch.zeros(VOCABULARY, WIDTH)

    def tied(params):
        return with_head(params) if listed else params

    end = "keeps a tensor of its own; load both with the same tie_word_embeddings"
    assert problems(tied(trainer_params()), with_head(engine_params(), head)) == [
        f"{HEAD}: the trainer ties it to the embedding, the engine {end}"]
    assert problems(with_head(trainer_params(), head), tied(engine_params())) == [
        f"{HEAD}: the engine ties it to the embedding, the trainer {end}"]


@pytest.mark.parametrize("name", ["transformer.h.0.attn.c_proj.weight", "lm_head_2.weight",
                                  "model.layers.0.mlp.experts.gate_up_proj", "scale"])
def test_equal_names_and_shapes_are_not_enough_where_the_storage_is_not_known(name):
    square = {name: torch.zeros(()) if name == "scale" else torch.zeros(WIDTH, WIDTH)}
    found, = problems(trainer_params() | square, engine_params() | square)
    assert found.startswith(f"{name}: it is not known how the engine stores a module called ")


def test_projections_that_the_trainer_fuses_too_are_the_engines_tensors():
    ours = engine_params()  # as Phi-3 has them
    places = engine_layout(ours, engine_params())
    assert places == {name: Place(name, 0, len(tensor)) for name, tensor in ours.items()}


def test_rows_that_two_parameters_claim_are_named():
    ours = trainer_params() | {ATTENTION + "qkv_proj.bias": torch.zeros(10)}
    found, = problems(ours, engine_params())
    assert found.startswith(f"{ATTENTION}qkv_proj.bias: row ")
    assert found.endswith("and to another parameter of the trainer")


def test_the_parameters_of_an_engine_tensor_are_listed_in_the_order_of_its_rows():
    ours = trainer_params()
    names = hf_names(engine_layout(dict(reversed(ours.items())), engine_params()))
    assert names[ATTENTION + "qkv_proj.bias"] == [
        ATTENTION + part for part in ("q_proj.bias", "k_proj.bias", "v_proj.bias")]
    assert names[MLP + "gate_up_proj.weight"] == [
        MLP + part for part in ("gate_proj.weight", "up_proj.weight")]
    assert names.keys() == engine_params().keys()
    assert sorted(sum(names.values(), [])) == sorted(ours)


@given(parts=st.lists(st.integers(1, 9), min_size=3, max_size=3), vocabulary=st.integers(1, 200))
def test_places_tile_every_engine_tensor_but_its_padding(parts, vocabulary):
    ours = {f"{ATTENTION}{name}_proj.weight": torch.empty(rows, WIDTH, device="meta")
            for name, rows in zip("qkv", parts, strict=True)}
    ours[EMBEDDING] = torch.empty(vocabulary, WIDTH, device="meta")
    padded = -(-vocabulary // 64) * 64
    theirs = {ATTENTION + "qkv_proj.weight": torch.empty(sum(parts), WIDTH, device="meta"),
              EMBEDDING: torch.empty(padded, WIDTH, device="meta")}
    owners = {name: [] for name in theirs}
    for place in engine_layout(ours, theirs).values():
        owners[place.name] += range(place.start, place.stop)
    assert sorted(owners[ATTENTION + "qkv_proj.weight"]) == list(range(sum(parts)))
    assert owners[EMBEDDING] == list(range(vocabulary))


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
