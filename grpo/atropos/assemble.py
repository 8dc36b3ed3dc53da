"""Gathers finished groups from any source until they fill a batch."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tensordict import TensorDict

from grpo.atropos.client import AtroposTimeoutError
from grpo.atropos.convert import GroupConverter, Sampled
from grpo.atropos.records import Records
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.atropos.silence import SilenceCheck
from grpo.atropos.stream import BatchStream
from grpo.atropos.wire_json import GroupError
from grpo.data import NO_VERSION

logger = logging.getLogger(__name__)

#: Waits at most so many seconds for a group, and returns those that have finished since last time.
GroupSource = Callable[[float], Sequence[ScoredGroup]]


@dataclass(eq=False)
class StreamSource:
    """A :class:`~grpo.atropos.stream.BatchStream` as a source of groups.

    The groups of one batch of the API may be spread over several batches of the trainer. It is
    acknowledged after all of them were trained on or left out: when more is asked for or, if the
    stream holds acknowledgements back, when a checkpoint was saved.

    Args:
        stream: has been started; its ``timeout`` is set at each call.
        checks: called before each question; each raises if something that the run depends on is
            gone, such as an environment. May grow.
    """

    stream: BatchStream
    checks: Sequence[Callable[[], None]] = ()
    _said: set[str] = field(default_factory=set, init=False)  # reasons
    _away: bool = field(default=False, init=False)

    @property
    def trouble(self) -> str | None:
        """Why the API does not answer; None while it does."""
        return self.stream.unreachable

    @property
    def silence(self) -> str | None:
        """Why registered environments send nothing; None if no check has found out."""
        return next((check.message for check in self.checks if isinstance(check, SilenceCheck)),
                    None)

    @property
    def counts(self) -> Counter[str]:
        """Groups that the stream left out, by reason."""
        rejected = {f"groups_rejected_{reason}": count
                    for reason, count in self.stream.rejected.items()}
        return Counter(groups_repeated=self.stream.repeated, **rejected)

    def used(self, groups: Sequence[ScoredGroup]) -> None:
        """Take note of groups that will be trained on before the next call, or are left out."""
        self.stream.used(groups)

    def saved(self) -> None:
        """Acknowledge what was trained on, now that a checkpoint has it."""
        self.stream.acknowledge()

    def state_dict(self) -> dict[str, Any]:
        """Names of the groups that were trained on and may come again, for checkpoints."""
        return {"used": self.stream.unacknowledged()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.client.leave_out(state["used"])

    def __call__(self, timeout: float) -> Sequence[ScoredGroup]:
        for check in self.checks:
            check()
        self.stream.timeout = timeout
        try:
            return self.stream.take().groups
        except AtroposTimeoutError:
            return []
        finally:
            if (self.trouble is not None) != self._away:
                self._away = not self._away
                logger.warning("nothing answers as the Atropos API; it is asked again until it "
                               "does: %s" if self._away else "the Atropos API answers%s",
                               self.trouble or "")
            for reason, message in self.stream.messages.items():
                if reason not in self._said:
                    self._said.add(reason)
                    _say_left_out(reason, message)


@dataclass(eq=False)
class GroupAssembler:
    """Collect whole groups of any sizes for batches of at most ``rows`` rows, in order.

    Args:
        source: where groups come from, asked while a batch is not full. It may have the further
            members of :class:`StreamSource`: ``counts``, ``used``, ``saved`` and the state for
            checkpoints; and ``metrics``.
        converter: makes the batch.
        rows: greatest number of rows of a batch.
        version: the policy's present version.
        records: what the policy sampled for environments, to restore log-probs and versions from.

    Attributes:
        counts: groups left out: ``groups_too_large`` for a batch, and ``groups_stale`` whose
            trained tokens are all older than the converter allows.

    Examples:
        >>> groups = [ScoredGroup(tokens=[[5, 6], [5, 7]], masks=[[-100, 6], [-100, 7]],
        ...                       scores=[1.0, 0.0]) for _ in range(3)]
        >>> assembler = GroupAssembler(lambda timeout: groups, GroupConverter(pad_token_id=0),
        ...                            rows=5)
        >>> assembler.poll(1.0)
        True
        >>> assembler.batch()["group_id"].tolist()
        [0, 0, 1, 1]
    """

    source: GroupSource
    converter: GroupConverter
    _: KW_ONLY
    rows: int
    version: Callable[[], int] = lambda: 0
    records: Records | None = None
    counts: Counter[str] = field(default_factory=Counter, init=False)
    _waiting: deque[tuple[ScoredGroup, Sampled | None]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1")

    @property
    def waiting_rows(self) -> int:
        """Rows of the groups that are in no batch yet."""
        return sum(len(group) for group, _ in self._waiting)

    def poll(self, timeout: float) -> bool:
        """Ask the source once unless a batch is full already; whether one is full then."""
        self._drop_stale()
        if self.waiting_rows < self.rows:
            for group in self.source(timeout):
                self._receive(group)
            self._drop_stale()
        return self.waiting_rows >= self.rows

    def batch(self) -> TensorDict:
        """The groups that have waited longest, as many as fit, converted.

        Raises:
            ValueError: if none waits.
        """
        chosen: list[tuple[ScoredGroup, Sampled | None]] = []
        rows = 0
        while self._waiting and rows + len(self._waiting[0][0]) <= self.rows:
            chosen.append(self._waiting.popleft())
            rows += len(chosen[-1][0])
        groups = [group for group, _ in chosen]
        self._ask_source("used", groups)
        return self.converter(groups, sampled=[known for _, known in chosen],
                              version=self.version())

    def metrics(self) -> dict[str, float]:
        """Everything that is counted, since the start."""
        counts = self.converter.counts + self.counts + getattr(self.source, "counts", Counter())
        if self.records is not None:
            counts = counts + Counter({f"records_{key}": value
                                       for key, value in self.records.counts.items()})
        own = {f"atropos/{name}": float(value) for name, value in counts.items()}
        return own | (self._ask_source("metrics") or {})

    def _ask_source(self, method: str, *args: Any) -> Any:
        """Call a method that the source need not have; None without it."""
        return getattr(self.source, method, lambda *_: None)(*args)

    def _receive(self, group: ScoredGroup) -> None:
        if len(group) > self.rows:
            self._ask_source("used", [group])
            self.counts["groups_too_large"] += 1
            logger.warning("a group of %d rows is left out, because it does not fit a batch of %d; "
                           "raise the batch size, or lower the environment's group_size",
                           len(group), self.rows)
            return
        try:
            self.converter.check(group)
        except GroupError as error:
            counted = f"groups_rejected_{error.reason}"
            if not self.counts[counted]:
                _say_left_out(error.reason, str(error))
            self.counts[counted] += 1
            self._ask_source("used", [group])
            return
        known = None if self.records is None else self.records.restore(group)
        self._waiting.append((group, known))

    def _drop_stale(self) -> None:
        if self.converter.max_staleness is None:
            return
        oldest = self.version() - self.converter.max_staleness
        fresh, stale = deque(), []
        for one in self._waiting:
            (stale if _all_older(*one, oldest) else fresh).append(one)
        self._waiting = fresh
        self.counts["groups_stale"] += len(stale)
        self._ask_source("used", [group for group, _ in stale])

    def state_dict(self) -> dict[str, Any]:
        """Counters and the source's state, for checkpoints. Groups that wait are not saved: a hub
        hands out again what was not trained on."""
        return {"converter": self.converter.state_dict(), "counts": dict(self.counts),
                "source": self._ask_source("state_dict")}

    def saved(self) -> None:
        """Tell the source that a checkpoint has the last :meth:`state_dict`."""
        self._ask_source("saved")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.converter.load_state_dict(state["converter"])
        self.counts = Counter(state["counts"])
        if state.get("source") is not None:
            self.source.load_state_dict(state["source"])


def _say_left_out(reason: str, message: str) -> None:
    """Called once a reason, because the fault of an environment is in all of its groups."""
    logger.warning("a group is left out (%s): %s. All of them are counted, as "
                   "atropos/groups_rejected_%s", reason, message, reason)


def _all_older(group: ScoredGroup, known: Sampled | None, oldest: int) -> bool:
    """Whether every trained token of a group is known to be older."""
    if known is None:
        return False
    return all(NO_VERSION < version < oldest
               for versions, mask in zip(known.versions, group.masks, strict=True)
               for version, value in zip(versions, mask, strict=True) if value != IGNORED)
