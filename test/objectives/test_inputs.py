"""What the loss reads of a batch: names, shapes, the loss mask and the tokens laid end to end."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from grpo import GRPOLoss, data
from grpo.data.torchrl import from_torchrl, to_torchrl
from grpo.objectives.inputs import Rows, batch_tokens, loss_mask, standard_batch

from .batches import gradient

REQUIRED = {data.TOKENS: "fix of tokens", data.ATTENTION_MASK: "fix of attention",
            data.ASSISTANT_MASK: "fix of assistant", data.LOG_PROBS: "fix of log-probs"}


def make_dense(attention, assistant, **rows) -> TensorDict:
    attention, assistant = torch.tensor(attention).bool(), torch.tensor(assistant).bool()
    batch = TensorDict({
        "tokens": {"full": torch.arange(attention.numel()).view_as(attention)},
        "masks": {"all_attention_mask": attention, "all_assistant_mask": assistant},
        "log_probs": {"full": torch.zeros(attention.shape)}}, batch_size=[len(attention)])
    for name, values in rows.items():
        batch[getattr(data, name)] = torch.tensor(values).view(-1, 1)
    return batch


@pytest.fixture
def batch():
    return make_dense([[1, 1, 1, 1], [1, 1, 1, 0]], [[0, 1, 1, 1], [0, 1, 1, 0]])


class TestStandardBatch:
    def test_the_usual_names_are_left_as_they_are(self, batch):
        names = {key: key for key in REQUIRED}
        out = standard_batch(batch, names=names, required=REQUIRED)
        assert set(out.keys(True, True)) == set(batch.keys(True, True))
        assert (out == batch).all()

    def test_two_entries_can_swap_their_names(self, batch):
        batch[data.REF_LOG_PROBS] = torch.ones_like(batch[data.LOG_PROBS])
        names = {data.LOG_PROBS: data.REF_LOG_PROBS, data.REF_LOG_PROBS: data.LOG_PROBS}
        out = standard_batch(batch, names=names, required=REQUIRED)
        assert out[data.LOG_PROBS].all() and not out[data.REF_LOG_PROBS].any()

    @pytest.mark.parametrize("key", [key for key in data.TOKEN_KEYS if key != data.TOKENS])
    def test_another_width_is_an_error_that_names_the_entry(self, batch, key):
        batch[key] = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)") as error:
            standard_batch(batch, names={}, required=REQUIRED)
        assert str(key) in str(error.value)

    def test_and_names_it_as_the_caller_does(self, batch):
        batch["mine"] = torch.zeros(2, 3)
        with pytest.raises(ValueError, match="mine has shape"):
            standard_batch(batch, names={data.LOG_PROBS: "mine"}, required=REQUIRED)

    def test_entries_of_several_values_a_token_pass(self, batch):
        batch[data.DISTILL_IDS] = torch.zeros(2, 4, 7, dtype=torch.int64)
        standard_batch(batch, names={}, required=REQUIRED)


class TestLossMask:
    def test_leaves_out_padding_and_the_first_token(self):
        batch = make_dense([[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 1, 0, 1], [1, 1, 1, 1]])
        assert loss_mask(batch).int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]

    @given(error=st.lists(st.booleans(), min_size=3, max_size=3),
           kept=st.lists(st.booleans(), min_size=3, max_size=3),
           given_entries=st.sets(st.sampled_from(["REWARD_ERROR", "ROW_MASK"])))
    def test_leaves_out_rows_without_a_reward_and_filtered_ones(self, error, kept, given_entries):
        rows = {name: values for name, values in (("REWARD_ERROR", error), ("ROW_MASK", kept))
                if name in given_entries}
        batch = make_dense([[1, 1]] * 3, [[0, 1]] * 3, **rows)
        expected = [not ("REWARD_ERROR" in rows and e) and ("ROW_MASK" not in rows or k)
                    for e, k in zip(error, kept, strict=True)]
        assert loss_mask(batch)[:, 1].tolist() == expected

    def test_leaves_the_batch_alone(self):
        batch = make_dense([[1, 1]] * 2, [[1, 1]] * 2, REWARD_ERROR=[True, False])
        before = batch.clone()
        loss_mask(batch)
        assert (batch == before).all()


LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def rows_of(lengths) -> Rows:
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    return Rows.of_mask(mask)


class TestRows:
    @given(lengths=LENGTHS)
    def test_starts_are_where_the_tokens_of_each_row_begin(self, lengths):
        assert rows_of(lengths).starts == [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    @given(lengths=LENGTHS.filter(any), range_=st.data())
    def test_within_gives_the_rows_of_a_range(self, lengths, range_):
        owner = [row for row, length in enumerate(lengths) for _ in range(length)]
        start = range_.draw(st.integers(0, len(owner) - 1))
        stop = range_.draw(st.integers(start + 1, len(owner)))
        first, last = rows_of(lengths).within(start, stop)
        # Rows without tokens may be in between, but not at either end.
        assert (first, last) == (owner[start], owner[stop - 1] + 1)

    @given(lengths=LENGTHS.filter(any), chunk_size=st.integers(1, 20), whole_rows=st.booleans())
    def test_borders_cut_all_tokens_into_parts_that_fit(self, lengths, chunk_size, whole_rows):
        rows = rows_of(lengths)
        borders = rows.borders(chunk_size, whole_rows=whole_rows)
        if whole_rows and max(lengths) > chunk_size:
            assert borders is None
            return
        assert borders[0] == 0 and borders[-1] == sum(lengths)
        sizes = [b - a for a, b in zip(borders[:-1], borders[1:], strict=True)]
        assert all(0 < size <= chunk_size for size in sizes)
        if not whole_rows:
            assert len(sizes) == -(-sum(lengths) // chunk_size)
            return
        assert set(borders) <= set(rows.starts)
        # As few as rows allow: the next row would not have fit.
        for start, border in zip(borders[:-2], borders[1:-1], strict=True):
            following = next(stop for stop in rows.starts if stop > border)
            assert following - start > chunk_size

    def test_borders_of_whole_rows_are_few(self):
        assert rows_of([2, 0, 3, 5, 1, 0]).borders(6, whole_rows=True) == [0, 5, 11]


class TestBatchTokens:
    @given(lengths=LENGTHS, dtype=st.sampled_from([torch.float32, torch.float64]))
    def test_are_those_under_the_mask_in_order(self, lengths, dtype):
        B, T = len(lengths), 7
        mask = torch.arange(T) < torch.tensor(lengths)[:, None]
        place = torch.arange(B * T).view(B, T)
        tokens = batch_tokens(mask, {
            "token": place.float(), "ids": place, "several": place[..., None] + torch.arange(3),
            "flag": place % 2 == 0, "row_B": torch.arange(B),
            "row_B1": torch.arange(B)[:, None] / 2}, group_B=None, dtype=dtype)
        flat = tokens.flat
        expected = [b * T + t for b, length in enumerate(lengths) for t in range(length)]
        owner = [p // T for p in expected]
        assert flat.batch_size == torch.Size([len(expected)])
        assert flat["row"].tolist() == flat["row_B"].tolist() == owner
        assert flat["ids"].tolist() == expected and flat["token"].tolist() == expected
        assert flat["several"].tolist() == [[p, p + 1, p + 2] for p in expected]
        assert flat["flag"].tolist() == [p % 2 == 0 for p in expected]
        assert flat["row_B1"].tolist() == [row / 2 for row in owner]
        assert flat["token"].dtype == flat["row_B1"].dtype == dtype
        assert flat["ids"].dtype == torch.int64 and flat["flag"].dtype == torch.bool
        assert tokens.rows.starts == rows_of(lengths).starts
        assert (tokens.first_row, tokens.num_rows) == (0, B)

    @given(lengths=LENGTHS.filter(any), range_=st.data())
    def test_a_part_knows_its_rows(self, lengths, range_):
        """Row by row what the whole batch says of the same tokens."""
        B, total = len(lengths), sum(lengths)
        mask = torch.arange(7) < torch.tensor(lengths)[:, None]
        row_value = 10.0 + torch.arange(B).double()
        tokens = batch_tokens(mask, {"advantage": row_value[:, None],
                                     "listwise_weight": row_value[:, None] / 100},
                              group_B=100 + torch.arange(B)[:, None], dtype=torch.float64)
        start = range_.draw(st.integers(0, total - 1))
        stop = range_.draw(st.integers(start + 1, total))
        log_probs = torch.arange(total).double()
        for part, values in ((tokens, log_probs), (tokens.part(start, stop),
                                                   log_probs[start:stop])):
            view = part.loss_tokens(values, values + 1)
            assert torch.equal(view.log_probs_N, values)
            assert torch.equal(view.old_log_probs_N, values + 1)
            assert len(view.length_R) == len(view.group_R) == view.num_rows == part.num_rows
            assert view.length_R.sum() == len(values) and view.row_N.min() >= 0
            # Whatever is known of the row of a token, it is that of one and the same row.
            assert torch.equal(view.of_row(view.group_R), view.advantage_N.long() + 90)
            torch.testing.assert_close(view.of_row(view.listwise_weight_R),
                                       view.advantage_N / 100, rtol=0, atol=0)
            assert not view.listwise_weight_R[view.length_R == 0].any()
        whole = tokens.loss_tokens(log_probs, log_probs)
        assert whole.length_R.tolist() == lengths

    def test_what_is_not_known_is_none(self):
        tokens = batch_tokens(torch.ones(1, 2).bool(), {"advantage": torch.ones(1, 1)},
                              group_B=None, dtype=torch.float32)
        view = tokens.loss_tokens(torch.zeros(2), torch.zeros(2))
        assert view.group_R is None and view.listwise_weight_R is None


@pytest.mark.parametrize("attention", [
    [[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 0, 1, 1], [1, 1, 1, 1]], [[0, 0, 0, 1], [0, 0, 1, 1]]])
def test_rows_that_are_not_padded_on_the_right_are_refused(attention):
    """Cutting the padding of the others off would take tokens of these along."""
    batch = make_dense(attention, attention)
    for read in (partial(standard_batch, names={}, required=REQUIRED), data.trim, to_torchrl,
                 partial(data.split_rows, max_tokens=4)):
        with pytest.raises(ValueError, match=r"padding before tokens in rows \[0.*from_torchrl"):
            read(batch)


def test_the_converter_lays_left_padded_rows_out_as_the_loss_reads_them(make_model, make_batch):
    model = make_model()
    batch = make_batch(model)
    left = batch.select(*data.token_keys(batch), "group_id", "advantage")
    for key in data.token_keys(batch):
        rows = zip(batch[key], data.lengths(batch).tolist(), strict=True)
        left[key] = torch.stack([row.roll(len(row) - size) for row, size in rows])
    loss = GRPOLoss(model, kl_to_ref_coeff=0.1)
    with pytest.raises(ValueError, match="padded on the right"):
        loss(left)
    assert_same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    assert_same(gradient(loss, from_torchrl(left, pad_token_id=0)), gradient(loss, batch))
