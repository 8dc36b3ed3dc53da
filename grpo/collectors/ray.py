"""Rollouts from workers that generate all the time, with a bound on their staleness."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from grpo import data
from grpo.collectors.reference_worker import scoring_of, since
from grpo.collectors.schedule import Finished, RolloutSchedule
from grpo.envs.rewards.batch import first_failures
from grpo.objectives.shaping import informative_groups
from grpo.policies.base import Policy
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import Call, WorkerPool, WorkersLost
from grpo.system.threads import in_background

# Seconds: of a worker's wait for a finished group; of a look for what nobody reports.
_POLL, _LOOK = 0.5, 0.1


class RolloutsFailed(RuntimeError):
    """No rollouts will come; the weights are as they were after the last update."""


class RayCollector:
    """Batches of groups from rollout workers.

    A thread hands out groups as the schedule admits them and takes finished ones, also while the
    trainer trains. At ``staleness=0`` batches are those of
    :class:`~grpo.collectors.sync.SyncCollector`: the same prompts, random numbers and order.

    Args:
        pool: of started workers.
        schedule: which group when.
        policy: what the trainer itself generates with; a checkpoint counts its calls.
        heal: replaces dead workers, with the present weights; called by :meth:`collect`.
        groups_each: groups that a worker has in hand at a time.
        timeout: seconds without a finished group or a new worker after which :meth:`collect`
            gives up.
        reference: pool of :class:`~grpo.collectors.reference_worker.ReferenceWorker`, which
            score groups as they come; None: the trainer does, if anybody.
        layout: what the rows of a group, their widths and rewards follow from. Finished groups of a
            checkpoint with another one are generated anew, and so are those with a reward that
            failed.

    Attributes:
        failures: of rewards that arrived for the last batch, as of
            :class:`~grpo.envs.rewards.RewardBatch`.
        seconds: ``"wait"``: what the last batch was waited for.
        metrics: staleness, fill of the buffer, rates and idle shares of the workers, and under
            ``async/overtaken_wait`` the seconds of the wait in which a batch was finished, and only
            groups were missing that it had overtaken.

    Raises:
        RolloutsFailed: from :meth:`collect`.
    """

    keeps_untrained = True

    def __init__(
        self, pool: WorkerPool, schedule: RolloutSchedule, policy: Policy, *,
        heal: Callable[[], None], groups_each: int, timeout: float = 1800.0,
        reference: WorkerPool | None = None, layout: dict[str, Any] | None = None,
    ) -> None:
        if groups_each < 1:
            raise ValueError(f"groups_each={groups_each} must be at least 1")
        self.pool, self.schedule, self.policy = pool, schedule, policy
        self.heal, self.groups_each, self.timeout = heal, groups_each, timeout
        self.reference = None if reference is None else scoring_of(reference)
        self.layout = layout
        self.seconds = {"wait": 0.0}
        self.metrics: dict[str, float] = {}
        self._overtaken_wait = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._error: str | None = None
        self._late: dict[int, int] = {}  # life -> groups it was late with, since its last good one
        self.failures: dict[str, str] = {}
        self._failures: dict[str, str] = {}  # since the last batch
        self._rewards: list[float] = []  # of all that was finished since the last batch
        self._latest: dict[int, Any] = {}  # worker -> its last report
        self._before: dict[int, Any] = {}  # worker -> that of the last batch

    @property
    def finished(self) -> int:
        """Groups that workers have finished, over the whole run."""
        return self.schedule.counts["finished"]

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints: the schedule, with what is finished and in flight."""
        with self._changed:
            state = self.schedule.state_dict()
        state["ready"] = [[*ticket, group.to_dict()] for *ticket, group in state["ready"]]
        return state | {"layout": self.layout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "ready" not in state:
            raise ValueError("resume: the checkpoint is of grpo.py with an engine of the trainer's "
                             "own, whose prompts are drawn in another way; go on with that, or "
                             "start anew from its model by model.name=CHECKPOINT/model")
        ready = [[*ticket, TensorDict(group, batch_size=[len(group["group_id"])])]
                 for *ticket, group in state["ready"]]
        fits, kept, unfinished = state.get("layout", self.layout) == self.layout, [], []
        for *ticket, group in ready:  # a reward that failed may have been mended since
            if fits and not group[data.REWARD_ERROR].any():
                kept.append([*ticket, group])
            else:
                unfinished.append(ticket[:2])
        with self._changed:
            self.schedule.load_state_dict(
                {**state, "unfinished": [*state["unfinished"], *unfinished], "ready": kept})

    def published(self, version: int) -> None:
        """The workers have new weights: hand out what that admits."""
        with self._changed:
            self.schedule.publish(version)
            if self._thread is not None:  # nobody generates before a batch is asked for
                self._hand_out()

    def collect(self) -> TensorDictBase:
        """One batch of whole groups, flat and dense."""
        start, self._overtaken_wait = time.perf_counter(), 0.0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="rollouts")
            self._thread.start()
        finished, patience = -1, 0.0
        # A signal may raise anywhere in this thread, but must not leave the schedule halfway.
        while (batch := in_background(self._taken).result()) is None:
            self._raise_failure()
            if self._heal() or finished != self.schedule.counts["finished"]:
                finished, patience = (self.schedule.counts["finished"],
                                      time.monotonic() + self.timeout)
            if time.monotonic() > patience:
                raise RolloutsFailed(self._nothing_comes())
        self.seconds = {"wait": time.perf_counter() - start}
        self._measure(batch)
        return torch.cat([done.group for done in batch])

    def close(self) -> None:
        """End the thread; the workers belong to the policy."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=10.0)

    # -- the trainer's side --------------------------------------------------------------------

    def _taken(self) -> list[Finished] | None:
        with self._changed:
            batch = self.schedule.take()
            if batch is None:
                start, overtaken = time.perf_counter(), self.schedule.awaited > 0
                self._changed.wait(_LOOK)
                self._overtaken_wait += overtaken * (time.perf_counter() - start)
                batch = self.schedule.take()
            if batch is not None:
                self._hand_out()
            return batch

    def _nothing_comes(self) -> str:
        with self._changed:
            slowest, running = self.schedule.slowest(), self.schedule.running
            scorer = self.reference.who_scores(slowest.id) if self.reference and slowest else None
        names = {life: self.pool.name(number) for number, life in enumerate(self.pool.lives)}
        who = "" if slowest is None else (
            f", one for {time.monotonic() - slowest.since:.0f} s by "
            f"{scorer or names.get(slowest.worker, 'a worker that is gone')}")
        advice = ("let train.group_deadline give its groups to another; if rows are that long, "
                  "raise train.rollout_timeout, or lower inference_model.max_tokens")
        if scorer:  # which that deadline does not end
            advice = ("see its log in Ray's session folder; if scores take that long, raise "
                      "train.rollout_timeout, or ref_model.num_devices")
        return (f"no group was finished within {self.timeout:g} s; {running} are being generated"
                f"{' or scored' * bool(self.reference)}{who}, {self.schedule.ready} are ready. If "
                f"that worker hangs, {advice}")

    def _heal(self) -> bool:
        """Replace the dead; whether a new worker is there, which begins its groups only now."""
        before = self._lives()
        try:
            if not self.pool.whole:
                self.heal()
            if self.reference is not None:
                self.reference.heal()
        except WorkersLost as error:
            raise RolloutsFailed(str(error)) from error
        return not self._lives() <= before

    def _lives(self) -> set[int]:
        return {self.pool.lives[number] for number in self.pool.usable}

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise RolloutsFailed(self._error)
        if not self._thread.is_alive() and not self._stopped:
            raise RolloutsFailed("the thread that hands out groups has ended")

    # -- the thread's side ---------------------------------------------------------------------

    def _run(self) -> None:
        pending: list[Call] = []
        try:
            while not self._stopped:
                self._ask_for_groups(pending)
                self._receive(pending)
                with self._changed:
                    self._receive_scores()
                    self._lose_gone()
                    self._end_late()
                    self._hand_out()
        except Exception as error:  # raised where the trainer waits
            if not self._stopped:
                with self._changed:
                    self._error = f"the thread that hands out groups failed: {error!r}"
                    self._changed.notify_all()

    def _ask_for_groups(self, pending: list[Call]) -> None:
        asked = {call.life for call in pending}
        for number in self.pool.present:
            if self.pool.lives[number] not in asked:
                pending.append(self.pool.send(number, "finished", _POLL))

    def _receive(self, pending: list[Call]) -> None:
        awaited = [*pending, *(self.reference.calls if self.reference else ())]
        if not awaited:  # all are dead; the trainer replaces them
            time.sleep(_LOOK)
            return
        for call in self.pool.wait(awaited, timeout=_LOOK):
            if call not in pending:  # a reference worker's
                continue
            pending.remove(call)
            try:
                report = self.pool.result(call, timeout=60.0)
                outcomes = report.outcomes()
            except EngineError as error:
                self.pool.bury(call, str(error))
                with self._changed:
                    self.schedule.lose(call.life)
                    self._changed.notify_all()
                continue
            with self._changed:
                self._latest[call.number] = report
                self._failures = first_failures([self._failures, report.failures])
                for outcome in outcomes:
                    self._late.pop(call.life, None)
                    self._take_back(call.number, *outcome)
                self._changed.notify_all()

    def _take_back(self, number: int, lease: int, group: TensorDictBase | None,
                   error: str | None) -> None:
        if error is not None:
            dropped = self.schedule.counts["dropped"]
            self.schedule.fail(lease)
            if self.schedule.counts["dropped"] > dropped:
                self._error = (f"a group failed, or was late, {self.schedule.max_attempts} times; "
                               f"at last it failed in {self.pool.name(number)}: {error}")
            return
        if self.reference is None:
            self._finish(lease, group)
        else:
            self.reference.add(lease, group)

    def _finish(self, lease: int, group: TensorDictBase) -> None:
        # A worker may have weights that are still on their way to others.
        version = min(int(group[data.POLICY_VERSION].min()), self.schedule.version)
        if self.schedule.max_rounds is None:
            self.schedule.finish(lease, group, version=version)
        elif self.schedule.finish(lease, group, version=version, rank=_rank(group)):
            valid_B = ~group[data.REWARD_ERROR].flatten()
            self._rewards += group[data.REWARD].flatten()[valid_B].tolist()

    def _receive_scores(self) -> None:
        """Let the reference score what has come, while the trainer trains."""
        if self.reference is None:
            return
        for lease, group in self.reference.take():
            self._finish(lease, group)
            self._changed.notify_all()
        self.reference.send()

    def _lose_gone(self) -> None:
        """Take back what is held by workers that the trainer's side found dead."""
        there = {self.pool.lives[number] for number in self.pool.present}
        for life in self.schedule.holders() - there:
            self.schedule.lose(life)

    def _end_late(self) -> None:
        numbers = {self.pool.lives[number]: number for number in self.pool.present}
        late: dict[int, list[int]] = {}
        generated = self.reference.leases if self.reference else set()  # and not yet scored
        for lease in self.schedule.expire(time.monotonic(), but=generated):
            late.setdefault(lease.worker, []).append(lease.id)
        for life, leases in late.items():
            self._late[life] = self._late.get(life, 0) + len(leases)
            if life in numbers:
                self.pool.send(numbers[life], "cancel", leases)

    def _hand_out(self) -> None:
        """Give groups to the workers with the fewest, but last to those that were late."""
        if self._thread is None or self._stopped:
            return
        numbers = {self.pool.lives[number]: number for number in self.pool.usable}
        given = self.schedule.deal(numbers, each=self.groups_each, now=time.monotonic(),
                                   late=self._late)
        for life, leases in given.items():
            self.pool.send(numbers[life], "submit",
                           [(lease.id, lease.ticket.index) for lease in leases])

    # -- numbers -------------------------------------------------------------------------------

    def _measure(self, batch: list[Finished]) -> None:
        with self._changed:
            metrics, latest = self.schedule.metrics(), dict(self._latest)
            version = self.schedule.version
            rewards, self._rewards = self._rewards, []
            self.failures, self._failures = self._failures, {}
            idle = self.reference.idle() if self.reference else []
        if self.schedule.max_rounds is not None:
            generated, useful = self.schedule.generated, sum(not done.rank for done in batch)
            metrics["sampling/rounds"] = generated / self.schedule.batch_groups
            metrics["sampling/informative_fraction"] = useful / generated
            if rewards:  # none, where a checkpoint had all of the batch
                metrics["sampling/reward_mean"] = sum(rewards) / len(rewards)
        for age in range(self.schedule.staleness + 1):
            share = sum(version - done.version == age for done in batch) / len(batch)
            metrics[f"async/age_{age}"] = share
        for number, report in latest.items():
            busy, seconds, tokens = since(self._before.get(number), report, "tokens")
            if seconds > 0:
                metrics[f"async/worker_{number}_idle"] = max(0.0, 1.0 - busy / seconds)
                metrics[f"async/worker_{number}_tokens_per_second"] = tokens / seconds
        if idle:
            metrics["async/reference_idle"] = sum(idle) / len(idle)
        metrics["async/overtaken_wait"] = self._overtaken_wait
        metrics["async/workers"] = float(len(self.pool.present))
        metrics["async/restarts"] = float(self.pool.restarts)
        self._before, self.metrics = latest, metrics


def _rank(group: TensorDictBase) -> int:
    """0: its rewards differ, so it teaches; 1: they do not; 2: it has none."""
    valid_B = ~group[data.REWARD_ERROR].flatten()
    useful_B = informative_groups(group[data.REWARD].flatten(), group[data.GROUP_ID].flatten(),
                                  valid_B)
    return 0 if useful_B.any() else 1 if valid_B.any() else 2
