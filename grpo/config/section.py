"""What the sections of the configuration have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from grpo.config.unread import Unread


class Section(BaseModel):
    """Keys are checked, unknown ones refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    #: Runs that read none of its keys.
    only: ClassVar[Unread | None] = None

    def given(self) -> dict[str, Any]:
        """The keys that are not null."""
        return {key: value for key, value in self if value is not None}
