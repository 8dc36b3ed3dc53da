"""What a person watching the terminal sees.

On a terminal: a start-up panel and three live lines (progress, learning, where the time goes). In a
log file or a pipe: one plain line a step, without control characters.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from grpo.report.history import thin
from grpo.report.loggers import Sample
from grpo.report.words import (
    ACCURACY,
    REWARD,
    STEP_TIME,
    TOKENS_PER_SECOND,
    format_duration,
    one_line,
    phase_times,
    reward_parts,
)

#: Iterations at both ends of a run whose mean rewards are compared.
TREND_STEPS = 5


@dataclass(frozen=True)
class _Glyphs:
    """Signs for terminals that can show them, and for those that cannot."""

    newline: str = "⏎"
    ellipsis: str = "…"
    yes: str = "✓"
    no: str = "✗"
    dot: str = "·"
    up: str = "▲"
    down: str = "▼"
    bars: str = "▁▂▃▄▅▆▇█"


_UNICODE = _Glyphs()
_ASCII = _Glyphs("\\n", "...", "yes", "no", "|", "+", "-", "_.-=^")


def _trend(history: Sequence[float]) -> float:
    """Mean of the last :data:`TREND_STEPS` values minus that of the first ones; of fewer, as long
    as both would overlap."""
    k = min(TREND_STEPS, len(history) // 2)
    return (sum(history[-k:]) - sum(history[:k])) / k if k else 0.0


def _sparkline(history: Sequence[float], bars: str, width: int = 16) -> str:
    """The history as ``width`` bars at most, each the mean of its share of the values."""
    _, means = thin(range(len(history)), history, limit=width)
    if len(means) < 2:
        return ""
    low, span = min(means), max(means) - min(means)
    top = len(bars) - 1
    return "".join(bars[round((mean - low) / span * top) if span else 0] for mean in means)


class Console:
    """The terminal side of a run; use it as a context manager around the training loop.

    Args:
        total_steps: of the run.
        console: the Rich console to write to; by default one on standard output.

    Raises:
        ValueError: if ``total_steps`` is below 1.

    Examples:
        >>> import io
        >>> out = RichConsole(file=io.StringIO(), width=100)
        >>> with Console(2, console=out) as console:
        ...     console.update(1, {"reward/mean": 0.25, "time/step": 1.5, "time/generate": 1.2})
        ...     console.update(2, {"reward/mean": 0.75, "eval/accuracy": 0.5})
        >>> print(out.file.getvalue().splitlines()[0])
        step 1/2  reward 0.250  step time 1.5s (generate 1.2s)  left 1.5s
    """

    def __init__(self, total_steps: int, *, console: RichConsole | None = None) -> None:
        if total_steps < 1:
            raise ValueError(f"{total_steps=} must be at least 1")
        self.total_steps = total_steps
        self._out = console or RichConsole(highlight=False)
        self._glyphs = _ASCII if self._out.options.ascii_only else _UNICODE
        self._clock = time.monotonic
        self._live: Live | None = None
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._rewards: list[float] = []
        self._accuracies: list[float] = []
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._updated_at: float | None = None

    def __enter__(self) -> Console:
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._out, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # Messages -------------------------------------------------------------------------------

    def banner(self, rows: Mapping[str, str]) -> None:
        """Show what was resolved at start-up: model, engine, weight sharing, device, ..."""
        grid = Table.grid(Column(style="cyan", no_wrap=True), Column(overflow="fold"),
                          padding=(0, 2))
        changes = (
            f"{self._glyphs.up} {self._glyphs.down} beside the reward: mean of the last "
            f"{TREND_STEPS} iterations less that of the first {TREND_STEPS}; beside held-out: "
            "points since the first evaluation; both since this start")
        for name, value in {**rows, "changes": changes}.items():
            grid.add_row(Text(name), Text(self._clean(str(value), limit=2_000)))
        self._out.print(
            Panel(grid, title=Text("GRPO", style="bold"), title_align="left", expand=False))

    def info(self, message: str) -> None:
        """Say something in passing."""
        self._print(Text(self._encodable(message)))

    def warn(self, message: str) -> None:
        """Say something the reader should act on."""
        self._print(Text.assemble(("warning: ", "bold yellow"), self._encodable(message)))

    def samples_table(self, samples: Sequence[Sample], *, step: int) -> None:
        """Print the first four completions with their rewards."""
        table = Table(
            Column("prompt", ratio=3, style="dim", overflow="fold"),
            Column("completion", ratio=5, overflow="fold"),
            Column("answer", max_width=12, overflow="fold"),
            Column("reward", justify="right", no_wrap=True), title=f"samples at step {step}",
            title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
        for sample in samples[:4]:
            completion = Text(self._clean(sample.completion, limit=320))
            if sample.truncated:
                completion.append(" [cut by the length limit]", style="yellow")
            mark, style = self._mark(sample.success)
            table.add_row(
                Text(self._clean(sample.prompt, limit=200)), completion,
                Text(self._clean(sample.answer, limit=60)),
                Text(f"{mark} {sample.reward:.2f}", style=style))
        self._out.print(table)

    def finish(self, paths: Mapping[str, Path], headline: str, *, tick: bool = True) -> None:
        """End the display: the result in one line, and where everything lies; a run that ended
        early, or had nothing to learn from, gets no ``tick``."""
        self._stop_live()
        mark, style = self._mark(tick)
        headline = self._encodable(headline)
        self._print(Text.assemble((f"{mark} ", f"bold {style}"), (headline, "bold")))
        width = max(map(len, paths), default=0)
        for name, path in paths.items():
            place = self._encodable(str(path))
            self._print(Text.assemble("  ", (f"{name:<{width}}", "cyan"), "  ", place))

    def _mark(self, good: bool) -> tuple[str, str]:
        return (self._glyphs.yes, "green") if good else (self._glyphs.no, "red")

    def _clean(self, text: str, *, limit: int) -> str:
        glyphs = self._glyphs
        text = one_line(text, limit=limit, newline=glyphs.newline, ellipsis=glyphs.ellipsis)
        return self._encodable(text)

    def _encodable(self, text: str) -> str:
        """The text with "?" for what the output cannot encode: a message must not end a run."""
        return text.encode(self._out.encoding, "replace").decode(self._out.encoding)

    def _print(self, text: Text) -> None:
        # Long lines are left to the terminal, so that a path can be copied in one piece.
        self._out.print(text, soft_wrap=True, highlight=False)

    # Progress -------------------------------------------------------------------------------

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step, 1 to ``total_steps``; 0 is before training."""
        now, steps = self._clock(), step - self._step
        if self._updated_at is not None and steps > 0:
            self._step_seconds.append((now - self._updated_at) / steps)
        self._step, self._updated_at, self._metrics = step, now, dict(metrics)
        for key, history in ((REWARD, self._rewards), (ACCURACY, self._accuracies)):
            if math.isfinite(metrics.get(key, math.nan)):
                history.append(float(metrics[key]))
        if self._live is None:
            self._print(self._plain_line())
            return
        if ACCURACY in metrics:  # stays above the live lines, so that the run leaves a history
            self._print(Text.assemble(self._count(), "  ", self._learning()))
        self._live.refresh()

    def _count(self) -> str:
        total = str(self.total_steps)
        return f"step {self._step:>{len(total)}}/{total}"

    def _seconds_left(self) -> float | None:
        """Time for the remaining steps at the pace of the last ones; None if not known yet."""
        paces = self._step_seconds or [self._metrics.get(STEP_TIME, math.nan)]
        pace = sum(paces) / len(paces)
        return pace * max(self.total_steps - self._step, 0) if math.isfinite(pace) else None

    def _learning(self, *, live: bool = False) -> Text:
        """Reward, held-out accuracy and throughput of a step; ``live`` keeps the last accuracy."""
        metrics, parts = self._metrics, []
        if REWARD in metrics:
            reward = Text.assemble("reward ", (f"{metrics[REWARD]:.3f}", "bold"))
            reward.append(self._arrow(_trend(self._rewards), "{:.3f}"))
            bars = _sparkline(self._rewards, self._glyphs.bars) if live else ""
            reward.append(f" {bars}" if bars else "", style="cyan")
            if parts_of := ", ".join(f"{name} {metrics[f'reward/{name}/mean']:.3f}"
                                     for name in reward_parts(metrics)):
                reward.append(f" ({parts_of})")
            parts.append(reward)
        if self._accuracies and (live or ACCURACY in metrics):
            first, last = self._accuracies[0], self._accuracies[-1]
            accuracy = Text.assemble("held-out ", (f"{last:.1%}", "bold"))
            parts.append(accuracy.append(self._arrow(100 * (last - first), "{:.1f}")))
        if TOKENS_PER_SECOND in metrics:
            parts.append(Text(f"{metrics[TOKENS_PER_SECOND]:,.0f} tok/s"))
        return Text("  ").join(parts)

    def _arrow(self, change: float, form: str) -> Text:
        size = form.format(abs(change))
        if float(size) == 0:
            return Text()
        sign, style = (self._glyphs.up, "green") if change > 0 else (self._glyphs.down, "red")
        return Text(f" {sign}{size}", style=style)

    def _times(self, form: str) -> str:
        """What the last step took, and in ``form`` its longest phases, those above one percent."""
        if STEP_TIME not in self._metrics:
            return ""
        phases = phase_times(self._metrics)
        floor = 0.01 * sum(phases.values())
        longest = sorted(phases.items(), key=lambda item: -item[1])[:4]
        shown = [f"{name} {format_duration(s)}" for name, s in longest if s > floor]
        took = f"step time {format_duration(self._metrics[STEP_TIME])}"
        return took + (form.format(f" {self._glyphs.dot} ".join(shown)) if shown else "")

    def _plain_line(self) -> Text:
        left = self._seconds_left()
        parts = [Text(self._count()), self._learning(), Text(self._times(" ({})")),
                 Text(f"left {format_duration(left)}" if left else "")]
        return Text("  ").join(part for part in parts if part.plain)

    def _render(self) -> Group:
        """The three live lines; each fits 80 columns and is cut, not wrapped, below that."""
        left = self._seconds_left()
        status = ("done" if self._step >= self.total_steps else
                  "starting" if left is None else f"left {format_duration(left)}")
        bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True),
                         padding=(0, 1), expand=True)
        bar.add_row(Text(self._count(), style="bold"),
                    ProgressBar(total=self.total_steps, completed=self._step),
                    Text(status, style="dim"))
        lines = [self._learning(live=True), Text(self._times("  {}"), style="dim")]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(bar, *(line for line in lines if line.plain))
