"""Which ``maxent.tau`` the listwise objective bears on the embedded task, several seeds.

    python benchmarks/maxent_tau.py --work /tmp/tau --out benchmarks/results/maxent_tau_cpu.json

Without a reference the loss wants the mean log-prob of a right completion 1 / (T_q tau) nats above
that of a wrong one, and says nothing of completions that were not sampled. A policy that draws
tokens of a vocabulary of V at random is log V nats a token away from one that is sure, so a gap
below that is had most cheaply by drawing at random. Each run is ``grpo.py preset=maxent_listwise``
with another tau; the result has the accuracy at each evaluation, and reward and entropy of
every tenth iteration. Runs that ``--work`` has already are not made again. ``--draw`` makes the
picture.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from machine import REPO, Recording
from runs import add_run_options, run_to_its_end

VOCABULARY = 258  # of the embedded model
RESULT = REPO / "benchmarks" / "results" / "maxent_tau_cpu.json"
IMAGE = REPO / "docs" / "images" / "maxent_tau.png"
SHOWN = {"reward": "reward/mean", "entropy": "policy/entropy"}


def curve(tau: float, seed: int, args: argparse.Namespace) -> dict:
    """What a run recorded, from its folder if it is there."""
    run_dir = args.work / f"tau-{tau:g}-{seed}"
    if not (run_dir / "final_model").is_dir():
        run_to_its_end("grpo.py", [
            "preset=maxent_listwise", f"maxent.tau={tau}", f"train.seed={seed}",
            f"train.max_steps={args.iterations}", "train.eval_frequency=20",
            "train.checkpoint_frequency=0", "device=cpu", "inference_model.backend=transformers"],
            run_dir, timeout=args.timeout)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    every = [row for row in rows if row["step"] and row["step"] % 10 == 0]
    return {"seed": seed, "accuracy": [[row["step"], row["eval/accuracy"]] for row in rows
                                       if "eval/accuracy" in row],
            **{name: [[row["step"], row[key]] for row in every] for name, key in SHOWN.items()}}


def draw(result: dict, path: Path) -> None:
    """Reward and entropy over iterations, a line for each seed and a colour for each tau."""
    from matplotlib.figure import Figure

    from grpo.report.charts import PALETTE
    from grpo.report.eval_page import tidy

    figure = Figure(figsize=(9, 3.3), dpi=130, layout="constrained")
    colors = [light for role, (light, _) in PALETTE.items() if role not in ("ink", "muted", "line")]
    for number, name in enumerate(SHOWN, start=1):
        axes = figure.add_subplot(1, 2, number)
        for (tau, runs), color in zip(result["runs"].items(), colors, strict=False):
            for at, run in enumerate(runs):
                axes.plot(*zip(*run[name], strict=True), color=color, linewidth=1,
                          label=f"tau {tau}" if at == 0 else None)
        tidy(axes, xlabel="iteration", ylabel="")
        axes.set_title(name if name == "reward" else "entropy, nats a token", loc="left",
                       fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taus", type=float, nargs="+", default=[0.5, 0.25, 0.1, 0.05])
    add_run_options(parser, iterations=360, image=IMAGE)
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(RESULT.read_text()), IMAGE)
        return
    if args.work is None:
        parser.error("--work FOLDER is needed")
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    recording = Recording("maxent_tau", args.out, iterations=args.iterations,
                          log_vocabulary=round(math.log(VOCABULARY), 3))
    recording.describe_machine()
    runs: dict[str, list[dict]] = {f"{tau:g}": [] for tau in args.taus}
    for seed in args.seeds:
        for tau in args.taus:
            runs[f"{tau:g}"].append(curve(tau, seed, args))
            recording.add(runs=runs)
    recording.finish(end={tau: [run["accuracy"][-1][1] for run in of] for tau, of in runs.items()})
    for tau, accuracies in recording.result["end"].items():
        print(f"tau {tau}: gap {1 / float(tau):g} nats a token, accuracies at the end {accuracies}")


if __name__ == "__main__":
    main()
