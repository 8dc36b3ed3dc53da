"""Weights of the rows' tokens and the normalizers they come from."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

from grpo.objectives.aggregate import (
    Normalizer,
    check_aggregation,
    check_whole_groups,
    count,
    row_weights,
)

from . import reference

AGGREGATIONS = {"token": None, "sequence": None, "prompt": None, "dr_grpo": 5}


def aggregate(values, mask, groups, normalizer, aggregation):
    """The loss as it is computed: the sum of weight times term over the loss tokens."""
    weights = row_weights(mask, normalizer, aggregation=aggregation, group_id_B=groups)
    assert weights.dtype == torch.float64 and weights.shape == (len(mask),)
    assert weights.isfinite().all()
    return (weights[:, None] * values)[mask].sum()


@st.composite
def masked_values(draw):
    """Values, mask and groups; the ids of the groups are neither consecutive nor sorted."""
    B, T = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B))
    groups = draw(st.lists(st.sampled_from([70, 3, -5, 12]), min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (torch.randn(B, T, generator=generator).double(), torch.tensor(mask),
            torch.tensor(groups))


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
@given(case=masked_values())
def test_equals_the_reference(aggregation, length, case):
    values, mask, groups = case
    norm = count(mask, aggregation=aggregation, constant_length=length, group_id_B=groups)
    actual = aggregate(values, mask, groups, norm, aggregation)
    rows = [(SimpleNamespace(group=int(groups[b])), values[b][mask[b]])
            for b in range(len(mask)) if mask[b].any()]
    expected = reference.aggregate(*zip(*rows, strict=True), aggregation, length) if rows else 0.0
    assert actual.item() == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
@given(case=masked_values(), cuts=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_normalizers_and_shares_of_parts_add_up(aggregation, length, case, cuts):
    """Wherever the rows are cut, also within a prompt."""
    values, mask, groups = case
    borders = [0, *sorted(cuts), len(mask)]
    parts = [slice(*pair) for pair in zip(borders[:-1], borders[1:], strict=True)]

    def normalizer(part=slice(None)):
        return count(mask[part], aggregation=aggregation, constant_length=length,
                     group_id_B=groups[part])

    norm, added = normalizer(), sum(normalizer(part) for part in parts)
    assert added.count.dtype == torch.float64 and torch.equal(added.count, norm.count)
    whole = aggregate(values, mask, groups, norm, aggregation)
    shares = [aggregate(values[part], mask[part], groups[part], added, aggregation)
              for part in parts]
    torch.testing.assert_close(sum(shares), whole)


class TestPrompts:
    @given(case=masked_values(), cut=st.integers(0, 6))
    def test_a_prompt_on_two_ranks_is_counted_once(self, case, cut):
        _, mask, groups = case

        def normalizer(part):
            return count(mask[part], aggregation="prompt", group_id_B=groups[part])

        whole = normalizer(slice(None))
        tokens = {}
        for group, number in zip(groups.tolist(), mask.sum(1).tolist(), strict=True):
            if number:
                tokens[group] = tokens.get(group, 0) + number
        for norm in (whole, normalizer(slice(0, cut)) + normalizer(slice(cut, None)),
                     normalizer(slice(cut, None)) + normalizer(slice(0, cut))):
            assert norm.group_G.tolist() == sorted(tokens)
            assert dict(zip(norm.group_G.tolist(), norm.tokens_G.tolist(), strict=True)) == tokens
            assert norm.count.item() == len(tokens)

    @given(case=masked_values())
    def test_an_uncounted_prompt_is_an_error(self, case):
        _, mask, groups = case
        rows = mask.any(1)
        assume(rows.any())
        others = groups != groups[rows][0]
        norm = count(mask[others], aggregation="prompt", group_id_B=groups[others])
        assume(len(norm.group_G))
        with pytest.raises(ValueError, match="whole optimizer batch"):
            row_weights(mask, norm, aggregation="prompt", group_id_B=groups)

    @given(case=masked_values(), rows=st.data())
    def test_a_prompt_that_was_cut_is_found(self, case, rows):
        _, mask, groups = case
        norm = count(mask, aggregation="prompt", group_id_B=groups)
        chosen = rows.draw(st.sets(st.integers(0, len(mask) - 1), min_size=1).map(sorted))
        here = set(groups[chosen][mask[chosen].any(1)].tolist())
        missing = {int(groups[b]) for b in range(len(mask)) if mask[b].any() and b not in chosen}
        cut = sorted(here & missing)
        if not cut:
            check_whole_groups(mask[chosen], norm, group_id_B=groups[chosen])
            return
        with pytest.raises(ValueError, match="whole_groups=True") as error:
            check_whole_groups(mask[chosen], norm, group_id_B=groups[chosen])
        assert f"prompts {cut} are" in str(error.value)

    def test_an_uncounted_prompt_without_tokens_is_none(self):
        groups, mask = torch.tensor([9, 1, 5]), torch.tensor([[False], [True], [False]])
        norm = count(mask[1:2], aggregation="prompt", group_id_B=groups[1:2])
        weights = row_weights(mask, norm, aggregation="prompt", group_id_B=groups)
        assert weights[1] == 1 and weights.isfinite().all()


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
def test_without_any_token_there_is_nothing_to_weigh(aggregation, length):
    mask, groups = torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    norm = count(mask, aggregation=aggregation, constant_length=length, group_id_B=groups)
    assert norm.count == 0
    values = torch.full((2, 3), torch.nan)
    assert aggregate(values, mask, groups, norm, aggregation) == 0


def test_a_normalizer_below_one_is_used_as_it_is():
    norm = Normalizer(torch.tensor(0.5, dtype=torch.float64))
    for aggregation in ("token", "sequence"):
        assert row_weights(torch.ones(1, 1).bool(), norm, aggregation=aggregation).item() == 2


@pytest.mark.parametrize(("aggregation", "length", "named"), [
    ("mean", None, "aggregation='mean'"), ("dr_grpo", None, "constant_length"),
    ("dr_grpo", 0, "constant_length"), ("token", 8, "constant_length=8"),
    ("sequence", 8, "constant_length=8"), ("prompt", 8, "constant_length=8")])
def test_wrong_options_are_errors(aggregation, length, named):
    with pytest.raises(ValueError, match=named):
        check_aggregation(aggregation, length)
