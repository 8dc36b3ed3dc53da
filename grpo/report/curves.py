"""The curves of a run, drawn from :mod:`grpo.report.charts` as PNG files and as inline SVG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.report.charts import CHARTS, PALETTE, PHASES, Chart, charts_of
from grpo.report.history import History, smooth, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

def _draw_lines(axes: Axes, history: History, chart: Chart) -> None:
    for line in chart.lines:
        steps, values = history.series(*line.names)
        if not steps:
            continue
        color = _light(line.color)
        if line.smooth and len(values) >= 30:
            axes.plot(*thin(steps, values), color=color, alpha=0.28, linewidth=1)
            values = smooth(values)
        style = {"color": color, "markersize": 3.5, "marker": "o" if len(values) <= 25 else None}
        label = f"{line.label}  {chart.text(values[-1])}"
        axes.plot(*thin(steps, values), label=label, **style)


def _draw_ratio(axes: Axes, history: History, chart: Chart) -> None:
    def band(low: str, high: str, label: str, alpha: float) -> None:
        both = [row for row in history.rows if None not in (row.get(low), row.get(high))]
        x, bottom = thin([row["step"] for row in both], [row[low] for row in both])
        _, top = thin([row["step"] for row in both], [row[high] for row in both])
        if len(x) == 1:
            axes.errorbar(x, bottom, [[0.0], [top[0] - bottom[0]]], color=_light("blue"), capsize=4)
        elif x:
            style = {"color": _light("blue"), "alpha": alpha, "linewidth": 0}
            axes.fill_between(x, bottom, top, label=label, **style)

    band("policy/ratio_min", "policy/ratio_max", "min to max", 0.14)
    band("policy/ratio_p01", "policy/ratio_p99", "1% to 99%", 0.32)
    _draw_lines(axes, history, chart)
    axes.axhline(1.0, color=_light("muted"), linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    lows, highs = history.series("policy/ratio_min")[1], history.series("policy/ratio_max")[1]
    # A few extreme tokens would flatten the band on a linear axis.
    if lows and min(lows) > 0 and highs and max(highs) > 5:
        axes.set_yscale("log")


def _without_slivers(
    steps: list[int], phases: dict[str, list[float]]
) -> tuple[list[int], dict[str, list[float]]]:
    """Phases below a hundredth of the whole go into ``other``: nobody could see them."""
    total = sum(map(sum, phases.values()))
    shown = {name: s for name, s in phases.items() if sum(s) >= 0.01 * total and name != "other"}
    rest = [seconds for name, seconds in phases.items() if name not in shown]
    if rest:
        shown["other"] = [sum(row) for row in zip(*rest, strict=True)]
    return steps, shown


def _draw_times(axes: Axes, history: History, chart: Chart) -> None:
    steps, phases = _without_slivers(*history.phases())
    bars, bottom = None, None
    for name, seconds in phases.items():
        x, y = thin(steps, seconds, limit=60)
        if bars is None:
            bars, bottom = x, [0.0] * len(x)
        width = 0.85 * (bars[-1] - bars[0]) / (len(bars) - 1) if len(bars) > 1 else 0.85
        color = _light(PHASES.get(name, "gray"))
        mean = chart.text(sum(seconds) / len(seconds))
        axes.bar(x, y, width, bottom, color=color, linewidth=0, label=f"{name}  {mean}")
        bottom = [a + b for a, b in zip(bottom, y, strict=True)]


_DRAWN = {"lines": _draw_lines, "ratio": _draw_ratio, "times": _draw_times}
_LEGEND_COLUMNS = 3


def _light(role: str) -> str:
    return PALETTE[role][0]


def draw(axes: Axes, history: History, chart: Chart) -> int:
    """Draw one chart: its data, a quiet grid, and a legend above that gives the last values.

    Returns:
        The number of rows of the legend.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    _DRAWN[chart.kind](axes, history, chart)
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
    axes.grid(axis="y", color=_light("line"), linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_light("line"))
    axes.tick_params(length=0, labelcolor=_light("muted"), labelsize=8)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        legend = axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=_LEGEND_COLUMNS,
            frameon=False,
            fontsize=8,
            labelcolor=_light("ink"),
            handlelength=0.9,
            handletextpad=0.4,
            columnspacing=1.1,
            borderaxespad=0.1,
        )
        legend.set_in_layout(False)  # a wide legend must not squeeze the plot
    return -(-len(handles) // _LEGEND_COLUMNS)


def svg(chart: Chart, history: History) -> str:
    """One chart as an ``<svg>`` element whose colours are the variables ``--ink``, ``--blue``, ...

    The text is left as text, in the font of the page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A fixed salt makes the same run give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure = Figure(figsize=(6.2, 2.7) if chart.wide else (4.4, 2.3))
        axes = figure.add_axes((0, 0, 1, 1))
        _place(axes, 0.1 + 0.17 * draw(axes, history, chart))
        out = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=empty)
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)
    for role, (light, _) in PALETTE.items():
        drawn = drawn.replace(light, f"var(--{role})")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{chart.title}"', 1).strip()


def write_png_curves(history: History, folder: Path) -> list[Path]:
    """Write ``overview.png`` with all charts, and ``accuracy.png`` and ``reward.png`` alone.

    A chart without data says so, so that the files are there for every run.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in CHARTS[:2]:
        figure = Figure(figsize=(7.2, 3.6), dpi=150)
        axes = figure.add_axes((0, 0, 1, 1))
        _place(axes, 0.38 + 0.17 * _titled(axes, history, chart))
        paths.append(folder / f"{chart.name}.png")
        figure.savefig(paths[-1])
    charts = ([chart for chart in charts_of(history) if chart.has_data(history)]
              or list(CHARTS[:1]))
    rows = -(-len(charts) // 3)
    figure = Figure(figsize=(13.5, 2.9 * rows), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    grid = list(figure.subplots(rows, 3, squeeze=False).flat)
    for axes in grid[len(charts) :]:
        axes.remove()
    for axes, chart in zip(grid, charts, strict=False):
        _titled(axes, history, chart)
    paths.append(folder / "overview.png")
    figure.savefig(paths[-1])
    return paths


def _place(axes: Axes, top: float) -> None:
    """Give the axes fixed margins in inches, so that the plots of a page line up."""
    width, height = axes.get_figure().get_size_inches()
    left, bottom = 0.55, 0.24
    size = ((width - left - 0.08) / width, (height - bottom - top) / height)
    axes.set_position((left / width, bottom / height, *size))


def _titled(axes: Axes, history: History, chart: Chart) -> int:
    rows = 0
    if chart.has_data(history):
        rows = draw(axes, history, chart)
    else:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", ha="center", color=_light("muted"))
    style = {"color": _light("ink"), "fontsize": 10.5, "fontweight": "bold"}
    axes.set_title(chart.title, loc="left", pad=7 + 12 * rows, **style)
    return rows
