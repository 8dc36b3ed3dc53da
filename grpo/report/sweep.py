"""The runs of a sweep beside each other: a table, and a plot of reward and held-out accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from grpo.report.charts import PALETTE
from grpo.report.history import History, smooth, thin

#: Metrics of table and plot, and their headings.
SHOWN = {"reward/mean": "reward", "eval/accuracy": "held-out"}
PLOT = "sweep.png"
#: Share of a run, at its end, over which the table's rewards are averaged.
_END = 0.1


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: of its folder.
        changes: what was typed for it, key to value.
        history: its metrics; without rows if it never got that far.
    """

    name: str
    changes: dict[str, str]
    history: History

    def last(self, metric: str) -> float | None:
        """The mean of a metric over the end of the run; of an evaluation the last."""
        _, values = self.history.series(metric)
        if not values:
            return None
        end = 1 if metric.startswith("eval/") else max(1, round(_END * len(values)))
        return sum(values[-end:]) / end


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Keys that the runs of a sweep do not have in common.

    Examples:
        >>> empty = History(())
        >>> differing_keys([Run("0", {"a": "1", "b": "2"}, empty), Run("1", {"a": "3", "b": "2"},
        ...                                                            empty)])
        ['a']
    """
    names = dict.fromkeys(name for run in runs for name in run.changes)
    return [name for name in names if len({run.changes.get(name) for run in runs}) > 1]


def results_table(runs: Sequence[Run]) -> Table:
    """A row for each run: its folder, what it does otherwise, how far it got, how well."""
    keys = differing_keys(runs)
    table = Table(title="results of the sweep", title_justify="left")
    for name in ("run", *keys, "iterations", *SHOWN.values()):
        table.add_column(name, justify="right")
    for run in runs:
        values = [run.last(metric) for metric in SHOWN]
        table.add_row(run.name, *(run.changes.get(key, "") for key in keys),
                      str(max(run.history.steps, default=0)),
                      *("-" if value is None else f"{value:.3f}" for value in values))
    return table


def plot(runs: Sequence[Run], path: Path) -> None:
    """Write the curves of all runs as PNG, a chart for each metric that any of them has."""
    from matplotlib.figure import Figure

    shown = [metric for metric in SHOWN if any(run.history.series(metric)[0] for run in runs)]
    keys, colors = differing_keys(runs), [light for role, (light, _) in PALETTE.items() if (
        role not in ("ink", "muted", "line"))]
    figure = Figure(figsize=(5.2 * max(1, len(shown)), 3.4), dpi=130, layout="constrained")
    for number, metric in enumerate(shown, start=1):
        axes = figure.add_subplot(1, len(shown), number)
        for run, color in zip(runs, _again(colors, len(runs)), strict=True):
            steps, values = thin(*run.history.series(metric))
            label = ", ".join(f"{key}={run.changes.get(key)}" for key in keys) or run.name
            if metric.startswith("eval/"):
                axes.plot(steps, values, color=color, marker="o", markersize=3, label=label)
            else:
                axes.plot(steps, values, color=color, alpha=0.3)
                axes.plot(steps, smooth(values), color=color, label=label)
        axes.set_title(SHOWN[metric])
        axes.set_xlabel("iteration")
    if shown:
        axes.legend(fontsize="small")
    figure.savefig(path)


def _again(items: Sequence[str], count: int) -> list[str]:
    return [items[i % len(items)] for i in range(count)]
