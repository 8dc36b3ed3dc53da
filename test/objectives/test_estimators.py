"""An advantage estimator of one's own, named by import path."""

from __future__ import annotations

import pytest
import torch

from grpo import GroupAdvantage, GRPOLoss, data
from grpo.config.schema import ConfigError, load_config
from grpo.objectives.advantages import group_advantages
from grpo.run.build_objective import build_advantage

SOURCE = """
import torch

def above_half(rewards_B, group_id_B, valid_B):
    return (rewards_B - 0.5) * (group_id_B + 1)

def column(rewards_B, group_id_B, valid_B):
    return rewards_B[:, None]

def infinite(rewards_B, group_id_B, valid_B):
    return rewards_B / 0

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_run_trains_on_the_advantages_of_ones_own_function(tiny_model, make_batch):
    config = load_config({"train": {"advantage_estimator": "my_estimators:above_half"}})
    batch = make_batch(tiny_model, error_rows=(2,))
    reward, error = (batch[key].flatten() for key in (data.REWARD, data.REWARD_ERROR))
    expected = ((reward - 0.5) * (batch[data.GROUP_ID] + 1)).where(~error, 0.0)
    advantage = build_advantage(config)(batch.exclude("advantage"))["advantage"].flatten()
    assert torch.equal(advantage, expected) and advantage.count_nonzero() == 3


def test_the_loss_reads_it_too_where_the_batch_brings_no_advantages(tiny_model, make_batch):
    batch = make_batch(tiny_model)
    own = "my_estimators:above_half"
    inside = GRPOLoss(tiny_model, advantage_estimator=own)(batch.exclude("advantage"))
    before = GroupAdvantage(estimator=own)(batch.exclude("advantage"))
    outside = GRPOLoss(tiny_model)(before)
    assert inside["loss_objective"].item() == outside["loss_objective"].item() != 0


@pytest.mark.parametrize("estimator, expected", [
    ("my_estimator:above_half", "No module named 'my_estimator'; give module:function"),
    ("my_estimators:below_half", "no attribute 'below_half'"),
    ("my_estimators:number", "is no function"), (":above_half", "cannot be imported"),
    ("gae", "or your own as module:function")])
def test_one_that_cannot_be_had_is_refused_at_the_start(estimator, expected):
    with pytest.raises(ConfigError, match="train.advantage_estimator") as error:
        load_config({"train": {"advantage_estimator": estimator}})
    assert expected in str(error.value)


def test_an_eps_that_it_would_not_read_is_refused():
    with pytest.raises(ConfigError, match="train.advantage_eps.*would be ignored"):
        load_config({"train": {"advantage_estimator": "my_estimators:above_half",
                               "advantage_eps": 1e-3}})


@pytest.mark.parametrize("name, expected", [
    ("column", r"Tensor of shape \(2, 1\); return a tensor of shape \(2,\)"),
    ("infinite", r"not finite for rows \[0, 1\]")])
def test_what_it_returns_is_checked(name, expected):
    with pytest.raises(ValueError, match=expected):
        group_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64),
                         estimator=f"my_estimators:{name}")
