"""What a part has left in its folder: figures, and whether it did what it should."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from acceptance.schedule import Missed

_LARGE = 50_000_000  # bytes


def read_run(iterations: int, *, runs: int = 1, says: str = "") -> Callable[[Path], dict]:
    """Figures of ``metrics.jsonl``: each of ``runs`` made its iterations, and proved its updates.

    Args:
        iterations: of each run.
        runs: a sweep has several.
        says: words that the log must have.
    """

    def read(folder: Path) -> dict:
        drop_large_files(folder)
        log = (folder / "log").read_text(errors="replace")
        files = sorted(folder.rglob("metrics.jsonl"))
        rows = [row for file in files for row in _lines(file) if "time/step" in row]
        figures = _of_rows(rows) if rows else {}
        figures["summary"] = ", ".join(
            f"{name} {figures[key]:.3g}" for name, key in (
                ("s a step", "step_seconds"), ("ratio to", "ratio_max"),
                ("canary", "canary_mean_abs_diff")) if figures.get(key) is not None)
        if len(files) != runs or len(rows) != runs * iterations:
            raise Missed(f"{len(rows)} iterations of {len(files)} runs, not {runs * iterations} "
                         f"of {runs}", figures)
        if figures["canary_mean_abs_diff"] is None:
            raise Missed("no update was proved by the canary", figures)
        if says and says not in log:
            raise Missed(f"its output does not say {says!r}", figures)
        return figures

    return read


def _of_rows(rows: list[dict]) -> dict:
    def of(key: str, choose=max):
        found = [row[key] for row in rows if row.get(key) is not None]
        return choose(found) if found else None

    return {
        "iterations": len(rows),
        "first_step_seconds": rows[0]["time/step"],
        "step_seconds": statistics.median(row["time/step"] for row in rows[1:] or rows),
        "grad_norm": of("train/grad_norm"),
        "ratio_min": of("policy/ratio_min", min), "ratio_max": of("policy/ratio_max"),
        "canary_max_abs_diff": of("canary/max_abs_diff"),
        "canary_mean_abs_diff": of("canary/mean_abs_diff"),
    }


def read_pytest(folder: Path) -> dict:
    """How many tests passed, were skipped and failed, by pytest's closing line."""
    lines = (folder / "log").read_text(errors="replace").splitlines()
    counts = {}
    for line in lines:
        if re.search(r"\d+ (passed|skipped|failed|errors?)\b.* in [\d.]+s", line):
            counts = {what: int(number) for number, what in
                      re.findall(r"(\d+) (passed|skipped|failed|errors?)", line)}
    figures = {**counts, "summary": ", ".join(f"{n} {what}" for what, n in counts.items())}
    if not counts.get("passed"):
        raise Missed("no test passed", figures)
    return figures


def read_benchmark(*shown: str) -> Callable[[Path], dict]:
    """The result of a benchmark, in ``result.json``.

    Args:
        *shown: keys for the table, with a slash between those of nested objects.
    """

    def read(folder: Path) -> dict:
        file = folder / "result.json"
        if not file.exists():
            raise Missed("it left no result")
        result = json.loads(file.read_text())
        summary = []
        for path in shown:
            value = result
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, float):
                value = f"{value:.3g}"
            summary += [f"{path} {value}"] if value is not None else []
        figures = {"summary": ", ".join(summary), **{
            key: value for key, value in result.items()
            if key not in ("machine", "versions", "commit", "benchmark")}}
        if not result.get("complete", True):
            raise Missed("its result is not complete", figures)
        return figures

    return read


def drop_large_files(folder: Path) -> None:
    """Remove checkpoints and models, which are gigabytes."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > _LARGE:
            path.unlink()


def _lines(file: Path) -> list[dict]:
    # What follows the last newline was being written when the program ended.
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
