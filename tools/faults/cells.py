"""The cells of the matrix: which fault strikes when in which kind of run, what must come of it, and
how that is put into a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: In which part of the fourth iteration a fault strikes.
PHASES = ("generation", "reward", "update", "checkpoint")
FAULTS = ("SIGINT", "SIGTERM", "SIGKILL", "disk full", "NaN", "damaged checkpoint")
#: What runs, and how far metrics of a run that went on may be from those of one that nothing
#: happened to. A server forms its batches as requests arrive, so its log-probs differ in rounding.
MODES = {
    "sync": ("`grpo.py`, Transformers generates", 0.0),
    "process": ("`grpo.py`, `engine=process`, vLLM", 0.0),
    "server": ("`grpo.py`, `engine=server`, a vLLM server that outlives its trainers", 1e-3),
    "async": ("`grpo-async.py`, a worker on Ray, `staleness=1`", None),
    "Atropos": ("`atropos-grpo`, hub, environment and trainer each a process", None),
}
#: Iterations of a run, those finished when the fault is armed, those between two checkpoints.
ITERATIONS, ARMED_AT, EVERY = 6, 3, 2
_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9, "disk full": 0, "damaged checkpoint": -9}

#: Combinations without a meaning, and why.
NONSENSE = {
    **{("damaged checkpoint", phase): "a checkpoint is damaged where it lies, whatever the run "
       "does then; it shows when the run goes on" for phase in PHASES[:3]},
    ("NaN", "checkpoint"): "saving computes nothing",
}


@dataclass(frozen=True)
class Cell:
    """One place in the matrix."""

    mode: str
    fault: str
    phase: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.mode} {self.fault} {self.phase}".replace(" ", "_")

    @property
    def exit_code(self) -> int:
        """Of the run that the fault strikes."""
        if self.fault == "NaN":
            return 0 if self.phase == "reward" else 1  # what has no reward is left out
        return _CODES[self.fault]

    @property
    def equal(self) -> bool:
        """Whether the metrics are promised to be those of an undisturbed run."""
        return MODES[self.mode][1] is not None and (self.fault, self.phase) != ("NaN", "reward")


def same(cell: Cell, rows: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> bool:
    """Whether the metrics of two runs are as alike as promised."""
    most = MODES[cell.mode][1]
    return len(rows) == len(undisturbed) and all(
        ours.keys() == theirs.keys() and all(
            ours[name] == theirs[name] or abs(ours[name] - theirs[name]) <= most for name in ours)
        for ours, theirs in zip(rows, undisturbed, strict=True))


def cells(modes=tuple(MODES), faults=FAULTS, phases=PHASES) -> list[Cell]:
    """Those that have a meaning."""
    return [Cell(mode, fault, phase) for mode in modes for fault in faults for phase in phases
            if (fault, phase) not in NONSENSE]


def problems(cell: Cell, found: dict[str, Any]) -> list[str]:
    """What is not as promised.

    Args:
        cell: that was run.
        found: what was seen, see :func:`faults.runs.observe`.
    """
    code = cell.exit_code
    wrong = [] if found["exit"] == code else [f"exit {found['exit']}, not {code}"]
    if not found["struck"]:
        wrong.append("the fault did not strike")
    if found["traceback"]:
        wrong.append("a traceback was printed")
    if code != -9 and not found["report"]:
        wrong.append("there is no report")
    if code in (1, 130, 143):
        if not found["says_resume"]:
            wrong.append("the run does not say resume=auto")
        if found["saved"] != found["done"]:
            wrong.append(f"{found['done']} iterations were finished, {found['saved']} saved")
    # Where a worker rewards, the disk may be full between two checkpoints.
    if cell.fault == "disk full" and not found["warned"] and not (
            {*range(EVERY, ITERATIONS, EVERY)} <= {*found["checkpoints"]}):
        wrong.append("no word of the checkpoint that is missing")
    if cell.fault == "damaged checkpoint" and not found["warned"]:
        wrong.append("no word of the checkpoint that is damaged")
    if code != 0 and found.get("resumed_at") != found["saved"]:
        wrong.append(f"went on from {found.get('resumed_at')}, though {found['saved']} was saved")
    if found["steps"] != list(range(1, ITERATIONS + 1)):
        wrong.append(f"metrics have the steps {found['steps']}")
    if cell.equal and not found["equal"]:
        wrong.append("other metrics than those of an undisturbed run")
    if found["left"]:
        wrong.append(f"left behind: {found['left']}")
    if cell.mode == "Atropos":
        groups = found["groups"]
        if groups["lost"] or groups["twice"]:
            wrong.append(f"{groups['lost']} acknowledged groups lost, {groups['twice']} twice")
    return wrong


def words(cell: Cell, found: dict[str, Any]) -> str:
    """What came of a cell, for the table."""
    if found["problems"]:
        return "**broken**: " + "; ".join(found["problems"])
    if found["exit"] == 0:
        parts = ["ran on"]
        if cell.fault == "disk full":
            parts.append(f"saved {', '.join(map(str, found['checkpoints']))}")
    else:
        code = "killed" if found["exit"] == -9 else f"exit {found['exit']}"
        parts = [f"{found['done']} done", code, f"on from {found['resumed_at']}"]
    if cell.equal:
        parts.append("same")
    if cell.mode == "Atropos":
        parts.append(f"{found['groups']['sent']} groups: 0 lost")
    return ", ".join(parts)


def table(result: dict[str, Any]) -> str:
    """Markdown: a line a fault and phase, a column a kind of run."""
    found = {(row["mode"], row["fault"], row["phase"]): row for row in result["cells"]}
    header = ("fault", "in", *MODES)
    lines = [header, ("---",) * len(header)]
    for fault in FAULTS:
        for phase in PHASES:
            if (fault, phase) in NONSENSE:
                said = ["no meaning"] * len(MODES)
            else:
                said = ["not run" if (row := found.get((mode, fault, phase))) is None
                        else words(Cell(mode, fault, phase), row) for mode in MODES]
            lines.append((fault, phase, *said))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reasons() -> str:
    """Why some combinations have no meaning, as a Markdown list."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (fault, phase), reason in NONSENSE.items():
        by_reason.setdefault((fault, reason), []).append(phase)
    return "\n".join(f"- {fault} in {', '.join(phases)}: {reason}."
                     for (fault, reason), phases in by_reason.items())


def columns() -> str:
    """What the columns are, as a Markdown list."""
    return "\n".join(f"- `{mode}`: {what}" for mode, (what, _) in MODES.items())
