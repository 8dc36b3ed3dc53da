"""Steady seconds a step: ``grpo.py`` on one GPU and ``grpo-async.py`` on several, in one go.

    python benchmarks/async_step.py --out benchmarks/results/async_step_h200x2.json   # 1+1
    python benchmarks/async_step.py --layout 2+2 --out ...      # two train, two generate
    python benchmarks/async_step.py --layout 2+1+1 --out ...    # and one scores: KL is on

The work is that of ``step_time.py``. The layout says how many GPUs train, generate and score. Both
runs write their medians, and the result has the ratio of the two; with ``--layout`` of several
training GPUs the synchronous run is still that on one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe_machine, write_result
from step_time import (
    REPO,
    add_work_options,
    describe_work,
    make_model,
    make_problems,
    overrides,
)

SKIPPED = 4  # iterations that still compile, capture, connect and fill the buffer
SCRIPTS = REPO / "sota-implementations" / "grpo"


def layout_overrides(layout: str) -> list[str]:
    """Keys of ``TRAIN+GENERATE`` or ``TRAIN+GENERATE+REFERENCE`` devices."""
    train, generate, *reference = map(int, layout.split("+"))
    keys = [f"train_model.num_devices={train}", f"inference_model.num_devices={generate}"]
    return keys + [f"ref_model.num_devices={reference[0]}"] if reference else keys


def run_script(
    script: str, chosen: list[str], run_dir: Path, *, timeout: float
) -> tuple[list[dict], str]:
    """The rows of ``metrics.jsonl`` of a run, and what it printed; a failure ends this program."""
    command = [sys.executable, str(SCRIPTS / script), *chosen, f"hydra.run.dir={run_dir}"]
    done = subprocess.run(command, cwd=run_dir.parent, env=os.environ | {"HF_HUB_OFFLINE": "1"},
                          timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    if done.returncode:
        sys.exit(f"{script} ended with exit code {done.returncode}:\n{done.stdout[-6000:]}")
    metrics = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in metrics.splitlines()], done.stdout


def run(script: str, chosen: list[str], run_dir: Path, *, timeout: float) -> dict:
    """Medians of the steady iterations of a run."""
    rows, printed = run_script(script, chosen, run_dir, timeout=timeout)
    rows = [row for row in rows if "time/step" in row]
    steady = rows[SKIPPED:-1]  # the last iteration also evaluates
    keys = [key for key in steady[-1]
            if key.startswith(("time/", "async/", "policy/age", "policy/ratio_p", "tokens/per"))]
    return {
        "seconds": statistics.median(row["time/step"] for row in steady),
        "medians": {key: statistics.median(row[key] for row in steady if key in row)
                    for key in sorted(keys)},
        "seconds_per_iteration": [row["time/step"] for row in rows],
        "canary_max_abs_diff": max(row["canary/max_abs_diff"] for row in rows),
        "last_lines": printed.strip().splitlines()[-12:],
        "run": [option for option in chosen if str(run_dir.parent) not in option],
    }


def measure(args: argparse.Namespace, work: Path) -> dict:
    parameters = make_model(args.shape, work / "model")
    make_problems(work / "problems", count=max(64, args.prompts), prompt_tokens=args.prompt_tokens)
    chosen = overrides(args, work / "model", work / "problems", work / "run")
    chosen = [option for option in chosen if not option.startswith(("hydra.run.dir", "--config",
                                                                    "grpo_gsm8k"))]
    if args.layout.count("+") == 2:
        chosen.append("train.kl_to_ref_coeff=0.001")
    asynchronous = ["--config-name", "grpo_async_gsm8k", *chosen, *layout_overrides(args.layout),
                    f"train.staleness={args.staleness}", *args.asynchronous]
    result = {"async": run("grpo-async.py", asynchronous, work / "async", timeout=args.timeout)}
    if not args.only_async:
        result["sync"] = run("grpo.py", ["--config-name", "grpo_gsm8k", *chosen], work / "sync",
                             timeout=args.timeout)
        result["ratio"] = result["async"]["seconds"] / result["sync"]["seconds"]
    return {
        "benchmark": "async_step",
        "work": describe_work(args),
        "layout": args.layout, "staleness": args.staleness, "parameters": parameters, **result,
        "command": " ".join(["python benchmarks/async_step.py", *sys.argv[1:]]),
        **describe_machine(),
    }


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
    sys.path.insert(0, str(REPO))
    with tempfile.TemporaryDirectory() as work:
        result = measure(args, Path(work))
    write_result(result, args.out)


if __name__ == "__main__":
    main()
