"""What held an asynchronous run up, and which key to turn."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

# Iterations that still compile, capture and fill the buffer.
_WARM_UP = 3
# A share of the step below which nothing is worth a word.
_MUCH = 0.1


def bottleneck_table(metrics: Path) -> list[str]:
    """Where the time of a step went, who was idle, and what to change; medians of the steady steps.

    Args:
        metrics: a run's ``metrics.jsonl``.
    """
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if "time/step" in row]
    rows = rows[_WARM_UP:] if len(rows) > 2 * _WARM_UP else rows
    if not rows:
        return []
    middle = {key: statistics.median(values) for key in sorted({key for row in rows for key in row})
              if (values := [row[key] for row in rows if isinstance(row.get(key), int | float)])}
    step = middle["time/step"]
    lines = [f"a step took {step:.3g} s (median of {len(rows)})"]
    lines += [f"  {key.removeprefix('time/'):<12} {middle[key]:8.3g} s  {middle[key] / step:4.0%}"
              for key in middle if key.startswith("time/") and key not in ("time/step", "time/eval")
              and middle[key] / step >= 0.005]
    overtaken = middle.get("async/overtaken_wait", 0.0)
    if overtaken / step >= 0.005:
        lines.append(f"  {overtaken:.3g} s of the wait, {overtaken / step:.0%} of the step, for "
                     "groups that shorter ones had overtaken")
    idle = {int(key.split("_")[1]): middle[key] for key in middle
            if key.startswith("async/worker_") and key.endswith("_idle")}
    for number, share in sorted(idle.items()):
        speed = middle.get(f"async/worker_{number}_tokens_per_second", 0.0)
        lines.append(f"  worker {number}: idle {share:.0%}, {speed:,.0f} tokens/s")
    if "async/reference_idle" in middle:
        lines.append(f"  reference: idle {middle['async/reference_idle']:.0%}")
    last = rows[-1]
    refused = {name: int(last.get(f"async/groups_{name}", 0))
               for name in ("too_old", "expired", "failed", "lost", "dropped")}
    if any(refused.values()):
        lines.append("  groups " + ", ".join(f"{name.replace('_', ' ')} {count}"
                                             for name, count in refused.items() if count))
    if refused["too_old"] or refused["expired"]:
        lines.append("  what is too old or expires is mostly long: the run favoured short "
                     "completions (train.oversample, train.group_deadline)")
    return [*lines, advice(middle, list(idle.values()))]


def advice(middle: dict[str, float], idle: list[float]) -> str:
    """One sentence from the medians of a step.

    Examples:
        >>> advice({"time/step": 2.0, "time/wait": 1.0, "time/train": 0.9}, [0.02])
        'generation was the bottleneck: the trainer waited 50% of the time; give inference_model \
more devices'
        >>> advice({"time/step": 2.0, "time/wait": 1.0, "async/overtaken_wait": 0.8}, [0.02])
        'long groups were the bottleneck: for 40% of the time a batch was finished, but groups \
that it had overtaken would become too old; raise train.staleness'
        >>> advice({"time/step": 2.0, "time/wait": 0.0, "time/train": 1.8}, [0.4])
        'training was the bottleneck: the workers were idle 40% of the time; give train_model more \
devices, or inference_model fewer'
        >>> advice({"time/step": 3.4, "time/wait": 0.0, "time/train": 2.0, "time/reference": 1.0},
        ...        [0.4])
        'training was the bottleneck: the workers were idle 40% of the time; give train_model more \
devices, or the reference, which took 29% of the step, one of its own'
    """
    step = middle["time/step"]
    waited, resting = middle.get("time/wait", 0.0) / step, sum(idle) / max(1, len(idle))
    overtaken = middle.get("async/overtaken_wait", 0.0) / step
    moved = (middle.get("time/sync", 0.0) + middle.get("time/canary", 0.0)) / step
    scorer = middle.get("async/reference_idle", 1.0)
    if waited >= _MUCH and resting >= _MUCH and scorer < _MUCH:
        return (f"the reference was the bottleneck: it was idle {scorer:.0%} of the time while the "
                f"trainer waited {waited:.0%}; raise train.max_tokens_per_micro_batch, by which it "
                "scores, or let the trainer score with ref_model.num_devices=null")
    if overtaken >= max(_MUCH, waited / 2):
        return (f"long groups were the bottleneck: for {overtaken:.0%} of the time a batch was "
                "finished, but groups that it had overtaken would become too old; raise "
                "train.staleness")
    if waited >= _MUCH and resting >= _MUCH:
        return (f"trainer and workers waited for each other ({waited:.0%} and {resting:.0%} of the "
                "time); raise train.staleness")
    if waited >= _MUCH:
        return (f"generation was the bottleneck: the trainer waited {waited:.0%} of the time; give "
                "inference_model more devices")
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
