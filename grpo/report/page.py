"""One page that tells how a run went: ``report.html``, complete in itself, and PNG curves."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grpo.report.charts import PALETTE, charts_of
from grpo.report.credentials import without_credentials
from grpo.report.curves import svg, write_png_curves
from grpo.report.history import History
from grpo.report.learning_signal import silence_at_end
from grpo.report.loggers import METRICS_FILE, SAMPLES_FILE, read_jsonl, write_atomically
from grpo.report.words import ACCURACY, REWARD, STEP_TIME, TOKENS_PER_SECOND, format_duration
from grpo.system.versions import versions

REPORT_FILE, FAILURES_FILE = "report.html", "reward_failures.jsonl"

_MAX_ROWS = 6
_MAX_CHARS = 4_000
#: Names that hold a credential; ``max_tokens`` and ``tokenizer`` are none.


def write_report(run_dir: Path | str, *, title: str, config: Mapping[str, Any]) -> Path:
    """Write ``report.html`` and ``curves/*.png`` of a run from its ``metrics.jsonl``.

    The page needs no other file and no network, and follows the reader's light or dark theme. A
    metric that the run does not have leaves out its chart. It may be written while the run goes on.

    Args:
        run_dir: folder with ``metrics.jsonl`` and, if there are samples, ``samples.jsonl``; if
            reward functions failed, ``reward_failures.jsonl``.
        title: heading of the page.
        config: resolved configuration; nested mappings are shown by group, and values of keys that
            name a credential are hidden.

    Raises:
        FileNotFoundError: if the folder holds no ``metrics.jsonl``.

    Examples:
        >>> import tempfile
        >>> from grpo.report.loggers import JsonlLogger
        >>> run_dir = Path(tempfile.mkdtemp())
        >>> with JsonlLogger(run_dir / "metrics.jsonl") as logger:
        ...     logger.log(1, {"reward/mean": 0.25})
        >>> write_report(run_dir, title="GSM8K", config={"seed": 42}).name
        'report.html'
    """
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).exists():
        raise FileNotFoundError(f"{run_dir} holds no {METRICS_FILE}: is it the folder of a run?")
    history = History.read(run_dir)
    write_png_curves(history, run_dir / "curves")
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True)
    templates.filters["cut"] = _cut
    drawings = [(chart, svg(chart, history)) for chart in charts_of(history)
                if chart.has_data(history)]
    page = templates.get_template("page.html").render(
        title=title, palette=PALETTE, facts=_facts(run_dir, history), tiles=_tiles(history),
        notices=_notices(history), failures=read_jsonl(run_dir / FAILURES_FILE), drawings=drawings,
        samples=_samples(read_jsonl(run_dir / SAMPLES_FILE)), config=_groups(config),
        metrics=_metrics(history), versions={"python": platform.python_version(), **versions(),
                                             "system": f"{platform.system()} {platform.machine()}"})
    # A lone surrogate has no UTF-8 form; as a character reference the browser shows it as "�".
    write_atomically(run_dir / REPORT_FILE, page, errors="xmlcharrefreplace")
    return run_dir / REPORT_FILE


def _facts(run_dir: Path, history: History) -> list[str]:
    """Of which run the page is, which steps, and when it got there."""
    facts = [run_dir.resolve().name]
    if steps := history.steps:
        facts.append(f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}")
        last = history.rows[-1].get("time")
        if last is not None:
            facts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(last)))
    return facts


@dataclass(frozen=True)
class _Tile:
    """A headline number."""

    label: str
    value: str
    detail: str = ""
    first: str = ""  # the value at first
    change: float = 0.0  # its sign colours the detail


def _tiles(history: History) -> list[_Tile]:
    tiles = []
    steps, accuracy = history.series(ACCURACY)
    if len(accuracy) > 1:
        points = 100 * (accuracy[-1] - accuracy[0])
        detail = f"{points:+.1f} points · best {max(accuracy):.1%} · since step {steps[0]}"
        tiles.append(_Tile("Held-out accuracy", f"{accuracy[-1]:.1%}", detail,
                           f"{accuracy[0]:.1%}", points))
    elif accuracy:
        tiles.append(_Tile("Held-out accuracy", f"{accuracy[0]:.1%}",
                           f"at step {steps[0]}, measured once"))
    _, reward = history.series(REWARD)
    if len(reward) > 1:
        k = min(10, len(reward) // 2)
        first, last = sum(reward[:k]) / k, sum(reward[-k:]) / k
        detail = f"{last - first:+.3f} · " + (
            f"the last {k} steps beside the first {k}" if k > 1 else "the last step, the first")
        tiles.append(_Tile("Train reward", f"{last:.3f}", detail, f"{first:.3f}", last - first))
    elif reward:
        tiles.append(_Tile("Train reward", f"{reward[0]:.3f}"))
    trained = sum(step > 0 for step in history.steps)  # step 0 is the state before training
    _, seconds = history.series(STEP_TIME)
    pace = f"{format_duration(sum(seconds) / len(seconds))} each" if seconds else ""
    tiles.append(_Tile("Steps", f"{trained:,}", pace))
    # The clock also runs while a run is interrupted, so the sum of its steps tells more.
    _, times = history.series("time")
    duration = sum(seconds) or (times[-1] - times[0] if len(times) > 1 else None)
    if duration is not None:
        tiles.append(_Tile("Training time", format_duration(duration)))
    _, speed = history.series(TOKENS_PER_SECOND)
    if speed:
        tiles.append(_Tile("Tokens / s", f"{sorted(speed)[len(speed) // 2]:,.0f}",
                           "median" if len(speed) > 1 else ""))
    return tiles


def _notices(history: History) -> list[str]:
    """What a reader should know before trusting the curves, in sentences."""
    notices = [] if history.rows else ["No step has been recorded."]
    if silence := silence_at_end(history.rows):
        text = str(silence)
        notices.append(f"{text[0].upper()}{text[1:]}.")
    errors, skipped, late, invalid, ended = (
        sum(history.series(f"reward/{name}")[1])
        for name in ("errors", "skipped", "timeouts", "invalid", "ended"))
    if errors:
        why = [f"for {errors - skipped - late - invalid - ended:,.0f} the reward failed",
               *([f"for {late:,.0f} it took too long"] if late else []),
               *([f"for {invalid:,.0f} it was no finite number"] if invalid else []),
               *([f"for {ended:,.0f} its process ended"] if ended else []),
               *([f"{skipped:,.0f} were left out by it"] if skipped else [])]
        notices.append(f"{errors:,.0f} completions got no reward: {', '.join(why)}.")
    _, cut = history.series("tokens/truncated_fraction")
    if cut and cut[-1] > 0.2:
        notices.append(f"{cut[-1]:.0%} of the completions of the last step were cut by the limit.")
    rejected = "atropos/groups_rejected_"
    for name, value in (history.rows[-1] if history.rows else {}).items():
        if name.startswith(rejected) and value:
            notices.append(f"{value:,.0f} groups of environments were left out "
                           f"({name.removeprefix(rejected)}).")
    holes = {name for row in history.rows for name, value in row.items()
             if value is None and name.startswith(("loss/", "train/", "policy/"))}
    if holes:
        notices.append(f"Not finite in at least one step: {', '.join(sorted(holes))}.")
    return notices


def pick_steps(steps: Sequence[int]) -> list[int]:
    """The first step, the one nearest to the middle, and the last, without repeats.

    Examples:
        >>> pick_steps([1, 20, 40, 60, 80, 100]), pick_steps([3, 3]), pick_steps([])
        ([1, 60, 100], [3], [])
    """
    if not steps:
        return []
    first, last = min(steps), max(steps)
    # Of two equally near ones the later: it shows more of what was learned.
    middle = min(steps, key=lambda step: (abs(2 * step - first - last), -step))
    return sorted({first, middle, last})


def _samples(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Completions of a few steps as a table, a column for each step.

    Returns:
        ``heads``, what each column is called and its step; ``rows`` of cells, None where a step
        has no more; ``shared``, whether all cells of a row answer the same prompt.
    """
    steps = pick_steps([row["step"] for row in rows])
    columns = [[row for row in rows if row["step"] == step] for step in steps]
    # The same prompt side by side says most; of several answers the first stands for it.
    first = [{row["prompt"]: row for row in reversed(column)} for column in columns]
    shared = [prompt for prompt in dict.fromkeys(row["prompt"] for row in rows)
              if all(prompt in column for column in first)]
    table = [[column[prompt] for column in first] for prompt in shared] or zip_longest(*columns)
    names = ["start", "middle", "end"] if len(steps) == 3 else ["start", "end"]
    return {"heads": list(zip(names, steps, strict=False)), "rows": list(table)[:_MAX_ROWS],
            "shared": bool(shared)}


def _cut(text: str) -> str:
    more = len(text) - _MAX_CHARS
    return f"{text[:_MAX_CHARS]}… ({more:,} more characters)" if more > 0 else text


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys.

    Examples:
        >>> flatten({"seed": 1, "model": {"name": "m", "max_tokens": 8}})
        {'seed': 1, 'model.name': 'm', 'model.max_tokens': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _groups(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The configuration by its sections; keys outside of one come first."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in flatten(without_credentials(config)).items():
        group, _, rest = name.partition(".")
        groups.setdefault(group if rest else "", {})[rest or name] = value
    return sorted(groups.items())


def _metrics(history: History) -> list[tuple[str, list[str]]]:
    """First, last, least and greatest value of each metric, and in how many steps it is."""
    return [(name, [f"{number:,.4g}" for number in (
        values[0], values[-1], min(values), max(values), len(values))])
        for name in history.names if (values := history.series(name)[1])]


