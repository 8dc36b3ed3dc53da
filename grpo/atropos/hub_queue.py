"""Groups that wait for a batch: first in, first out for each environment, and what goes next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A group as it was received.

    Attributes:
        number: counts groups in the order they came.
        env: the sender's id; None if it named none.
        size: sequences in it.
        body: its JSON object.
    """

    number: int
    env: int | None
    size: int
    body: bytes


class GroupQueue:
    """Waiting groups, one queue for each environment.

    Examples:
        >>> queue = GroupQueue()
        >>> for number, size in enumerate([4, 8, 4]):
        ...     queue.push(QueuedGroup(number, size, size, b"{}"))
        >>> batch = queue.choose(8, {})
        >>> [group.number for group in batch]
        [0, 2]
        >>> queue.remove(batch)
        >>> queue.sequences, queue.choose(16, {})
        (8, None)
    """

    def __init__(self) -> None:
        self._by_env: dict[int | None, deque[QueuedGroup]] = {}
        self._sizes: Counter[int] = Counter()
        self.sequences_by_env: Counter[int | None] = Counter()
        self.groups = self.sequences = self.bytes = 0

    def __iter__(self) -> Iterator[QueuedGroup]:
        """All groups in the order they came."""
        return iter(sorted((group for queue in self._by_env.values() for group in queue),
                           key=lambda group: group.number))

    @property
    def max_size(self) -> int:
        """Sequences of the largest group, at least 1."""
        return max(self._sizes, default=1)

    def push(self, group: QueuedGroup) -> None:
        """Add a group behind the others of its environment."""
        self._by_env.setdefault(group.env, deque()).append(group)
        self._count(group, 1)

    def head(self, env: int | None) -> QueuedGroup:
        """An environment's next group.

        Raises:
            KeyError: if it has none.
        """
        return self._by_env[env][0]

    def remove(self, groups: list[QueuedGroup]) -> None:
        """Take out groups that are next in the queues of their environments."""
        for group in groups:
            queue = self._by_env[group.env]
            assert queue[0] is group, "groups leave in the order they came"
            queue.popleft()
            if not queue:
                del self._by_env[group.env]
            self._count(group, -1)

    def choose(self, batch_size: int, minima: dict[int, int]) -> list[QueuedGroup] | None:
        """Whole groups that make a batch.

        First each environment's minimum, as far as it has groups; then the oldest of the rest,
        whatever its size, so that no group waits for ever; then the oldest that still fits, and so
        on. If that does not come to ``batch_size`` exactly, the smallest next group goes on top.

        Args:
            batch_size: sequences wanted.
            minima: of each environment that has one, the least sequences wanted from it.

        Returns:
            Groups in the order they came, with ``batch_size`` or more sequences; None if fewer
            are waiting.
        """
        if self.sequences < batch_size:
            return None
        picks = _Picks(self._by_env, batch_size)
        for env, minimum in minima.items():
            enough = picks.left - minimum
            while picks.left > max(enough, 0) and (head := picks.head(env)):
                picks.pick(head)
        first = True
        while picks.left > 0:
            heads = picks.heads()
            fitting = heads if first else [head for head in heads if head.size <= picks.left]
            picks.pick(min(fitting, key=lambda head: head.number) if fitting
                       else min(heads, key=lambda head: (head.size, head.number)))
            first = False
        return sorted(picks.picked, key=lambda group: group.number)

    def _count(self, group: QueuedGroup, sign: int) -> None:
        self.groups += sign
        self.sequences += sign * group.size
        self.bytes += sign * len(group.body)
        self.sequences_by_env[group.env] += sign * group.size
        self._sizes[group.size] += sign
        if not self._sizes[group.size]:
            del self._sizes[group.size]
        if not self.sequences_by_env[group.env]:
            del self.sequences_by_env[group.env]


class _Picks:
    """The groups picked so far, and the next one of each environment behind them."""

    def __init__(self, by_env: dict[int | None, deque[QueuedGroup]], left: int) -> None:
        self.left = left  # sequences still wanted; below zero, there are more than wanted
        self.picked: list[QueuedGroup] = []
        self._by_env = by_env
        self._heads = {env: queue[0] for env, queue in by_env.items()}
        self._depth: Counter[int | None] = Counter()

    def head(self, env: int | None) -> QueuedGroup | None:
        return self._heads.get(env)

    def heads(self) -> list[QueuedGroup]:
        return list(self._heads.values())

    def pick(self, group: QueuedGroup) -> None:
        self.picked.append(group)
        self.left -= group.size
        self._depth[group.env] += 1
        queue, depth = self._by_env[group.env], self._depth[group.env]
        if depth < len(queue):
            self._heads[group.env] = queue[depth]
        else:
            del self._heads[group.env]
