"""The hub's state: order, batches, leases, bounds, environments; each also after a restart."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grpo.atropos import hub as hub_module
from grpo.atropos.hub import (
    Hub,
    Limits,
    NotRegisteredError,
    UnknownEnvironmentError,
    UnknownLeaseError,
)
from grpo.atropos.hub_journal import Journal
from grpo.atropos.hub_state import HubState

from .groups import Clock, env_registration, registration


def body(tag: int) -> bytes:
    return b'{"n":%d}' % tag


def add(hub: Hub, *tags: int, size: int = 2, env: int | None = None) -> None:
    for tag in tags:
        hub.add([(env, size, body(tag))])


def tags(lease) -> list[int]:
    return [entry["n"] for entry in orjson.loads(lease.body())["batch"]]


@pytest.fixture
def clock():
    return Clock()


def restarted(hub: Hub) -> Hub:
    """The hub after an end of its process; the same one if it has no journal."""
    if hub.journal is None:
        return hub
    hub.journal.close()
    return Hub(limits=hub.limits, journal=Journal(hub.journal.path), clock=hub.clock)


@pytest.fixture(params=["in memory", "restarted"])
def make(request, clock, tmp_path):
    def make(**limits) -> Hub:
        journal = Journal(tmp_path / "journal") if request.param == "restarted" else None
        return Hub(limits=Limits(**limits), journal=journal, clock=clock)

    return make


@pytest.fixture
def kept(tmp_path, clock) -> Hub:
    """A hub with a journal."""
    return Hub(journal=Journal(tmp_path / "journal"), clock=clock)


@pytest.fixture
def hub(make):
    hub = make()
    hub.register(registration(), "trainer")
    return hub


def test_groups_leave_in_the_order_they_came(hub):
    add(hub, *range(6))
    hub = restarted(hub)
    assert [tags(hub.next_batch("trainer")) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert hub.next_batch("trainer") is None


def test_groups_before_the_trainer_wait_for_it(make):
    hub = make()
    add(hub, 0, 1)
    with pytest.raises(NotRegisteredError):
        hub.next_batch("trainer")
    hub = restarted(hub)
    hub.register(registration(), "trainer")
    assert tags(hub.next_batch("trainer")) == [0, 1]


@pytest.mark.parametrize("sizes, batches", [
    ([2, 2, 2, 2], [[0, 1], [2, 3]]),
    ([3, 3, 3, 3], [[0, 1], [2, 3]]),  # six sequences, for they are not to be split
    ([8], [[0]]),
    ([3, 2, 1, 2], [[0, 2], [1, 3]]),  # what fits goes before what does not
    ([1, 8, 3], [[0, 2], [1]]),
])
def test_batches_are_whole_groups_of_any_size(hub, sizes, batches):
    for number, size in enumerate(sizes):
        add(hub, number, size=size, env=number)
    found = []
    while lease := hub.next_batch("trainer"):
        found.append(tags(lease))
    assert found == batches


def test_too_few_sequences_are_no_batch(hub):
    add(hub, 0, size=3)
    assert hub.next_batch("trainer") is None
    add(hub, 1, size=1)
    assert tags(hub.next_batch("trainer")) == [0, 1]


def test_a_large_group_is_not_overtaken_for_ever(hub):
    add(hub, 0, size=4, env=0)
    add(hub, 100, size=3, env=1)
    for tag in range(1, 5):
        add(hub, tag, size=4, env=0)
    assert tags(hub.next_batch("trainer")) == [0]
    assert 100 in tags(hub.next_batch("trainer"))


def test_the_next_request_acknowledges_for_a_trainer_that_cannot(hub):
    add(hub, *range(4))
    hub.next_batch("trainer")
    hub = restarted(hub)
    assert hub.status()["hub"]["leases"] == 1
    hub.next_batch("trainer")
    assert hub.next_batch("trainer") is None
    assert restarted(hub).status()["hub"]["leases"] == 0


def test_a_trainer_that_starts_again_gets_its_batch_again(hub):
    add(hub, *range(4))
    assert tags(hub.next_batch("trainer")) == [0, 1]
    hub = restarted(hub)
    hub.register(registration(starting_step=7), "trainer")
    assert tags(hub.next_batch("trainer")) == [0, 1]
    assert tags(hub.next_batch("trainer")) == [2, 3]
    assert hub.state.step == 8  # the one handed out again is not counted again


def test_two_trainers_get_different_batches(hub):
    add(hub, *range(6))
    batches = [tags(hub.next_batch(name)) for name in ("one", "two", "one")]
    assert batches == [[0, 1], [2, 3], [4, 5]]
    assert [lease.owner for lease in hub.state.leases.values()] == ["two", "one"]


def test_a_lease_ends_by_its_acknowledgement(hub):
    add(hub, *range(4))
    lease = hub.next_batch("trainer", lease_seconds=10)
    assert orjson.loads(lease.body())["lease"] == lease.id
    hub = restarted(hub)
    hub.acknowledge(lease.id)
    with pytest.raises(UnknownLeaseError):
        hub.acknowledge(lease.id)
    assert tags(hub.next_batch("trainer", lease_seconds=10)) == [2, 3]


def test_a_batch_that_is_not_acknowledged_goes_to_the_next(hub, clock):
    add(hub, *range(4))
    late = hub.next_batch("one", lease_seconds=10)
    clock.now = 9.9
    assert hub.status()["hub"]["leases"] == 1
    clock.now = 10.1
    again = hub.next_batch("two", lease_seconds=10)
    assert tags(again) == tags(late) == [0, 1] and again.id != late.id
    with pytest.raises(UnknownLeaseError):
        hub.acknowledge(late.id)
    hub.acknowledge(again.id)
    assert hub.status()["hub"]["handed_out_again"] == 1


def test_a_late_acknowledgement_counts_while_nobody_has_the_batch(hub, clock):
    add(hub, *range(4))
    late = hub.next_batch("one", lease_seconds=10)
    clock.now = 11.0
    hub = restarted(hub)
    clock.now = 22.0
    hub.acknowledge(late.id)
    assert tags(hub.next_batch("two")) == [2, 3]


def test_a_batch_that_is_given_back_is_the_next(hub):
    add(hub, *range(4))
    hub.release(hub.next_batch("one", lease_seconds=10).id)
    hub = restarted(hub)
    assert tags(hub.next_batch("two", lease_seconds=10)) == [0, 1]


def test_the_latest_registration_counts(hub):
    hub.register(registration(batch_size=8, starting_step=3), "trainer")
    hub.register(registration(batch_size=8, starting_step=3), "trainer")
    add(hub, *range(4))
    hub = restarted(hub)
    assert tags(hub.next_batch("trainer")) == [0, 1, 2, 3]
    assert hub.status()["current_step"] == 4


def test_the_queue_is_bounded_but_never_below_a_batch(make):
    hub = make(queue_bytes=len(body(0)))
    hub.register(registration(batch_size=6), "trainer")
    add(hub, 0, 1)
    assert hub.has_room()
    add(hub, 2)
    assert not hub.has_room() and hub.status()["hub"]["full"]
    hub.next_batch("trainer")
    assert hub.has_room()


def test_environments_wait_for_the_trainer_and_get_names(hub):
    assert hub.register_env(env_registration()) is None
    hub.next_batch("trainer")
    first, second = (hub.register_env(env_registration()) for _ in range(2))
    assert [(env.id, env.name) for env in (first, second)] == [(0, "add_0"), (1, "add_1")]
    assert list(restarted(hub).state.environments) == [0, 1]


def test_an_environment_that_is_gone_counts_no_more_and_gives_up_its_place(make, clock):
    hub = make(env_seconds=10.0)
    hub.register(registration(), "trainer")
    hub.next_batch("trainer")
    hub.register_env(env_registration(min_batch_allocation=0.5))
    other = hub.register_env(env_registration(desired_name="other"))
    assert hub.status_env(other.id)["env_weight"] == 0.5
    clock.now = 9.0
    hub.status_env(other.id)
    clock.now = 11.0
    status = hub.status_env(other.id)
    assert (status["env_weight"], status["unallocated_fraction"]) == (1.0, 1.0)
    assert hub.register_env(env_registration()).id == 0
    hub.disconnect(0)
    assert not hub.connected(hub.state.environments[0])
    hub.status_env(0)
    assert hub.connected(hub.state.environments[0])


def test_an_environment_from_before_goes_on(hub):
    assert hub.status_env(5)["queue_size"] == 0
    for unknown in (-1, 10**9):
        with pytest.raises(UnknownEnvironmentError):
            hub.status_env(unknown)
    with pytest.raises(UnknownEnvironmentError):
        hub.disconnect(6)


def test_what_an_environment_sees_of_the_queue(hub):
    hub.register(registration(batch_size=16), "trainer")
    hub.next_batch("trainer")
    mine = hub.register_env(env_registration(group_size=2, weight=3.0))
    other = hub.register_env(env_registration(
        desired_name="other", group_size=4, min_batch_allocation=0.25, max_token_length=64))
    add(hub, 0, 1, 2, size=2, env=mine.id)
    add(hub, 3, 4, 5, size=4, env=other.id)
    assert hub.status_env(mine.id) == {
        "current_step": 0, "max_group_size": 4, "self_queue_size": 3,
        # Six of its own, and of the other's twelve those beyond its minimum of four.
        "queue_size": (6 + 12 - 4) // 2, "unallocated_fraction": 0.75, "env_weight": 0.6}
    assert hub.status_env(other.id)["queue_size"] == (12 + 8) // 4


def test_a_minimum_is_honoured(hub):
    hub.next_batch("trainer")
    mine = hub.register_env(env_registration(min_batch_allocation=0.5))
    add(hub, *range(4))
    assert hub.next_batch("trainer") is None  # it may be about to send
    add(hub, 100, env=mine.id)
    assert tags(hub.next_batch("trainer")) == [0, 100]


def test_a_silent_environment_is_waited_for_only_so_long(hub, clock):
    hub.next_batch("trainer")
    mine = hub.register_env(env_registration(min_batch_allocation=0.5))
    add(hub, *range(4))
    clock.now = 61.0
    hub.status_env(mine.id)  # alive, but without a group
    assert tags(hub.next_batch("trainer")) == [0, 1]


def test_a_full_queue_waits_for_no_minimum(make):
    hub = make(queue_bytes=1)
    hub.register(registration(), "trainer")
    hub.next_batch("trainer")
    hub.register_env(env_registration(min_batch_allocation=0.5))
    add(hub, 0, 1)
    assert tags(hub.next_batch("trainer")) == [0, 1]


def test_minima_of_more_than_a_batch_are_scaled(hub):
    hub.next_batch("trainer")
    envs = [hub.register_env(env_registration(desired_name=name, min_batch_allocation=1.0))
            for name in "ab"]
    for env in envs:
        add(hub, env.id, env.id, env=env.id)
    assert tags(hub.next_batch("trainer")) == [0, 1]


def test_a_reset_forgets_everything(hub):
    add(hub, *range(4))
    lease = hub.next_batch("trainer", lease_seconds=10)
    hub.register_env(env_registration())
    hub.reject("bad_type", "x")
    hub.expect_retry("digest")
    hub.reset()
    hub = restarted(hub)
    status = hub.status()
    assert (status["current_step"], status["queue_size"]) == (0, 0)
    assert not any(status["hub"][name] for name in status["hub"])
    assert not hub.is_retry("digest") and hub.state.latest is None
    with pytest.raises(UnknownLeaseError):
        hub.acknowledge(lease.id)
    with pytest.raises(NotRegisteredError):
        hub.next_batch("trainer")


def test_a_retry_is_known_after_a_restart(kept, clock):
    kept.add([(None, 2, body(0))], digest="a")
    assert not kept.is_retry("a")  # its sender has been answered
    hub = restarted(kept)
    assert hub.is_retry("a") and not hub.is_retry("b")
    clock.now = 601.0
    assert not hub.is_retry("a")


def test_a_journal_that_is_mostly_old_is_rewritten(kept, monkeypatch):
    monkeypatch.setattr(hub_module, "_COMPACT_BYTES", 2000)
    hub = kept
    hub.register(registration(), "trainer")
    add(hub, 0, 1)
    out = hub.next_batch("leaser", lease_seconds=50)
    back = (add(hub, 2, 3), hub.next_batch("leaser", lease_seconds=50))[1]
    hub.release(back.id)
    for tag in range(1000, 1400, 2):
        add(hub, tag, tag + 1)
        # The first of these gets the batch that was given back; the second acknowledges it.
        hub.next_batch("trainer")
    assert hub.journal.path.stat().st_size < 8000
    status = hub.status()
    hub = restarted(hub)
    assert hub.status() == status
    hub.acknowledge(out.id)


def test_a_rewritten_journal_holds_all_there_is(kept):
    hub = kept
    hub.register(registration(), "trainer")
    add(hub, *range(6), env=1)
    back, out, plain = (hub.next_batch("trainer", lease_seconds=seconds)
                        for seconds in (50, 50, None))
    hub.release(back.id)
    add(hub, 6, env=1)
    hub.register_env(env_registration())
    status = hub.status()
    hub.journal.compact(hub.state.snapshot())
    hub = restarted(hub)
    assert hub.status() == status
    assert hub.state.leases == {out.id: out, plain.id: plain}
    assert hub.state.latest == body(6)
    add(hub, 7, env=0)
    found = [tags(hub.next_batch("other", lease_seconds=50)) for _ in range(2)]
    assert found == [[0, 1], [6, 7]]


@pytest.mark.parametrize("name", ["queue_bytes", "env_seconds", "minimum_seconds"])
def test_limits_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0"):
        Limits(**{name: 0})


class HubMachine(RuleBasedStateMachine):
    """Nothing is lost or split, order is kept, and a restart changes nothing, whatever happens."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.hub = Hub(limits=Limits(queue_bytes=200), clock=self.clock,
                       journal=Journal(Path(self.folder.name) / "journal"))
        self.hub.register(registration(batch_size=8), "plain")
        self.sent: dict[int, tuple[int | None, int]] = {}
        self.done: set[int] = set()
        self.first_given: dict[int | None, list[int]] = defaultdict(list)
        self.plain: list[int] = []
        # What it holds, for how long, and until when.
        self.leases: dict[str, tuple[list[int], int, float]] = {}

    def teardown(self) -> None:
        self.hub.journal.close()
        self.folder.cleanup()

    @precondition(lambda self: self.hub.has_room())
    @rule(sizes=st.lists(st.integers(1, 10), min_size=1, max_size=3),
          env=st.none() | st.integers(0, 2))
    def send(self, sizes, env):
        groups = []
        for size in sizes:
            groups.append((env, size, body(len(self.sent))))
            self.sent[len(self.sent)] = (env, size)
        self.hub.add(groups)

    @rule(minimum=st.none() | st.floats(0, 1), name=st.sampled_from("ab"))
    def environment(self, minimum, name):
        self.hub.register_env(env_registration(desired_name=name, min_batch_allocation=minimum))

    @rule(seconds=st.none() | st.integers(1, 20))
    def fetch(self, seconds):
        if seconds is None:
            self.done.update(self.plain)
            self.plain = []
        lease = self.hub.next_batch("plain", lease_seconds=seconds)
        if lease is None:
            return
        found = tags(lease)
        assert not self.done.intersection(found), "what is acknowledged never comes again"
        assert sum(self.sent[tag][1] for tag in found) >= 8
        for tag in found:
            env = self.sent[tag][0]
            if tag not in self.first_given[env]:
                assert tag > max(self.first_given[env], default=-1), "first in, first out"
                self.first_given[env].append(tag)
        if seconds is None:
            self.plain = found
        else:
            self.leases[lease.id] = (found, seconds, self.clock.now + seconds)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), use=st.booleans())
    def end_lease(self, data, use):
        id = data.draw(st.sampled_from(sorted(self.leases)))
        found, _, deadline = self.leases.pop(id)
        try:
            (self.hub.acknowledge if use else self.hub.release)(id)
        except UnknownLeaseError:
            assert deadline <= self.clock.now, "a lease holds as long as it was promised"
        else:
            if use:
                self.done.update(found)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def restart(self):
        before = self.hub.status()
        self.hub = restarted(self.hub)
        after = self.hub.status()
        # Its clock starts anew, so all environments count as just seen, and leases as just given.
        del before["hub"]["environments"], after["hub"]["environments"]
        assert after == before
        for id in self.hub.state.leases.keys() & self.leases.keys():
            found, seconds, _ = self.leases[id]
            self.leases[id] = (found, seconds, self.clock.now + seconds)

    @rule()
    def compact(self):
        self.hub.journal.compact(self.hub.state.snapshot())

    @invariant()
    def nothing_is_lost(self):
        state = self.hub.state
        held = [group for group in state.queue]
        for lease in (*state.leases.values(), *state.returned):
            held += lease.groups
        names = [orjson.loads(group.body)["n"] for group in held]
        assert len(names) == len(set(names)), "no group is in two places"
        assert set(names) | self.done == set(self.sent)
        assert not set(names) & self.done

    @invariant()
    def sums_are_right(self):
        queue = self.hub.state.queue
        waiting = list(queue)
        assert queue.groups == len(waiting)
        assert queue.sequences == sum(group.size for group in waiting)
        assert queue.sequences == sum(queue.sequences_by_env.values())
        assert queue.bytes == sum(len(group.body) for group in waiting) <= 200 + 3 * 10
        assert queue.max_size == max((group.size for group in waiting), default=1)


