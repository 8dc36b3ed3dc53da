"""An unmodified environment of atroposlib in ``grpo.py`` and ``grpo-async.py``, which start it and
its hub (``make atropos-env``): on one and several training ranks, with engines here and on Ray."""

from __future__ import annotations

import pytest

from grpo.report.loggers import read_jsonl

from ..support import REPO
from .conftest import ASYNC, SCRIPT

ENVIRONMENT = REPO / "examples" / "atropos" / "arithmetic_env.py"
SMALL = ("env=atropos", f"env.environment={ENVIRONMENT}", "env.num_envs=8", "env.repeats=8",
         "inference_model.max_model_len=64", "train.max_steps=16", "train.checkpoint_frequency=0",
         "optimizer.lr=2e-4", "optimizer.schedule=constant", "hydra.run.dir=outputs/atropos")


@pytest.fixture
def train(runner, python):
    """Run a script on less work; its metrics."""
    def run(*overrides: str, script=SCRIPT) -> list[dict]:
        runner.environment["GRPO_ATROPOS_PYTHON"] = str(python)
        output = runner.run(*SMALL, *overrides, script=script)
        reason = "inference_model.engine=process, because 2 devices train"
        assert (reason in output) == (script == SCRIPT and "train_model.num_devices=2" in overrides)
        assert not runner.left_behind()
        return read_jsonl(runner.folder / "outputs" / "atropos" / "metrics.jsonl")

    return run


def check(rows: list[dict]) -> None:
    """The reward rises, engines have the trainer's weights, log-probs are those sampled with."""
    assert [row["step"] for row in rows] == [*range(1, 17)]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    assert all(row["canary/max_abs_diff"] < 1e-4 for row in rows)
    assert rows[0]["policy/log_prob_diff_abs_max"] < 1e-3
    assert rows[-1]["atropos/recomputed_tokens"] == 0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_py_learns_from_an_environment_that_it_starts(train, ranks):
    check(train(f"train_model.num_devices={ranks}", "train.kl_to_ref_coeff=0.001"))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("devices", [1, 2])
def test_grpo_async_learns_from_it_and_bounds_the_age_of_groups(train, devices):
    rows = train(f"train_model.num_devices={devices}", f"inference_model.num_devices={devices}",
                 "train.staleness=2", script=ASYNC)
    check(rows)
    assert max(row["policy/age_max"] for row in rows) <= 2


@pytest.mark.slow
def test_what_is_older_than_the_bound_is_left_out_and_counted(train):
    rows = train("train.staleness=0", "inference_model.backend=transformers",
                 "train.objective=maxent_listwise", "train.aggregation=prompt", script=ASYNC)
    check(rows)
    assert max(row["policy/age_max"] for row in rows) == 0
    assert rows[-1]["atropos/groups_stale"] > 0
