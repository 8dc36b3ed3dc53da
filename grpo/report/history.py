"""The metrics of a run, read back from its record: series, thinning, smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from grpo.report.loggers import METRICS_FILE, read_jsonl


@dataclass(frozen=True)
class History:
    """The metrics of a run, one row a step, in order of steps.

    Examples:
        >>> rows = [{"step": 1, "reward/mean": 0.5}, {"step": 1, "eval/accuracy": None}]
        >>> history = History.from_rows(rows)
        >>> history.steps, history.series("reward/mean"), history.series("eval/accuracy")
        ([1], ([1], [0.5]), ([], []))
    """

    rows: tuple[dict[str, Any], ...]

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, Any]]) -> History:
        """Join rows of the same step; a later value replaces an earlier one."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in rows:
            by_step.setdefault(row["step"], {}).update(row)
        return cls(tuple(by_step[step] for step in sorted(by_step)))

    @classmethod
    def read(cls, run_dir: Path) -> History:
        """Read ``metrics.jsonl`` of a run."""
        return cls.from_rows(read_jsonl(run_dir / METRICS_FILE))

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    @property
    def names(self) -> list[str]:
        """Of all metrics, sorted."""
        return sorted({name for row in self.rows for name in row} - {"step", "time"})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The steps in which a metric has a finite value, and these values."""
        rows = [row for row in self.rows if row.get(name) is not None]
        return [row["step"] for row in rows], [float(row[name]) for row in rows]


def thin(steps: Sequence[int], values: Sequence[float], *, limit: int = 300) -> tuple:
    """At most ``limit`` points: neighbours are joined, each group at its mean step and value.

    Examples:
        >>> thin([1, 2, 3, 4], [0.0, 1.0, 4.0, 6.0], limit=2)
        ([1.5, 3.5], [0.5, 5.0])
    """
    n = len(steps)
    if n <= limit:
        return list(steps), list(values)
    edges = [i * n // limit for i in range(limit + 1)]
    return tuple([sum(column[a:b]) / (b - a) for a, b in pairwise(edges)]
                 for column in (steps, values))


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average with exponential weights on both sides, so that it does not lag behind.

    The weights halve every fortieth of the run.

    Examples:
        >>> smooth([1.0, 1.0, 1.0])
        [1.0, 1.0, 1.0]
    """
    decay = 0.5 ** (1 / max(1.0, len(values) / 40))

    def sums(values: Sequence[float]) -> list[float]:
        left, right = (list(accumulate(side, lambda total, value: decay * total + value))
                       for side in (values, values[::-1]))
        # The value itself is in both sums and counts once.
        return [a + b - value for a, b, value in zip(left, right[::-1], values, strict=True)]

    weights = sums([1.0] * len(values))
    return [total / weight for total, weight in zip(sums(values), weights, strict=True)]
