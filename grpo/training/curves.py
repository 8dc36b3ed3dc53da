"""The curves of a run: one description of each chart, drawn as PNG files and as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.training.history import History, smooth, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours by role: (on light, on dark). The light ones are distinct strings, because an SVG drawn
#: in them is turned into one that follows the reader's theme by replacing each with a variable.
PALETTE = {
    "ink": ("#1b1f27", "#e9ebee"),
    "muted": ("#667085", "#98a2b3"),
    "line": ("#e4e7ec", "#2b3038"),
    "blue": ("#2f6bdb", "#7aa7ff"),
    "green": ("#12956a", "#4ccf9f"),
    "amber": ("#d98a0b", "#f0b452"),
    "red": ("#d0453e", "#ff8a80"),
    "violet": ("#7d55d6", "#b79bff"),
    "teal": ("#0e90a8", "#5fd0e4"),
    "pink": ("#cb4a93", "#f290c4"),
    "gray": ("#98a1b0", "#6b7482"),
}
PHASES = {
    "generate": "blue",
    "reward": "amber",
    "train": "violet",
    "optimizer": "pink",
    "sync": "green",
    "canary": "teal",
    "eval": "red",
    "other": "gray",
}


@dataclass(frozen=True)
class Line:
    """One line of a chart: the first of ``names`` that the run has."""

    names: tuple[str, ...]
    label: str
    color: str
    smooth: bool = False


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{_number(value)}s"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


@dataclass(frozen=True)
class Chart:
    """One chart, its lines, and a sentence on how to read it.

    Attributes:
        name: file name and anchor.
        title: heading.
        note: what it shows and what is healthy.
        lines: the lines; a chart without data for any of them is left out.
        text: how a value is written.
        floor: lowest end of the value axis, or None to fit the data.
        span: what the value axis shows at least, so that rounding does not look like movement.
        wide: whether it belongs to the first look, and takes half the page rather than a third.
        prefix: any metric whose name starts so counts as data too.
        draw: draws the chart if it is more than lines.
    """

    name: str
    title: str
    note: str
    lines: tuple[Line, ...]
    text: Callable[[float], str] = _number
    floor: float | None = None
    span: tuple[float, float] | None = None
    wide: bool = False
    prefix: str | None = None
    draw: Callable[[Axes, History, Chart], None] | None = None

    def has_data(self, history: History) -> bool:
        """Whether the run has a value to draw."""
        names = [name for line in self.lines for name in line.names]
        if self.prefix is not None:
            names += [name for name in history.names if name.startswith(self.prefix)]
        return bool(history.series(*names)[0])


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


_LEGEND_COLUMNS = 3


def _light(role: str) -> str:
    return PALETTE[role][0]


CHARTS = (
    Chart(
        "accuracy",
        "Accuracy",
        "Held-out: greedy answers to prompts never trained on. Train: sampled answers.",
        (
            Line(("reward/success_rate",), "train", "gray", smooth=True),
            Line(("eval/accuracy",), "held-out", "green"),
        ),
        _percent,
        floor=0.0,
        wide=True,
    ),
    Chart(
        "reward",
        "Train reward",
        "Mean over the completions of a step (pale) and its moving average (strong).",
        (Line(("reward/mean",), "reward", "blue", smooth=True),),
        wide=True,
    ),
    Chart(
        "ratio",
        "Probability ratio",
        "Trained policy over sampler, for each sampled token. On-policy it hugs 1.",
        (Line(("policy/ratio_p50",), "median", "blue"),),
        wide=True,
        span=(0.99, 1.01),
        prefix="policy/ratio_",
        draw=_draw_ratio,
    ),
    Chart(
        "step_time",
        "Step time",
        "Seconds of a step by phase; the legend gives the means.",
        (),
        _seconds,
        floor=0.0,
        wide=True,
        prefix="time/",
        draw=_draw_times,
    ),
    Chart(
        "reward_std",
        "Reward spread",
        "Standard deviation. Near 0 there is nothing left to learn from.",
        (Line(("reward/std",), "std", "amber", smooth=True),),
        floor=0.0,
    ),
    Chart(
        "zero_variance_groups",
        "Groups without a signal",
        "Groups in which every completion got the same reward.",
        (Line(("reward/zero_variance_groups",), "groups", "amber", smooth=True),),
        floor=0.0,
    ),
    Chart(
        "kl",
        "KL divergence",
        "To the reference: how far the policy has moved. To the engine: should stay near 0.",
        (
            Line(("policy/kl_to_ref", "loss/kl_to_ref"), "reference", "violet"),
            Line(("policy/kl_to_inference", "loss/kl_to_inference"), "engine", "teal"),
        ),
    ),
    Chart(
        "entropy",
        "Entropy",
        "Of the next-token distribution, in nats. A collapse to 0 ends exploration.",
        (Line(("policy/entropy", "loss/entropy"), "entropy", "teal"),),
        floor=0.0,
    ),
    Chart(
        "clip_fraction",
        "Clip fraction",
        "Share of tokens whose ratio left the trust region, on either side.",
        (
            Line(("policy/clip_fraction_low",), "low", "red", smooth=True),
            Line(("policy/clip_fraction_high",), "high", "green", smooth=True),
        ),
        _percent,
        floor=0.0,
    ),
    Chart(
        "grad_norm",
        "Gradient norm",
        "Before clipping. Rare spikes are normal, growth is not.",
        (Line(("train/grad_norm",), "norm", "pink", smooth=True),),
        floor=0.0,
    ),
    Chart(
        "response_length",
        "Completion length",
        "Sampled tokens of a completion.",
        (
            Line(("tokens/response_max",), "max", "gray"),
            Line(("tokens/response_mean",), "mean", "blue", smooth=True),
        ),
        floor=0.0,
    ),
    Chart(
        "truncated",
        "Cut completions",
        "Share of completions that hit the length limit.",
        (Line(("tokens/truncated_fraction",), "cut", "red", smooth=True),),
        _percent,
        floor=0.0,
    ),
    Chart(
        "throughput",
        "Throughput",
        "Tokens per second.",
        (Line(("tokens/per_second",), "tokens/s", "green", smooth=True),),
        floor=0.0,
    ),
    Chart(
        "ess",
        "Effective sample size",
        "Of the importance weights; 1 (or the batch size) when on-policy.",
        (Line(("policy/ess",), "ESS", "violet", smooth=True),),
        span=(0.99, 1.0),
    ),
    Chart(
        "lr",
        "Learning rate",
        "As the optimizer used it.",
        (Line(("train/lr",), "lr", "gray"),),
        floor=0.0,
    ),
)


def draw(axes: Axes, history: History, chart: Chart) -> int:
    """Draw one chart: its data, a quiet grid, and a legend above that gives the last values.

    Returns:
        The number of rows of the legend.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    (chart.draw or _draw_lines)(axes, history, chart)
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
    charts = [chart for chart in CHARTS if chart.has_data(history)] or list(CHARTS[:1])
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
