"""Groups of any sizes become batches of whole groups, in order, and none is lost."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from grpo import data
from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.convert import GroupConverter
from grpo.atropos.schemas import parse_group

from .groups import group


def make_assembler(sizes, *, rows):
    """A source that gives one group of each size; the last token of its rows is its place."""
    groups = (parse_group(group(size=size, tag=place)) for place, size in enumerate(sizes))
    return GroupAssembler(lambda timeout: list(itertools.islice(groups, 1)),
                          GroupConverter(pad_token_id=0), rows=rows)


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_groups_of_any_sizes_stay_whole_and_none_is_lost(sizes):
    assembler = make_assembler(sizes, rows=6)
    seen = []
    for _ in range(2 * len(sizes)):  # a poll takes one group, or finds a batch full without
        if assembler.poll(0.0):
            batch = assembler.batch()
            assert len(batch) <= 6
            for number in batch[data.GROUP_ID].unique():
                of_group = batch[batch[data.GROUP_ID] == number]
                seen.append((len(of_group), int(of_group[data.TOKENS][0, 2])))
    assert seen == [(size, place) for place, size in enumerate(sizes)][: len(seen)]
    assert assembler.waiting_rows == sum(sizes[len(seen):]) < 6


def test_a_group_too_large_is_left_out_and_said(caplog):
    assembler = make_assembler([5, 4], rows=4)
    assert not assembler.poll(0.0) and assembler.poll(0.0)
    assert assembler.batch()[data.TOKENS][:, 2].tolist() == [1] * 4
    assert assembler.counts["groups_too_large"] == 1
    assert "a group of 5 rows is left out" in caplog.text
