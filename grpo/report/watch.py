"""A logger that speaks up when trainer and engine drift apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from grpo.report.loggers import MetricLogger

# Nats a token, the mean of the absolute differences.
_FAR = 0.1


class AlignmentWarning(MetricLogger):
    """Say so, with what to check, when the trainer's log-probs are far from the sampled ones, and
    again after ``every`` steps.

    Examples:
        >>> watch = AlignmentWarning(lambda text: print(text[:17]))
        >>> watch.log(1, {"policy/log_prob_diff_abs_mean": 0.01})
        >>> watch.log(2, {"policy/log_prob_diff_abs_mean": 0.5})
        LogProb alignment
    """

    def __init__(self, warn: Callable[[str], None], *, every: int = 20) -> None:
        self.warn, self.every = warn, every
        self._warned_at = -math.inf

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        difference = metrics.get("policy/log_prob_diff_abs_mean", 0.0)
        if difference <= _FAR or step < self._warned_at + self.every:
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
