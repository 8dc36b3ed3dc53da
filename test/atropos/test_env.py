"""The Atropos API as a TorchRL environment: its specs, its batches, and what it acknowledges."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torchrl.envs import check_env_specs

from grpo import AtroposEnv, GroupAdvantage, data
from grpo.atropos.advantages import GivenAdvantage
from grpo.atropos.schemas import parse_group

from .groups import group, registration

KNOWN = {"inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.5, -2.0]]}


@pytest.fixture
def env(shared, client):
    env = AtroposEnv(shared.url, rows=4, seq_len=8, pad_token_id=0, timeout=20.0)
    yield env
    env.close(raise_if_closed=False)


def send(client, tags, *, size=2, **fields):
    """Groups for an environment whose trainer is registered or not."""
    client.register(registration())
    for tag in tags:
        client.send(group(size=size, tag=tag, **(KNOWN | fields)))


def test_its_specs_are_what_it_gives(env, client):
    send(client, range(1, 25))
    check_env_specs(env)


def test_a_rollout_is_a_batch_of_scored_groups(env, client):
    send(client, (7, 8))
    batch = env.rollout(1)[:, 0]
    assert batch[data.TOKENS][:, :4].tolist() == [[5, 6, 7, 0]] * 2 + [[5, 6, 8, 0]] * 2
    assert batch[data.TOKENS].shape == (4, 8)
    assert batch[data.GROUP_ID].tolist() == [0, 0, 1, 1]
    assert batch[data.REWARD].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch[data.LOG_PROBS][:, 1:3].tolist() == [[-0.5, -0.25], [-0.5, -2.0]] * 2
    assert batch[data.ASSISTANT_MASK].sum(-1).tolist() == [2] * 4
    assert batch[data.RESPONSE_TOKENS][:, :3].tolist() == [[6, 7, 0]] * 2 + [[6, 8, 0]] * 2
    assert batch["next", "done"].all() and not batch["done"].any()
    assert not batch["success"].any() and batch[data.SUCCESS].sum() == 2


def test_rows_that_fill_a_batch_are_not_trained_on(shared, client):
    env = AtroposEnv(shared.url, rows=5, seq_len=8, pad_token_id=0, timeout=20.0)
    env.groups.assembler.source = three_groups
    batch = env.rollout(1)[:, 0]
    assert batch[data.GROUP_ID].tolist() == [0, 0, 1, 1, -1]
    assert not batch[data.ATTENTION_MASK][4].any() and not batch[data.ROW_MASK][4]
    GivenAdvantage(GroupAdvantage(estimator="group_mean"))(batch)
    assert batch[data.ADVANTAGE].flatten().tolist() == [-0.5, 0.5, -0.5, 0.5, 0.0]
    assert not batch[data.ROW_MASK][4]
    env.close()


def three_groups(timeout):
    """Three groups at once, where the API would wait for five rows exactly."""
    return [parse_group(group(tag=tag, **KNOWN)) for tag in (1, 2, 3)]


def test_a_batch_is_acknowledged_when_it_was_used(env, client):
    send(client, (1, 2))
    env.rollout(1)
    assert env._stream.unacknowledged()
    env.close()
    assert not env._stream.unacknowledged()


def test_it_waits_no_longer_than_it_was_told(shared, client):
    env = AtroposEnv(shared.url, rows=4, seq_len=8, pad_token_id=0, timeout=0.5)
    with pytest.raises(TimeoutError, match="no group finished within 0.5 s"):
        env.reset()
    env.close()


def test_unknown_log_probs_are_refused(env, client):
    send(client, (1, 2), inference_logprobs=None)
    with pytest.raises(ValueError, match="log-probs of 4 of 4 rows are not known"):
        env.reset()


def test_part_of_a_batch_cannot_be_reset(env, client):
    send(client, (1, 2))
    done = env.rollout(1)[:, 0]["next"]
    done["_reset"] = torch.tensor([[True], [False], [True], [True]])
    with pytest.raises(ValueError, match="partial '_reset' mask"):
        env.reset(done)


def test_the_package_is_imported_without_it():
    code = "import sys, grpo; assert 'torch' not in sys.modules; grpo.AtroposEnv"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
