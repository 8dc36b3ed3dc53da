"""The curves of a run, drawn from :mod:`grpo.report.charts` as PNG files and as inline SVG.

Matplotlib takes a second to import, so only what draws imports it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.report.charts import CHARTS, PALETTE, PHASES, Chart, charts_of
from grpo.report.history import History, smooth, thin
from grpo.report.words import STEP_TIME, phase_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIGHT = {role: light for role, (light, _) in PALETTE.items()}
_LEGEND_COLUMNS = 3


def svg(chart: Chart, history: History) -> str:
    """One chart as an ``<svg>`` element whose colours are the variables ``--ink``, ``--blue``, ...

    The text is left as text, in the font of the page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The salt makes the same run give the same file, and keeps the ids of two charts apart.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure = Figure(figsize=(6.2, 2.7) if chart.wide else (4.4, 2.3))
        axes = figure.add_axes((0, 0, 1, 1))
        rows = _draw(axes, history, chart)
        # Margins in inches, which are the same for all, make the plots of the page line up.
        width, height = figure.get_size_inches()
        left, bottom, right, top = 0.55, 0.24, 0.08, 0.1 + 0.17 * rows
        axes.set_position((left / width, bottom / height,
                           1 - (left + right) / width, 1 - (bottom + top) / height))
        out = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=empty)
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)
    for role, light in _LIGHT.items():
        drawn = drawn.replace(light, f"var(--{role})")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{chart.title}"', 1).strip()


def write_png_curves(history: History, folder: Path) -> None:
    """Write ``overview.png`` with all charts, and ``accuracy.png`` and ``reward.png`` alone.

    A chart without data says so, so that the files are there for every run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for chart in CHARTS[:2]:
        _write_png(folder / f"{chart.name}.png", history, [chart], size=(7.2, 3.6), dpi=150)
    charts = [chart for chart in charts_of(history) if chart.has_data(history)]
    _write_png(folder / "overview.png", history, charts or CHARTS[:1], size=(4.5, 2.9), dpi=110,
               columns=3)


def _write_png(
    path: Path, history: History, charts: Sequence[Chart], *, size: tuple[float, float], dpi: int,
    columns: int = 1,
) -> None:
    """Charts with their titles in a grid; ``size`` is that of one, in inches."""
    from matplotlib.figure import Figure

    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=dpi, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    for number, chart in enumerate(charts, start=1):
        axes, legend_rows = figure.add_subplot(rows, columns, number), 0
        if chart.has_data(history):
            legend_rows = _draw(axes, history, chart)
        else:
            axes.set_axis_off()
            axes.text(0.5, 0.5, "no data", ha="center", color=_LIGHT["muted"])
        axes.set_title(chart.title, loc="left", pad=7 + 12 * legend_rows, color=_LIGHT["ink"],
                       fontsize=10.5, fontweight="bold")
    figure.savefig(path)


def _draw(axes: Axes, history: History, chart: Chart) -> int:
    """Draw one chart: its data, a quiet grid, and a legend above that gives the last values; the
    number of rows of the legend."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    {"lines": _draw_lines, "ratio": _draw_ratio, "times": _draw_times}[chart.kind](
        axes, history, chart)
    first, last = history.steps[0], history.steps[-1]
    margin = max(0.02 * (last - first), 0.6)
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.text(value)))
    if chart.floor is not None:
        axes.set_ylim(bottom=chart.floor)
    if chart.span is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, chart.span[0]), max(high, chart.span[1]))
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_LIGHT["line"], linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LIGHT["line"])
    axes.tick_params(length=0, labelcolor=_LIGHT["muted"], labelsize=8)
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=_LEGEND_COLUMNS, frameon=False,
        fontsize=8, labelcolor=_LIGHT["ink"], handlelength=0.9, handletextpad=0.4,
        columnspacing=1.1, borderaxespad=0.1)
    legend.set_in_layout(False)  # a wide legend must not squeeze the plot
    return -(-len(legend.get_texts()) // _LEGEND_COLUMNS)


def _draw_lines(axes: Axes, history: History, chart: Chart) -> None:
    for line in chart.lines:
        steps, values = history.series(line.name)
        if not steps:
            continue
        color = _LIGHT[line.color]
        if line.smooth and len(values) >= 30:
            axes.plot(*thin(steps, values), color=color, alpha=0.28, linewidth=1)
            values = smooth(values)
        axes.plot(*thin(steps, values), label=f"{line.label}  {chart.text(values[-1])}",
                  color=color, markersize=3.5, marker="o" if len(values) <= 25 else None)


def _draw_ratio(axes: Axes, history: History, chart: Chart) -> None:
    color = _LIGHT["blue"]
    for low, high, label, alpha in (
        ("policy/ratio_min", "policy/ratio_max", "min to max", 0.14),
        ("policy/ratio_p01", "policy/ratio_p99", "1% to 99%", 0.32),
    ):
        both = History(tuple(row for row in history.rows
                             if None not in (row.get(low), row.get(high))))
        x, bottom = thin(*both.series(low))
        _, top = thin(*both.series(high))
        if len(x) == 1:
            axes.errorbar(x, bottom, [[0.0], [top[0] - bottom[0]]], color=color, capsize=4)
        elif x:
            axes.fill_between(x, bottom, top, label=label, color=color, alpha=alpha, linewidth=0)
    _draw_lines(axes, history, chart)
    axes.axhline(1.0, color=_LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    lows, highs = history.series("policy/ratio_min")[1], history.series("policy/ratio_max")[1]
    # A few extreme tokens would flatten the band on a linear axis.
    if lows and min(lows) > 0 and highs and max(highs) > 5:
        axes.set_yscale("log")


def _draw_times(axes: Axes, history: History, chart: Chart) -> None:
    steps, phases = phase_seconds(history)
    x, _ = thin(steps, steps, limit=60)
    width = 0.85 * (x[-1] - x[0]) / (len(x) - 1) if len(x) > 1 else 0.85
    bottom = [0.0] * len(x)
    for name, seconds in phases.items():
        _, y = thin(steps, seconds, limit=60)
        axes.bar(x, y, width, bottom, color=_LIGHT[PHASES.get(name, "gray")], linewidth=0,
                 label=f"{name}  {chart.text(sum(seconds) / len(seconds))}")
        bottom = [a + b for a, b in zip(bottom, y, strict=True)]


def phase_seconds(history: History) -> tuple[list[int], dict[str, list[float]]]:
    """The steps with times, and for each phase its seconds in each of them (0 where absent).

    The phase ``other`` fills up ``time/step`` and takes in the phases below a hundredth of the
    whole, which nobody could see; it is left out where it is as small itself.
    """
    rows = [row for row in history.rows if row.get(STEP_TIME) is not None]
    times = [phase_times(row) for row in rows]
    found = {name for phases in times for name in phases}
    order = [*(name for name in PHASES if name in found), *sorted(found - PHASES.keys())]
    seconds = {name: [phases.get(name, 0.0) for phases in times] for name in order}
    # An evaluation follows its step and is no part of it.
    seconds["other"] = [
        max(0.0, row[STEP_TIME] - sum(phases.values()) + phases.get("eval", 0.0))
        for row, phases in zip(rows, times, strict=True)]
    least = 0.01 * sum(map(sum, seconds.values()))
    for name in order:
        if sum(seconds[name]) < least:
            small = seconds.pop(name)
            seconds["other"] = [a + b for a, b in zip(seconds["other"], small, strict=True)]
    if sum(seconds["other"]) < least:
        del seconds["other"]
    return [row["step"] for row in rows], seconds
