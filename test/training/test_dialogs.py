"""Runs whose completions are conversations."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from grpo import data
from grpo.config.schema import ConfigError
from grpo.report.loggers import read_jsonl
from grpo.training.checkpoint import find_checkpoint

from ..collectors.asynchronous import LocalRay, async_config, make_async_trainer, rows_of
from ..envs.worlds import guess
from . import runs
from .runs import make_trainer, timeless

STEP = f"{runs.__name__}:again"


@pytest.fixture(scope="module")
def talker(tmp_path_factory, tokenizer):
    return runs.save_talker(tmp_path_factory.mktemp("talker"), tokenizer, seed=0)


@pytest.fixture
def talking(make_config, talker):
    def make(**env):
        return make_config(
            iterations=4, model={"name": str(talker)}, inference_model={"max_tokens": 24},
            env={"step": STEP, **env})

    return make


def trained(config, folder) -> list[dict]:
    make_trainer(config, folder).fit()
    return timeless(read_jsonl(folder / "metrics.jsonl"))


def turns(rows: list[dict]) -> list[float]:
    return [row["tokens/turns_mean"] for row in rows if "tokens/turns_mean" in row]


def test_completions_have_at_most_so_many_turns(talking, make_config, tmp_path):
    two, four = (turns(trained(talking(max_steps=most), tmp_path / str(most))) for most in (2, 4))
    assert all(1 < mean <= 2 for mean in two) and max(four) > 2
    assert turns(trained(make_config(iterations=1), tmp_path / "one")) == [1.0]


def test_samples_show_what_was_said_in_between(talking, tmp_path):
    trained(talking(), tmp_path)
    assert any("+" in sample["completion"] for sample in read_jsonl(tmp_path / "samples.jsonl"))


def test_a_resumed_run_holds_the_conversations_of_one_that_was_not_interrupted(talking, tmp_path):
    whole = trained(talking(), tmp_path / "whole")
    stopped = make_trainer(talking(), tmp_path / "stopped")
    for _ in range(2):
        stopped.iterate()
    stopped.save()
    stopped.reporter.loggers.close()
    checkpoint = find_checkpoint("auto", root=tmp_path / "stopped", exp_name="grpo")
    make_trainer(talking(), checkpoint.run_dir, checkpoint).fit()
    again = timeless(read_jsonl(tmp_path / "stopped" / "metrics.jsonl"))
    assert turns(again)[-2:] == turns(whole)[-2:]
    assert [row["reward/mean"] for row in again[-2:]] == [row["reward/mean"] for row in whole[-2:]]


def test_engines_elsewhere_hold_them_too(talker, tmp_path, monkeypatch):
    LocalRay(monkeypatch)
    config = async_config(
        talker, env={"step": STEP, "max_steps": 3, "reward": f"{runs.__name__}:by_text"},
        inference_model={"max_tokens": 24})
    with ExitStack() as at_end:
        make_async_trainer(config, tmp_path, at_end).fit()
    rows = rows_of(tmp_path)[1:]
    assert all(1 < row["tokens/turns_mean"] <= 3 for row in rows)
    # At float32 the trainer's log-probs are those that were sampled from: also behind messages.
    assert rows[0]["policy/ratio_p99"] == pytest.approx(1.0, abs=1e-4)


def test_new_weights_reach_engines_elsewhere_between_two_conversations(
        talker, tmp_path, monkeypatch):
    LocalRay(monkeypatch)
    config = async_config(
        talker, env={"step": STEP, "max_steps": 3, "reward": f"{runs.__name__}:by_text"},
        inference_model={"max_tokens": 24}, train={"staleness": 2})
    ages, turns_in_one = set(), set()
    with ExitStack() as at_end:
        trainer = make_async_trainer(config, tmp_path, at_end)
        for _ in range(5):
            batch = trainer.collector.collect()
            for row, mask in zip(batch[data.POLICY_VERSIONS], batch[data.ASSISTANT_MASK],
                                 strict=True):
                assert len(row[mask].unique()) == 1
                turns_in_one.add(int((mask[1:] & ~mask[:-1]).sum()))
            ages |= set((trainer.weights.version - batch[data.POLICY_VERSION]).tolist())
            trainer.weights.publish()
    assert len(ages) > 1 and max(turns_in_one) > 1  # updates came while they were held


@pytest.mark.slow
def test_an_environment_of_verifiers_answers_in_both_scripts(talker, make_config, tmp_path,
                                                              monkeypatch):
    if not hasattr(pytest.importorskip("verifiers"), "load_environment"):
        pytest.skip("needs the extra verifiers")
    env = {"dataset": "verifiers", "id": guess.__name__, "step": "environment", "max_steps": 3,
           "task": {"num_test": 2}, "num_envs": 2, "reward": None}
    sync = trained(make_config(iterations=3, model={"name": str(talker)}, env=env,
                               inference_model={"max_tokens": 44}), tmp_path / "sync")
    LocalRay(monkeypatch)
    config = async_config(talker, env=env, inference_model={"max_tokens": 44})
    with ExitStack() as at_end:
        make_async_trainer(config, tmp_path / "async", at_end).fit()
    for rows in (sync, rows_of(tmp_path / "async")):
        rows = [row for row in rows if "tokens/turns_mean" in row]
        assert rows and all(1 < row["tokens/turns_mean"] <= 3 for row in rows)
        assert not sum(row["reward/errors"] for row in rows)
        # Nobody of a random model guesses: a tenth is lost with each turn.
        assert all(row["reward/mean"] == pytest.approx(-row["tokens/turns_mean"] / 10, abs=1e-3)
                   for row in rows)
        assert rows[0]["policy/ratio_p99"] == pytest.approx(1.0, abs=1e-4)


def test_the_step_of_environments_needs_one(make_config, tmp_path):
    with pytest.raises(ConfigError, match="the problems of arithmetic have nobody who answers"):
        make_trainer(make_config(env={"step": "environment"}), tmp_path)


def test_turns_without_a_step_are_refused(make_config):
    with pytest.raises(ConfigError, match="env.max_steps=3 is not read.*env.step"):
        make_config(env={"max_steps": 3})


def test_a_step_that_is_not_there_is_refused_before_anything_starts(make_config, tmp_path):
    with pytest.raises(ValueError, match="there is no step 'nothing'; give retry, environment, or"):
        make_trainer(make_config(env={"step": "nothing"}), tmp_path)
