"""A command line that says in one line what is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Errors without the pages of usage that argparse puts before them; flags are written in full.

    Examples:
        >>> parser = Parser(prog="train")
        >>> _ = parser.add_argument("--learning-rate")
        >>> import contextlib, sys
        >>> with contextlib.redirect_stderr(sys.stdout), contextlib.suppress(SystemExit):
        ...     parser.parse_args(["--learning-rat", "1"])
        error: --learning-rat: unknown flag; did you mean --learning-rate? (train --help lists all)
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        end_with(self, message)


def end_with(
    parser: argparse.ArgumentParser, message: str, *, more: Sequence[str] = ()
) -> NoReturn:
    """End the command with one line, which proposes a flag in place of an unknown one: one of the
    parser's, or of ``more``."""
    if found := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
        known = [name for action in parser._actions for name in action.option_strings]
        known += more
        close = difflib.get_close_matches(found[1], known, n=1, cutoff=0.7)
        message = f"{found[1]}: unknown flag" + "".join(
            f"; did you mean {name}?" for name in close)
    parser.exit(2, f"error: {message} ({parser.prog} --help lists all)\n")


@contextmanager
def errors_in_a_line(
    *errors: type[Exception], switch: str, said: Callable[[str], str] = str
) -> Iterator[None]:
    """End the command with a message instead of a traceback, unless the variable ``switch`` is 1.

    For what is nearly always bad input, or something outside that failed.
    """
    try:
        yield
    except errors as error:
        if os.environ.get(switch) == "1":
            raise
        sys.exit(f"error: {said(str(error))}\n(set {switch}=1 to see where it was raised)")
