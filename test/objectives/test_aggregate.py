"""Aggregation of token terms and its normalizers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo.objectives.aggregate import aggregate, check_aggregation, normalizer

AGGREGATIONS = {"token": None, "sequence": None, "dr_grpo": 5}


def loops(values, mask, aggregation):
    rows = [[v for v, m in zip(*row, strict=True) if m] for row in zip(values, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "sequence":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / (5 * len(rows))


@st.composite
def masked_values(draw):
    B, T = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(B, T, generator=generator).double(), torch.tensor(mask)


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
@given(case=masked_values())
def test_equals_loops_and_ignores_what_is_masked(aggregation, length, case):
    values, mask = case
    norm = normalizer(mask, aggregation=aggregation, constant_length=length)
    actual = aggregate(values.masked_fill(~mask, torch.nan), mask, aggregation=aggregation,
                       normalizer=norm)
    expected = loops(values.tolist(), mask.tolist(), aggregation)
    assert actual.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
@given(case=masked_values(), cut=st.integers(0, 5))
def test_normalizers_and_shares_of_parts_add_up(aggregation, length, case, cut):
    values, mask = case

    def count(part):
        return normalizer(part, aggregation=aggregation, constant_length=length)

    norm = count(mask)
    assert norm.dtype == torch.float64 and norm == count(mask[:cut]) + count(mask[cut:])
    whole, *shares = (aggregate(v, m, aggregation=aggregation, normalizer=norm)
                      for v, m in ((values, mask), (values[:cut], mask[:cut]),
                                   (values[cut:], mask[cut:])))
    torch.testing.assert_close(shares[0] + shares[1], whole)


def test_a_normalizer_below_one_is_used_as_it_is():
    value = aggregate(torch.ones(1, 1), torch.ones(1, 1).bool(), aggregation="token",
                      normalizer=0.5)
    assert value == 2


@pytest.mark.parametrize(("aggregation", "length", "named"), [
    ("mean", None, "aggregation='mean'"), ("dr_grpo", None, "constant_length"),
    ("dr_grpo", 0, "constant_length"), ("token", 8, "constant_length=8"),
    ("sequence", 8, "constant_length=8")])
def test_wrong_options_are_errors(aggregation, length, named):
    with pytest.raises(ValueError, match=named):
        check_aggregation(aggregation, length)


@pytest.mark.parametrize(("aggregation", "length"), AGGREGATIONS.items())
def test_right_options_pass(aggregation, length):
    check_aggregation(aggregation, length)
