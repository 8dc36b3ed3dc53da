"""Asynchronous runs that end while a batch is waited for or trained: what is finished is kept."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch

from grpo import data
from grpo.training.checkpoint import list_checkpoints
from grpo.training.stopping import Stopped

from ..support import wait_until

OPTIONS = {"train": {"staleness": 0, "eval_frequency": 0, "total_dialog_turns": 3 * 16}}


def numbers(groups: list[list]) -> list[int]:
    return sorted(number for number, *_ in groups)


def second_batch(trainer, then, *, without: int | None = None) -> None:
    """Train one batch; the groups of the next one, but for that number, are generated only when
    that is waited for, and ``then`` is called beside."""
    held, collect = [], trainer.collector.collect

    def submit(worker, groups):
        held.extend((worker, group) for group in groups if group[1] >= 4)
        type(worker).submit(worker, [group for group in groups if group[1] < 4])

    def release():
        wait_until(lambda: len(held) == 4)
        for worker, group in held:
            if group[1] != without:
                type(worker).submit(worker, [group])
        then()

    def collect_second():
        threading.Thread(target=release, daemon=True).start()
        return collect()

    for worker in trainer.collector.pool.actors:
        worker.submit = partial(submit, worker)
    trainer.iterate()
    trainer.collector.collect = collect_second


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("frequency", [0, 1])  # of checkpoints; 1: there is one of that step
def test_groups_that_came_while_a_batch_was_waited_for_are_kept(start, frequency):
    trainer = start(**{**OPTIONS, "train": OPTIONS["train"] | {"checkpoint_frequency": frequency}})
    schedule = trainer.collector.schedule
    second_batch(trainer, lambda: wait_until(lambda: schedule.ready == 3) and stop(), without=6)
    with pytest.raises(Stopped):
        trainer.fit()
    checkpoint = list_checkpoints(trainer.run_dir)[-1]
    saved = checkpoint.state()["env"]
    assert checkpoint.step == saved["version"] == 1
    assert numbers(saved["ready"]) == [4, 5, 7] and numbers(saved["unfinished"]) == [6]
    batch = start(checkpoint, **OPTIONS).collector.collect()
    assert sorted(set(batch[data.GROUP_ID].tolist())) == [4, 5, 6, 7]
    number, *_, group = saved["ready"][0]
    rows = batch[batch[data.GROUP_ID].flatten() == number]
    assert torch.equal(rows[data.REWARD], group["next"]["reward"])


def generate_only(trainer, groups: range | list[int]) -> None:
    """Let the others of these numbers never be finished."""
    def submit(worker, asked):
        type(worker).submit(worker, [group for group in asked if group[1] in groups])

    for worker in trainer.collector.pool.actors:
        worker.submit = partial(submit, worker)


def stop_when_ready(trainer, count: int) -> None:
    """Let a signal end the run when so many groups wait to be trained."""
    collect, schedule = trainer.collector.collect, trainer.collector.schedule

    def wait_and_stop():
        try:
            wait_until(lambda: schedule.ready == count)
        finally:
            stop()

    def collect_and_stop():
        threading.Thread(target=wait_and_stop, daemon=True).start()
        return collect()

    trainer.collector.collect = collect_and_stop


def test_a_run_that_always_ends_before_its_next_step_loses_nothing_that_was_finished(start):
    trainer, ready = start(**OPTIONS), []
    generate_only(trainer, range(4))
    trainer.iterate()
    checkpoint = trainer.save()
    for finished in ([4, 6], [5], []):
        trainer, ready, saves = start(checkpoint, **OPTIONS), sorted([*ready, *finished]), []
        trainer.after_saving.append(saves.append)
        generate_only(trainer, finished)
        stop_when_ready(trainer, len(ready))
        with pytest.raises(Stopped):
            trainer.fit()
        checkpoint, = list_checkpoints(trainer.run_dir)
        assert checkpoint.step == 1 and numbers(checkpoint.state()["env"]["ready"]) == ready
        assert len(saves) == bool(finished)  # what has not changed is not written again


def test_a_batch_that_could_not_be_trained_is_trained_by_the_run_that_goes_on(start):
    trainer = start(**OPTIONS)
    second_batch(trainer, lambda: None)
    trainer.advantage = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    checkpoint = list_checkpoints(trainer.run_dir)[-1]
    saved = checkpoint.state()["env"]
    assert checkpoint.step == saved["version"] == 1
    assert numbers(saved["ready"]) == [4, 5, 6, 7] and saved["unfinished"] == []
    resumed = start(checkpoint, **OPTIONS)
    batch = resumed.collector.collect()
    rows = torch.cat([group["next"]["reward"] for *_, group in saved["ready"]])
    assert torch.equal(batch[data.REWARD], rows) and resumed.collector.schedule.running == 0


def test_a_batch_that_is_trained_but_not_with_the_workers_is_not_trained_twice(start):
    options = {**OPTIONS, "ray": {"max_restarts": 0}}
    trainer = start(**options)
    trainer.iterate()
    pool = trainer.collector.pool
    pool.intercept["load_state"] = lambda *args: (pool.kill(0), pool.kill(1))
    with pytest.raises(Exception, match="killed"):
        trainer.fit()
    saved = list_checkpoints(trainer.run_dir)[-1].state()["env"]
    assert saved["version"] == 2 and saved["next"] == 8
    assert saved["ready"] == saved["unfinished"] == []


def test_a_signal_in_the_middle_of_taking_a_batch_loses_no_group(start):
    trainer = start(**OPTIONS)
    second_batch(trainer, lambda: None)
    schedule, stopped = trainer.collector.schedule, []

    class Counts(dict):
        def __setitem__(self, name: str, value: float) -> None:
            super().__setitem__(name, value)
            if self["finished"] == 8 and not schedule.ready and not stopped:
                stopped.append(name)
                stop()
                time.sleep(0.2)

    schedule.counts = Counts(schedule.counts)
    with pytest.raises(Stopped):
        trainer.fit()
    saved = list_checkpoints(trainer.run_dir)[-1].state()["env"]
    assert stopped and numbers(saved["ready"]) == [4, 5, 6, 7]


def test_a_group_whose_rewards_failed_is_made_anew_by_the_run_that_goes_on(start):
    trainer = start(**OPTIONS)
    trainer.iterate()
    trainer.collector.collect()
    state = trainer.collector.state_dict()
    state["ready"][1][-1]["next"]["reward_error"][0] = True
    resumed = start(**OPTIONS).collector
    resumed.load_state_dict(state)
    found = resumed.state_dict()
    assert numbers(found["ready"]) == [4, 6, 7] and numbers(found["unfinished"]) == [5]
