"""A completion as an evaluation records it."""

from __future__ import annotations

from typing import Any

from grpo.report.loggers import Sample


def sample(**changes: Any) -> Sample:
    """A right answer, but for what is to be different."""
    right = {"prompt": "2 + 2?", "completion": "4", "reward": 1.0, "success": True,
             "truncated": False, "answer": "4"}
    return Sample(**(right | changes))
