"""Records of what was sampled: every trajectory finds its own, and memory stays bounded."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo.atropos.records import Records
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.data import NO_VERSION

EOS = 1
TOKENS = st.lists(st.integers(2, 5), min_size=1, max_size=4)


@st.composite
def trajectories(draw):
    """Turns ``[(what the environment says, what the policy answers, whether it ended), ...]``."""
    return [(draw(TOKENS), draw(TOKENS), draw(st.booleans()))
            for _ in range(draw(st.integers(1, 3)))]


def play(records, turns, *, number, strip=False):
    """Record the policy's turns as a bridge does; returns the row that an environment sends."""
    tokens, masks, log_probs, versions = [], [], [], []
    for turn, (said, answer, ended) in enumerate(turns):
        output = answer + [EOS] * ended
        values = [-(number + 1) - at / 64 - turn / 8 for at in range(len(output))]
        records.add(tokens + said, output, values, versions=[(number, len(output))],
                    truncated=not ended)
        if strip and ended:
            output, values = output[:-1], values[:-1]
        tokens += said + output
        masks += [IGNORED] * len(said) + output
        log_probs += [math.nan] * len(said) + values
        versions += [NO_VERSION] * len(said) + [number] * len(output)
    return tokens, masks, log_probs, versions


def group_of(rows):
    return ScoredGroup(tokens=[row[0] for row in rows], masks=[row[1] for row in rows],
                       scores=[0.0] * len(rows))


def same(first, second):
    return all(a == b or math.isnan(a) and math.isnan(b)
               for a, b in zip(first, second, strict=True))


@given(st.lists(trajectories(), min_size=1, max_size=12), st.booleans(), st.randoms())
def test_every_trajectory_is_matched_token_by_token(plays, strip, random):
    """Even with so few different tokens that many trajectories begin alike."""
    records = Records()
    rows = [play(records, turns, number=number, strip=strip and len(turns) == 1)
            for number, turns in enumerate(plays)]
    random.shuffle(rows)
    known = records.restore(group_of(rows))
    assert records.counts["rows_matched"] == len(rows)
    for i, (_, masks, _, _) in enumerate(rows):
        trained = [mask != IGNORED for mask in masks]
        assert all(not math.isnan(value) for value, on in zip(known.log_probs[i], trained,
                                                              strict=True) if on)
        assert all(v != NO_VERSION for v, on in zip(known.versions[i], trained, strict=True) if on)


@given(st.lists(trajectories(), min_size=1, max_size=8))
def test_trajectories_that_nothing_confuses_get_exactly_their_own_values(plays):
    records = Records()
    # A first token that no other trajectory has.
    rows = [play(records, [([100 + i, *turns[0][0]], *turns[0][1:]), *turns[1:]], number=i)
            for i, turns in enumerate(plays)]
    known = records.restore(group_of(rows))
    for i, (_, _, log_probs, versions) in enumerate(rows):
        assert same(known.log_probs[i], log_probs)
        assert known.versions[i] == versions


@given(st.integers(1, 6))
def test_identical_samples_get_a_record_each(count):
    records = Records()
    rows = [play(records, [([7], [8, 9], True)], number=number) for number in range(count)]
    known = records.restore(group_of(rows))
    assert sorted(values[-1] for values in known.log_probs) == sorted(row[2][-1] for row in rows)
    assert records.restore(group_of(rows[:1])).versions == [[NO_VERSION, 0, 0, 0]]


def test_branches_share_the_record_of_their_common_turn():
    records = Records()
    records.add([5], [6, EOS], [-0.1, -0.2], versions=[(1, 2)])
    rows = []
    for i in range(3):
        records.add([5, 6, EOS, 9], [10 + i, EOS], [-1.0 - i, -0.5], versions=[(2, 2)])
        tokens = [5, 6, EOS, 9, 10 + i, EOS]
        rows.append((tokens, [IGNORED, 6, EOS, IGNORED, 10 + i, EOS]))
    known = records.restore(group_of(rows))
    assert [values[1:3] for values in known.log_probs] == [pytest.approx([-0.1, -0.2])] * 3
    assert [values[4] for values in known.log_probs] == [-1.0, -2.0, -3.0]
    assert known.versions[0] == [NO_VERSION, 1, 1, NO_VERSION, 2, 2]


