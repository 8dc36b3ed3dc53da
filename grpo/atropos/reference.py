"""Groups that reference workers score before the trainer gets them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensordict import TensorDictBase

from grpo import data
from grpo.atropos.assemble import GroupSource
from grpo.atropos.convert import GroupConverter
from grpo.atropos.schemas import ScoredGroup
from grpo.atropos.wire_json import GroupError
from grpo.collectors.reference_worker import SharedScoring

# Seconds of a look for new groups while others are being scored.
_LOOK = 0.05
_READ = (data.TOKENS, data.ATTENTION_MASK, data.ASSISTANT_MASK, data.LOG_PROBS, data.GROUP_ID)


@dataclass
class _Group:
    """One that has come, as it came and as it goes out."""

    came: ScoredGroup
    out: ScoredGroup | None = None  # None: it is being scored
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class ReferenceSource:
    """A source whose groups have the reference's log-probs, as if their environments had sent them.

    Groups that bring such log-probs keep them. The others are scored by workers, while more are
    generated; given to :meth:`begin` as soon as they are there, also while the trainer trains. They
    come out in the order in which they came.

    Args:
        source: of the groups. What else a :class:`~grpo.atropos.assemble.GroupAssembler` asks of
            its source is passed on to it.
        scoring: the workers; nobody else uses it.
        converter: cuts rows as that of the trainer does; what it refuses is passed on unscored.

    Raises:
        WorkersLost: when called, if workers die faster than they may be replaced.
    """

    source: GroupSource
    scoring: SharedScoring
    converter: GroupConverter
    _groups: dict[int, _Group] = field(default_factory=dict, init=False)  # by id()
    _order: deque[int] = field(default_factory=deque, init=False)  # what the source has returned
    _given: dict[int, _Group] = field(default_factory=dict, init=False)  # by id() of the scored one
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def begin(self, groups: Sequence[ScoredGroup]) -> None:
        """Have groups scored that the source is going to return; may be called by any thread."""
        with self._lock:
            for group in groups:
                if id(group) not in self._groups:
                    rows = self._rows(group)
                    self._groups[id(group)] = entry = _Group(group)
                    if rows is None:
                        entry.out = group
                    else:
                        self.scoring.add(id(group), rows)
            self.scoring.send()

    def __call__(self, timeout: float) -> Sequence[ScoredGroup]:
        new = self.source(min(timeout, _LOOK) if self._order else timeout)
        self.begin(new)
        self._order.extend(map(id, new))
        self.scoring.heal()  # may wait for a worker, so others are not kept from beginning
        with self._lock:
            for key, rows in self.scoring.take():
                self._finish(self._groups[key], rows)
            self.scoring.send()  # what a worker that died had
            return self._release()

    def used(self, groups: Sequence[ScoredGroup]) -> None:
        """Pass on to the source which of its groups were used."""
        originals = [self._given.pop(id(group)).came for group in groups]
        getattr(self.source, "used", lambda _: None)(originals)

    @property
    def silence(self) -> str | None:
        """Why groups do not come out, if it is because they are not scored; else what the source
        says."""
        with self._lock:
            waiting = [entry.since for entry in self._groups.values() if entry.out is None]
        if not waiting:
            return getattr(self.source, "silence", None)
        pool = self.scoring.pool
        return (f"{len(waiting)} groups have come and wait for the reference, one for "
                f"{time.monotonic() - min(waiting):.0f} s; {len(pool.present)} of {pool.count} "
                "reference workers (ref_model.num_devices) are there, see their logs in Ray's "
                "session folder")

    def metrics(self) -> dict[str, float]:
        """Idle share of the workers since the last call."""
        with self._lock:
            idle = self.scoring.idle()
        return {"async/reference_idle": sum(idle) / len(idle)} if idle else {}

    def _rows(self, group: ScoredGroup) -> TensorDictBase | None:
        """What a worker needs; None for a group that is not scored."""
        if group.ref_logprobs:
            return None
        try:
            return self.converter([group]).select(*_READ)
        except GroupError:
            return None

    def _finish(self, entry: _Group, rows: TensorDictBase) -> None:
        sizes = data.lengths(rows).tolist()
        scores = [row[:size].tolist()
                  for row, size in zip(rows[data.REF_LOG_PROBS], sizes, strict=True)]
        entry.out = replace(entry.came, ref_logprobs=scores)

    def _release(self) -> list[ScoredGroup]:
        out = []
        while self._order and self._groups[self._order[0]].out is not None:
            entry = self._groups.pop(self._order.popleft())
            self._given[id(entry.out)] = entry
            out.append(entry.out)
        return out
