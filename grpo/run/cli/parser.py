"""A command line that says in one line what is wrong with it, and the types of its values."""

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
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

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


class OneName(argparse.Action):
    """A value that counts as it is given last, but not under two names: one of them would be
    silently ignored."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Any, option_string: str | None = None) -> None:
        names = vars(namespace).setdefault("_names", {})
        before, name = getattr(namespace, self.dest), names.setdefault(self.dest, option_string)
        if name != option_string and before != values:
            parser.error(f"{name} {before} and {option_string} {values} are the same setting; "
                         "give one")
        setattr(namespace, self.dest, values)


def layer_indices(text: str) -> list[int]:
    """Numbers of layers from a list of numbers and ranges.

    Examples:
        >>> layer_indices("0-3,28-31")
        [0, 1, 2, 3, 28, 29, 30, 31]
        >>> layer_indices("3-1")
        Traceback (most recent call last):
        ...
        argparse.ArgumentTypeError: '3-1' is no range of layers; write such as 0-3,28-31
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise argparse.ArgumentTypeError(f"{part!r} is no range of layers; write such as "
                                             "0-3,28-31")
        found.update(range(first, last + 1))
    return sorted(found)


def ports(text: str) -> list[int]:
    """Ports from a list.

    Examples:
        >>> ports("9004,9005")
        [9004, 9005]
    """
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ports; write such as 9004,9005")
    return [int(port) for port in text.split(",")]


def device(text: str) -> str:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; use auto, cpu, cuda or cuda:1")
    return text


def dtype(text: str) -> str:
    """The precision of the weights on both sides."""
    if text == "float16":
        raise argparse.ArgumentTypeError(
            "float16 is not trained in: small gradients vanish in its range, and a loss scaled "
            "against that would step late; use bfloat16")
    if text not in ("auto", "bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; use auto, bfloat16 or float32")
    return text
