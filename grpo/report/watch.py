"""Loggers that speak up: when trainer and engine drift apart, and at the end on where time went."""

from __future__ import annotations

import math
import resource
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from grpo.report.loggers import MetricLogger, Sample
from grpo.report.words import format_duration

_DIFFERENCE = "policy/log_prob_diff_abs_mean"


class AlignmentWarning(MetricLogger):
    """Say so, with what to check, when the trainer's log-probs are far from the sampled ones.

    Args:
        warn: shows a warning.
        threshold: nats a token, the mean of the absolute differences.
        every: steps after which a warning is repeated.

    Examples:
        >>> watch = AlignmentWarning(lambda text: print(text[:17]), threshold=0.1)
        >>> watch.log(1, {"policy/log_prob_diff_abs_mean": 0.01})
        >>> watch.log(2, {"policy/log_prob_diff_abs_mean": 0.5})
        LogProb alignment
    """

    def __init__(
        self, warn: Callable[[str], None], *, threshold: float = 0.1, every: int = 20
    ) -> None:
        self.warn, self.threshold, self.every = warn, threshold, every
        self._warned_at = -math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        difference = metrics.get(_DIFFERENCE, 0.0)
        if difference <= self.threshold or step < self._warned_at + self.every:
            return
        self._warned_at = step
        self.warn(
            f"LogProb alignment: at step {step} the trainer's log-probs differ from the sampled "
            f"ones by {difference:.3f} nats a token, at most "
            f"{metrics.get('policy/log_prob_diff_abs_max', math.nan):.2f}. Check, in this order: "
            "(1) canary/max_abs_diff: if it is small, engine and trainer have the same weights; "
            "(2) policy/ratio_p50: far from 1 means another temperature, dtype or model; "
            "(3) groups that are old: lower the environments' max_batches_offpolicy, or the "
            "learning rate; (4) environments that tokenize text again, whose tokens nobody "
            "sampled: see atropos/recomputed_tokens; (5) LoRA dropout, which the engine has not")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing to say of them."""

    def close(self) -> None:
        """Nothing is open."""


class BenchmarkSummary(MetricLogger):
    """A table of the run's phases, printed once at its end.

    Args:
        show: prints it.
        device: whose greatest memory use is reported.
    """

    def __init__(self, show: Callable[[str], None], *, device: torch.device) -> None:
        self.show, self.device = show, device
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.rates: list[float] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("time/"):
                self.seconds[name.removeprefix("time/")].append(value)
        if (rate := metrics.get("tokens/per_second")) is not None:
            self.rates.append(rate)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """They take no time."""

    def close(self) -> None:
        if self.seconds:
            self.show(self.table())
        self.seconds = defaultdict(list)

    def table(self) -> str:
        """Median, greatest and total time of each phase; then throughput and memory."""
        lines = [f"{'phase':<12}{'median':>10}{'greatest':>10}{'total':>10}"]
        by_total = sorted(self.seconds.items(), key=lambda item: -sum(item[1]))
        for name, values in by_total:
            numbers = (statistics.median(values), max(values), sum(values))
            lines.append(f"{name:<12}" + "".join(f"{format_duration(x):>10}" for x in numbers))
        if self.rates:
            lines.append(f"tokens a second: median {statistics.median(self.rates):,.0f}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        lines.append(f"memory of this process, greatest: {peak:.1f} GiB of the host"
                     + self._gpu_memory())
        return "\n".join(lines)

    def _gpu_memory(self) -> str:
        if self.device.type != "cuda":
            return ""
        return f", {torch.cuda.max_memory_allocated(self.device) / 2**30:.1f} GiB of the GPU"
