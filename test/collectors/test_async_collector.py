"""Asynchronous training with workers in this process: age, deaths, deadlines, resumption."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from grpo import data
from grpo.collectors.ray import RolloutsFailed
from grpo.collectors.reference_worker import (
    ReferenceWorker,
    Scored,
    SharedScoring,
    scoring_of,
    since,
)
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, WorkersLost
from grpo.run.build_worker import build_reference
from grpo.run.cli.endings import fit_with_workers
from grpo.training.checkpoint import list_checkpoints
from grpo.weights.canary import StaleWeightsError
from grpo.weights.packed import Packed

from ..support import wait_until
from ..weights.faults import FAULTS
from .asynchronous import LORA, LocalPool, async_config


def test_rollouts_run_ahead_but_not_too_far(start):
    trainer = start(train={"staleness": 2, "oversample": 0.5})
    ages = []
    for _ in range(6):
        metrics = trainer.iterate()
        ages.append(metrics["policy/age_max"])
        shares = [metrics[f"async/age_{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1.0)
        assert metrics["canary/max_abs_diff"] < 1e-4
    assert 0 < max(ages) <= 2


@pytest.mark.parametrize("sections", [{}, LORA], ids=["weights", "adapters"])
def test_a_dead_worker_is_replaced_by_one_with_the_present_weights(start, sections):
    trainer = start(**sections)
    for step in range(5):
        if step == 2:
            trainer.collector.pool.kill(0)
        assert trainer.iterate()["canary/max_abs_diff"] < 1e-4
    assert trainer.collector.pool.restarts == 1
    assert trainer.weights.differing() == []
    with torch.no_grad():
        trainer.learner.optimizer.params[0].add_(1.0)
    assert len(trainer.weights.differing()) == 1


def test_a_check_of_a_worker_that_has_been_replaced_meanwhile_is_made_again(start):
    trainer = start()
    pool = trainer.collector.pool
    pool.kill(0)
    trainer.canary.start()
    pool.dead[0] = "noticed by the thread that hands out groups"
    wait_until(lambda: trainer.weights.heal() or pool.whole)  # as while a batch is waited for
    assert trainer.canary.finish().max_abs_diff < 1e-4 and pool.restarts == 1


@pytest.mark.parametrize(("sections", "staleness"), [({}, 1), (LORA, 0)],
                         ids=["weights", "adapters"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_loss_that_no_canary_sees_ends_the_run_within_the_interval(
        start, sections, fault, staleness):
    train = {**sections.get("train", {}), "staleness": staleness, "eval_frequency": 0,
             "proof_interval": 3, "total_dialog_turns": 20 * 16}
    trainer = start(**{**sections, "train": train}, optimizer={"lr": 1e-7})
    trainer._prove_start()
    assert trainer.weights.version == 0
    for _ in range(4):
        assert trainer.iterate()["canary/max_abs_diff"] < 1e-4
    name = next(name for name, param in trainer.model.named_parameters() if param.requires_grad)

    def lossy(load):
        def load_state(packed, *rest):
            kept = {key: value for key, value in packed.tensors().items()
                    if fault == FAULTS[1] and key != name}
            return load(Packed.of(kept), *rest)
        return load_state

    for worker in trainer.collector.pool.actors[fault == FAULTS[2]:]:
        worker.load_state = lossy(worker.load_state)
    with pytest.raises(StaleWeightsError, match="differ to the bit"):
        # Where workers run ahead, a comparison ends before the next step of the optimizer.
        for _ in range((3 if fault == FAULTS[1] else 1) + (staleness > 0)):
            trainer.iterate()


def test_the_only_worker_dies_while_the_trainer_waits_for_it(start):
    trainer = start(train={"staleness": 0}, inference_model={"num_devices": 1})
    trainer.iterate()
    trainer.collector.pool.kill(0)
    trainer.iterate()
    assert trainer.collector.pool.restarts == 1


def test_a_worker_that_took_a_dead_ones_place_has_the_whole_time_for_its_first_group(start):
    trainer = start(train={"staleness": 0, "rollout_timeout": 2.0},
                    inference_model={"num_devices": 1})
    collector, pool, heal = trainer.collector, trainer.collector.pool, trainer.collector.heal
    pool.actors[0].submit = lambda groups: None  # it has none finished when it dies
    collector.heal = lambda: time.sleep(2.5) or heal()
    threading.Timer(0.5, pool.kill, [0]).start()
    assert len(collector.collect()) == 16 and pool.restarts == 1


def test_a_call_waits_for_a_worker_where_the_last_one_is_found_dead_just_before(start):
    trainer = start(inference_model={"num_devices": 1})
    policy, pool, heals = trainer.canary.policy, trainer.collector.pool, []
    heal = policy.heal

    def heal_and_die():
        heal()
        if not heals:
            heals.append(pool.dead.setdefault(0, "noticed by the thread that hands out groups"))

    policy.heal = heal_and_die
    assert trainer.canary.check().max_abs_diff < 1e-4
    assert heals and pool.restarts == 1


def test_a_worker_that_dies_again_and_again_ends_the_run_with_the_reason(start):
    trainer = start(ray={"max_restarts": 1}, inference_model={"num_devices": 1},
                    train={"staleness": 0})
    trainer.iterate()
    trainer.collector.pool.intercept["load_state"] = (
        lambda *args: trainer.collector.pool.kill(0))
    with pytest.raises((RolloutsFailed, WorkersLost), match="killed; 1 rollout workers were "
                                                           "replaced.*ray.max_restarts=1"):
        for _ in range(3):
            trainer.iterate()


@pytest.mark.parametrize(("method", "reason", "kept"), [
    ("load_state", "killed", 0), ("generate", "generate failed", 4)])
def test_lost_workers_leave_a_checkpoint_of_all_updates_and_of_what_was_not_trained(
        start, method, reason, kept):
    """They die in an update of the weights, or fail to continue the canary's prompts."""
    options = {"train": {"staleness": 1, "eval_frequency": 0},
               "inference_model": {"num_devices": 1}}
    trainer = start(ray={"max_restarts": 0}, **options)
    trainer.iterate()
    trainer.iterate()
    wait_until(lambda: trainer.collector.schedule.ready >= 4 + kept)  # a batch, and what is kept
    pool = trainer.collector.pool
    pool.intercept[method] = lambda *args: pool.kill(0) if method == "load_state" else 1 / 0
    with pytest.raises(SystemExit, match=f"{reason}(.|\n)*the run can go on: resume="):
        fit_with_workers(trainer)
    checkpoint = list_checkpoints(trainer.run_dir)[-1]
    saved = checkpoint.state()
    assert saved["step"] == saved["version"] == saved["env"]["version"] == checkpoint.step == 3
    assert len(saved["env"]["ready"]) >= kept

    resumed = start(checkpoint, **options)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(
        resumed.model.parameters(), trainer.model.parameters(), strict=True))
    batch = resumed.collector.collect()
    assert {row[0] for row in saved["env"]["ready"][:kept]} <= set(batch[data.GROUP_ID].tolist())
    assert resumed.iterate()["canary/max_abs_diff"] < 1e-4


