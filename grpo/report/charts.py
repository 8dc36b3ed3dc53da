"""The charts of a run: what each shows, of which metrics, in which colours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from grpo.report.history import History
from grpo.report.words import at_k_metrics, reward_parts

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
#: Colours of the phases of a step, from the bottom of its bar to the top.
PHASES = {"generate": "blue", "reward": "amber", "train": "violet", "optimizer": "pink",
          "border": "amber", "sync": "green", "canary": "teal", "eval": "red", "other": "gray"}


@dataclass(frozen=True)
class Line:
    """One metric in a chart; a smooth one is drawn pale, with its moving average on top."""

    name: str
    label: str
    color: str
    smooth: bool = True


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
        note: what it shows and what is healthy.
        lines: a chart without data for any of them is left out.
        text: how a value is written.
        floor: lowest end of the value axis, or None to fit the data.
        span: what the value axis shows at least, so that rounding does not look like movement.
        wide: whether it belongs to the first look, and takes half the page rather than a third.
        kind: how it is drawn; ``ratio`` adds bands of quantiles, ``times`` stacks the phases.
    """

    name: str
    title: str
    note: str
    lines: tuple[Line, ...]
    text: Callable[[float], str] = _number
    floor: float | None = None
    span: tuple[float, float] | None = None
    wide: bool = False
    kind: Literal["lines", "ratio", "times"] = "lines"

    def has_data(self, history: History) -> bool:
        return any(history.series(line.name)[0] for line in self.lines)


def charts_of(history: History) -> tuple[Chart, ...]:
    """The charts of a run: :data:`CHARTS`, one of its rewards where it has several, and those of
    its samples and benchmarks."""
    names = history.names
    own = [Line(f"reward/{name}/mean", name, color) for name, color in _colored(
        reward_parts(names))]
    charts = [Chart("rewards", "Each reward", "Mean of each reward function, before its weight.",
                    tuple(own))] if own else []
    for task, metrics in at_k_metrics(names).items():
        lines = tuple(Line(metric, metric.rpartition("/")[2], color, smooth=False)
                      for metric, color in _colored(metrics))
        charts.append(Chart(
            f"at_k_{task}" if task else "at_k", f"pass@k: {task}" if task else "pass@k",
            "Held-out. pass@k: the chance that one of k samples is right; coverage@k: what k "
            "samples in a row found; accuracy: greedy.", lines, _percent, floor=0.0))
    wide = sum(chart.wide for chart in CHARTS)
    return (*CHARTS[:wide], *charts, *CHARTS[wide:])


def _colored(names: list[str]) -> zip[tuple[str, str]]:
    colors = [role for role in PALETTE if role not in ("ink", "muted", "line")]
    return zip(names, cycle(colors), strict=False)


#: Of every run, in the order of the page.
CHARTS = (
    Chart("accuracy", "Accuracy",
          "Held-out: greedy answers to prompts never trained on. Train: sampled answers.",
          (Line("reward/success_rate", "train", "gray"),
           Line("eval/accuracy", "held-out", "green", smooth=False)),
          _percent, floor=0.0, wide=True),
    Chart("reward", "Train reward",
          "Mean over the completions of a step (pale) and its moving average (strong).",
          (Line("reward/mean", "reward", "blue"),), wide=True),
    Chart("ratio", "Probability ratio",
          "Trained policy over sampler, for each sampled token. On-policy it hugs 1.",
          (Line("policy/ratio_p50", "median", "blue", smooth=False),),
          span=(0.99, 1.01), wide=True, kind="ratio"),
    Chart("step_time", "Step time", "Seconds of a step by phase; the legend gives the means.",
          (Line("time/step", "step", "gray"),), _seconds, floor=0.0, wide=True, kind="times"),
    Chart("reward_std", "Reward spread",
          "Standard deviation. Near 0 there is nothing left to learn from.",
          (Line("reward/std", "std", "amber"),), floor=0.0),
    Chart("zero_variance_groups", "Groups without a signal",
          "Groups in which every completion got the same reward.",
          (Line("reward/zero_variance_groups", "groups", "amber"),), floor=0.0),
    Chart("kl", "KL divergence",
          "To the reference: how far the policy has moved. To the engine: should stay near 0.",
          (Line("policy/kl_to_ref", "reference", "violet", smooth=False),
           Line("policy/kl_to_inference", "engine", "teal", smooth=False))),
    Chart("entropy", "Entropy",
          "Of the next-token distribution, in nats. A collapse to 0 ends exploration.",
          (Line("policy/entropy", "entropy", "teal", smooth=False),), floor=0.0),
    Chart("clip_fraction", "Clip fraction",
          "Share of tokens whose ratio left the trust region, on either side.",
          (Line("policy/clip_fraction_low", "low", "red"),
           Line("policy/clip_fraction_high", "high", "green")), _percent, floor=0.0),
    Chart("grad_norm", "Gradient norm",
          "Before clipping. Rare spikes are normal, growth is not.",
          (Line("train/grad_norm", "norm", "pink"),), floor=0.0),
    Chart("response_length", "Completion length", "Sampled tokens of a completion.",
          (Line("tokens/response_max", "max", "gray", smooth=False),
           Line("tokens/response_mean", "mean", "blue")), floor=0.0),
    Chart("truncated", "Cut completions", "Share of completions that hit the length limit.",
          (Line("tokens/truncated_fraction", "cut", "red"),), _percent, floor=0.0),
    Chart("throughput", "Throughput", "Tokens per second.",
          (Line("tokens/per_second", "tokens/s", "green"),), floor=0.0),
    Chart("ess", "Effective sample size",
          "Of the importance weights; 1 (or the batch size) when on-policy.",
          (Line("policy/ess", "ESS", "violet"),), span=(0.99, 1.0)),
    Chart("lr", "Learning rate", "As the optimizer used it.",
          (Line("train/lr", "lr", "gray", smooth=False),), floor=0.0),
)
