"""Where the time of a run went: its phases, who waited for whom, and which key to turn."""

from __future__ import annotations

import resource
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo.report.words import STEP_TIME, TOKENS_PER_SECOND, format_duration, phase_times

# Iterations that still compile, capture and fill the buffer.
_WARM_UP = 3
# A share of the step below which nothing is worth a word.
_MUCH = 0.1

#: A run's ``metrics.jsonl``.
Rows = Sequence[Mapping[str, Any]]


def phase_table(rows: Rows) -> list[str]:
    """A step's time by phase, the longest in total first; nothing for a run without a step.

    Medians are those of the steady steps, the greatest and total times those of the whole run. An
    evaluation is no part of a step, so it has no share of it.
    """
    rows = [row for row in rows if STEP_TIME in row]
    if not rows:
        return []
    middle = _medians(rows)
    step = middle[STEP_TIME]
    lines = [f"a step took {step:.3g} s (median of {len(_steady(rows))})",
             f"  {'phase':<12} {'median':>10} {'share':>5}{'greatest':>10}{'total':>10}"]
    seconds = defaultdict(list)
    for row in rows:
        for phase, value in {**phase_times(row), "step": row[STEP_TIME]}.items():
            seconds[phase].append(value)
    for phase, values in sorted(seconds.items(), key=lambda item: -sum(item[1])):
        # What happened in the warm-up alone has no steady median.
        median = middle.get(f"time/{phase}", statistics.median(values))
        share = "" if phase == "eval" else f"{median / step:.0%}"
        lines.append(f"  {phase:<12} {median:8.3g} s {share:>5}"
                     f"{format_duration(max(values)):>10}{format_duration(sum(values)):>10}")
    if TOKENS_PER_SECOND in middle:
        lines.append(f"tokens a second: median {middle[TOKENS_PER_SECOND]:,.0f}")
    return lines


def greatest_memory(device: torch.device) -> str:
    """A line on the greatest memory use of this process, on the host and on its GPU, if any."""
    line = ("memory of this process, greatest: "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of the host")
    if device.type == "cuda":
        line += f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of the GPU"
    return line


def bottleneck(rows: Rows, *, in_flight: bool = True, ahead: bool = True) -> list[str]:
    """Who of a run with workers was idle, which groups were refused, and what to change; nothing
    for a run without a step. ``in_flight``: new weights can reach what is being generated.
    ``ahead``: the script has keys that let workers run ahead of the trainer."""
    rows = [row for row in rows if STEP_TIME in row]
    if not rows:
        return []
    middle = _medians(rows)
    step, lines = middle[STEP_TIME], []
    overtaken = middle.get("async/overtaken_wait", 0.0)
    if overtaken / step >= 0.005:
        lines.append(f"  {overtaken:.3g} s of the wait, {overtaken / step:.0%} of the step, for "
                     "groups that shorter ones had overtaken")
    idle = {int(key.split("_")[1]): share for key, share in middle.items()
            if key.startswith("async/worker_") and key.endswith("_idle")}
    for number, share in sorted(idle.items()):
        speed = middle.get(f"async/worker_{number}_tokens_per_second", 0.0)
        lines.append(f"  worker {number}: idle {share:.0%}, {speed:,.0f} tokens/s")
    if "async/reference_idle" in middle:
        lines.append(f"  reference: idle {middle['async/reference_idle']:.0%}")
    refused = {name: int(rows[-1].get(f"async/groups_{name}", 0))
               for name in ("too_old", "expired", "failed", "lost", "dropped")}
    if any(refused.values()):
        lines.append("  groups " + ", ".join(f"{name.replace('_', ' ')} {count}"
                                             for name, count in refused.items() if count))
    if refused["too_old"] or refused["expired"]:
        lines.append("  what is too old or expires is mostly long: the run favoured short "
                     "completions (train.oversample, train.group_deadline)")
    return [*lines, advice(middle, list(idle.values()), in_flight=in_flight, ahead=ahead)]


def advice(middle: dict[str, float], idle: list[float], *, in_flight: bool = True,
           ahead: bool = True) -> str:
    """One sentence from the medians of a step; for the options see :func:`bottleneck`.

    Examples:
        >>> advice({"time/step": 2.0, "time/wait": 1.0, "time/train": 0.9}, [0.02])
        'generation was the bottleneck: the trainer waited 50% of the time; give inference_model \
more devices'
    """
    step = middle["time/step"]
    waited, resting = middle.get("time/wait", 0.0) / step, sum(idle) / max(1, len(idle))
    overtaken = middle.get("async/overtaken_wait", 0.0) / step
    border = middle.get("time/border", 0.0) / step
    moved = (middle.get("time/sync", 0.0) + middle.get("time/canary", 0.0)) / step
    scorer = middle.get("async/reference_idle", 1.0)
    if waited >= _MUCH and resting >= _MUCH and scorer < _MUCH:
        return (f"the reference was the bottleneck: it was idle {scorer:.0%} of the time while the "
                f"trainer waited {waited:.0%}; give ref_model more devices, raise "
                "train.max_tokens_per_micro_batch, by which it scores, or let the trainer score "
                "with ref_model.num_devices=null")
    if overtaken >= max(_MUCH, waited / 2):
        return (f"long groups were the bottleneck: for {overtaken:.0%} of the time a batch was "
                "finished, but groups that it had overtaken would become too old; raise "
                "train.staleness")
    if waited >= _MUCH and resting >= _MUCH:
        way = "raise train.staleness" if ahead else (
            "here they take turns, start grpo-async.py, whose workers run ahead")
        return (f"trainer and workers waited for each other ({waited:.0%} and {resting:.0%} of the "
                f"time); {way}")
    if waited >= _MUCH:
        return (f"generation was the bottleneck: the trainer waited {waited:.0%} of the time; give "
                "inference_model more devices")
    if border >= _MUCH:
        way = "train.update_at=in_flight" if in_flight else "inference_model.backend=vllm"
        return (f"updates waited {border:.0%} of the time for groups that were being generated; "
                f"{way} lets new weights reach them")
    if moved >= _MUCH:
        return (f"weights and their proof took {moved:.0%} of the time; raise env.num_envs, so "
                "that there are fewer updates")
    if resting >= _MUCH:
        scoring = middle.get("time/reference", 0.0) / step
        way = "inference_model fewer" if scoring < _MUCH else (
            f"the reference, which took {scoring:.0%} of the step, one of its own")
        return (f"training was the bottleneck: the workers were idle {resting:.0%} of the time; "
                f"give train_model more devices, or {way}")
    return "nothing waited: both sides were busy all the time"


def _steady(rows: Rows) -> Rows:
    """The steps after the warm-up; all of them, if the run is too short to have others."""
    return rows[_WARM_UP:] if len(rows) > 2 * _WARM_UP else rows


def _medians(rows: Rows) -> dict[str, float]:
    """The median of each metric over the steady steps that have it."""
    rows = _steady(rows)
    names = sorted({name for row in rows for name in row})
    return {name: statistics.median(values) for name in names
            if (values := [row[name] for row in rows if isinstance(row.get(name), int | float)])}