def test_a_resumed_run_keeps_finished_groups_and_generates_the_others_again(start):
    trainer = start(train={"staleness": 2})
    trainer.iterate()
    trainer.iterate()
    wait_until(lambda: trainer.collector.schedule.ready >= 4)
    checkpoint = trainer.save()
    saved = checkpoint.state()["env"]
    assert len(saved["ready"]) >= 4

    resumed = start(checkpoint, train={"staleness": 2})
    schedule = resumed.collector.schedule
    assert schedule.version == resumed.weights.version == 2 == resumed.step
    assert schedule.ready == len(saved["ready"])
    batch = resumed.collector.collect()
    assert {row[0] for row in saved["ready"]} >= set(batch[data.GROUP_ID].tolist())
    assert resumed.iterate()["policy/age_max"] <= 2


def test_workers_of_a_resumed_run_have_its_adapter_before_they_generate(start):
    trainer = start(**LORA)
    for _ in range(2):
        trainer.iterate()
    checkpoint = trainer.save()
    assert not checkpoint.model_folder.exists()
    trained = [param.detach().clone() for param in trainer.learner.optimizer.params]
    assert all(value.any() for value in trained)

    resumed = start(checkpoint, **LORA)
    assert all(map(torch.equal, resumed.learner.optimizer.params, trained))
    assert resumed.weights.version == 2 and resumed.weights.differing() == []
    assert resumed.iterate()["canary/max_abs_diff"] < 1e-4


def test_batches_are_filled_with_groups_whose_rewards_differ(start):
    trainer = start(train={"staleness": 1, "max_sampling_rounds": 3},
                    env={"reward": f"{__name__}:where_odd"})
    for _ in range(3):
        metrics = trainer.iterate()
        assert 1 < metrics["sampling/rounds"] <= 6  # also those generated ahead
        assert metrics["sampling/informative_fraction"] < 1
        assert 0 <= metrics["sampling/reward_mean"] <= 1
    assert metrics["reward/zero_variance_groups"] == 0.0
    assert metrics["async/groups_filtered"] > 0


