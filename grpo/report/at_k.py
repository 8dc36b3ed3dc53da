"""What ``n`` samples of each problem say of a policy: pass@k and its relatives, with intervals.

Every measure is a mean over problems of a number for each, so one bootstrap over problems serves
all of them. Arrays have a row for each of ``P`` problems and a column for each of ``n`` samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

#: Subsets over which a majority of fewer than all samples is averaged, and a chunk of them.
_SUBSETS, _CHUNK = 200, 1 << 24
#: Draws of a bootstrap, and the share of them that an interval holds.
RESAMPLES, COVERED = 2000, 0.95


class Estimate(NamedTuple):
    """A mean over problems, and the interval that holds 95 % of its bootstrap."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Samples:
    """``n`` scored samples of each of ``P`` problems, in the order in which they were drawn.

    Args:
        correct: bool ``[P, n]``; a sample without a reward is not correct.
        rewards: float ``[P, n]``, not a number for a sample without one; None: 1 for what is
            correct, else 0.
        answers: what each sample answered, ``[P][n]``; None where it gave none. Answers of a
            problem that are equal are the same answer.

    Raises:
        ValueError: for arrays of other or different shapes, or without a sample.

    Examples:
        >>> samples = Samples(np.array([[True, False], [False, False]]), answers=[
        ...     ["4", "5"], ["9", "9"]])
        >>> samples.per_problem("pass", 1).tolist(), samples.per_problem("distinct", 2).tolist()
        ([0.5, 0.0], [2.0, 1.0])
        >>> samples.per_problem("pass", 4)
        Traceback (most recent call last):
        ...
        ValueError: pass@4 needs at least k=4 samples of each problem, and there are n=2
    """

    correct: NDArray[np.bool_]
    rewards: Values | None = None
    answers: Sequence[Sequence[str | None]] | None = None

    def __post_init__(self) -> None:
        if self.correct.ndim != 2 or not self.correct.size:
            raise ValueError(f"correct has shape {self.correct.shape}; give a row of at least one "
                             "sample for each problem")
        if self.rewards is not None and self.rewards.shape != self.correct.shape:
            raise ValueError(f"rewards have shape {self.rewards.shape}, correct has "
                             f"{self.correct.shape}; give one of each sample")
        shape = None if self.answers is None else [len(row) for row in self.answers]
        if shape is not None and shape != [self.n] * self.problems:
            raise ValueError(f"{shape} answers of problems with {self.n} samples each; give one of "
                             "each sample, None where there is none")

    @property
    def problems(self) -> int:
        return self.correct.shape[0]

    @property
    def n(self) -> int:
        return self.correct.shape[1]

    def per_problem(self, measure: str, k: int) -> Values:
        """A measure of each problem, float ``[P]``, whose mean is the measure.

        Args:
            measure: one of :data:`MEASURES`.
            k: how many samples it is of, at most ``n``.

        Raises:
            ValueError: for an unknown measure, for ``k`` below 1, or above ``n``.
        """
        if measure not in MEASURES:
            raise ValueError(f"measure {measure!r} is unknown; known are {', '.join(MEASURES)}")
        if k < 1 or k > self.n:
            raise ValueError(f"{measure}@{k} needs at least k={max(k, 1)} samples of each problem, "
                             f"and there are n={self.n}")
        return MEASURES[measure](self, k)

    def has(self, measure: str) -> bool:
        """Whether what the measure is made of is known."""
        return self.answers is not None or measure not in ("majority", "distinct")

    def codes(self) -> NDArray[np.int64]:
        """Answers as numbers, ``[P, n]``: equal ones of a problem have the same; -1 for none."""
        rows = []
        for answers in self.answers or ():
            known: dict[str, int] = {}
            rows.append([-1 if answer is None else known.setdefault(answer, len(known))
                         for answer in answers])
        return np.array(rows, dtype=np.int64)


def _missing(count: NDArray[np.int64], n: int, k: int) -> Values:
    """The chance that ``k`` of ``n`` samples, drawn without repeats, hold none of ``count``.

    ``C(n - c, k) / C(n, k)`` as a product, which no factorial overflows (Chen et al. 2021,
    arXiv:2107.03374, sec. 2.1).
    """
    steps = np.arange(k)
    return np.prod(np.clip(n - count[..., None] - steps, 0, None) / (n - steps), axis=-1)


def _pass(samples: Samples, k: int) -> Values:
    """The chance that one of ``k`` samples is correct: of all subsets of ``k`` of the ``n``."""
    return 1.0 - _missing(samples.correct.sum(1), samples.n, k)


def _pass_ordered(samples: Samples, k: int) -> Values:
    """Whether one of the first ``k`` is correct."""
    return samples.correct[:, :k].any(1).astype(np.float64)


def _coverage(samples: Samples, k: int) -> Values:
    """The share of successive blocks of ``k`` samples in which one is correct."""
    blocks = samples.n // k
    return samples.correct[:, :blocks * k].reshape(-1, blocks, k).any(-1).mean(1)


def _rewards(samples: Samples) -> Values:
    return samples.correct.astype(np.float64) if samples.rewards is None else samples.rewards


