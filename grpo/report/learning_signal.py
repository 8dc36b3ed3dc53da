"""Whether rewards tell completions apart. Where they do not, a run goes on and learns nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo.report.loggers import MetricLogger

#: Iterations in a row that may be without a signal by chance.
PATIENCE = 5
_EQUAL_GROUPS = "reward/zero_variance_groups"
_TEACHERS = ("policy/kl_to_teacher", "loss/distill")
#: Of their magnitude: how far equal rewards seem apart in float32.
_ROUNDING = 1e-6


def has_signal(metrics: Mapping[str, float | None]) -> bool:
    """Whether an iteration had anything to learn from.

    It had none where no completion entered the loss, where all got the same reward (shaping can
    still tell them apart, by their length for instance, but not by what they were asked for), and
    where all completions of each group did and the advantage is relative to the group. A teacher's
    opinion is a signal whatever the rewards are.

    Examples:
        >>> has_signal({"reward/zero_variance_groups": 0.5, "reward/std": 0.4})
        True
        >>> has_signal({"reward/zero_variance_groups": 1.0, "reward/std": 0.0})
        False
    """
    if _number(metrics, "reward/rows_in_loss", 1) == 0:
        return False
    if any(name in metrics for name in _TEACHERS):
        return True
    if _is_constant(metrics) and "reward/shaped_mean" in metrics:
        return False
    return (_number(metrics, _EQUAL_GROUPS, 0) < 1
            or _number(metrics, "advantage/zero_fraction", 1) < 1)


@dataclass(frozen=True)
class Silence:
    """Iterations in a row without a signal."""

    rows: Sequence[Mapping[str, float | None]]  # their metrics, at least one
    whole: bool  # whether they are all iterations of the run

    def __str__(self) -> str:
        """What was seen, and what to try."""
        count = len(self.rows)
        found, advice = self._case()
        iterations = "the only iteration" if count == 1 else f"all {count} iterations"
        when = f"in {iterations}" if self.whole else f"in the last {count} iterations"
        cut = _number(self.rows[-1], "tokens/truncated_fraction", 0)
        if cut > 0.5:
            advice = (f"{cut:.0%} of the completions were cut by the length limit, before their "
                      f"answer perhaps: raise the limit. {advice}")
        return f"nothing to learn from: {found} {when}. {advice}"

    def _case(self) -> tuple[str, str]:
        means = [_number(row, "reward/mean", math.nan) for row in self.rows]
        if all(_number(row, "reward/rows_in_loss", 1) == 0 for row in self.rows):
            return ("no completion entered the loss", "Options that take rows out of it: "
                    "train.mask_truncated, train.zero_variance_filter")
        if all(_number(row, "reward/success_rate", 0) == 1 for row in self.rows):
            return "every completion succeeded", "Give it harder problems, or stop here"
        if all(map(_is_constant, self.rows)) and _same(min(means), max(means)):
            return (f"every completion got the reward {means[0]:.4g}",
                    "Check, in this order: (1) samples.jsonl: do completions have the form that "
                    "the reward function reads? (2) the reward function, on an answer that you "
                    "know to be right; (3) easier problems, a higher sampling temperature, more "
                    "completions a prompt; (4) a model that knows the form: instruction-tuned, or "
                    "warm-started on examples")
        return ("the completions of each prompt all got the same reward",
                "Try a higher sampling temperature, more completions a prompt, or problems that "
                "the model solves sometimes: harder ones if it always does, easier ones if never")


def silence_at_end(rows: Iterable[Mapping[str, float | None]]) -> Silence | None:
    """The iterations without a signal that a run ended with, from the metrics of all its steps;
    None where the last iteration had a signal, or only a few had none."""
    trained = [row for row in rows if _EQUAL_GROUPS in row]
    heard = max((i for i, row in enumerate(trained) if has_signal(row)), default=-1)
    silent = trained[heard + 1 :]
    whole = heard == -1
    return Silence(silent, whole) if silent and (whole or len(silent) >= PATIENCE) else None


class SignalWarning(MetricLogger):
    """Say so when iterations in a row had nothing to learn from, and again after ``every`` more.

    Examples:
        >>> watch = SignalWarning(lambda text: print(text[:60]))
        >>> for step in range(1, 6):
        ...     watch.log(step, {"reward/zero_variance_groups": 1.0, "reward/mean": 0.0,
        ...                      "reward/std": 0.0})
        nothing to learn from: every completion got the reward 0 in 
    """

    def __init__(self, warn: Callable[[str], None], *, every: int = 50) -> None:
        self.warn, self.every = warn, every
        self._silent: list[Mapping[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if _EQUAL_GROUPS not in metrics:
            return  # an evaluation
        if has_signal(metrics):
            self._silent = []
            return
        self._silent.append(metrics)
        beyond = len(self._silent) - PATIENCE
        if beyond >= 0 and beyond % self.every == 0:
            self.warn(str(Silence(self._silent, whole=False)))


def _is_constant(metrics: Mapping[str, float | None]) -> bool:
    """Whether all rewards of a batch were the same."""
    mean = _number(metrics, "reward/mean", 0)
    return _same(mean, mean + _number(metrics, "reward/std", math.inf))


def _same(one: float, other: float) -> bool:
    """Whether two numbers differ by no more than float32's rounding."""
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _number(metrics: Mapping[str, float | None], name: str, default: float) -> float:
    """A metric; the default where it is missing or was not finite."""
    value = metrics.get(name)
    return default if value is None else float(value)