def where_odd(completion: str, problem) -> float:
    """Rewards that differ within the groups of some problems only."""
    return float(sum(map(ord, completion)) % 2) if int(problem.answer) % 2 else 0.0


def test_a_group_that_nobody_can_generate_ends_the_run_with_the_error(start):
    trainer = start()
    for worker in trainer.collector.pool.actors:
        worker.policy.write = lambda *args: 1 / 0
    with pytest.raises(RolloutsFailed, match="a group failed.* 3 times; at last it failed in "
                                              "rollout worker .*ZeroDivisionError"):
        trainer.collector.collect()


def test_a_worker_without_an_answer_is_noticed(start):
    trainer = start(train={"rollout_timeout": 0.5})
    trainer.collector.pool.intercept["submit"] = lambda leases: None
    with pytest.raises(RolloutsFailed, match="no group was finished within 0.5 s; . are being "
                       "generated, one for . s by rollout worker ., 0 are.*train.group_deadline"):
        trainer.collector.collect()


def test_an_evaluation_that_takes_too_long_names_the_key_that_gives_it_more_time(start):
    trainer = start(train={"rollout_timeout": 0.5})
    for worker in trainer.collector.pool.actors:
        worker.driver.submit, worker.driver.cancel = lambda job: Future(), lambda job: None
    with pytest.raises(EngineError, match="1 rows within 0.5 s; .* raise train.rollout_timeout"):
        trainer.canary.policy.generate_from_ids([[5, 6]])


def test_long_groups_are_waited_for_and_trained(start):
    """One worker keeps its groups for three updates that the other could make without them."""
    trainer = start(train={"staleness": 1})
    pool, held = trainer.collector.pool, []
    slow = pool.actors[0]
    submit, slow.submit = slow.submit, held.extend
    trainer.iterate()
    assert held and trainer.collector.metrics["async/overtaken_wait"] == 0
    timer = threading.Timer(1.0, lambda: (setattr(slow, "submit", submit), submit(held)))
    timer.start()
    waited = [trainer.iterate() for _ in range(3)]
    timer.join()
    assert sum(metrics["async/overtaken_wait"] for metrics in waited) > 0.2
    assert waited[-1]["async/groups_awaited"] > 0 == waited[-1]["async/groups_too_old"]
    assert all(metrics["policy/age_max"] <= 1 for metrics in waited)


def test_a_group_past_its_deadline_is_given_to_another(start):
    trainer = start(train={"staleness": 0, "group_deadline": 0.5, "rollout_timeout": 30})
    pool, ignored = trainer.collector.pool, []
    stuck = pool.actors[0]
    stuck.submit, stuck.cancel = ignored.append, ignored.append
    batch = trainer.collector.collect()
    assert isinstance(batch, TensorDict) and len(batch[data.GROUP_ID].unique()) == 4
    assert trainer.collector.schedule.counts["expired"] > 0
    cancelled = [entry for entry in ignored if entry and isinstance(entry[0], int)]
    assert cancelled, "the worker was not told"


@pytest.mark.parametrize("count", [1, 2])
def test_references_score_groups_as_they_come_and_one_is_replaced_when_it_dies(
        start, folder, count):
    options = {"train": {"staleness": 0, "kl_to_ref_coeff": 0.1}}
    trainer = start(**options)
    here = trainer.frozen["reference"]
    config = async_config(folder, **options).model_dump(mode="json")
    build = partial(build_reference, config, str(folder), "cpu", "float32")
    pool = LocalPool(lambda number: ReferenceWorker(build, str(folder)), count=count,
                     kind="reference worker")
    pool.start()
    trainer.collector.reference, trainer.frozen["reference"] = SharedScoring(pool), None
    for step in range(3):
        if step == 1:
            pool.kill(0)
        batch = trainer.collector.collect()
        scored = batch[data.REF_LOG_PROBS].clone()
        assert torch.allclose(scored, here(batch)[data.REF_LOG_PROBS], atol=1e-6)
        assert scored.min() < 0
        assert 0 <= trainer.collector.metrics["async/reference_idle"] < 1
        trainer.collector.pool.actors[0].set_version(step + 1)
        trainer.collector.pool.actors[1].set_version(step + 1)
        trainer.collector.published(step + 1)
    trainer.collector._heal()  # a batch may have come from the other one before
    assert pool.restarts == 1


