"""``env=atropos`` in both scripts, without vLLM, Ray or atroposlib: environments in threads, a hub
that runs already, and workers that are objects of this process."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest
from transformers import AutoModelForCausalLM

from grpo import data
from grpo.atropos.hub_server import HubServer
from grpo.collectors.rollout_worker import RolloutWorker
from grpo.config.atropos_script import in_script_keys
from grpo.config.keys import ConfigError
from grpo.policies.scoring import ReferenceScorer
from grpo.report.loggers import read_jsonl
from grpo.run import script_atropos
from grpo.run.assemble import assemble, assemble_async
from grpo.run.script_atropos import assemble_on_atropos, environment_flags
from grpo.run.start_atropos import set_up

from ..collectors.asynchronous import LocalRay
from ..config.configs import composed_like
from ..support import free_port
from .test_atropos_run import WANTED, ToHub, chance_of, running

ASYNC = "grpo-async.py"


@pytest.fixture
def make(make_on_ray, monkeypatch):
    """The same, with workers that are objects of this process."""
    LocalRay(monkeypatch)
    return make_on_ray


@pytest.fixture
def make_on_ray(tmp_path, small_folder, monkeypatch):
    """A trainer of a script, beside environments and a hub that run already."""
    monkeypatch.setattr("grpo.report.reporter.write_report", lambda run_dir, **_: run_dir)
    with ExitStack() as at_end:
        def make(*overrides: str, script: str = "grpo.py"):
            port, hub = free_port(), at_end.enter_context(HubServer())
            at_end.enter_context(running(port, ToHub(hub.url)))
            config = composed_like([
                "env=atropos", f"env.url={hub.url}", f"env.port={port}", "device=cpu",
                f"model.name={small_folder}", "inference_model.backend=transformers",
                "inference_model.max_model_len=48", "env.num_envs=4", "env.repeats=6",
                "train.checkpoint_frequency=0", "optimizer.lr=2e-2", *overrides], script=script)
            build = assemble_async if script == ASYNC else assemble
            return build(config, tmp_path / "run", None, at_end)

        yield make


def ages(folder) -> list[float]:
    return [row["policy/age_max"] for row in read_jsonl(folder / "metrics.jsonl")]


def test_grpo_py_learns_from_a_hub_that_runs_already(make, tmp_path, small_folder):
    make("train.max_steps=16", "train.kl_to_ref_coeff=0.001").fit()
    final, start = (AutoModelForCausalLM.from_pretrained(path) for path in
                    (tmp_path / "run" / "final_model", small_folder))
    assert chance_of(final, WANTED) > chance_of(start, WANTED) + 0.03
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 17)]
    assert all(row["atropos/recomputed_tokens"] == 0 for row in rows)


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_answer_and_groups_are_no_older_than_allowed(
        make, tmp_path, small_folder, staleness):
    make(f"train.staleness={staleness}", "inference_model.num_devices=2", "train.max_steps=16",
         script=ASYNC).fit()
    final, start = (AutoModelForCausalLM.from_pretrained(path) for path in
                    (tmp_path / "run" / "final_model", small_folder))
    assert chance_of(final, WANTED) > chance_of(start, WANTED) + 0.03
    assert len(ages(tmp_path / "run")) == 16 and max(ages(tmp_path / "run")) <= staleness


def test_a_worker_that_dies_is_replaced_and_the_run_goes_on(make, tmp_path):
    trainer = make("train.staleness=1", "inference_model.num_devices=2", "train.max_steps=6",
                   script=ASYNC)
    pool, publish = trainer.weights.pool, trainer.weights.publish

    def killing(**options):
        if trainer.step == 2:
            pool.kill(0)
        return publish(**options)

    trainer.weights.publish = killing
    trainer.fit()
    assert pool.restarts == 1 and all(isinstance(one, RolloutWorker) for one in pool.actors)
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 6


def test_the_scripts_workers_wait_for_each_batch_in_grpo_py(make, tmp_path):
    make("inference_model.num_devices=2", "train.max_steps=3").fit()
    assert len(ages(tmp_path / "run")) == 3


def test_a_taken_port_is_named_by_the_key_of_the_scripts(make, capsys):
    with HubServer() as other:
        port = other.url.rpartition(":")[2]
        with pytest.raises(ConfigError) as error:
            make(f"env.port={port}")
    assert in_script_keys(str(error.value)).startswith(f"env.port={port}, where environments")


def test_the_size_of_groups_is_given_once():
    config = composed_like(["env=atropos", "env.environment=env.py",
                            "env.task.flags={env: {group_size: 3}}"])
    with pytest.raises(ConfigError, match="env.group_size=3, which is env.repeats=16"):
        environment_flags(config)


def test_the_address_of_the_hub_is_no_flag_of_the_environment():
    config = composed_like(["env=atropos", "env.environment=env.py",
                            "env.task.flags={env: {rollout_server_url: 'http://other:8000'}}"])
    with pytest.raises(ConfigError, match="env.rollout_server_url=http://other:8000, but the run "
                                          "takes groups from env.url; set that"):
        environment_flags(config)


def test_an_environment_that_is_not_there_is_named(tmp_path):
    config = composed_like(["env=atropos", "env.environment=none.py"])
    with pytest.raises(ConfigError, match="env.environment=none.py: there is no such file"):
        assemble_on_atropos(config, tmp_path, None, ExitStack())


@pytest.mark.parametrize("given, refused", [([], None), (
    ["env.port=9123"], "env.port=9123 is not read because inference_model.url=http://127.0.0.1")])
def test_an_environment_that_the_run_starts_may_ask_an_engine_that_runs_already(
        tmp_path, monkeypatch, small_folder, given, refused):
    script = tmp_path / "env.py"
    script.touch()
    monkeypatch.setattr(script_atropos, "environment_python", lambda: "python")
    monkeypatch.setattr(script_atropos, "start_hub", lambda *_, **given: None)
    monkeypatch.setattr(script_atropos, "assemble_atropos", lambda composed, *_, **given: composed)
    config = composed_like([
        "env=atropos", f"env.environment={script}", "device=cpu", f"model.name={small_folder}",
        "inference_model.engine=server", "inference_model.url=http://127.0.0.1:9001", *given])
    composed = assemble_on_atropos(config, tmp_path, None, ExitStack())
    assert composed.engine_url == "http://127.0.0.1:9001"
    if refused is None:
        assert set_up(composed, tmp_path, None).setup.config.inference_model.url.endswith(":9001")
        return
    with pytest.raises(ConfigError) as error:
        set_up(composed, tmp_path, None)
    assert in_script_keys(str(error.value)).startswith(refused)


OWN = ("train.kl_to_ref_coeff=0.1", "train.max_steps=6")


@pytest.mark.parametrize("script, overrides", [
    ("grpo.py", ["ref_model.num_devices=2"]),
    (ASYNC, ["ref_model.num_devices=1", "train.staleness=1"])])
def test_references_with_devices_of_their_own_score_what_environments_send(
        make, tmp_path, small_folder, script, overrides):
    trainer = make(*OWN, *overrides, script=script)
    assert trainer.frozen["reference"] is None
    check_references(trainer, small_folder, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("script, overrides", [
    ("grpo.py", ["ref_model.num_devices=2", "ref_model.sharded=true"]),
    (ASYNC, ["ref_model.num_devices=1", "train.staleness=1"])])
def test_references_on_ray_score_what_environments_send_also_when_one_dies(
        make_on_ray, tmp_path, small_folder, script, overrides):
    pytest.importorskip("ray")
    trainer = make_on_ray(*OWN, *overrides, script=script)
    pool = trainer.collector.assembler.source.scoring.pool
    check_references(trainer, small_folder, tmp_path / "run",
                     at_step_2=lambda: os.kill(pool.about[0]["pid"], signal.SIGKILL))
    assert pool.restarts == 1


def check_references(trainer, start, run_dir, at_step_2=lambda: None) -> None:
    """Row by row what a whole copy on the trainer's device computes."""
    whole, compared = ReferenceScorer(AutoModelForCausalLM.from_pretrained(start), temperature=1.0,
                                      max_tokens=2048), []
    collect = trainer.collector.collect

    def checked():
        if trainer.step == 2:
            at_step_2()
        batch = collect()
        expected = whole(batch.clone())[data.REF_LOG_PROBS]
        compared.append((batch[data.REF_LOG_PROBS] - expected).abs().max().item())
        return batch

    trainer.collector.collect = checked
    trainer.fit()
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert len(compared) == 6 and max(compared) < 1e-5
    assert rows[0]["policy/kl_to_ref"] == pytest.approx(0, abs=1e-6)
    assert all(row["policy/kl_to_ref"] > 1e-4 for row in rows[2:])
    # A batch may be scored before the step that trains on it; nobody has then been at work.
    idle = [row["async/reference_idle"] for row in rows if "async/reference_idle" in row]
    assert idle and all(0 <= share <= 1 for share in idle)
