"""One page that tells how a run went: ``report.html``, complete in itself, and PNG curves."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo.report.charts import charts_of
from grpo.report.curves import svg, write_png_curves
from grpo.report.history import History
from grpo.report.learning_signal import silence_at_end
from grpo.report.loggers import METRICS_FILE, SAMPLES_FILE, read_jsonl, write_atomically
from grpo.report.style import STYLE
from grpo.report.words import format_duration

REPORT_FILE = "report.html"
CURVES_DIR = "curves"
PACKAGES = ("torch", "torchrl", "tensordict", "vllm", "transformers", "numpy")

_MAX_ROWS = 6
_MAX_CHARS = 4_000
#: Names that hold a credential; ``max_tokens`` and ``tokenizer`` are none.
_SECRET = re.compile(r"(^|[_.])(api_?key|secret|password|(access|auth|hf|bearer)_token)$", re.I)


def write_report(run_dir: Path | str, *, title: str, config: Mapping[str, Any]) -> Path:
    """Write ``report.html`` and ``curves/*.png`` of a run from its ``metrics.jsonl``.

    The page needs no other file and no network, and follows the reader's light or dark theme. A
    metric that the run does not have leaves out its chart. It may be written while the run goes on.

    Args:
        run_dir: folder with ``metrics.jsonl`` and, if there are samples, ``samples.jsonl``.
        title: heading of the page.
        config: resolved configuration; nested mappings are shown by group, and values of keys that
            name a credential are hidden.

    Returns:
        The path of ``report.html``.

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
        >>> sorted(path.name for path in (run_dir / "curves").iterdir())
        ['accuracy.png', 'overview.png', 'reward.png']
    """
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).exists():
        raise FileNotFoundError(f"{run_dir} holds no {METRICS_FILE}: is it the folder of a run?")
    history = History.read(run_dir)
    samples = read_jsonl(run_dir / SAMPLES_FILE)
    write_png_curves(history, run_dir / CURVES_DIR)
    body = [
        _header(title, run_dir, history),
        _headline(history),
        _charts(history),
        _samples(samples),
        _config(config),
        _all_metrics(history),
        _versions(),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    path = run_dir / REPORT_FILE
    # A lone surrogate has no UTF-8 form; as a character reference the browser shows it as "�".
    write_atomically(path, page, errors="xmlcharrefreplace")
    return path


def _section(heading: str, content: str, *, note: str = "") -> str:
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>{note}\n{content}\n</section>"


def _header(title: str, run_dir: Path, history: History) -> str:
    facts = [run_dir.resolve().name]
    if history.rows:
        steps = history.steps
        facts.append(f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}")
        last = history.rows[-1].get("time")
        if last is not None:
            facts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(last)))
    facts_html = " <i>·</i> ".join(escape(fact) for fact in facts)
    return f"<header>\n<h1>{escape(title)}</h1>\n<p>{facts_html}</p>\n</header>"


# Headline numbers ---------------------------------------------------------------------------


def _tile(label: str, value: str, detail: str = "", *, tone: str = "") -> str:
    return (
        f'<div class="tile"><span class="label">{escape(label)}</span>'
        f'<span class="value">{value}</span>'
        f'<span class="detail {tone}">{escape(detail)}</span></div>'
    )


def _change(first: str, last: str) -> str:
    return f'<span class="from">{escape(first)} →</span> {escape(last)}'


def _headline(history: History) -> str:
    tiles = []
    steps, accuracy = history.series("eval/accuracy")
    if len(accuracy) > 1:
        points = 100 * (accuracy[-1] - accuracy[0])
        detail = f"{points:+.1f} points · best {max(accuracy):.1%} · since step {steps[0]}"
        value = _change(f"{accuracy[0]:.1%}", f"{accuracy[-1]:.1%}")
        tiles.append(_tile("Held-out accuracy", value, detail, tone=_tone(points)))
    elif accuracy:
        detail = f"at step {steps[0]}, measured once"
        tiles.append(_tile("Held-out accuracy", f"{accuracy[0]:.1%}", detail))
    _, reward = history.series("reward/mean")
    if len(reward) > 1:
        k = min(10, len(reward) // 2)
        first, last = sum(reward[:k]) / k, sum(reward[-k:]) / k
        detail = f"{last - first:+.3f} · " + (
            f"the last {k} steps beside the first {k}" if k > 1 else "the last step, the first")
        value = _change(f"{first:.3f}", f"{last:.3f}")
        tiles.append(_tile("Train reward", value, detail, tone=_tone(last - first)))
    elif reward:
        tiles.append(_tile("Train reward", f"{reward[0]:.3f}"))
    trained = sum(step > 0 for step in history.steps)  # step 0 is the state before training
    tiles.append(_tile("Steps", f"{trained:,}", _pace(history)))
    duration = _duration(history)
    if duration is not None:
        tiles.append(_tile("Training time", format_duration(duration)))
    _, speed = history.series("tokens/per_second")
    if speed:
        detail = "median" if len(speed) > 1 else ""
        tiles.append(_tile("Tokens / s", f"{sorted(speed)[len(speed) // 2]:,.0f}", detail))
    return f'<div class="tiles">{"".join(tiles)}</div>' + _notices(history)


def _tone(change: float) -> str:
    return "up" if change > 0 else "down" if change < 0 else ""


def _duration(history: History) -> float | None:
    """Seconds the steps took; their sum, since the clock also runs while a run is interrupted."""
    _, steps = history.series("time/step")
    if steps:
        return sum(steps)
    times = [row["time"] for row in history.rows if row.get("time") is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def _pace(history: History) -> str:
    _, seconds = history.series("time/step")
    return f"{format_duration(sum(seconds) / len(seconds))} each" if seconds else ""


def _notices(history: History) -> str:
    """What a reader should know before trusting the curves, in sentences."""
    notices = []
    if not history.rows:
        notices.append("No step has been recorded.")
    if silence := silence_at_end(history.rows):
        text = str(silence)
        notices.append(f"{text[0].upper()}{text[1:]}.")
    errors = sum(history.series("reward/errors")[1])
    if errors:
        skipped = sum(history.series("reward/skipped")[1])
        late = sum(history.series("reward/timeouts")[1])
        why = [f"for {errors - skipped - late:,.0f} the reward failed",
               *([f"for {late:,.0f} it took too long"] if late else []),
               *([f"{skipped:,.0f} were left out by it"] if skipped else [])]
        notices.append(f"{errors:,.0f} completions got no reward: {', '.join(why)}.")
    _, cut = history.series("tokens/truncated_fraction")
    if cut and cut[-1] > 0.2:
        notices.append(f"{cut[-1]:.0%} of the completions of the last step were cut by the limit.")
    for name, value in (history.rows[-1] if history.rows else {}).items():
        kind, prefix, reason = name.partition("atropos/groups_rejected_")
        if prefix and not kind and value:
            notices.append(f"{value:,.0f} groups of environments were left out ({reason}).")
    holes = {
        name
        for row in history.rows
        for name, value in row.items()
        if value is None and name.startswith(("loss/", "train/", "policy/"))
    }
    if holes:
        notices.append(f"Not finite in at least one step: {', '.join(sorted(holes))}.")
    items = "".join(f"<li>{escape(notice)}</li>" for notice in notices)
    return f'<ul class="notices">{items}</ul>' if items else ""


# Charts -------------------------------------------------------------------------------------


def _charts(history: History) -> str:
    figures = {True: "", False: ""}
    for chart in charts_of(history):
        if chart.has_data(history):
            caption = f"<h3>{escape(chart.title)}</h3><p>{escape(chart.note)}</p>"
            drawing = svg(chart, history)
            figures[chart.wide] += (
                f'<figure id="{chart.name}"><figcaption>{caption}</figcaption>{drawing}</figure>\n'
            )
    sections = (("At a glance", "wide", figures[True]), ("Diagnostics", "small", figures[False]))
    return "\n".join(
        _section(heading, f'<div class="charts {kind}">\n{content}</div>')
        for heading, kind, content in sections
        if content
    )


# Samples ------------------------------------------------------------------------------------


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


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    steps = pick_steps([row["step"] for row in rows])
    if not steps:
        return ""
    columns = [[row for row in rows if row["step"] == step] for step in steps]
    shared = set.intersection(*({row["prompt"] for row in column} for column in columns))
    if shared:
        # The same prompt side by side says most; of several answers the first stands for it.
        prompts = list(dict.fromkeys(r["prompt"] for r in columns[0] if r["prompt"] in shared))
        found = [{row["prompt"]: row for row in reversed(column)} for column in columns]
        table = [[column[prompt] for column in found] for prompt in prompts[:_MAX_ROWS]]
        note = "The same prompts at each of these steps."
    else:
        height = min(_MAX_ROWS, max(map(len, columns)))
        table = [[c[i] if i < len(c) else None for c in columns] for i in range(height)]
        note = "No prompt was sampled at all of these steps, so each has its own."
    names = ["start", "middle", "end"] if len(steps) == 3 else ["start", "end"][: len(steps)]
    heads = "".join(
        f"<div class='when'>{name} <i>·</i> step {step}</div>"
        for name, step in zip(names, steps, strict=True)
    )
    lines = [f'<div class="row">{heads}</div>']
    for cells in table:
        if shared:
            lines.append(_prompt(cells[0]))
        cards = "".join(_card(cell, with_prompt=not shared) for cell in cells)
        lines.append(f'<div class="row">{cards}</div>')
    content = f'<div class="samples" style="--columns:{len(steps)}">{"".join(lines)}</div>'
    return _section("Completions", content, note=note if len(steps) > 1 else "")


def _prompt(row: Mapping[str, Any]) -> str:
    answer = row.get("answer", "")
    reference = f'<span class="answer">answer <b>{_text(answer)}</b></span>' if answer else ""
    return f'<div class="prompt"><pre>{_text(row["prompt"])}</pre>{reference}</div>'


def _card(row: Mapping[str, Any] | None, *, with_prompt: bool) -> str:
    if row is None:
        return '<div class="card empty"></div>'
    mark, tone = ("✓", "up") if row["success"] else ("✗", "down")
    reward = "none" if row["reward"] is None else f"{row['reward']:.2f}"
    badges = [f'<span class="badge {tone}">{mark} {reward}</span>']
    if row["truncated"]:
        badges.append('<span class="badge warn">cut by the length limit</span>')
    prompt = _prompt(row) if with_prompt else ""
    completion = f'<pre class="completion">{_text(row["completion"])}</pre>'
    return f'<div class="card {tone}">{prompt}<p>{"".join(badges)}</p>{completion}</div>'


def _text(text: str) -> str:
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}… ({len(text) - _MAX_CHARS:,} more characters)"
    return escape(text)


# Tables -------------------------------------------------------------------------------------


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; values of keys that name a credential are hidden.

    Examples:
        >>> flatten({"seed": 1, "model": {"name": "m", "hf_token": "hf_x", "max_tokens": 8}})
        {'seed': 1, 'model.name': 'm', 'model.hf_token': '(hidden)', 'model.max_tokens': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = "(hidden)" if value and _SECRET.search(name) else value
    return flat


def _table(rows: Mapping[str, Any]) -> str:
    cells = (
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _config(config: Mapping[str, Any]) -> str:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in flatten(config).items():
        group, _, rest = name.partition(".")
        groups.setdefault(group if rest else "", {})[rest or name] = value
    blocks = (
        f'<div class="group"><h3>{escape(group or "general")}</h3>{_table(rows)}</div>'
        for group, rows in sorted(groups.items())
    )
    content = "".join(blocks)
    return _section("Configuration", f'<div class="groups">{content}</div>') if content else ""


def _all_metrics(history: History) -> str:
    rows = []
    for name in history.names:
        _, values = history.series(name)
        if values:
            numbers = (values[0], values[-1], min(values), max(values), len(values))
            cells = "".join(f"<td>{number:,.4g}</td>" for number in numbers)
            rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("", "first", "last", "min", "max", "steps"))
    table = f'<table class="metrics"><thead><tr>{head}</tr></thead>{"".join(rows)}</table>'
    return f"<details>\n<summary>All {len(rows)} metrics</summary>\n{table}\n</details>"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for a result; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def _versions() -> str:
    items = " <i>·</i> ".join(f"{escape(k)} {escape(v)}" for k, v in versions().items())
    return f"<footer>{items}</footer>"