class Held:
    """A reference worker that scores by its number, once it may."""

    def __init__(self, number: int, may: threading.Event) -> None:
        self.number, self.may = number, may

    def describe(self) -> dict:
        return {}

    def score(self, group: TensorDict) -> Scored:
        assert self.may.wait(30)
        return Scored(torch.full((2, 3), float(self.number)), busy=1.0, seconds=2.0, started=0.0)


def test_a_reference_worker_without_an_answer_is_named_and_no_rollout_worker(start):
    trainer = start(train={"staleness": 0, "rollout_timeout": 3.0})
    may = threading.Event()
    pool = LocalPool(lambda number: Held(number, may), count=1, kind="reference worker")
    pool.start()
    trainer.collector.reference = SharedScoring(pool)
    with pytest.raises(RolloutsFailed, match="4 are being generated or scored, one for . s by "
                                              "reference worker 0, 0 are ready. If that worker "
                                              "hangs, see its log.*ref_model.num_devices$"):
        trainer.collector.collect()
    may.set()


def test_a_group_goes_to_the_reference_with_the_least_to_do_and_those_of_a_dead_one_to_others():
    may = threading.Event()
    pool = LocalPool(lambda number: Held(number, may), count=3, kind="reference worker")
    pool.start()
    pool.dead[1] = "it died before"
    scoring, scored = SharedScoring(pool), {}
    for lease in range(5):
        scoring.add(lease, TensorDict({}, [2]))
        scoring.send()
    assert scoring.in_hand == {0: 3, 2: 2}
    assert scoring.leases == {0, 1, 2, 3, 4} and scoring.take() == []
    pool.kill(0)
    may.set()

    def finished() -> bool:
        scored.update(scoring.take())
        scoring.send()
        return len(scored) == 5

    wait_until(finished)
    assert all(group[data.REF_LOG_PROBS].eq(2).all() for group in scored.values())
    assert sorted(pool.dead) == [0, 1] and not scoring.leases and not scoring.calls
    scoring.add(5, TensorDict({}, [2]))
    pool.dead[2] = "it died too"
    scoring.send()
    assert scoring.leases == {5} and not scoring.calls
    wait_until(lambda: scoring.heal() or len(pool.present) == 3)
    scoring.send()
    assert scoring.in_hand == {0: 1}


class Part(Held):
    """The same of a worker that has a part of the reference, whose first one answers."""

    def score(self, group: TensorDict) -> Scored:
        report = super().score(group)
        return replace(report, log_probs=None) if self.number else report


def test_all_score_each_group_together_and_are_replaced_together_where_one_dies():
    may, made = threading.Event(), Counter()

    def make(number: int) -> Part:
        made[number] += 1
        return Part(number, may)

    pool = LocalPool(make, count=3, kind="reference worker", together=True, max_restarts=1)
    pool.start()
    scoring, scored = scoring_of(pool), []
    for lease in range(2):
        scoring.add(lease, TensorDict({}, [2]))
    scoring.send()
    assert scoring.in_hand == {0: 2, 1: 2, 2: 2} and scoring.leases == {0, 1}
    pool.kill(1)
    may.set()

    def finished() -> bool:
        scored.extend(scoring.take())
        scoring.heal()
        scoring.send()
        return len(scored) == 2

    wait_until(finished)
    assert sorted(lease for lease, _ in scored) == [0, 1]
    assert all(group[data.REF_LOG_PROBS].eq(0).all() for _, group in scored)
    assert made == {0: 2, 1: 2, 2: 2} and pool.restarts == 1
    assert not scoring.calls and len(scoring.idle()) == 3
    pool.kill(2)
    scoring.add(2, TensorDict({}, [2]))
    scoring.send()
    with pytest.raises(WorkersLost, match="reference worker 2 died during score.*; 1 reference "
                                          "workers were replaced before.*max_restarts=1"):
        wait_until(lambda: scoring.take() or scoring.heal())


class Starts:
    """A worker that answers when it may, or fails."""

    def __init__(self, number: int, may: threading.Event) -> None:
        self.number, self.may = number, may

    def describe(self) -> dict:
        if self.number == 0:
            assert self.may.wait(30)
        if self.number == 2:
            raise RuntimeError("no memory")
        return {"number": self.number}


def test_workers_start_together_and_each_is_met_when_it_answers():
    may = threading.Event()
    pool = LocalPool(lambda number: Starts(number, may), count=2)
    pool.launch()
    wait_until(lambda: pool.there(1))
    assert not pool.there(0) and pool.present == []
    may.set()
    pool.meet()
    assert pool.present == [0, 1] and [about["number"] for about in pool.about] == [0, 1]
    assert pool.there(0) and pool.there(1)


