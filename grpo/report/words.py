"""Names of metrics, and figures and texts as a line of a screen has room for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

REWARD = "reward/mean"
ACCURACY = "eval/accuracy"
TOKENS_PER_SECOND = "tokens/per_second"
STEP_TIME = "time/step"


def format_duration(seconds: float) -> str:
    """Seconds as people say them.

    Examples:
        >>> [format_duration(s) for s in (0.42, 7.31, 75, 3_725, 180_000)]
        ['0.42s', '7.3s', '1m 15s', '1h 02m', '2d 02h']
    """
    if seconds < 1:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def one_line(text: str, *, limit: int, newline: str = "⏎", ellipsis: str = "…") -> str:
    """Text on one line of at most ``limit`` characters, its middle cut out if need be.

    The head and the tail stay, because a completion says what it is at its head and gives its
    answer at its tail. Characters that could steer a terminal become spaces.

    Examples:
        >>> one_line("first\\nlast", limit=20)
        'first⏎last'
        >>> one_line("0123456789" * 5, limit=12)
        '0123456…6789'
    """
    text = text.strip().replace("\r\n", "\n").replace("\n", newline)
    text = "".join(c if c.isprintable() else " " for c in text)
    if len(text) <= limit:
        return text
    room = limit - len(ellipsis)
    tail = room * 2 // 5
    return text[: room - tail] + ellipsis + text[len(text) - tail :]


def phase_times(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds of each phase of a step: the finite ``time/*`` metrics except ``time/step``.

    Examples:
        >>> phase_times({"time/step": 3.0, "time/train": 2.0, "reward/mean": 0.5})
        {'train': 2.0}
    """
    return {name.removeprefix("time/"): seconds for name, seconds in metrics.items()
            if name.startswith("time/") and name != STEP_TIME
            and seconds is not None and math.isfinite(seconds)}


def reward_parts(names: Iterable[str]) -> list[str]:
    """Names of the rewards that are summed, from those of metrics.

    Examples:
        >>> reward_parts(["reward/mean", "reward/brevity/mean", "reward/std"])
        ['brevity']
    """
    return [name.removeprefix("reward/").removesuffix("/mean") for name in names
            if name.startswith("reward/") and name.endswith("/mean") and name != REWARD]


def at_k_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """The metrics of samples that make a chart of each task, by its name; ``""`` is the run's own.

    Examples:
        >>> at_k_metrics(["eval/accuracy", "eval/pass@8", "eval/best@8", "eval/gsm8k/accuracy"])
        {'': ['eval/pass@8'], 'gsm8k': ['eval/gsm8k/accuracy']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        *task, metric = name.removeprefix("eval/").split("/")
        if name.startswith("eval/") and len(task) <= 1 and (
                metric.startswith(("pass@", "coverage@", "majority@"))
                or task and metric == "accuracy"):
            found.setdefault("".join(task), []).append(name)
    return found