def _lowest(rewards_PN: Values) -> float:
    """The lowest reward of all samples, 0 if none has one."""
    return float(np.nanmin(rewards_PN)) if not np.isnan(rewards_PN).all() else 0.0


def _mean(samples: Samples, k: int) -> Values:
    """The mean reward of the first ``k`` that have one, the lowest of all where none has."""
    rewards_PN = _rewards(samples)
    first_PK = np.take_along_axis(
        rewards_PN, np.isnan(rewards_PN).argsort(axis=1, kind="stable")[:, :k], axis=1)
    known_P = (~np.isnan(first_PK)).sum(1)
    means_P = np.nansum(first_PK, axis=1) / np.maximum(1, known_P)
    return np.where(known_P > 0, means_P, _lowest(rewards_PN))


def _best(samples: Samples, k: int) -> Values:
    """The expected greatest reward of ``k``: the ``i``-th smallest of ``n`` is the greatest of
    ``C(i - 1, k - 1)`` of the ``C(n, k)`` subsets. A sample without a reward is never better than
    one that has a reward."""
    n, rewards_PN = samples.n, _rewards(samples)
    rewards_PN = np.where(np.isnan(rewards_PN), _lowest(rewards_PN), rewards_PN)
    weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return np.sort(rewards_PN, axis=1) @ np.array(weights)


def _distinct(samples: Samples, k: int) -> Values:
    """The expected number of different answers among ``k``."""
    codes_PN = samples.codes()
    counts = np.stack([(codes_PN == code).sum(1) for code in range(codes_PN.max() + 1)] or
                      [np.zeros(samples.problems, np.int64)], axis=1)
    return (1.0 - _missing(counts, samples.n, k)).sum(1)


def _majority(samples: Samples, k: int) -> Values:
    """The chance that the most frequent answer of ``k`` is correct, ties broken by lot; 0 without
    an answer. Over all subsets where ``k`` is ``n``, else over 200 that are always the same."""
    n, rng = samples.n, np.random.default_rng(0)
    subsets_SK = np.arange(n)[None] if k == n else np.stack(
        [rng.permutation(n)[:k] for _ in range(_SUBSETS)])
    codes_PN, at_once = samples.codes(), max(1, _CHUNK // (len(subsets_SK) * k * k))
    parts = []
    for first in range(0, samples.problems, at_once):
        codes_PSK = codes_PN[first:first + at_once][:, subsets_SK]
        correct_PSK = samples.correct[first:first + at_once][:, subsets_SK]
        votes_PSK = (codes_PSK[..., None] == codes_PSK[..., None, :]).sum(-1) * (codes_PSK >= 0)
        most_PS1 = votes_PSK.max(-1, keepdims=True)
        # Each of t answers that tie holds as many samples, so a mean over samples is one by lot.
        winner_PSK = (votes_PSK == most_PS1) & (votes_PSK > 0)
        won_PS = (winner_PSK & correct_PSK).sum(-1) / np.maximum(1, winner_PSK.sum(-1))
        parts.append(won_PS.mean(-1))
    return np.concatenate(parts)


#: By name, in the order of a table.
MEASURES = {"pass": _pass, "pass_ordered": _pass_ordered, "coverage": _coverage, "mean": _mean,
            "best": _best, "majority": _majority, "distinct": _distinct}


def estimates(
    per_problem: dict[str, Values], *, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Means over problems and their percentile bootstrap intervals.

    Problems are drawn anew with repeats, the same ones for all measures. The interval says how far
    a mean over other problems of the kind may lie; that of the samples of each is in it.

    Args:
        per_problem: float ``[P]`` of each measure.
        seed: of the draws.
        resamples: how many.

    Examples:
        >>> found = estimates({"pass@1": np.array([0.0, 1.0, 1.0, 1.0])})
        >>> found["pass@1"].value, found["pass@1"].low <= 0.75 <= found["pass@1"].high
        (0.75, True)
    """
    if not per_problem:
        return {}
    table_MP = np.stack([*per_problem.values()])
    problems = table_MP.shape[1]
    rng = np.random.default_rng(seed)
    drawn_RP = rng.multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    means_MR = table_MP @ drawn_RP.T / problems
    tail = (1 - COVERED) / 2
    low_M, high_M = np.quantile(means_MR, [tail, 1 - tail], axis=1)
    return {name: Estimate(*map(float, row)) for name, row in zip(
        per_problem, zip(table_MP.mean(1), low_M, high_M, strict=True), strict=True)}


def all_at_k(samples: Samples, ks: Sequence[int]) -> dict[str, Values]:
    """Every measure that the samples allow at every ``k``, as ``pass@8``, float ``[P]`` each."""
    return {f"{measure}@{k}": samples.per_problem(measure, k)
            for measure in MEASURES if samples.has(measure) for k in ks}


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact test of whether two policies solve equally many problems.

    Under the hypothesis each problem that one of them alone solves is either's with chance 1/2
    (McNemar 1947, with the binomial in the place of its approximation).

    Args:
        only_first: problems that the first alone solved.
        only_second: and the second.

    Examples:
        >>> round(mcnemar(1, 9), 6), mcnemar(0, 0)
        (0.021484, 1.0)
    """
    total, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, i) for i in range(least + 1))
    return min(1.0, 2 * tail / 2**total)
