"""Groups to batches: nothing lost, masks exact, everything that the environment says honoured."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from grpo import data
from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.convert import (
    TEMPERATURE,
    GroupConverter,
    Sampled,
    groups_to_batch,
)
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.atropos.schemas import IGNORED, ScoredGroup, parse_group
from grpo.objectives.advantages import GroupAdvantage
from grpo.objectives.scorer import TokenScorer

PAD = 0
LOG_PROBS = st.floats(-20, 0, width=32)


@st.composite
def rows(draw):
    """Tokens, masks (some token after the first is trained, anywhere) and log-probs."""
    tokens = draw(st.lists(st.integers(1, 22), min_size=2, max_size=12))
    trained = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    trained[draw(st.integers(1, len(tokens) - 1))] = True
    masks = [token if on else IGNORED for token, on in zip(tokens, trained, strict=True)]
    log_probs = [draw(LOG_PROBS) if on else 1.0 for on in trained]
    return tokens, masks, log_probs


@st.composite
def some_groups(draw):
    groups = []
    for of_group in draw(st.lists(st.lists(rows(), min_size=1, max_size=5), min_size=1,
                                  max_size=4)):
        tokens, masks, log_probs = (list(part) for part in zip(*of_group, strict=True))
        groups.append(parse_group({
            "tokens": tokens, "masks": masks, "inference_logprobs": log_probs,
            "scores": [draw(st.floats(-2, 2, width=32)) for _ in tokens]}))
    return groups


def group(*texts, scores=None, **fields):
    """A group whose rows are ``(prompt, response)``."""
    return ScoredGroup(
        tokens=[p + r for p, r in texts], masks=[[IGNORED] * len(p) + r for p, r in texts],
        scores=scores or [float(i) for i in range(len(texts))], **fields)


def response_of(batch, i):
    """A row put together from its prompt and its response."""
    prompt = batch[data.PROMPT_TOKENS][i][batch[data.PROMPT_MASK][i]].tolist()
    size = int(batch[data.ATTENTION_MASK][i].sum())
    return prompt, batch[data.RESPONSE_TOKENS][i][: size - len(prompt)].tolist()


@given(groups=some_groups())
def test_every_row_can_be_read_back_from_the_batch(groups):
    batch = GroupConverter(pad_token_id=PAD)(groups)
    flat = [(i, tokens, masks, log_probs, score) for i, g in enumerate(groups)
            for tokens, masks, log_probs, score in zip(
                g.tokens, g.masks, g.inference_logprobs, g.scores, strict=True)]
    assert batch.batch_size == (len(flat),)
    for i, (number, tokens, masks, log_probs, score) in enumerate(flat):
        size = len(tokens)
        assert batch[data.TOKENS][i].tolist() == tokens + [PAD] * (
            batch[data.TOKENS].shape[1] - size)
        assert batch[data.ATTENTION_MASK][i].sum() == size
        trained = [mask != IGNORED and t > 0 for t, mask in enumerate(masks)]
        assert batch[data.ASSISTANT_MASK][i, :size].tolist() == trained
        assert not batch[data.ASSISTANT_MASK][i, size:].any()
        expected = [value if on else 0.0 for value, on in zip(log_probs, trained, strict=True)]
        assert batch[data.LOG_PROBS][i, :size].tolist() == pytest.approx(expected, abs=0)
        assert not batch[data.LOG_PROBS][i, size:].any()
        prompt, response = response_of(batch, i)
        assert prompt + response == tokens and len(prompt) == trained.index(True)
        assert batch[data.REWARD][i].item() == score
        assert batch[data.GROUP_ID][i] == number


@given(groups=some_groups(), seq_len=st.integers(2, 12))
def test_long_rows_are_cut_counted_and_marked(groups, seq_len):
    converter = GroupConverter(pad_token_id=PAD, seq_len=seq_len)
    batch = converter(groups)
    tokens = [row for g in groups for row in g.tokens]
    cut = [len(row) > seq_len for row in tokens]
    assert converter.counts["rows_cut"] == sum(cut)
    assert batch[data.TRUNCATED].flatten().tolist() == cut
    assert data.lengths(batch).tolist() == [min(len(row), seq_len) for row in tokens]
    untrained = ~batch[data.ASSISTANT_MASK].any(-1)
    assert converter.counts["rows_untrained"] == untrained.sum()
    assert converter.counts["rows"] == len(tokens)


def test_turns_of_the_environment_are_not_trained():
    tokens = [5, 6, 7, 8, 9, 10, 11]
    masks = [IGNORED, IGNORED, 7, IGNORED, IGNORED, 10, 11]
    batch = groups_to_batch([ScoredGroup(tokens=[tokens], masks=[masks], scores=[1.0])],
                            pad_token_id=PAD)
    assert response_of(batch, 0) == ([5, 6], [7, 8, 9, 10, 11])
    assert batch[data.ASSISTANT_MASK][0].nonzero().flatten().tolist() == [2, 5, 6]


def test_group_numbers_go_on_over_batches_and_checkpoints():
    converter = GroupConverter(pad_token_id=PAD)
    one = group(([5], [6]), ([5], [7]))
    assert converter([one, one])[data.GROUP_ID].tolist() == [0, 0, 1, 1]
    again = GroupConverter(pad_token_id=PAD)
    again.load_state_dict(converter.state_dict())
    assert again([one])[data.GROUP_ID].tolist() == [2, 2]
    assert again.counts["groups"] == 3


# -- log-probs -------------------------------------------------------------------------------------


def test_unknown_log_probs_are_nan_on_trained_tokens_alone_and_counted():
    converter = GroupConverter(pad_token_id=PAD)
    none = group(([5, 6], [7, 8]), ([5, 6], [9]))
    partly = group(([5], [6, 7]), inference_logprobs=[[1.0, -0.5, 1.0]])
    batch = converter([none, partly])
    assert torch.equal(batch[data.LOG_PROBS].isnan()[:2], batch[data.ASSISTANT_MASK][:2])
    assert batch[data.LOG_PROBS][2, :2].tolist() == [0.0, -0.5]
    assert batch[data.LOG_PROBS][2, 2].isnan()
    assert converter.counts["rows_without_log_probs"] == 3


def test_what_the_policy_recorded_precedes_what_the_environment_sent():
    sent = group(([5], [6, 7]), inference_logprobs=[[1.0, -9.0, -9.0]],
                 generation_params={"temperature": 0.3})
    known = Sampled([[math.nan, -0.5, math.nan]], [[-1, 4, -1]], [0.7], [True])
    batch = GroupConverter(pad_token_id=PAD)([sent], sampled=[known], version=6)
    assert batch[data.LOG_PROBS].tolist() == [[0.0, -0.5, -9.0]]
    assert batch[data.POLICY_VERSION].tolist() == [4]
    assert batch[data.TRUNCATED].item()
    assert batch[TEMPERATURE].item() == pytest.approx(0.7)


def test_unknown_log_probs_become_the_trainers_own(tiny_model):
    scorer = TokenScorer(tiny_model)
    known = group(([5, 6], [7, 8]), inference_logprobs=[[1.0, 1.0, -0.25, -0.75]])
    unknown = group(([5, 6], [7, 8]), ([9], [10, 11, 12]))
    batch = groups_to_batch([known, unknown], pad_token_id=PAD)
    recompute = RecomputeLogProbs(scorer, max_tokens=64)
    recompute(batch)
    mask = batch[data.ASSISTANT_MASK]
    expected, _ = scorer(batch[data.TOKENS], batch[data.ATTENTION_MASK], mask)
    assert batch[data.LOG_PROBS][0, 2:4].tolist() == [-0.25, -0.75]
    torch.testing.assert_close(batch[data.LOG_PROBS][1:], expected[1:].float().detach())
    assert recompute.metrics["atropos/recomputed_tokens"] == pytest.approx(5 / 7)
    assert recompute.metrics["atropos/recomputed_rows"] == pytest.approx(2 / 3)
    recompute(batch)
    assert recompute.metrics["atropos/recomputed_rows"] == 0


# -- versions and staleness ------------------------------------------------------------------------


def test_old_tokens_are_not_trained_and_a_row_is_as_old_as_its_oldest_trained_token():
    converter = GroupConverter(pad_token_id=PAD, max_staleness=2)
    rows = group(([5], [6, 7, 8]), ([5], [9, 10, 11]))
    known = Sampled([[math.nan, -1.0, -1.0, -1.0]] * 2, [[-1, 3, 7, 9], [-1, 8, 8, 9]],
                    [1.0] * 2, [False] * 2)
    batch = converter([rows], sampled=[known], version=9)
    assert batch[data.ASSISTANT_MASK].tolist() == [[False, False, True, True],
                                                   [False, True, True, True]]
    assert batch[data.LOG_PROBS].tolist() == [[0.0, 0.0, -1.0, -1.0], [0.0, -1.0, -1.0, -1.0]]
    assert batch[data.POLICY_VERSIONS].tolist() == [[-1, -1, 7, 9], [-1, 8, 8, 9]]
    assert batch[data.POLICY_VERSION].tolist() == [7, 8]
    assert converter.counts["tokens_stale"] == 1


def test_undated_tokens_count_as_sampled_now():
    batch = GroupConverter(pad_token_id=PAD, max_staleness=0)([group(([5], [6]))], version=5)
    assert batch[data.POLICY_VERSION].tolist() == [5]
    assert batch[data.ASSISTANT_MASK].sum() == 1


# -- what environments may set ---------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, math.nan),
    ({"group_overrides": {"temperature": 0.3}}, 0.3),
    ({"group_overrides": {"temperature": 0.3}, "generation_params": {"temperature": 0.5}}, 0.5),
    ({"group_overrides": {"temperature": 0.3}, "generation_params": {"temperature": 0.5},
      "overrides": [{"temperature": 0.9}]}, 0.9),
    ({"generation_params": {"temperature": 0.5}, "overrides": [{}]}, 0.5),
])
def test_priority_of_temperatures(fields, expected):
    batch = groups_to_batch([group(([5], [6]), **fields)], pad_token_id=PAD)
    assert batch[TEMPERATURE].item() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("option", [
    {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 3}])
@pytest.mark.parametrize("where", ["generation_params", "group_overrides", "overrides"])
def test_rows_of_a_distribution_that_was_not_only_tempered_leave_the_loss(option, where):
    converter = GroupConverter(pad_token_id=PAD, temperature=0.7)
    said = {"temperature": 0.7, **option}
    batch = converter([group(([5], [6]), **{where: [said] if where == "overrides" else said})])
    assert batch[TEMPERATURE].isnan().all() and not batch[data.ROW_MASK].any()
    assert converter.counts["rows_other_sampling"] == 1


def test_options_that_change_nothing_keep_their_rows():
    said = {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0.0, "presence_penalty": None,
            "repetition_penalty": 1.0, "max_tokens": 9, "stop": ["."], "logit_bias": {}}
    batch = groups_to_batch([group(([5], [6]), generation_params=said)], pad_token_id=PAD,
                            temperature=0.7)
    assert batch[TEMPERATURE].item() == pytest.approx(0.7) and batch[data.ROW_MASK].all()


def test_a_record_precedes_what_the_environment_says_of_its_options():
    known = Sampled([[math.nan, -0.5]], [[-1, 0]], [0.7], [False])
    batch = GroupConverter(pad_token_id=PAD, temperature=0.7)(
        [group(([5], [6]), generation_params={"top_p": 0.8})], sampled=[known])
    assert batch[data.ROW_MASK].all()


def test_rows_of_another_temperature_leave_the_loss_and_are_counted():
    converter = GroupConverter(pad_token_id=PAD, temperature=1.0)
    rows = group(([5], [6]), ([5], [7]), ([5], [8]),
                 overrides=[{"temperature": 0.5}, {"temperature": 1}, {}])
    assert converter([rows])[data.ROW_MASK].flatten().tolist() == [False, True, True]
    assert converter.counts["rows_other_sampling"] == 1


def advantages(groups, **options):
    batch = groups_to_batch(groups, pad_token_id=PAD, **options)
    return GivenAdvantage(GroupAdvantage(estimator="group_mean"))(batch)


def test_given_advantages_replace_estimated_ones_row_by_row():
    own = group(([5], [6]), ([5], [7]), advantages=[3.0, -4.0])
    batch = advantages([own, group(([5], [6]), ([5], [7]))])
    assert batch[data.ADVANTAGE].tolist() == [[3.0], [-4.0], [-0.5], [0.5]]


def test_given_advantages_of_tokens_make_all_advantages_those_of_tokens():
    own = group(([5], [6, 7]), ([5], [8]), advantages=[[9.0, 1.0, 2.0], [9.0, 3.0]])
    batch = advantages([own, group(([5], [6]), ([5], [7]))])
    assert batch[data.ADVANTAGE].tolist() == [
        [0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [0.0, -0.5, 0.0], [0.0, 0.5, 0.0]]


def test_an_advantage_set_to_zero_still_counts_in_the_mean_of_its_group():
    rows = group(([5], [6]), ([5], [7]), scores=[4.0, 0.0],
                 overrides=[{"set_advantage_to_zero": True}, {}])
    assert advantages([rows])[data.ADVANTAGE].tolist() == [[0.0], [-2.0]]


def test_rows_out_of_the_loss_stay_out_whatever_the_estimator_masks():
    rows = group(([5], [6]), ([5], [7]), overrides=[{"temperature": 0.5}, {}])
    batch = groups_to_batch([rows, group(([5], [6]), ([5], [7]), scores=[1.0, 1.0])],
                            pad_token_id=PAD, temperature=1.0)
    GivenAdvantage(GroupAdvantage(zero_variance_filter=True))(batch)
    assert batch[data.ROW_MASK].flatten().tolist() == [False, True, False, False]


@pytest.mark.parametrize("given", [[0.5, -0.5], [[0.0, 0.5], [0.0, -0.5]]])
def test_groups_that_bring_their_advantages_are_trained_whatever_their_scores(given):
    equal = group(([5], [6]), ([5], [7]), scores=[1.0, 1.0])
    own = group(([5], [6]), ([5], [7]), scores=[1.0, 1.0], advantages=given,
                overrides=[{"temperature": 0.5}, {}])
    batch = groups_to_batch([own, equal], pad_token_id=PAD, temperature=1.0)
    GivenAdvantage(GroupAdvantage(zero_variance_filter=True))(batch)
    assert batch[data.ROW_MASK].flatten().tolist() == [False, True, False, False]
    batch = groups_to_batch([own, equal], pad_token_id=PAD)
    batch[data.TRUNCATED][0] = True
    GivenAdvantage(GroupAdvantage(zero_variance_filter=True, mask_truncated=True))(batch)
    assert batch[data.ROW_MASK].flatten().tolist() == [False, True, False, False]
    assert batch[data.ADVANTAGE][1, -1] == -0.5


def test_reference_log_probs_are_taken_if_every_group_has_them():
    with_them = group(([5], [6, 7]), ref_logprobs=[[1.0, -0.5, -0.25]])
    batch = groups_to_batch([with_them], pad_token_id=PAD)
    assert batch[data.REF_LOG_PROBS].tolist() == [[0.0, -0.5, -0.25]]
    batch = groups_to_batch([with_them, group(([5], [6]))], pad_token_id=PAD)
    assert data.REF_LOG_PROBS not in batch.keys(True)


@pytest.mark.parametrize(("topk", "ids", "log_probs"), [
    (None, [[4, 6], [0, 0]], [[-0.25, -2.0], [-math.inf] * 2]),
    (1, [[4], [0]], [[-0.25], [-math.inf]]),
    (3, [[4, 6, 0], [0, 0, 0]], [[-0.25, -2.0, -math.inf], [-math.inf] * 3]),
])
def test_teachers_tokens_are_sorted_and_padded(topk, ids, log_probs):
    taught = group(([5], [6, 7]), distill_token_ids=[[[9], [6, 4], []]],
                   distill_logprobs=[[[-1.0], [-2.0, -0.25], []]])
    batch = groups_to_batch([taught, group(([5], [6]))], pad_token_id=PAD, distill_topk=topk)
    assert batch[data.DISTILL_IDS][0, 1:].tolist() == ids
    assert batch[data.DISTILL_LOG_PROBS][0, 1:].tolist() == log_probs
    assert batch[data.DISTILL_LOG_PROBS][0, 0].isinf().all()  # the prompt is not distilled
    assert batch[data.DISTILL_LOG_PROBS][1].isinf().all()


def test_a_converted_batch_trains(tiny_model):
    from grpo.objectives import GRPOLoss
    from grpo.objectives.grpo import total_loss

    tokens = [5, 6, 7, 8, 9, 10]
    masks = [IGNORED, 6, IGNORED, IGNORED, 9, 10]
    rows = ScoredGroup(tokens=[tokens, [5, 11]], masks=[masks, [IGNORED, 11]], scores=[1.0, 0.0],
                       inference_logprobs=[[1.0, -3.0, 1.0, 1.0, -3.0, -3.0], [1.0, -3.0]])
    batch = GivenAdvantage(GroupAdvantage())(groups_to_batch([rows], pad_token_id=PAD))
    loss = GRPOLoss(tiny_model)
    normalizer = loss.normalizer(batch)
    assert normalizer.count == 4
    parts = data.split_rows(batch, num_micro_batches=2)
    sum(total_loss(loss(part, normalizer=normalizer)) for part in parts).backward()
    assert all(p.grad.isfinite().all() for p in tiny_model.parameters() if p.grad is not None)


def test_no_groups_and_bad_options_are_refused():
    with pytest.raises(ValueError, match="no groups to convert"):
        groups_to_batch([], pad_token_id=PAD)
    for options, message in [({"seq_len": 1}, "seq_len=1 must be at least 2"),
                             ({"max_staleness": -1}, "max_staleness=-1 must be at least 0"),
                             ({"distill_topk": -1}, "distill_topk=-1"),
                             ({"temperature": 0.0}, "temperature=0.0 must be positive")]:
        with pytest.raises(ValueError, match=message):
            GroupConverter(pad_token_id=PAD, **options)
