"""Groups that wait for a batch: first in, first out for each environment, and what goes next."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A group as it was received."""

    number: int  # counts groups in the order they came
    env: int | None  # the sender's id, if it sent one
    size: int  # sequences
    body: bytes  # JSON object


class GroupQueue:
    """Waiting groups, one queue for each environment.

    Examples:
        >>> queue = GroupQueue()
        >>> for number, size in enumerate([4, 8, 4]):
        ...     queue.push(QueuedGroup(number, size, size, b"{}"))
        >>> batch = queue.choose(8, {})
        >>> [group.number for group in batch]
        [0, 2]
        >>> [queue.pop(group.env).number for group in batch], queue.sequences, queue.choose(16, {})
        ([0, 2], 8, None)
    """

    def __init__(self) -> None:
        self._by_env: dict[int | None, deque[QueuedGroup]] = {}
        self._sizes: Counter[int] = Counter()
        self.sequences_by_env: Counter[int | None] = Counter()
        self.groups = self.sequences = self.bytes = 0

    def __iter__(self) -> Iterator[QueuedGroup]:
        """All groups in the order they came."""
        return iter(sorted(chain.from_iterable(self._by_env.values()),
                           key=lambda group: group.number))

    @property
    def max_size(self) -> int:
        """Sequences of the largest group, at least 1."""
        return max(self._sizes, default=1)

    def push(self, group: QueuedGroup) -> None:
        """Add a group behind the others of its environment."""
        self._by_env.setdefault(group.env, deque()).append(group)
        self._count(group, 1)

    def pop(self, env: int | None) -> QueuedGroup:
        """Take out an environment's next group; KeyError if it has none."""
        queue = self._by_env[env]
        group = queue.popleft()
        if not queue:
            del self._by_env[env]
        self._count(group, -1)
        return group

    def choose(self, batch_size: int, minima: dict[int, int]) -> list[QueuedGroup] | None:
        """Whole groups that make a batch.

        First each environment's minimum, as far as it has groups; then the oldest of the rest,
        whatever its size, so that no group waits for ever; then, again and again, the oldest that
        still fits. Where none fits, the smallest next group makes the batch larger than asked for.

        Args:
            batch_size: sequences wanted.
            minima: the least sequences wanted from each environment that has a minimum.

        Returns:
            Groups in the order they came; None if fewer than ``batch_size`` sequences wait.
        """
        if self.sequences < batch_size:
            return None
        behind = {env: iter(queue) for env, queue in self._by_env.items()}
        heads = {env: next(groups) for env, groups in behind.items()}
        picked: list[QueuedGroup] = []
        left = batch_size  # below zero, more than wanted is picked

        def pick(group: QueuedGroup) -> int:
            picked.append(group)
            heads[group.env] = next(behind[group.env], None)
            if heads[group.env] is None:
                del heads[group.env]
            return left - group.size

        for env, minimum in minima.items():
            enough = left - minimum
            while left > max(enough, 0) and env in heads:
                left = pick(heads[env])
        limit = math.inf  # the oldest of the rest goes whatever its size
        while left > 0:
            fitting = [head for head in heads.values() if head.size <= limit]
            left = pick(min(fitting, key=lambda head: head.number) if fitting
                        else min(heads.values(), key=lambda head: (head.size, head.number)))
            limit = left
        return sorted(picked, key=lambda group: group.number)

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
