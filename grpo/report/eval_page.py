"""An evaluation, or several side by side, as a table on the screen, ``report.html`` and a PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.table import Table

from grpo.report.at_k import MEASURES, Estimate, Samples, estimates
from grpo.report.charts import PALETTE
from grpo.report.eval_file import TaskScores
from grpo.report.loggers import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, PICTURE = "report.html", "pass_at_k.png"
_NOTE = ("pass@k: the chance that one of k samples is right; coverage@k: the share of problems "
         "that k samples in a row solved. Bars and bands hold 95 % of a bootstrap over problems.")
_LIGHT = {role: light for role, (light, _) in PALETTE.items()}
_COLORS = [role for role in PALETTE if role not in ("ink", "muted", "line")]


def written(estimate: Mapping[str, float] | None) -> str:
    """A figure with its interval.

    Examples:
        >>> written({"value": 0.5, "low": 0.41, "high": 0.625}), written(None)
        ('0.500 [0.410, 0.625]', '')
    """
    if estimate is None:
        return ""
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _brief(estimate: Mapping[str, float] | None) -> str:
    """The same in less room, for a terminal."""
    return "" if estimate is None else (
        f"{estimate['value']:.3f} {estimate['low']:.2f}-{estimate['high']:.2f}")


def columns_of(record: Mapping[str, Any]) -> list[str]:
    """The heads of a task's table: greedy and samples side by side."""
    return ["", "greedy", *(f"k={k}" for k in record["k"])]


def rows_of(
    task: Mapping[str, Any], ks: Sequence[int], write: Callable[[Any], str]
) -> Iterator[list[str]]:
    """The cells of a task's table, a row for each measure."""
    found = task["estimates"]
    yield ["accuracy", write(found["accuracy"]), *("" for _ in ks)]
    for name in MEASURES:
        if any(f"{name}@{k}" in found for k in ks):
            yield [f"{name}@k", "", *(write(found.get(f"{name}@{k}")) for k in ks)]


def head_of(name: str, task: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """What stands above a task's table."""
    errors = f", {task['errors']:,} completions without a reward" if task["errors"] else ""
    sampled = (f", {record['replicates']} samples each at temperature "
               f"{record['temperature']:g}" if record["replicates"] else "")
    return f"{name}: {task['problems']:,} problems{sampled}{errors}"


def screen_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A table of each task for the terminal."""
    for name, task in record["tasks"].items():
        table = Table(*columns_of(record), box=box.SIMPLE_HEAD, title_style="bold",
                      title=head_of(name, task, record), title_justify="left")
        for row in rows_of(task, record["k"], _brief):
            table.add_row(*row)
        yield table


    for head, columns, rows in lm_eval_tables(record):
        table = Table(*columns, box=box.SIMPLE_HEAD, title_style="bold", title=head,
                      title_justify="left")
        for row in rows:
            table.add_row(*row)
        yield table


def lm_eval_tables(
    record: Mapping[str, Any]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Head, columns and rows of the table of each task of lm-eval."""
    for name, task in record.get("lm_eval", {}).items():
        problems = "" if task["problems"] is None else f": {task['problems']:,} problems"
        shots = "" if not task["num_fewshot"] else f", {task['num_fewshot']} examples each"
        yield f"{name}{problems}{shots}", ["", "value", "standard error"], [
            [metric, f"{found['value']:.4f}",
             "" if found["stderr"] is None else f"{found['stderr']:.4f}"]
            for metric, found in task["metrics"].items()]


def curve(samples: Samples, *, seed: int) -> dict[int, Estimate]:
    """pass@k at the powers of two up to ``n``, and at ``n``."""
    ks = sorted({*(2**i for i in range(samples.n.bit_length())), samples.n})
    found = estimates({str(k): samples.per_problem("pass", k) for k in ks}, seed=seed)
    return {int(k): value for k, value in found.items()}


def draw_curves(axes: Axes, curves: Mapping[str, dict[int, Estimate]]) -> None:
    """pass@k over k, a line with its band for each name."""
    for (name, points), role in zip(curves.items(), _COLORS, strict=False):
        ks, color = [*points], _LIGHT[role]
        low, high = zip(*((point.low, point.high) for point in points.values()), strict=True)
        axes.plot(ks, [point.value for point in points.values()], color=color, marker="o",
                  markersize=3, label=name)
        axes.fill_between(ks, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axes, xlabel="k", ylabel="pass@k")


def tidy(axes: Axes, *, xlabel: str, ylabel: str) -> None:
    """A quiet grid, a legend, and labels."""
    axes.set_xlabel(xlabel, color=_LIGHT["muted"])
    axes.set_ylabel(ylabel, color=_LIGHT["muted"])
    axes.grid(axis="y", color=_LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=_LIGHT["muted"], labelsize=8)
    axes.legend(frameon=False, fontsize=8, labelcolor=_LIGHT["ink"])


def _draw(tasks: Sequence[TaskScores], record: Mapping[str, Any]) -> Any:
    """Curves of pass@k where there are samples, else bars of greedy accuracy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    sampled = {task.name: curve(task.samples, seed=record["seed"])
               for task in tasks if task.samples is not None and task.samples.n > 1}
    if sampled:
        draw_curves(axes, sampled)
    for number, (task, role) in enumerate(zip(tasks, _COLORS, strict=False)):
        found = Estimate(**record["tasks"][task.name]["estimates"]["accuracy"])
        if sampled:
            axes.axhline(found.value, color=_LIGHT[role], linestyle=":", linewidth=1,
                         label=f"{task.name}, greedy")
        else:
            axes.bar(number, found.value, color=_LIGHT[role], label=task.name, width=0.6, yerr=[
                [found.value - found.low], [found.high - found.value]])
    if not sampled:
        axes.set_xticks([])
    tidy(axes, xlabel="k" if sampled else "", ylabel="pass@k" if sampled else "greedy accuracy")
    return figure


def write_page(folder: Path, tasks: Sequence[TaskScores], record: Mapping[str, Any]) -> Path:
    """Write ``report.html`` and ``pass_at_k.png`` of an evaluation."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evaluation"}):
        figure, out = _draw(tasks, record), io.StringIO()
        figure.savefig(folder / PICTURE, dpi=150)
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=empty)
    drawing = out.getvalue()[out.getvalue().index("<svg"):]
    for role, light in _LIGHT.items():
        drawing = re.sub(re.escape(light), f"var(--{role})", drawing, flags=re.I)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True)
    page = templates.get_template("eval_page.html").render(
        title=f"Evaluation of {record['model']}", palette=PALETTE, drawing=drawing, note=_NOTE,
        facts=[f"engine {record['engine']}", f"seed {record['seed']}",
               *(f"{name} {value:g} s" for name, value in record["seconds"].items())],
        tables=[*((head_of(name, task, record), columns_of(record),
                   list(rows_of(task, record["k"], written)))
                  for name, task in record["tasks"].items()), *lm_eval_tables(record)])
    write_atomically(folder / PAGE, page, errors="xmlcharrefreplace")
    return folder / PAGE
