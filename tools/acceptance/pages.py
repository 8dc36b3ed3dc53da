"""Commands in the code blocks of the pages that people read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/environments.md", "docs/async.md", "docs/objectives.md",
         "docs/weights.md", "examples/atropos/README.md")


class Command(NamedTuple):
    """A command, in one line, and the page it stands on."""

    page: str
    text: str


def page_commands(root: Path = REPO) -> list[Command]:
    """All commands of the pages, in their order; one that stands on two pages is there twice."""
    return [Command(page, text) for page in PAGES
            for block in blocks((root / page).read_text(encoding="utf-8"))
            for text in commands(block)]


def blocks(page: str, language: str = "bash") -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def commands(block: str) -> list[str]:
    """Commands of a block of shell lines; what a backslash or an open quote goes on with is joined.

    Examples:
        >>> commands("one \\\\\\n  two\\nA=$(python -c '\\nx = 1')\\n")
        ['one two', "A=$(python -c '\\nx = 1')"]
    """
    found, begun = [], ""
    for line in block.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if begun.endswith("\\"):
            continue
        try:
            words = shlex.split(begun)
        except ValueError:  # a quote is still open
            continue
        if words:
            found.append(re.sub(r"\s*\\\n\s*", " ", begun))
        begun = ""
    return found
