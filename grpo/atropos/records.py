"""What the policy sampled for environments, kept until the tokens come back in a scored group.

A record is found by the hash of its prompt and output tokens. As the same tokens may be sampled
several times, each hash has a queue of records. A row of several turns has a record for each turn:
the prompt and output of a turn are a prefix of the row.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo.atropos.convert import Sampled
from grpo.atropos.schemas import IGNORED, ScoredGroup
from grpo.data import NO_VERSION
from grpo.policies.spans import Spans


@dataclass(eq=False)
class Record:
    """One sampled continuation."""

    prompt_tokens: int  # length of the prompt
    log_probs: array  # of the output tokens, float32
    versions: Spans  # of the output tokens
    temperature: float  # NaN for what no temperature describes, such as top-p
    truncated: bool  # by the length limit
    born: float  # time of arrival, seconds on the monotonic clock
    keys: tuple[bytes, ...] = field(repr=False)
    lengths: tuple[int, ...] = field(repr=False)
    claimed: bool = False  # by a row


class Records:
    """A bounded multimap from token sequences to records; safe to use from several threads.

    Records that are too old or too many are forgotten, oldest first, whether a group has claimed
    them or not. For many no group ever comes, because environments drop groups of equal scores,
    cancel workers and evaluate.

    Args:
        max_tokens: output tokens to remember in all; about 4 bytes each.
        max_age: seconds.

    Attributes:
        counts: ``recorded``, ``expired`` without being claimed, and of the rows of groups
            ``rows_matched`` (every trained token has a record), ``rows_partly_matched`` and
            ``rows_unmatched``.

    Examples:
        >>> records = Records()
        >>> records.add([5, 6], [7, 1], [-0.5, -0.25], versions=[(3, 2)])
        >>> group = ScoredGroup(tokens=[[5, 6, 7, 1]], masks=[[-100, -100, 7, 1]], scores=[1.0])
        >>> known = records.restore(group)
        >>> known.log_probs[0][2:], known.versions[0]
        ([-0.5, -0.25], [-1, -1, 3, 3])
    """

    def __init__(self, *, max_tokens: int = 16_000_000, max_age: float = 3600.0) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if not max_age > 0:
            raise ValueError(f"max_age={max_age} must be positive; it is in seconds")
        self.max_tokens, self.max_age = max_tokens, max_age
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        # By the tokens as sampled, and without the end token; the former are looked at first.
        self._exact: dict[bytes, deque[Record]] = {}
        self._ended: dict[bytes, deque[Record]] = {}
        self._by_age: deque[Record] = deque()
        # Number of tokens -> records that end there; elsewhere no turn of a row can end.
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_age)

    def add(
        self,
        prompt: list[int],
        output: list[int],
        log_probs: Sequence[float],
        *,
        versions: Spans = (),
        temperature: float = 1.0,
        truncated: bool = False,
    ) -> None:
        """Remember one continuation.

        A continuation that the model ended is found without its end token, too, because
        environments that work with texts may leave it out. ValueError if tokens and log-probs
        differ in number.
        """
        if len(output) != len(log_probs):
            raise ValueError(f"{len(log_probs)} log-probs for {len(output)} output tokens")
        if not output:
            return
        total = len(prompt) + len(output)
        lengths = (total,) if truncated or len(output) == 1 else (total, total - 1)
        prefixes = _prefix_keys(prompt + output, sorted(lengths))
        record = Record(len(prompt), array("f", log_probs), tuple(versions), temperature, truncated,
                        time.monotonic(), keys=tuple(prefixes[n] for n in lengths), lengths=lengths)
        with self._lock:
            for queues, key in zip((self._exact, self._ended), record.keys, strict=False):
                queues.setdefault(key, deque()).append(record)
            self._lengths.update(lengths)
            self._by_age.append(record)
            self.tokens += len(output)
            self.counts["recorded"] += 1
            self._expire()

    def restore(self, group: ScoredGroup) -> Sampled:
        """What the records know of a group's rows; identical rows get records of their own, as
        long as there are enough."""
        with self._lock:
            self._expire()
            rows = [self._row(tokens, mask)
                    for tokens, mask in zip(group.tokens, group.masks, strict=True)]
        return Sampled(*(list(part) for part in zip(*rows, strict=True)))

    def _row(
        self, tokens: list[int], mask: list[int]
    ) -> tuple[list[float], list[int], float | None, bool]:
        log_probs, versions = [math.nan] * len(tokens), [NO_VERSION] * len(tokens)
        temperatures, truncated = set(), False
        for record, end in self._turns(tokens):
            record.claimed = True
            start = record.prompt_tokens
            log_probs[start:end] = record.log_probs[: end - start]
            at = start
            for version, count in record.versions:
                count = min(count, end - at)
                versions[at : at + count] = [version] * count
                at += count
            temperatures.add(record.temperature)
            truncated = record.truncated
        trained = [t for t, value in enumerate(mask) if value != IGNORED]
        known = sum(not math.isnan(log_probs[t]) for t in trained)
        kind = "matched" if known == len(trained) else "partly_matched" if known else "unmatched"
        self.counts[f"rows_{kind}"] += 1
        temperature = temperatures.pop() if temperatures else None
        return log_probs, versions, math.nan if temperatures else temperature, truncated

    def _turns(self, tokens: list[int]) -> list[tuple[Record, int]]:
        """Records of prefixes of a row, in order, each with the end of its output. Where two
        overlap, the shorter one is the beginning of the longer one, which is taken."""
        ends = sorted(n for n in self._lengths if n <= len(tokens))
        turns: list[tuple[Record, int]] = []
        for end, key in _prefix_keys(tokens, ends).items():
            queue = self._exact.get(key) or self._ended.get(key)
            if not queue:
                continue
            while turns and turns[-1][1] > queue[0].prompt_tokens:
                turns.pop()
            queue.rotate(-1)  # the next row with the same tokens gets the next record
            turns.append((queue[-1], end))
        return turns

    def _expire(self) -> None:
        oldest_allowed = time.monotonic() - self.max_age
        while self._by_age and (self.tokens > self.max_tokens
                                or self._by_age[0].born < oldest_allowed):
            record = self._by_age.popleft()
            self.tokens -= len(record.log_probs)
            self.counts["expired"] += not record.claimed
            for queues, key, length in zip((self._exact, self._ended), record.keys, record.lengths,
                                           strict=False):
                queues[key].remove(record)
                if not queues[key]:
                    del queues[key]
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]


def _prefix_keys(tokens: list[int], ends: Sequence[int]) -> dict[int, bytes]:
    """Hash of the first ``n`` tokens for each of some ascending ``n``."""
    raw = memoryview(array("i", tokens)).cast("B")
    size = array("i").itemsize
    state, keys, done = hashlib.blake2b(digest_size=16), {}, 0
    for end in ends:
        state.update(raw[size * done : size * end])
        keys[end] = state.copy().digest()
        done = end
    return keys
