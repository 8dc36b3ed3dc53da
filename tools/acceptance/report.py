"""The table of an acceptance, and its file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from acceptance.pages import REPO
from acceptance.schedule import Outcome, Part, Schedule, needed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import commit, save  # noqa: E402

_NAME = 78  # characters
_SOURCES = ("grpo/**/*", "sota-implementations/**/*", "config/**/*", "examples/**/*",
            "benchmarks/*.py", "test/gpu/**/*", "tools/acceptance/figures.py",
            "tools/acceptance/compare.py")


class Report:
    """Writes the file anew whenever a part has begun or ended, and prints a line for each ending.

    Args:
        out: the file.
        work: folder of the acceptance, where the first part leaves what machine this is.
        earlier: the file as an earlier call left it, if this one goes on from there.
        **values: what is known from the start, of this call.
    """

    def __init__(
        self, out: Path, work: Path, *, earlier: dict | None = None, **values: object
    ) -> None:
        self.out, self.work, self.values = out, work, values
        self._calls = (earlier or {}).get("calls", [])
        self._started = time.monotonic()
        self._printed: set[str] = set()

    def update(self, schedule: Schedule) -> None:
        """Write what there is."""
        for part in schedule.parts:
            outcome = schedule.outcomes[part.name]
            if outcome.status not in ("waiting", "running") and part.name not in self._printed:
                self._printed.add(part.name)
                print(line(part, outcome), flush=True)
        save(self.result(schedule), self.out)

    def result(self, schedule: Schedule) -> dict:
        """The file's content."""
        outcomes = schedule.outcomes
        machine = self.work / "machine.json"
        described = read_machine(machine)
        seconds = round(time.monotonic() - self._started, 1)
        calls = [*self._calls, {**self.values, "commit": commit(), "seconds": seconds}]
        return {
            "benchmark": "acceptance", "gpus": len(schedule.gpus), "calls": calls,
            "commit": commit(), "sources": sources(), **described,
            "complete": all(o.status not in ("waiting", "running") for o in outcomes.values()),
            "accepted": accepted(list(outcomes.values())),
            "seconds": round(sum(call["seconds"] for call in calls), 1),
            "counts": dict(Counter(outcome.status for outcome in outcomes.values())),
            "parts": [describe(part, outcomes[part.name]) for part in schedule.parts],
        }


@cache
def sources(root: Path = REPO) -> str:
    """A hash of all that parts run and are judged by. What starts them is in their commands."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_earlier(out: Path, *, gpus: int | None = None) -> dict:
    """The file of an earlier call that can be gone on with; empty if there is none.

    Raises:
        SystemExit: for one of other sources, or of another number of GPUs where that is given.
    """
    if not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    for what, said, now in (("state of the sources", earlier.get("sources"), sources()),
                            ("number of GPUs", earlier["gpus"], gpus or earlier["gpus"])):
        if said != now:
            sys.exit(f"error: {out} is of another {what}, {said} and not {now}; "
                     "remove the file, or the option")
    return earlier


def passed_before(parts: Sequence[Part], earlier: dict, *, where: str = "") -> dict[str, Outcome]:
    """Outcomes of parts that passed as they are now, unless one that did not comes after them."""
    passed = {part["name"]: part for part in earlier.get("parts", [])
              if part["status"] == "passed"}
    same = {part.name for part in parts if part.name in passed and not part.missing
            and passed[part.name]["command"] == part.script.splitlines()
            and passed[part.name]["gpus"] == part.gpus}
    again = needed({part.name for part in parts} - same, parts)
    return {name: Outcome("passed", f"in {where}" if where else passed[name].get("reason", ""),
                          passed[name]["seconds"], passed[name].get("figures", {}))
            for name in same - again}


def read_machine(path: Path) -> dict:
    """What ``prepare.py`` has found, if it has."""
    return json.loads(path.read_text()) if path.exists() else {
        "machine": f"{os.cpu_count()} cores", "versions": {}}


def accepted(outcomes: Sequence[Outcome]) -> bool:
    """Nothing failed, was ended or was not reached. What cannot run here does not count."""
    return all(outcome.status in ("passed", "skipped") for outcome in outcomes)


def describe(part: Part, outcome: Outcome) -> dict:
    """A part in the file."""
    described = {
        "name": part.name, "status": outcome.status, "reason": outcome.reason,
        "seconds": outcome.seconds, "limit_seconds": part.limit, "gpus": part.gpus,
        "alone": part.alone, "command": part.script.splitlines(), "figures": outcome.figures,
        "log_end": [text.replace(str(REPO), "$REPO") for text in outcome.log_end]}
    return {key: value for key, value in described.items() if value not in ("", {}, [], None)}


def line(part: Part, outcome: Outcome) -> str:
    """A part in the table."""
    name = part.name if len(part.name) <= _NAME else part.name[:_NAME - 3] + "..."
    seconds = "" if outcome.seconds is None else f"{outcome.seconds:.0f} s"
    said = "; ".join(filter(None, (outcome.reason, outcome.figures.get("summary"))))
    return f"{outcome.status:<10}{seconds:>6}  {name:<{_NAME}}  {said[:160]}".rstrip()


def table(schedule: Schedule) -> str:
    """All parts, and how many ended in which way."""
    lines = [line(part, schedule.outcomes[part.name]) for part in schedule.parts]
    counts = Counter(outcome.status for outcome in schedule.outcomes.values())
    verdict = "accepted" if accepted(list(schedule.outcomes.values())) else "NOT accepted"
    return "\n".join([*lines, f"{verdict}: " + ", ".join(
        f"{count} {status}" for status, count in counts.items())])
