"""The types of a command line's values."""

from __future__ import annotations

import argparse
import re
from typing import Any


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
