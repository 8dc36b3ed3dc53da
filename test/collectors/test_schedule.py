"""What the schedule promises, for any order in which workers finish, fail and die."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from grpo.collectors.schedule import Lease, RolloutSchedule, Ticket

WORKERS = 3


class Run(RuleBasedStateMachine):
    """Workers, a trainer and a clock that do anything in any order."""

    @initialize(groups=st.integers(1, 4), staleness=st.integers(0, 3),
                deadline=st.none() | st.integers(1, 5), oversample=st.sampled_from([0.0, 0.5, 1.0]),
                max_rounds=st.none() | st.integers(2, 3))
    def start(self, groups, staleness, deadline, oversample, max_rounds) -> None:
        self.options = {"staleness": staleness, "group_deadline": deadline,
                        "oversample": oversample, "max_rounds": max_rounds}
        self.groups = groups
        self.schedule = RolloutSchedule(groups, **self.options)
        self.now = 0.0
        self.leases: dict[int, tuple] = {}  # id -> (lease, version at its start)
        self.trained: list[int] = []
        self.seen: set[int] = set()

    @rule(worker=st.integers(0, WORKERS - 1))
    def lease(self, worker) -> None:
        lease = self.schedule.lease(worker=worker, now=self.now)
        if lease is not None:
            assert lease.ticket.index not in self.trained
            assert lease.ticket.index not in {held.ticket.index for held, _ in
                                              self.leases.values()}
            self.leases[lease.id] = lease, self.schedule.version
            self.seen.add(lease.ticket.index)

    @rule(data=st.data())
    def finish(self, data) -> None:
        if self.leases:
            id = data.draw(st.sampled_from(sorted(self.leases)))
            lease, version = self.leases.pop(id)
            # Weights may have changed before the worker began, at the latest now.
            begun = data.draw(st.integers(version, self.schedule.version))
            rank = data.draw(st.integers(0, 2))
            assert self.schedule.finish(id, lease.ticket.index, version=begun, rank=rank)

    @rule(data=st.data())
    def fail(self, data) -> None:
        if self.leases:
            id = data.draw(st.sampled_from(sorted(self.leases)))
            del self.leases[id]
            self.schedule.fail(id)

    @rule(worker=st.integers(0, WORKERS - 1))
    def die(self, worker) -> None:
        gone = {lease.id for lease in self.schedule.lose(worker)}
        assert gone == {id for id, (lease, _) in self.leases.items() if lease.worker == worker}
        self.leases = {id: held for id, held in self.leases.items() if id not in gone}
        assert not any(self.schedule.finish(id, None, version=0) for id in gone)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds) -> None:
        self.now += seconds
        for lease in self.schedule.expire(self.now):
            assert self.now - lease.since > self.options["group_deadline"]
            del self.leases[lease.id]

    @rule()
    def train(self) -> None:
        batch = self.schedule.take()
        if batch is None:
            return
        assert len(batch) == self.groups
        ages = [self.schedule.version - done.version for done in batch]
        assert 0 <= min(ages) and max(ages) <= self.options["staleness"]
        if any(done.rank for done in batch):  # only where there was no better one in all rounds
            assert self.schedule.generated >= self.options["max_rounds"] * self.groups
            assert self.schedule.ready == 0
        indices = [done.group for done in batch]
        assert indices == sorted(set(indices))
        assert not set(indices) & set(self.trained)
        self.trained += indices
        self.schedule.publish(self.schedule.version + 1)

    @rule()
    def resume(self) -> None:
        """From a checkpoint in another process."""
        state = self.schedule.state_dict()
        self.schedule = RolloutSchedule(self.groups, **self.options)
        self.schedule.load_state_dict(state)
        self.leases = {}

    @invariant()
    def no_more_is_started_than_can_be_fresh(self) -> None:
        live = self.schedule.running + self.schedule.ready
        bound = (self.schedule.version + 1 + self.options["staleness"]) * self.groups
        assert len(self.trained) + live <= bound + self.schedule.extra

    @rule()
    def let_all_finish(self) -> None:
        """Whatever has happened, a batch comes as soon as nothing is running any more."""
        while (batch := self.schedule.take()) is None:
            lease = self.schedule.lease(worker=0, now=self.now)
            if lease is not None:
                self.leases[lease.id] = lease, self.schedule.version
                self.seen.add(lease.ticket.index)
            assert self.leases, "no batch, nothing running and nothing to start: stuck"
            id = min(self.leases)
            lease, version = self.leases.pop(id)
            self.schedule.finish(id, lease.ticket.index, version=version)
        self.trained += [done.group for done in batch]
        self.schedule.publish(self.schedule.version + 1)

    @invariant()
    def none_is_too_old_that_was_not_meant_to_be_left_over(self) -> None:
        if not self.schedule.extra:
            assert self.schedule.counts["too_old"] == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        """Each group that was ever started is trained, waiting, running, queued or counted."""
        state = self.schedule.state_dict()
        waiting = {index for index, *_ in state["unfinished"] + state["ready"]}
        missing = self.seen - waiting - set(self.trained)
        counts = self.schedule.counts
        assert len(missing) == counts["dropped"] + counts["filtered"]
        assert state["next"] == len(self.seen)


TestAnyRun = Run.TestCase


def lease(schedule: RolloutSchedule, count: int) -> list[Lease]:
    """So many groups in the hands of worker 0, 1, ..."""
    return [schedule.lease(worker=worker, now=0.0) for worker in range(count)]


def finish(schedule: RolloutSchedule, leases, *, version: int) -> None:
    """Each with its number as its rows."""
    for lease in leases:
        assert schedule.finish(lease.id, lease.ticket.index, version=version)


def groups(batch) -> list:
    return [done.group for done in batch]


def fill(schedule: RolloutSchedule, rank=lambda index: 0) -> list[int]:
    """Finish whatever is admitted, group by group; the numbers of the batch."""
    while (batch := schedule.take()) is None:
        lease = schedule.lease(worker=0, now=0.0)
        schedule.finish(lease.id, lease.ticket.index, version=schedule.version,
                        rank=rank(lease.ticket.index))
    schedule.publish(schedule.version + 1)
    return groups(batch)


class TestOrder:
    @given(size=st.integers(1, 5), order=st.randoms(use_true_random=False))
    def test_without_staleness_batches_are_those_of_a_synchronous_run(self, size, order):
        schedule = RolloutSchedule(size, staleness=0)
        for batch in range(3):
            leases = lease(schedule, size)
            assert schedule.lease(worker=0, now=0.0) is None
            order.shuffle(leases)
            for one in leases:
                assert schedule.take() is None
                finish(schedule, [one], version=batch)
            assert groups(schedule.take()) == list(range(batch * size, (batch + 1) * size))
            assert schedule.lease(worker=0, now=0.0) is None, "started with outdated weights"
            schedule.publish(batch + 1)

    def test_groups_are_trained_in_their_order_when_workers_keep_it(self):
        schedule = RolloutSchedule(2, staleness=2)
        assert [fill(schedule) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]

    def test_a_group_given_back_goes_before_new_ones(self):
        schedule = RolloutSchedule(4, staleness=0)
        first, _ = lease(schedule, 2)
        schedule.lose(0)
        assert schedule.lease(worker=1, now=0.0).ticket == first.ticket


class TestAge:
    @staticmethod
    def next_one(schedule: RolloutSchedule, lease) -> object:
        """Train on what a lease brings, and start another group."""
        schedule.finish(lease.id, "fast", version=schedule.version)
        assert len(schedule.take()) == 1 and schedule.awaited == 0
        schedule.publish(schedule.version + 1)
        return schedule.lease(worker=1, now=0.0)

    def test_a_batch_waits_for_a_straggler_that_would_be_too_old_after_it(self):
        schedule = RolloutSchedule(1, staleness=1)
        slow, fast = lease(schedule, 2)
        fast = self.next_one(schedule, fast)
        schedule.finish(fast.id, "fast", version=1)
        assert schedule.take() is None and schedule.take() is None
        assert schedule.awaited == schedule.counts["awaited"] == 1
        schedule.finish(slow.id, "slow", version=0)
        assert groups(schedule.take()) == ["slow"] and schedule.awaited == 0
        schedule.publish(2)
        assert groups(schedule.take()) == ["fast"]
        assert schedule.counts["too_old"] == 0 and schedule.counts["awaited"] == 1

    def test_it_waits_where_two_stragglers_would_need_the_one_place_that_is_left(self):
        """Neither is due yet, but the batches until both are too old hold one of them."""
        schedule = RolloutSchedule(1, staleness=2)
        fast, *slow = lease(schedule, 3)
        fast = self.next_one(schedule, fast)
        schedule.finish(fast.id, "fast", version=1)
        assert schedule.take() is None and schedule.awaited == 1
        schedule.finish(slow[1].id, "slow", version=0)
        assert groups(schedule.take()) == ["slow"]

    @pytest.mark.parametrize("staleness", [1, 2, 4])
    def test_nothing_waits_for_a_group_that_finds_a_place_later(self, staleness):
        schedule = RolloutSchedule(1, staleness=staleness)
        slow, fast = lease(schedule, 2)
        for _ in range(staleness):
            fast = self.next_one(schedule, fast)
        schedule.finish(fast.id, "fast", version=staleness)
        assert schedule.take() is None and schedule.awaited == 1

    @pytest.mark.parametrize("gone", ["lose", "fail", "expire"])
    def test_a_straggler_that_is_given_back_holds_nobody_up(self, gone):
        """It keeps its number, and starts anew with the present weights."""
        schedule = RolloutSchedule(1, staleness=1, group_deadline=5.0)
        slow, fast = lease(schedule, 2)
        fast = self.next_one(schedule, fast)
        schedule.finish(fast.id, "fast", version=1)
        assert schedule.take() is None and schedule.slowest() == slow
        {"lose": lambda: schedule.lose(0), "fail": lambda: schedule.fail(slow.id),
         "expire": lambda: schedule.expire(9.0)}[gone]()
        assert groups(schedule.take()) == ["fast"]
        schedule.publish(2)
        again = schedule.lease(worker=1, now=9.0)
        assert again.ticket.index == slow.ticket.index and again.version == 2

    def test_a_group_older_than_the_weights_it_was_started_with_is_refused(self):
        schedule = RolloutSchedule(1, staleness=1)
        lease = self.next_one(schedule, schedule.lease(worker=1, now=0.0))
        with pytest.raises(ValueError, match="version=0 .* handed out, 1: worker 1 has missed"):
            schedule.finish(lease.id, None, version=0)

    def test_the_oldest_go_first(self):
        schedule = RolloutSchedule(1, staleness=1)
        old, new = lease(schedule, 2)
        schedule.finish(new.id, "new", version=0)
        schedule.take()
        schedule.publish(1)
        newest = schedule.lease(worker=0, now=0.0)
        schedule.finish(newest.id, "newest", version=1)
        schedule.finish(old.id, "old", version=0)
        assert groups(schedule.take()) == ["old"]


class TestLongTail:
    def test_a_batch_does_not_wait_for_a_group_started_beyond_its_need(self):
        schedule = RolloutSchedule(2, staleness=0, oversample=0.5)
        leases = lease(schedule, 3)
        assert schedule.lease(worker=0, now=0.0) is None
        finish(schedule, leases[1:], version=0)
        assert groups(schedule.take()) == [1, 2]
        assert schedule.lease(worker=0, now=0.0) is None, "nobody could use it"
        schedule.publish(1)
        finish(schedule, leases[:1], version=0)
        assert schedule.take() is None and schedule.counts["too_old"] == 1
        assert schedule.lease(worker=0, now=0.0).ticket == Ticket(0), "its prompt comes again"

    def test_no_more_groups_are_left_over_than_were_started_beyond_the_need(self):
        schedule = RolloutSchedule(2, staleness=1, oversample=0.5)
        leases = lease(schedule, 5)
        finish(schedule, leases[:2], version=0)
        assert schedule.take() and schedule.publish(1) is None
        finish(schedule, lease(schedule, 2), version=1)
        assert schedule.take() is None and schedule.awaited == 2
        finish(schedule, leases[2:4], version=0)
        assert groups(schedule.take()) == [2, 3]

    def test_a_group_that_always_takes_too_long_is_dropped_and_another_takes_its_place(self):
        schedule = RolloutSchedule(1, staleness=0, group_deadline=10.0, max_attempts=2)
        for now in (0.0, 20.0):
            assert schedule.lease(worker=0, now=now).ticket.index == 0
            assert len(schedule.expire(now + 10.0)) == 0
            assert len(schedule.expire(now + 10.1)) == 1
        assert schedule.counts["expired"] == 2 and schedule.counts["dropped"] == 1
        assert schedule.lease(worker=0, now=40.0).ticket.index == 1

    def test_what_is_generated_already_does_not_expire(self):
        schedule = RolloutSchedule(2, staleness=0, group_deadline=1.0)
        first, second = lease(schedule, 2)
        assert schedule.holders() == {0, 1}
        assert schedule.expire(2.0, but={first.id}) == [second]
        assert schedule.holders() == {0}

    def test_the_answer_of_an_expired_lease_is_ignored_and_counted(self):
        schedule = RolloutSchedule(1, staleness=0, group_deadline=1.0)
        late, = lease(schedule, 1)
        schedule.expire(2.0)
        assert not schedule.finish(late.id, "late", version=0)
        assert schedule.counts["late"] == 1 and schedule.take() is None


class TestDynamicSampling:
    def test_groups_that_teach_nothing_are_replaced(self):
        schedule = RolloutSchedule(2, staleness=0, max_rounds=3)
        assert fill(schedule, lambda index: index % 2) == [0, 2]
        assert schedule.generated == 3 and schedule.counts["filtered"] == 1
        assert fill(schedule, lambda index: 0) == [3, 4] and schedule.generated == 2

    def test_after_the_last_round_a_batch_is_filled_with_the_best_there_is(self):
        schedule = RolloutSchedule(2, staleness=0, max_rounds=2)
        assert fill(schedule, lambda index: 0 if index == 1 else 2 - index // 3) == [1, 3]
        assert schedule.generated == 4 and schedule.counts["filtered"] == 2

    def test_those_generated_ahead_are_kept_with_their_rank_over_a_resumption(self):
        schedule = RolloutSchedule(1, staleness=1, max_rounds=2)
        for rank in (1, 0, 0):
            started, = lease(schedule, 1)
            schedule.finish(started.id, started.ticket.index, version=0, rank=rank)
        resumed = RolloutSchedule(1, staleness=1, max_rounds=2)
        resumed.load_state_dict(schedule.state_dict())
        assert groups(resumed.take()) == [1]
        assert resumed.counts["filtered"] == 1 and resumed.ready == 1

    def test_without_rounds_every_group_is_used(self):
        assert fill(RolloutSchedule(2, staleness=0), lambda index: 1) == [0, 1]


class TestResume:
    def test_running_groups_are_handed_out_again_and_finished_ones_kept(self):
        schedule = RolloutSchedule(2, staleness=1)
        schedule.finish(lease(schedule, 4)[2].id, "kept", version=0)
        resumed = RolloutSchedule(2, staleness=1)
        resumed.load_state_dict(schedule.state_dict())
        assert (schedule.counts["lost"], resumed.counts["lost"]) == (0, 3)
        again = lease(resumed, 3)
        assert [one.ticket.index for one in again] == [0, 1, 3]
        assert resumed.lease(worker=0, now=0.0) is None
        resumed.finish(again[0].id, "new", version=0)
        assert groups(resumed.take()) == ["new", "kept"]

    def test_what_no_longer_fits_smaller_batches_is_generated_again(self):
        schedule = RolloutSchedule(3, staleness=0)
        finish(schedule, lease(schedule, 3), version=0)
        resumed = RolloutSchedule(1, staleness=0)
        resumed.load_state_dict(schedule.state_dict())
        assert groups(resumed.take()) == [0]
        resumed.publish(1)
        assert resumed.counts["too_old"] == 2 and resumed.take() is None
        assert resumed.lease(worker=0, now=0.0).ticket == Ticket(1)


@pytest.mark.parametrize("options, message", [
    ({"staleness": -1}, "staleness=-1"), ({"staleness": 0, "oversample": -0.1}, "oversample=-0.1"),
    ({"staleness": 0, "group_deadline": 0.0}, "group_deadline=0.0"),
    ({"staleness": 0, "max_attempts": 0}, "max_attempts=0")])
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RolloutSchedule(1, **options)


def test_a_version_from_the_future_is_refused():
    schedule = RolloutSchedule(1, staleness=0)
    with pytest.raises(ValueError, match="newer than the weights"):
        finish(schedule, lease(schedule, 1), version=1)


class TestDeal:
    """Groups for several workers at once."""

    def given(self, schedule: RolloutSchedule, workers, **options) -> dict[int, list[int]]:
        dealt = schedule.deal(workers, now=7.0, **options)
        assert all(lease.worker == worker and lease.since == 7.0
                   for worker, leases in dealt.items() for lease in leases)
        return {worker: [lease.ticket.index for lease in leases]
                for worker, leases in dealt.items()}

    def test_those_with_the_fewest_are_given_the_next(self):
        schedule = RolloutSchedule(7, staleness=0)
        for _ in range(2):
            schedule.lease(worker=5, now=0.0)
        assert self.given(schedule, [4, 5, 6], each=9) == {4: [2, 4, 6], 6: [3, 5]}
        assert self.given(schedule, [4, 5, 6], each=9) == {}  # no more are admitted

    def test_none_has_more_than_it_may(self):
        schedule = RolloutSchedule(10, staleness=0)
        assert self.given(schedule, [0, 1], each=2) == {0: [0, 2], 1: [1, 3]}
        assert self.given(schedule, [0, 1], each=2) == {} and schedule.admits()
        assert self.given(schedule, [], each=2) == {}

    def test_those_that_were_late_come_last(self):
        schedule = RolloutSchedule(5, staleness=0)
        assert self.given(schedule, [0, 1, 2], each=2, late={0: 2, 1: 1}) == {
            2: [0, 1], 1: [2, 3], 0: [4]}


def test_a_run_that_goes_on_without_dynamic_sampling_trains_on_what_it_would_have_left_out():
    schedule = RolloutSchedule(2, staleness=1, max_rounds=2)
    for rank in (0, 1):
        schedule.finish(schedule.lease(worker=0, now=0.0).id, rank, version=0, rank=rank)
    assert schedule.ready == 1
    resumed = RolloutSchedule(2, staleness=1)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.ready == 2 and [done.group for done in resumed.take()] == [0, 1]
