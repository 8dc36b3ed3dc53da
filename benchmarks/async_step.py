"""Steady seconds a step: ``grpo.py`` on one GPU and ``grpo-async.py`` on several, in one go.

    python benchmarks/async_step.py --out benchmarks/results/async_step_h200x2.json   # 1+1
    python benchmarks/async_step.py --layout 2+2 --out ...      # two train, two generate
    python benchmarks/async_step.py --layout 2+1+1 --out ...    # and one scores: KL is on

The work is that of ``step_time.py``. The layout says how many GPUs train, generate and score. The
result has the medians of both runs, the ratio of the two, and from the first iteration on what
there is; with ``--layout`` of several training GPUs the synchronous run is still that on one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from machine import Recording
from runs import WatchedRun
from step_time import add_work_options, describe_work, overrides, prepare

SKIPPED = 4  # iterations that still compile, capture, connect and fill the buffer


def layout_overrides(layout: str) -> list[str]:
    """Keys of ``TRAIN+GENERATE`` or ``TRAIN+GENERATE+REFERENCE`` devices."""
    train, generate, *reference = map(int, layout.split("+"))
    keys = [f"train_model.num_devices={train}", f"inference_model.num_devices={generate}"]
    return keys + [f"ref_model.num_devices={reference[0]}"] if reference else keys


def summary(run: WatchedRun, chosen: list[str]) -> dict:
    """Medians of the steady iterations, as soon as there are any."""
    steady = run.rows[SKIPPED:]
    result = {"run": chosen, **run.describe()}
    if not steady:
        return result
    keys = [key for key in steady[-1]
            if key.startswith(("time/", "async/", "policy/age", "policy/ratio_p", "tokens/per"))]
    return {
        "seconds": statistics.median(row["time/step"] for row in steady),
        "steady_iterations": len(steady),
        "medians": {key: statistics.median(row[key] for row in steady if key in row)
                    for key in sorted(keys)},
        "canary_max_abs_diff": max(row["canary/max_abs_diff"] for row in run.rows),
        **result}


def measure_run(name: str, script: str, chosen: list[str], args: argparse.Namespace, work: Path,
                recording: Recording) -> float:
    """Run a script until enough was seen; returns its seconds a step."""
    shown = [option for option in chosen if str(work) not in option]

    def record(run: WatchedRun) -> None:
        recording.add(**{name: summary(run, shown)})

    run = WatchedRun(script, chosen, work / name, seen=record)
    try:
        run.follow(iterations=args.iterations, timeout=args.timeout)
    finally:
        record(run)
    return recording.result[name]["seconds"]


def measure(args: argparse.Namespace, work: Path, recording: Recording) -> None:
    model, problems, parameters = prepare(args, work)
    recording.add(parameters=parameters)
    recording.describe_machine()
    chosen = [option for option in overrides(args, model, problems)
              if option not in ("--config-name", "grpo_gsm8k")]
    if args.layout.count("+") == 2:
        chosen.append("train.kl_to_ref_coeff=0.001")
    asynchronous = ["--config-name", "grpo_async_gsm8k", *chosen, *layout_overrides(args.layout),
                    f"train.staleness={args.staleness}", *args.asynchronous]
    # First, so that the start of the other is that of a host on which vLLM has compiled before.
    alone = None if args.only_async else measure_run(
        "sync", "grpo.py", ["--config-name", "grpo_gsm8k", *chosen], args, work, recording)
    seconds = measure_run("async", "grpo-async.py", asynchronous, args, work, recording)
    if alone is not None:
        recording.add(ratio=seconds / alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="1+1", help="train+generate[+reference] devices")
    parser.add_argument("--staleness", type=int, default=1)
    add_work_options(parser)
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--only-async", action="store_true", help="leave the synchronous run out")
    parser.add_argument("--async", dest="asynchronous", nargs="*", default=[], metavar="OVERRIDE",
                        help="further overrides for grpo-async.py alone")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for each run")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    parser.add_argument("overrides", nargs="*", help="further overrides for both scripts")
    args = parser.parse_args()
    if args.iterations <= SKIPPED:
        parser.error(f"--iterations {args.iterations}: the first {SKIPPED} are not counted, give "
                     "more")
    recording = Recording("async_step", args.out, work=describe_work(args), layout=args.layout,
                          staleness=args.staleness)
    with tempfile.TemporaryDirectory() as work:
        measure(args, Path(work), recording)
    recording.finish()


if __name__ == "__main__":
    main()