def test_a_worker_that_fails_is_named_though_others_still_start():
    pool = LocalPool(lambda number: Starts(number, threading.Event()), count=3,
                     kind="reference worker")
    pool.launch()
    with pytest.raises(EngineError, match="reference worker 2: describe failed.*no memory"):
        pool.meet()
    assert not pool.there(2)


def test_workers_that_do_not_answer_in_time_are_named_with_the_key():
    pool = LocalPool(lambda number: Starts(0, threading.Event()), count=2, start_timeout=0.2)
    with pytest.raises(EngineError, match=r"rollout worker 0, rollout worker 1: not started within "
                                          r"0.2 s \(ray.start_timeout\)"):
        pool.start()


def test_references_that_have_nothing_to_do_are_idle_and_one_at_work_is_judged_later():
    scoring, report = SharedScoring(SimpleNamespace(count=3)), Scored(None, 1.0, 4.0, 0.0)
    scoring.reports = {0: report}
    scoring._sent = {Call(1, 1, "score", None): (0, TensorDict())}
    assert scoring.idle() == [0.75, 1.0]
    scoring.reports = {0: report, 1: report}
    assert scoring.idle() == [1.0, 0.75, 1.0]


def test_the_groups_of_a_worker_that_nobody_asked_meanwhile_are_taken_back(start):
    collector = start().collector
    schedule = collector.schedule
    lease = schedule.lease(worker=99, now=0.0)  # a life that the trainer's side has replaced
    kept = schedule.lease(worker=collector.pool.lives[1], now=0.0)
    collector._lose_gone()
    assert schedule.holders() == {kept.worker}
    assert schedule.lease(worker=kept.worker, now=0.0).ticket == lease.ticket


@pytest.mark.parametrize(("kept", "sections"), [
    (True, {}),
    (True, {"env": {"num_envs": 2, "reward_workers": 2, "max_reward_errors": 1.0}}),
    (False, {"inference_model": {"max_tokens": 4}}),
    (False, {"inference_model": {"temperature": 0.5}}),
    (False, {"env": {"reward_weights": [-5.0]}}),
    (False, {"env": {"system_prompt": "Add."}})])
def test_finished_groups_of_a_checkpoint_are_made_anew_where_the_run_makes_others(
        start, kept, sections):
    options = {"train": {"staleness": 2}, "env": {"reward": ["negative_length"]}}
    trainer = start(**options)
    trainer.iterate()
    wait_until(lambda: trainer.collector.state_dict()["ready"])
    checkpoint = trainer.save()
    trainer.collector.close()
    state = checkpoint.state()["env"]
    resumed = start(checkpoint, **sections | {
        name: section | sections.get(name, {}) for name, section in options.items()})
    found = resumed.collector.state_dict()
    if kept:
        assert len(found["ready"]) >= len(state["ready"]) > 0
    else:
        assert found["ready"] == []
        assert found["unfinished"] == sorted(
            [*state["unfinished"], *(ready[:2] for ready in state["ready"])])
    resumed.iterate()


def test_a_synchronous_runs_checkpoint_is_refused_with_what_to_do(start):
    with pytest.raises(ValueError, match="checkpoint is of grpo.py.*model.name="):
        start().collector.load_state_dict({"epoch": 0, "position": 4})


def test_a_replaced_worker_is_measured_from_its_own_start():
    before = Scored(None, busy=5.0, seconds=6.0, started=1.0)
    assert since(before, Scored(None, busy=6.0, seconds=9.0, started=1.0)) == [1.0, 3.0]
    # It lives longer than the other had when that was asked last.
    assert since(before, Scored(None, busy=2.0, seconds=8.0, started=2.0)) == [2.0, 8.0]


def test_what_an_update_waits_for_running_groups_is_no_cost_of_the_weights(start):
    trainer = start(train={"staleness": 1})
    for worker in trainer.collector.pool.actors:
        step = worker.driver.sampler.step
        worker.driver.sampler.step = lambda step=step: time.sleep(0.5) or step()
    publish, waiting = trainer.weights.publish, trainer.collector.schedule
    trainer.weights.publish = lambda **options: (
        wait_until(lambda: waiting.running) and publish(**options))
    metrics = trainer.iterate()
    assert metrics["time/border"] > 0.1 > metrics["time/sync"] - metrics["time/border"]
