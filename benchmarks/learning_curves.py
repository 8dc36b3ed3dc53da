"""Held-out accuracy of asynchronous runs beside synchronous ones, over several seeds.

    python benchmarks/learning_curves.py --out benchmarks/results/learning_curves_cpu.json

The embedded task and model, ``grpo.py`` and ``grpo-async.py`` with the same keys and seeds; no GPU
is needed. A curve is the greedy accuracy on the held-out problems at each evaluation. ``area`` is
its mean: it is higher for runs that learn sooner. The result has, for the area and for the last
accuracy, the difference of the seeds' means and the standard error of that difference, from the
spread of the seeds (Welch). A difference within two of them is noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from pathlib import Path

from machine import Recording
from runs import run_to_its_end

ROWS = 32 * 8  # of an iteration


def curve(script: str, seed: int, chosen: list[str], args: argparse.Namespace, work: Path) -> dict:
    """Accuracies of one run, and how old its rollouts were."""
    run_dir = work / f"{Path(script).stem}-{seed}"
    keys = [f"train.seed={seed}", f"train.total_dialog_turns={ROWS * args.iterations}",
            f"train.eval_frequency={args.every}", "train.checkpoint_frequency=0", *chosen,
            *args.overrides]
    rows = run_to_its_end(script, keys, run_dir, timeout=args.timeout)
    accuracies = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    learned = [value for step, value in accuracies.items() if step]
    return {"seed": seed, "accuracy_by_iteration": accuracies, "last": learned[-1],
            "area": statistics.mean(learned),
            "mean_age": statistics.mean(row["policy/age_mean"] for row in rows
                                        if "policy/age_mean" in row)}


def compare(runs: dict[str, list[dict]], key: str) -> dict[str, float]:
    """Asynchronous minus synchronous mean over the seeds, and its standard error."""
    values = {name: [run[key] for run in of] for name, of in runs.items()}
    error = math.sqrt(sum(statistics.variance(of) / len(of) for of in values.values()))
    difference = statistics.mean(values["async"]) - statistics.mean(values["sync"])
    return {"sync": statistics.mean(values["sync"]), "async": statistics.mean(values["async"]),
            "difference": difference, "standard_error": error,
            "within_two_standard_errors": abs(difference) <= 2 * error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="iterations between evaluations")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--async", dest="asynchronous", nargs="*", default=[], metavar="OVERRIDE",
                        help="further overrides for grpo-async.py alone")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each run")
    parser.add_argument("--out", type=Path, help="where the JSON result is written")
    parser.add_argument("overrides", nargs="*", help="further keys for both scripts")
    args = parser.parse_args()
    if len(args.seeds) < 2:
        parser.error("--seeds needs at least two, or there is no spread to compare with")
    asynchronous = [f"train.staleness={args.staleness}", *args.asynchronous]
    runs: dict[str, list[dict]] = {"sync": [], "async": []}
    recording = Recording("learning_curves", args.out, staleness=args.staleness,
                          of_async_alone=args.asynchronous)
    recording.describe_machine(also=("ray",))
    with tempfile.TemporaryDirectory() as work:
        for seed in args.seeds:
            runs["sync"].append(curve("grpo.py", seed, [], args, Path(work)))
            recording.add(runs=runs)
            runs["async"].append(curve("grpo-async.py", seed, asynchronous, args, Path(work)))
            recording.add(runs=runs)
            if len(runs["async"]) > 1:
                recording.add(**{key: compare(runs, key) for key in ("area", "last")})
    recording.finish()


if __name__ == "__main__":
    main()
