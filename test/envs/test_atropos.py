"""``AtroposEnv``: finished groups as TorchRL episodes, for our collectors and TorchRL's."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import check_env_specs

from grpo import data
from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.env import AtroposEnv, RecordedPolicy
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.collectors import SyncCollector
from grpo.objectives.advantages import GroupAdvantage

VOCABULARY = 64


def make_group(size, *, number=0, log_probs=True, **fields):
    """Rows ``[5, 6, 10 + row]`` of two trained tokens; a tool speaks between them in odd rows."""
    tokens = [[5, 6, 10 + row, number % 50 + 2] for row in range(size)]
    masks = [[IGNORED, 6 if row % 2 else IGNORED, IGNORED if row % 2 else t[2], t[3]]
             for row, t in enumerate(tokens)]
    values = [[1.0 if m == IGNORED else -0.5 - row for m in mask]
              for row, mask in enumerate(masks)]
    return ScoredGroup(tokens=tokens, masks=masks, scores=[float(row) for row in range(size)],
                       inference_logprobs=values if log_probs else None, **fields)


class Source:
    """Gives the groups one by one, then nothing; counts what it was asked for."""

    def __init__(self, groups):
        self.groups, self.timeouts = iter(groups), []

    def __call__(self, timeout):
        self.timeouts.append(timeout)
        return list(itertools.islice(self.groups, 1))


def endless(size=2):
    return Source(make_group(size, number=i) for i in itertools.count())


def make_env(source, **options):
    return AtroposEnv(source, **{"rows": 4, "seq_len": 8, "pad_token_id": 0,
                                 "vocab_size": VOCABULARY, "timeout": 5.0, **options})


@pytest.mark.parametrize("options", [{}, {"distill_topk": 2, "ref_log_probs": True}])
def test_specs_are_true(options):
    group = make_group(2, distill_token_ids=[[[3, 4]] * 4] * 2,
                       distill_logprobs=[[[-1.0, -2.0]] * 4] * 2, ref_logprobs=[[-1.0] * 4] * 2)
    check_env_specs(make_env(Source(itertools.repeat(group)), **options))


def test_recorded_policy_repeats_what_was_sampled_and_gets_its_scores():
    batch = make_env(endless()).rollout(1, RecordedPolicy()).flatten()
    assert batch[data.REWARD].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch[data.GROUP_ID].tolist() == [0, 0, 1, 1]
    assert not batch[data.REWARD_ERROR].any()
    assert batch[data.TOKENS][1].tolist() == [5, 6, 11, 2, 0, 0, 0, 0]
    assert batch[data.ASSISTANT_MASK][1].nonzero().flatten().tolist() == [1, 3]
    assert batch[data.LOG_PROBS][1].tolist() == [0, -1.5, 0, -1.5, 0, 0, 0, 0]
    assert batch[data.PROMPT_MASK].sum(-1).tolist() == [2, 1, 2, 1]


def test_another_action_has_no_reward():
    env = make_env(endless())
    batch = RecordedPolicy()(env.reset())
    batch[data.RESPONSE_TOKENS][0, 0] += 1
    batch = env.step(batch)
    assert batch[data.REWARD_ERROR].flatten().tolist() == [True, False, False, False]
    assert batch[data.REWARD].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_groups_of_any_sizes_stay_whole_and_none_is_lost(sizes):
    source = Source(make_group(size, number=i) for i, size in enumerate(sizes))
    env = make_env(source, rows=6, timeout=0.05)
    seen = []
    while True:
        try:
            batch = env.rollout(1, RecordedPolicy()).flatten()
        except TimeoutError:
            break
        rows = batch[batch["active"].flatten()]
        assert batch[~batch["active"].flatten()][data.REWARD_ERROR].all()
        for number in rows[data.GROUP_ID].unique():
            of_group = rows[rows[data.GROUP_ID] == number]
            seen.append((len(of_group), int(of_group[data.TOKENS][0, 3]) - 2))
        assert len(batch[data.GROUP_ID].unique()) == (
            len(rows[data.GROUP_ID].unique()) + len(batch) - len(rows))
    assert seen == [(size, i) for i, size in enumerate(sizes)][: len(seen)]
    assert sum(sizes[len(seen):]) < 6 == env.batch_size[0]  # what is left does not fill a batch
    assert env.assembler.waiting_rows == sum(sizes[len(seen):])


def test_spare_rows_take_no_part_in_advantages_and_loss(tiny_model):
    from grpo.objectives import GRPOLoss

    source = Source([make_group(3), make_group(3, number=1), make_group(2, number=2)])
    env = make_env(source, rows=5)
    batch = SyncCollector(env, RecordedPolicy()).collect()
    assert batch["active"].flatten().tolist() == [True] * 3 + [False] * 2
    GivenAdvantage(GroupAdvantage())(batch)
    assert batch[data.ADVANTAGE][3:].tolist() == [[0.0], [0.0]]
    loss = GRPOLoss(tiny_model)
    batch[data.TOKENS] %= 23
    assert loss.normalizer(batch).count == loss.normalizer(batch[:3]).count == 6
    assert loss(batch)["loss_objective"].isfinite()


def test_our_collector_runs_it():
    collector = SyncCollector(make_env(endless()), RecordedPolicy(), turns_per_batch=8)
    batch = collector.collect()
    assert batch[data.GROUP_ID].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {data.TOKENS, data.LOG_PROBS, data.REWARD, data.POLICY_VERSION} <= set(batch.keys(True))


def test_torchrl_collectors_and_buffers_run_it():
    from torchrl.collectors import Collector

    collector = Collector(make_env(endless()), RecordedPolicy(), frames_per_batch=4,
                          total_frames=8)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8)
    try:
        for batch in collector:
            buffer.extend(batch.flatten())
    finally:
        collector.shutdown()
    stored = buffer[:]
    assert len(stored) == 8
    assert torch.equal(stored[data.REWARD].flatten(), torch.tensor([0.0, 1.0] * 4))
    assert sorted(stored[data.GROUP_ID].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_deadline_says_how_far_it_came_and_keeps_the_groups():
    groups = [make_group(2), make_group(1, number=1)]
    env = make_env(Source(groups), timeout=0.05)
    with pytest.raises(TimeoutError, match=r"3 of 4 rows arrived within 0.05 s; see the env"):
        env.reset()
    env.assembler.source = Source([make_group(1, number=2)])
    assert env.reset()[data.GROUP_ID].tolist() == [0, 0, 1, 2]


def test_a_group_too_large_is_left_out_and_counted(caplog):
    env = make_env(Source([make_group(5), make_group(4)]))
    assert env.reset()["active"].all()
    assert env.assembler.counts["groups_too_large"] == 1
    assert "a group of 5 rows is left out" in caplog.text


def test_unknown_log_probs_are_no_crash_but_marked():
    env = make_env(Source([make_group(4, log_probs=False)]))
    batch = env.rollout(1, RecordedPolicy()).flatten()
    assert torch.equal(batch[data.LOG_PROBS].isnan(), batch[data.ASSISTANT_MASK])


def test_reference_log_probs_must_come_if_they_are_asked_for():
    env = make_env(Source([make_group(4, ref_logprobs=[[-1.0] * 4] * 4)]), ref_log_probs=True)
    batch = env.rollout(1, RecordedPolicy()).flatten()
    assert torch.equal(batch[data.REF_LOG_PROBS] == -1, batch[data.ASSISTANT_MASK])
    with pytest.raises(ValueError, match="ref_log_probs=True, but not every group brings"):
        make_env(Source([make_group(4)]), ref_log_probs=True).reset()


def test_positions_are_saved_with_a_checkpoint():
    env = make_env(endless())
    env.reset()
    again = make_env(endless())
    again.load_state_dict(env.state_dict())
    assert again.reset()[data.GROUP_ID].tolist() == [2, 2, 3, 3]


def test_a_partial_reset_is_refused():
    env = make_env(endless())
    batch = env.reset()
    batch["_reset"] = torch.tensor([[True], [False], [True], [True]])
    with pytest.raises(ValueError, match="AtroposEnv resets whole batches"):
        env.reset(batch)


def test_timeout_must_be_positive():
    with pytest.raises(ValueError, match="timeout=0"):
        make_env(endless(), timeout=0)
