"""What a check has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Examples:
        >>> str(Finding("shm", "problem", "64 MiB are free", "docker run --shm-size=8g"))
        'problem  shm          64 MiB are free -> docker run --shm-size=8g'
    """

    name: str
    status: Literal["ok", "remark", "problem"]
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.status:8} {self.name:12} {self.found}" + f" -> {self.fix}" * bool(self.fix)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


Check = Callable[[], "Finding | list[Finding]"]


def findings(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """What each check finds; one that fails itself is a problem by its name, and the others go on.

    Examples:
        >>> found, = findings([("hub", lambda: 1 / 0)])
        >>> found.status, found.found
        ('problem', 'could not be checked: ZeroDivisionError: division by zero')
    """
    for name, check in checks:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001  whatever it is, the rest is still worth knowing
            found = Finding(name, "problem",
                            f"could not be checked: {type(error).__name__}: {error}",
                            "tell the authors, with this line")
        yield from found if isinstance(found, list) else [found]
