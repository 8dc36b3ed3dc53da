"""Tool calls in text."""

from __future__ import annotations

import pytest

from grpo.envs.tasks.tool_calls import ToolCall, read_tool_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_several_calls_are_read_in_their_order():
    other = '<tool_call>{"name": "stop"}</tool_call>'
    assert read_tool_calls(f"Well.\n{CALL}\n{other}") == (
        "Well.", [ToolCall("add", {"a": 1, "b": [2]}), ToolCall("stop", {})])


@pytest.mark.parametrize("text", [
    "", "no call", "<tool_call>{}</tool_call>", "<tool_call>[1]</tool_call>",
    '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": "a", "arguments": "b"}</tool_call>',
    '<tool_call>{"name": "a"}', "<tool_call>{'name': 'a'}</tool_call>",
    "<tool_call>" + "[" * 100_000 + "</tool_call>"])
def test_what_is_no_call_stays_text(text):
    assert read_tool_calls(text) == (text, [])


def test_a_call_beside_one_that_cannot_be_read_counts():
    assert read_tool_calls(f"<tool_call>{{</tool_call>{CALL}")[1] == [
        ToolCall("add", {"a": 1, "b": [2]})]
