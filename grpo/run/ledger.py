"""A ledger of what a run will need of a device's memory: rows, totals, refusals.

A step has phases: the policy generates, the head turns hidden states into a loss, the backward
pass runs. What is only needed in one of them does not add up with the others, so the total is
that of the greatest phase. The rows are computed in :mod:`grpo.run.memory_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["generate", "head", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)

GIB = 2**30


class DoesNotFitError(ValueError):
    """A run that needs more memory than its device has."""


@dataclass(frozen=True)
class Row:
    """One line of the ledger: what takes memory of one device."""

    name: str
    bytes: int
    note: str  # where the number comes from
    phases: tuple[Phase, ...] = PHASES  # when it is taken


@dataclass(frozen=True)
class Saving:
    """A change of the configuration, and the bytes it saves at the greatest moment of a step."""

    change: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """What a run needs of one device.

    Examples:
        >>> ledger = Ledger((Row("weights", 3 * GIB, "1.5 B parameters"),
        ...                  Row("KV cache", GIB, "64 rows", ("generate",)),
        ...                  Row("activations", 4 * GIB, "8192 tokens", ("backward",))))
        >>> human(ledger.total), ledger.peak
        ('7.00 GiB', 'backward')
        >>> print(ledger.table(8 * GIB)[-1])
        total            7.00 GiB   87.5 %  at the greatest moment: backward
    """

    rows: tuple[Row, ...]

    def at(self, phase: Phase) -> int:
        """Bytes taken in a phase."""
        return sum(row.bytes for row in self.rows if phase in row.phases)

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(PHASES, key=self.at)

    @property
    def total(self) -> int:
        """Bytes at the greatest moment of a step."""
        return self.at(self.peak)

    def table(self, capacity: int) -> list[str]:
        """Lines for the terminal, with shares of ``capacity`` bytes."""
        def line(name: str, size: int, note: str) -> str:
            return f"{name:<15}{human(size):>10}  {100 * size / capacity:5.1f} %  {note}"

        lines = []
        for row in self.rows:
            when = "" if row.phases == PHASES else f" ({' and '.join(row.phases)})"
            lines.append(line(row.name, row.bytes, row.note + when))
        return [*lines, line("total", self.total, f"at the greatest moment: {self.peak}")]


def check_fits(
    ledger: Ledger, capacity: int, *, who: str = "this run",
    advised: Callable[[], Sequence[Saving]] = tuple,
) -> None:
    """Refuse a run that does not fit.

    Args:
        ledger: of the run, or of a part of it.
        capacity: bytes of the device, or what others have left of them.
        who: needs it, for the message.
        advised: what could be changed; asked where the run does not fit.

    Raises:
        DoesNotFitError: naming the greatest rows and what would help by how much.

    Examples:
        >>> check_fits(Ledger((Row("weights", 3 * GIB, ""),)), 2 * GIB)
        Traceback (most recent call last):
        ...
        grpo.run.ledger.DoesNotFitError: this run needs 3.00 GiB (generate) and the device has \
room for 2.00 GiB; the greatest rows are weights 3.00 GiB
    """
    if ledger.total <= capacity:
        return
    rows = sorted((row for row in ledger.rows if ledger.peak in row.phases),
                  key=lambda row: row.bytes, reverse=True)
    greatest = ", ".join(f"{row.name} {human(row.bytes)}" for row in rows[:4])
    message = (f"{who} needs {human(ledger.total)} ({ledger.peak}) and the device has "
               f"room for {human(capacity)}; the greatest rows are {greatest}")
    savings = advised()
    enough = [ledger.total - saving.bytes <= capacity for saving in savings]
    lines = [f"{saving.change} saves {human(saving.bytes)}{': enough' * is_enough}"
             for saving, is_enough in zip(savings, enough, strict=True)]
    if savings and not any(enough):
        lines.append("no single one of these is enough; combine several")
    raise DoesNotFitError("\n  ".join([message, *lines]))


def human(size: float) -> str:
    """Bytes as people say them.

    Examples:
        >>> [human(size) for size in (512, 3 * 2**20, 79.2 * 2**30)]
        ['512 B', '3.0 MiB', '79.20 GiB']
    """
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
