"""Reads and writes JSON of unknown senders, and names what it refuses."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import orjson

MAX_DEPTH = 64  # of the fields that may hold anything


class GroupError(ValueError):
    """A group that cannot be queued or trained on.

    Attributes:
        reason: a short word to count by: ``not_json``, ``bad_type``, ``not_finite``,
            ``out_of_range``, ``too_deep``, ``empty_group``, ``empty_sequence``, ``bad_length``,
            ``bad_token``, ``bad_mask``, ``nothing_trained``, and of a model ``unknown_token``,
            ``images``.

    Examples:
        >>> GroupError("empty_group", "tokens=[] has no sequence").reason
        'empty_group'
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_json(raw: bytes) -> tuple[Any, bool]:
    """Decode JSON as Python writes it, NaN and lone surrogates included, and say whether it is
    standard JSON, too; GroupError ``not_json`` for anything else.

    Examples:
        >>> read_json(b"[1.5]"), read_json(b"[NaN]")
        (([1.5], True), ([nan], False))
    """
    try:
        return orjson.loads(raw), True
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw), False
        except (ValueError, RecursionError) as error:
            raise GroupError("not_json", f"the body is not JSON: {error}") from None


def write_json(value: Any) -> bytes:
    """``value`` as standard JSON. Half of a surrogate pair becomes a question mark; NaN and
    infinity are refused (GroupError ``not_finite``), wherever they are.

    Examples:
        >>> write_json({"content": "a" + chr(0xd800)})
        b'{"content": "a?"}'
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    except ValueError as error:
        raise GroupError("not_finite", f"a field holds NaN or infinity: {error}") from None
    except RecursionError:
        raise GroupError("too_deep", "a field is nested too deeply") from None


def restandardised(value: Any) -> Any:
    """``value`` without what standard JSON lacks, such as half of a surrogate pair; GroupError for
    what cannot be written so, such as an integer beyond 64 bits."""
    try:
        return orjson.loads(write_json(value))
    except orjson.JSONDecodeError as error:
        raise GroupError("out_of_range", f"the body is JSON that few can read: {error}") from None


def check_depth(obj: Any, *, known: Collection[str] = ()) -> None:
    """Refuse an object (reason ``too_deep``) that is nested so deeply that writing or reading it
    again would fail; the depth of the ``known`` fields is checked with their types."""
    if not isinstance(obj, dict):
        return
    level = [value for name, value in obj.items() if name not in known]
    for _ in range(MAX_DEPTH):
        level = [child for value in level if isinstance(value, (dict, list))
                 for child in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise GroupError("too_deep", f"a field is nested more than {MAX_DEPTH} levels deep")
