"""MaxEnt beside plain GRPO: pass@1, pass@8 and coverage@8 on the embedded task, several seeds.

    python benchmarks/maxent_coverage.py --work /tmp/maxent \\
        --out benchmarks/results/maxent_coverage_cpu.json

Each preset trains the embedded model with each seed, with ``grpo.py`` and its defaults; what it has
saved every ``--every`` iterations is evaluated by ``python -m grpo.run.evaluate``, with 32 samples
of each of the 256 held-out problems. Runs and evaluations that ``--work`` has already are not made
again. The result has the figures of each with the interval of a bootstrap over problems, the means
over seeds, and how far they are apart (Welch, over the seeds). ``--draw`` makes its picture.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
from contextlib import redirect_stdout
from pathlib import Path

from machine import REPO, Recording
from runs import add_run_options, run_to_its_end

PRESETS = {"grpo": "GRPO", "maxent_listwise": "MaxEnt, listwise"}
FIGURES = ("pass@1", "pass@8", "coverage@8", "majority@8", "distinct@8")
SAMPLES = 32
RESULT = REPO / "benchmarks" / "results" / "maxent_coverage_cpu.json"
IMAGE = REPO / "docs" / "images" / "maxent_coverage.png"


def evaluated(model: str, folder: Path, options: list[str]) -> dict:
    """Figures with intervals of a model, from ``folder`` if they are there."""
    found = [*folder.glob("metrics/eval_iter_*.json")]
    if not found:
        from grpo.run.evaluate.__main__ import main as evaluate

        with redirect_stdout(io.StringIO()):  # in this process: imports take longer than it does
            evaluate([f"model.name={model}", "device=cpu", f"eval.samples={SAMPLES}",
                      "eval.k=[1,8]", "inference_model.backend=transformers", "batch_size=2048",
                      f"out={folder}", *options])
        found = [*folder.glob("metrics/eval_iter_*.json")]
    record = json.loads(found[0].read_text())
    (task,) = record["tasks"].values()
    return {"iteration": record["iteration"],
            **{name: task["estimates"][name] for name in ("accuracy", *FIGURES)}}


def curve(preset: str, seed: int, args: argparse.Namespace) -> list[dict]:
    """What a run is worth at its start and at each checkpoint."""
    run_dir = args.work / f"{preset}-{seed}"
    if not (run_dir / "final_model").is_dir():
        run_to_its_end("grpo.py", [
            f"preset={preset}", f"train.seed={seed}", f"train.max_steps={args.iterations}",
            "train.eval_frequency=0", f"train.checkpoint_frequency={args.every}",
            f"train.keep_checkpoints={args.iterations // args.every}", "device=cpu",
            "inference_model.backend=transformers"], run_dir, timeout=args.timeout)
    start = evaluated("embedded", args.work / f"evaluated-start-{seed}", [f"train.seed={seed}"])
    return [start, *(evaluated(str(run_dir / "checkpoints" / f"step_{step:06d}"),
                               args.work / f"evaluated-{preset}-{seed}-{step}", [])
                     for step in range(args.every, args.iterations + 1, args.every))]


def compared(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """MaxEnt minus GRPO at the end: means over the seeds, and the standard error of the
    difference from their spread."""
    found = {}
    for name in ("accuracy", *FIGURES):
        ours, theirs = ([run["curve"][-1][name]["value"] for run in runs[preset]]
                        for preset in ("maxent_listwise", "grpo"))
        error = math.sqrt(sum(statistics.variance(side) / len(side) for side in (ours, theirs)))
        found[name] = {
            "grpo": statistics.mean(theirs), "maxent_listwise": statistics.mean(ours),
            "difference": statistics.mean(ours) - statistics.mean(theirs),
            "standard_error": error}
    return found


def table(result: dict) -> str:
    """The figures at the end, as a Markdown table."""
    lines = ["| | GRPO | MaxEnt, listwise | difference | standard error |", "|---|---|---|---|---|"]
    for name, row in result["end"].items():
        lines.append(f"| {name} | {row['grpo']:.3f} | {row['maxent_listwise']:.3f} | "
                     f"{row['difference']:+.3f} | {row['standard_error']:.3f} |")
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    """Three charts side by side: thin lines are seeds with their intervals, thick ones means."""
    from matplotlib.figure import Figure

    from grpo.report.charts import PALETTE
    from grpo.report.eval_page import tidy

    figure = Figure(figsize=(10.5, 3.3), dpi=130, layout="constrained")
    for number, name in enumerate(("pass@1", "pass@8", "coverage@8"), start=1):
        axes = figure.add_subplot(1, 3, number)
        for (preset, label), role in zip(PRESETS.items(), ("blue", "amber"), strict=True):
            color, curves = PALETTE[role][0], [run["curve"] for run in result["runs"][preset]]
            steps = [point["iteration"] for point in curves[0]]
            for points in curves:
                axes.plot(steps, [point[name]["value"] for point in points], color=color,
                          alpha=0.5, linewidth=0.8)
                axes.fill_between(steps, [point[name]["low"] for point in points],
                                  [point[name]["high"] for point in points], color=color,
                                  alpha=0.08, linewidth=0)
            axes.plot(steps, [statistics.mean(point[name]["value"] for point in at)
                              for at in zip(*curves, strict=True)], color=color, label=label)
        tidy(axes, xlabel="iteration", ylabel="")
        axes.set_title(name, loc="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, iterations=60, image=IMAGE)
    parser.add_argument("--every", type=int, default=20, help="iterations between evaluations")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(RESULT.read_text()), IMAGE)
        return
    if args.work is None or len(args.seeds) < 2:
        parser.error("--work FOLDER and at least two --seeds are needed")
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    recording = Recording("maxent_coverage", args.out, samples=SAMPLES, problems=256)
    recording.describe_machine()
    runs: dict[str, list[dict]] = {preset: [] for preset in PRESETS}
    for seed in args.seeds:
        for preset in PRESETS:
            runs[preset].append({"seed": seed, "curve": curve(preset, seed, args)})
            recording.add(runs=runs)
    recording.finish(end=compared(runs))
    print(table(recording.result))


if __name__ == "__main__":
    main()
