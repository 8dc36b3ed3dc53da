"""The tables of docs/commands.md: their rows, what each is made of, and what a role is given."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import NamedTuple

HEADER = ["there", "here", "what differs"]
SAME = "the same"

SYNC = "python sota-implementations/grpo/grpo.py"
ASYNC = "python sota-implementations/grpo/grpo-async.py"
OFFLINE = "python sota-implementations/grpo/grpo-offline.py"
SERVER = "python -m grpo.server.serve"
STOCK = "python -m vllm.entrypoints.openai.api_server"
#: Kind of a row -> how its last command begins, variables left out; longer ones first.
KINDS = {
    "install": ("pip install ",),
    "api": (".venv-atropos/bin/run-api ", "python -m grpo.atropos.hub_server "),
    "environment": (".venv-atropos/bin/python path/to/environment.py serve ",),
    "launcher": ("atropos-grpo-run ",),
    "trainer": ("atropos-grpo ",),
    "local": ("examples/slurm/local.sh ",),
    "job": ("sbatch ",),
    "sweep": (f"{SYNC} --multirun ",),
    "run": (f"{SYNC} ", f"{ASYNC} "),
    "offline": (f"{OFFLINE} ",),
    "tests": ("python -m pytest ",),
}

_CODE = r"`[^`|]+`"
_CODES = re.compile(f"{_CODE}(<br>{_CODE})*")


class Line(NamedTuple):
    """A command, taken apart."""

    variables: dict[str, str]  # that stand before it
    words: list[str]

    @classmethod
    def of(cls, text: str) -> Line:
        """
        Examples:
            >>> Line.of("PORT=1 python run.py a=b")
            Line(variables={'PORT': '1'}, words=['python', 'run.py', 'a=b'])
        """
        words = shlex.split(text)
        count = next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)),
                     len(words))
        return cls(dict(word.split("=", 1) for word in words[:count]), words[count:])


@dataclass(frozen=True)
class Row:
    """What was typed, what to type here, in terminals of their own, and what differs."""

    section: str
    there: tuple[str, ...]
    here: tuple[str, ...]
    differs: str

    @property
    def kind(self) -> str:
        """How it is run.

        Raises:
            ValueError: where nobody has said how.
        """
        last = " ".join(Line.of(self.here[-1]).words)
        for kind, begins in KINDS.items():
            if last.startswith(begins):
                served = kind in ("run", "offline") and len(self.here) > 1
                return {"run": "served", "offline": "offline_served"}[kind] if served else kind
        raise ValueError(f"nobody has said how test_commands.py runs {last!r}; see KINDS")


def rows(page: str) -> list[Row]:
    """The rows of all tables of the page.

    Raises:
        ValueError: naming a line of a table that is no row of three cells: commands, commands or
            :data:`SAME`, and a few words.
    """
    found, section, begun = [], "", False
    for line in page.splitlines():
        if line.startswith("## "):
            section, begun = line.removeprefix("## "), False
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.split("|")]
        if cells.pop(0) or cells.pop() or len(cells) != 3:
            raise ValueError(f"{section}: not three cells: {line}")
        if cells == HEADER or begun and set("".join(cells)) == {"-"}:
            begun = True
            continue
        there, here, differs = cells
        if not (begun and _CODES.fullmatch(there) and differs
                and (here == SAME or _CODES.fullmatch(here))):
            raise ValueError(f"{section}: no row of commands, commands or {SAME!r}, and words, "
                             f"below {' | '.join(HEADER)}: {line}")
        old = tuple(re.findall("`([^`]+)`", there))
        found.append(Row(section, old, tuple(re.findall("`([^`]+)`", here)) or old, differs))
    known = [row.there for row in found]
    if twice := [there for there in known if known.count(there) > 1]:
        raise ValueError(f"two rows for {twice[0]}")
    return found


def devices(words: list[str], section: str) -> int:
    """How many devices a role is given by ``num_devices`` or ``devices``; 0: nothing is said.

    Examples:
        >>> devices(["ref_model.devices=[0,2]"], "ref_model")
        2
    """
    for word in words:
        key, _, value = word.partition("=")
        if key == f"{section}.num_devices":
            return int(value)
        if key == f"{section}.devices":
            return value.count(",") + 1
    return 0
