"""The dense batch: padding, joining, trimming, splitting and packing lose nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from grpo import data

PAD = 0
TOKENS = st.integers(1, 99)
# Prompt and response of each row.
ROWS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=6)),
                min_size=1, max_size=7)


def joined(rows, *, extra=0, junk=PAD):
    """Dense batch of ``rows`` with ``extra`` columns and ``junk`` in the padding of its parts."""
    prompts, responses = ([row[part] for row in rows] for part in (0, 1))
    P, R = (max(map(len, part)) + extra for part in (prompts, responses))
    prompt_mask = torch.arange(P) < torch.tensor([[len(p)] for p in prompts])
    response_mask = torch.arange(R) < torch.tensor([[len(r)] for r in responses])
    response = data.pad_rows(responses, R, junk)
    log_probs = torch.where(response_mask, -response.float(), torch.nan)
    return data.join_prompt_response(data.pad_rows(prompts, P, junk), prompt_mask, response,
                                     response_mask, log_probs, pad_token_id=PAD)


def dense(rows, *, token_level=False, **options):
    """:func:`joined` with every optional entry; ``"row"`` numbers the rows."""
    batch = joined(rows, **options)
    B, T = batch["tokens", "full"].shape
    values = torch.arange(B * T).view(B, T).float()
    batch["next"] = {"ref_log_probs": {"full": -values}, "reward": torch.arange(B).float()[:, None],
                     "teacher_log_probs": {"full": -2 * values}}
    batch["log_probs", "proximal"] = values + 1
    batch["masks", "high_entropy"] = values % 3 == 0
    tokens = values.long()[..., None]
    batch["distill"] = {"token_ids": torch.cat([tokens, tokens + 1], -1),
                        "log_probs": -torch.cat([tokens, 2 * tokens], -1).float()}
    data.stamp_versions(batch, torch.arange(B * T).view(B, T))
    batch["group_id"] = torch.arange(B) % 3
    batch["listwise_weight"] = torch.arange(B).float()[:, None] / B
    batch["row_mask"] = torch.arange(B)[:, None] % 2 == 0
    batch["advantage"] = values if token_level else torch.arange(B).float()[:, None]
    batch["row"] = torch.arange(B)
    return batch


class TestPad:
    @given(rows=st.lists(st.lists(TOKENS, max_size=6), max_size=6), extra=st.integers(0, 3))
    def test_round_trip(self, rows, extra):
        width = max(map(len, rows), default=0) + extra
        out = data.pad_rows(rows, width, -1)
        assert out.dtype == torch.int64 and out.shape == (len(rows), width)
        for row, padded in zip(rows, out.tolist(), strict=True):
            assert padded == row + [-1] * (width - len(row))

    def test_a_row_that_does_not_fit_is_an_error(self):
        with pytest.raises(ValueError, match="3 tokens.*width is 2"):
            data.pad_rows([[1], [1, 2, 3]], 2, 0)


class TestJoin:
    @given(rows=ROWS, extra=st.integers(0, 2), junk=st.sampled_from([PAD, 77]))
    def test_puts_each_response_right_after_its_prompt(self, rows, extra, junk):
        batch = joined(rows, extra=extra, junk=junk)
        T = batch["tokens", "full"].shape[1]
        assert data.lengths(batch).tolist() == [len(p) + len(r) for p, r in rows]
        for out, (prompt, response) in zip(batch, rows, strict=True):
            padding = T - len(prompt) - len(response)

            def lay(before, sampled, after, prompt=prompt, response=response, padding=padding):
                return [before] * len(prompt) + sampled(response) + [after] * padding

            assert out["tokens", "full"].tolist() == prompt + response + [PAD] * padding
            assert out["masks", "all_attention_mask"].tolist() == (
                [True] * (T - padding) + [False] * padding)
            assert out["masks", "all_assistant_mask"].tolist() == lay(
                False, lambda r: [True] * len(r), False)
            assert out["log_probs", "full"].tolist() == lay(0, lambda r: [-float(t) for t in r], 0)

    def test_a_prompt_or_response_padded_on_the_left_is_refused(self):
        left, right = torch.tensor([[False, True]]), torch.tensor([[True, False]])
        ids, log_probs = torch.tensor([[5, 6]]), torch.zeros(1, 2)
        for prompt_mask, response_mask, name in ((left, right, "prompts"), (right, left,
                                                                           "responses")):
            with pytest.raises(ValueError, match=f"mask of the {name} has padding before tokens"):
                data.join_prompt_response(ids, prompt_mask, ids, response_mask, log_probs,
                                          pad_token_id=PAD)

    def test_types(self):
        batch = joined([([1], [2])])
        types = {key: value.dtype for key, value in batch.items(True, True)}
        assert types == {data.TOKENS: torch.int64, data.ATTENTION_MASK: torch.bool,
                         data.ASSISTANT_MASK: torch.bool, data.LOG_PROBS: torch.float32}


class TestVersions:
    @given(rows=ROWS, extra=st.integers(0, 2), seed=st.integers(0, 99))
    def test_every_sampled_token_and_no_other_has_its_own(self, rows, extra, seed):
        batch = joined(rows, extra=extra)
        R = max(len(response) for _, response in rows) + 1
        generator = torch.Generator().manual_seed(seed)
        given_BR = torch.randint(0, 9, (len(rows), R), generator=generator)
        data.stamp_versions(batch, given_BR)
        versions_BT = batch["policy_versions", "full"]
        assert versions_BT.dtype == batch["policy_version"].dtype == torch.int64
        for row, (_, response) in enumerate(rows):
            own = given_BR[row, : len(response)]
            mask = batch["masks", "all_assistant_mask"][row]
            assert torch.equal(versions_BT[row][mask], own)
            assert (versions_BT[row][~mask] == data.NO_VERSION).all()
            oldest = own.min() if len(own) else given_BR[row, 0]
            assert batch["policy_version"][row] == oldest

    @given(rows=ROWS, seed=st.integers(0, 99), age=st.integers(0, 5))
    def test_staleness_counts_updates_since_each_token(self, rows, seed, age):
        batch = joined(rows)
        R = max(1, *(len(response) for _, response in rows), 1)
        generator = torch.Generator().manual_seed(seed)
        given_BR = torch.randint(0, 9, (len(rows), R), generator=generator)
        data.stamp_versions(batch, given_BR)
        ages = [8 + age - version for row, (_, response) in enumerate(rows)
                for version in given_BR[row, : len(response)].tolist()]
        expected = {"policy/age_mean": pytest.approx(sum(ages) / len(ages)),
                    "policy/age_max": max(ages)} if ages else {}
        assert data.staleness(batch, 8 + age) == expected
        of_rows = data.staleness(batch.exclude(data.POLICY_VERSIONS), 8 + age)
        assert of_rows.get("policy/age_max") == expected.get("policy/age_max")
        assert of_rows.get("policy/age_mean", 0) >= data.staleness(batch, 8 + age).get(
            "policy/age_mean", 0) - 1e-6

    def test_a_batch_without_versions_has_no_age(self):
        assert data.staleness(joined([([1], [2])]), 3) == {}


class TestTrim:
    @given(rows=ROWS, extra=st.integers(0, 4), token_level=st.booleans())
    def test_drops_unused_columns_and_nothing_else(self, rows, extra, token_level):
        batch = dense(rows, extra=extra, token_level=token_level)
        before = batch.clone()
        out = data.trim(batch)
        width = out["tokens", "full"].shape[1]
        assert width == max(len(p) + len(r) for p, r in rows)
        assert set(data.token_keys(batch)) == set(
            data.TOKEN_KEYS + (("advantage",) if batch["advantage"].shape[1] > 1 else ()))
        for key in batch.keys(True, True):
            kept = batch[key][:, :width] if key in data.token_keys(batch) else batch[key]
            assert torch.equal(out[key], kept), key
        assert (batch == before).all()

    def test_keeps_one_advantage_a_row(self):
        batch = dense([([1], [2, 3])], extra=1)
        assert data.trim(batch)["advantage"].shape == (1, 1)
        assert "advantage" not in data.token_keys(batch)
        assert "advantage" in data.token_keys(dense([([1], [2, 3])], token_level=True))


class TestSplit:
    @given(rows=ROWS, num=st.integers(1, 9), extra=st.integers(0, 3), token_level=st.booleans())
    def test_into_a_number_of_pieces(self, rows, num, extra, token_level):
        batch = dense(rows, extra=extra, token_level=token_level)
        pieces = data.split_rows(batch, num_micro_batches=num)
        sizes = [len(piece) for piece in pieces]
        assert len(pieces) == min(num, len(rows)) and max(sizes) - min(sizes) <= 1
        assert torch.cat([piece["row"] for piece in pieces]).tolist() == list(range(len(rows)))
        self.check_contents(pieces, batch)

    @given(rows=ROWS, budget=st.integers(1, 60), extra=st.integers(0, 3), token_level=st.booleans())
    def test_by_token_budget(self, rows, budget, extra, token_level):
        batch = dense(rows, extra=extra, token_level=token_level)
        pieces = data.split_rows(batch, max_tokens=budget)
        for piece in pieces:
            assert piece["tokens", "full"].numel() <= budget or len(piece) == 1
        assert sorted(torch.cat([p["row"] for p in pieces]).tolist()) == list(range(len(rows)))
        self.check_contents(pieces, batch)

    def check_contents(self, pieces, batch):
        for piece in pieces:
            assert piece["tokens", "full"].shape[1] == data.lengths(piece).max()
            for row in piece:
                source = batch[int(row["row"])]
                length = int(row["masks", "all_attention_mask"].sum())
                assert length == source["masks", "all_attention_mask"].sum()
                for key in data.token_keys(batch):
                    assert torch.equal(row[key][:length], source[key][:length]), key
                for key in (data.REWARD, data.GROUP_ID, data.LISTWISE_WEIGHT, data.ROW_MASK):
                    assert row[key] == source[key]

    @pytest.mark.parametrize(("budget", "sizes"), [
        (1, [1, 1, 1, 1]), (5, [1, 1, 1, 1]), (6, [2, 2]), (8, [2, 2]), (9, [2, 2]), (11, [2, 2]),
        (12, [4])])
    def test_a_budget_is_not_exceeded_and_pieces_are_of_a_size(self, budget, sizes):
        pieces = data.split_rows(dense([([1], [2, 3])] * 4), max_tokens=budget)
        assert [len(piece) for piece in pieces] == sizes

    @given(rows=ROWS)
    def test_a_budget_for_all_gives_one_piece(self, rows):
        batch = dense(rows)
        assert len(data.split_rows(batch, max_tokens=batch["tokens", "full"].numel())) == 1

    @given(groups=st.lists(st.integers(-2, 4), min_size=1, max_size=9), data_=st.data(),
           split=st.one_of(
               st.builds(lambda n: {"num_micro_batches": n}, st.integers(1, 9)),
               st.builds(lambda n: {"max_tokens": n}, st.integers(1, 120))))
    def test_whole_groups_stay_together(self, groups, data_, split):
        B = len(groups)
        batch = dense(data_.draw(st.lists(
            st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=6)),
            min_size=B, max_size=B)))
        batch["group_id"] = torch.tensor(groups)
        pieces = data.split_rows(batch, whole_groups=True, **split)
        assert sorted(torch.cat([p["row"] for p in pieces]).tolist()) == list(range(B))
        assert sum(len(p["group_id"].unique()) for p in pieces) == len(set(groups))
        for piece in pieces:
            fits = piece["tokens", "full"].numel() <= split.get("max_tokens", 10**6)
            assert fits or len(piece["group_id"].unique()) == 1
        if "num_micro_batches" in split:
            assert len(pieces) == min(split["num_micro_batches"], len(set(groups)))
        self.check_contents(pieces, batch)

    def test_units_are_rows_or_groups_in_the_order_of_the_batch(self):
        batch = dense([([1], [2])] * 5)
        batch["group_id"] = torch.tensor([[7], [3], [7], [3], [5]])
        rows = data.row_units(batch, whole_groups=False)
        assert [unit.tolist() for unit in rows] == [[0], [1], [2], [3], [4]]
        groups = data.row_units(batch, whole_groups=True)
        assert sorted(unit.tolist() for unit in groups) == [[0, 2], [1, 3], [4]]

    def test_groups_of_similar_length_share_a_micro_batch(self):
        batch = dense([([1], [2]), ([1], [2] * 9), ([1], [2]), ([1], [2] * 9), ([1], [2]),
                       ([1], [2])])
        batch["group_id"] = torch.tensor([4, 1, 4, 1, 2, 2])
        pieces = data.split_rows(batch, max_tokens=20, whole_groups=True)
        assert [piece["row"].sort().values.tolist() for piece in pieces] == [[0, 2, 4, 5], [1, 3]]
        # Two groups of two short rows are eight tokens.
        pieces = data.split_rows(batch, max_tokens=7, whole_groups=True)
        assert [len(piece) for piece in pieces] == [2, 2, 2]

    def test_packed_rows_count_a_prompt_once(self):
        batch = dense([([1] * 5, [2]), ([3], [2]), ([1] * 5, [2] * 2), ([3], [2]),
                       ([1] * 5, [2] * 3)])
        batch["group_id"] = torch.tensor([8, 2, 8, 2, 8])
        sizes = {1: [[1], [3], [0], [2], [4]], 3: [[1, 3], [0], [2], [4]],
                 8: [[1, 3], [0, 2], [4]], 10: [[1, 3, 0], [2, 4]], 13: [[1, 3, 0], [2, 4]],
                 14: [[1, 3, 0, 2, 4]]}
        for most, rows in sizes.items():
            pieces = data.split_rows(batch, max_tokens=most, packed=True)
            assert [piece["row"].tolist() for piece in pieces] == rows, most
        (piece,) = data.split_rows(batch, max_tokens=8, packed=True, whole_groups=True)[1:]
        assert piece["row"].tolist() == [0, 2, 4]

    @pytest.mark.parametrize("options", [
        {}, {"num_micro_batches": 1, "max_tokens": 9}, {"num_micro_batches": 0}, {"max_tokens": 0},
        {"max_tokens": -1}])
    def test_wrong_options_are_errors(self, options):
        with pytest.raises(ValueError, match="num_micro_batches.*max_tokens"):
            data.split_rows(dense([([1], [2])]), **options)


def test_keys_of_a_batch_without_optional_entries():
    batch = joined([([1], [2])])
    assert data.token_keys(batch) == [data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK,
                                      data.LOG_PROBS]
    assert isinstance(data.trim(batch), TensorDict)


def test_split_pads_to_a_multiple_within_the_batch(make_model, make_batch):
    batch = make_batch(make_model(), prompts=(2, 4, 1, 3, 9), responses=(1, 1, 1, 1, 9))
    for options in ({"max_tokens": 16}, {"num_micro_batches": 3}):
        pieces = data.split_rows(batch, multiple_of=8, **options)
        assert sum(len(piece) for piece in pieces) == len(batch)
        widths = {piece["tokens", "full"].shape[1] for piece in pieces}
        assert widths <= {8, 16, batch["tokens", "full"].shape[1]} and 8 in widths
