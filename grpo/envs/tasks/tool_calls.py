"""Tool calls in what a model has said, in the format of Hermes, which Qwen's chat templates use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A tool's name, and its arguments by their names."""

    name: str
    arguments: dict[str, Any]


def read_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """What stands before the first tool call, and the calls.

    A block that is no call is left out, so that a model which writes none that can be read has
    called no tool; where none can be read, the text is all that was said.

    Examples:
        >>> read_tool_calls('Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        ('Hm.', [ToolCall(name='add', arguments={'a': 1})])
        >>> read_tool_calls("<tool_call>add(1)</tool_call>")
        ('<tool_call>add(1)</tool_call>', [])
    """
    said, *blocks = text.split(_OPEN)
    calls = [call for block in blocks
             if _CLOSE in block and (call := _read(block.partition(_CLOSE)[0])) is not None]
    return (said.strip(), calls) if calls else (text, [])


def _read(block: str) -> ToolCall | None:
    try:
        found = json.loads(block)
    except (ValueError, RecursionError):  # brackets nested too deep
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return ToolCall(found["name"], arguments) if isinstance(arguments, dict) else None