def test_an_end_token_may_be_missing_in_the_row():
    records = Records()
    records.add([5], [6, 7, EOS], [-0.5, -0.25, -0.125], versions=[(3, 3)])
    known = records.restore(group_of([([5, 6, 7], [IGNORED, 6, 7])]))
    assert known.log_probs[0][1:] == [-0.5, -0.25] and known.versions[0] == [NO_VERSION, 3, 3]
    assert records.counts["rows_matched"] == 1


def test_the_tokens_as_sampled_come_before_those_without_their_end():
    records = Records()
    records.add([5], [6, EOS], [-9.0, -9.0], versions=[(0, 2)])
    records.add([5], [6], [-0.5], versions=[(1, 1)], truncated=True)
    known = records.restore(group_of([([5, 6], [IGNORED, 6])]))
    assert known.log_probs[0][1] == -0.5 and known.truncated == [True]


def test_a_shorter_sample_that_begins_alike_is_left_alone():
    records = Records()
    records.add([5], [6, EOS], [-9.0, -9.0], temperature=0.5)
    records.add([5], [6, 7, EOS], [-1.0, -2.0, -3.0], temperature=1.0)
    known = records.restore(group_of([([5, 6, 7, EOS], [IGNORED, 6, 7, EOS])]))
    assert known.log_probs[0][1:] == [-1.0, -2.0, -3.0] and known.temperatures == [1.0]
    assert [record.claimed for record in records._by_age] == [False, True]


def test_spans_of_several_versions_are_laid_out():
    records = Records()
    records.add([5], [6, 7, 8, EOS], [-1.0] * 4, versions=[(3, 1), (4, 3)])
    known = records.restore(group_of([([5, 6, 7, 8, EOS], [IGNORED, 6, 7, 8, EOS])]))
    assert known.versions[0] == [NO_VERSION, 3, 4, 4, 4]


def test_unknown_and_half_known_rows_are_counted():
    records = Records()
    records.add([5], [6, EOS], [-1.0, -1.0])
    rows = [([9, 9], [IGNORED, 9]), ([5, 6, EOS, 7, 8], [IGNORED, 6, EOS, IGNORED, 8])]
    known = records.restore(group_of(rows))
    assert records.counts["rows_unmatched"] == 1 and records.counts["rows_partly_matched"] == 1
    assert math.isnan(known.log_probs[1][4]) and known.temperatures == [None, 1.0]


def test_turns_of_different_temperatures_have_no_temperature():
    records = Records()
    records.add([5], [6, EOS], [-1.0, -1.0], temperature=1.0)
    records.add([5, 6, EOS, 7], [8], [-1.0], temperature=0.5, truncated=True)
    row = ([5, 6, EOS, 7, 8], [IGNORED, 6, EOS, IGNORED, 8])
    assert math.isnan(records.restore(group_of([row])).temperatures[0])


@given(st.lists(TOKENS, max_size=30), st.integers(1, 20))
def test_memory_is_bounded_and_the_oldest_go_first(outputs, limit):
    records = Records(max_tokens=limit)
    for i, output in enumerate(outputs):
        records.add([i + 10], output, [-1.0] * len(output))
        assert records.tokens <= limit
    kept, total = 0, 0
    for output in reversed(outputs):
        total += len(output)
        if total > limit:
            break
        kept += 1
    assert len(records) == kept
    assert records.counts["expired"] == len(outputs) - kept
    # Nothing of the others is left behind.
    assert sum(map(len, records._exact.values())) == kept
    assert sum(records._lengths.values()) == sum(
        1 + (len(output) > 1) for output in outputs[len(outputs) - kept :])


def test_old_records_expire_whether_groups_come_or_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("grpo.atropos.records.time.monotonic", lambda: now[0])
    records = Records(max_age=10.0)
    records.add([5], [6, 7], [-1.0, -1.0])
    records.add([5], [8, 9], [-1.0, -1.0])
    row = ([5, 6, 7], [IGNORED, 6, 7])
    assert not math.isnan(records.restore(group_of([row])).log_probs[0][1])
    now[0] += 11
    assert math.isnan(records.restore(group_of([row])).log_probs[0][1])
    assert len(records) == records.tokens == 0
    assert records.counts["expired"] == 1  # the other one had been claimed


def test_bad_bounds_and_uneven_log_probs_are_refused():
    with pytest.raises(ValueError, match="max_tokens=0"):
        Records(max_tokens=0)
    with pytest.raises(ValueError, match="max_age=0"):
        Records(max_age=0)
    with pytest.raises(ValueError, match="1 log-probs for 2 output tokens"):
        Records().add([5], [6, 7], [-1.0])