TestHubMachine = HubMachine.TestCase
TestHubMachine.settings = settings(max_examples=10, stateful_step_count=40)


def test_a_batch_that_a_stranger_took_comes_back(hub, clock):
    # Whoever asks without a lease need not be a trainer, and may never come again.
    add(hub, 1, 2)
    assert tags(hub.next_batch("stranger")) == [1, 2]
    assert hub.next_batch("trainer", lease_seconds=60) is None
    clock.now += hub.limits.owner_seconds + 1
    assert tags(hub.next_batch("trainer", lease_seconds=60)) == [1, 2]


@pytest.mark.parametrize("times", [1, 2])
def test_retries_are_known_after_the_journal_was_rewritten(kept, monkeypatch, times):
    hub, path = kept, kept.journal.path
    hub.add([(None, 2, body(1))], digest="named", named=True)
    hub.add([(None, 2, body(2))], digest="late")
    for _ in range(times):  # kill -9, each time after the journal was rewritten
        before = path.stat().st_ino
        monkeypatch.setattr(hub_module, "_COMPACT_BYTES", 0)
        monkeypatch.setattr(HubState, "live_bytes", 0)
        hub._compact(hub.journal)
        monkeypatch.undo()
        assert path.stat().st_ino != before  # it was
        hub = restarted(hub)
        assert hub.is_retry("named") and hub.is_retry("late") and not hub.is_retry("new")
    assert hub.state.queue.groups == 2
