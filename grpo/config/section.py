"""What the sections of the configuration have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict

from grpo.config.unread import Unread
from grpo.system.http_call import split_url


class Section(BaseModel):
    """Keys are checked, unknown ones refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    #: Runs that read none of its keys.
    only: ClassVar[Unread | None] = None

    def given(self) -> dict[str, Any]:
        """The keys that are not null."""
        return {key: value for key, value in self if value is not None}


def server_address(section: str) -> AfterValidator:
    """For key ``url`` of a section: refuses what is not of the form ``http://host:port``."""
    def check(url: str) -> str:
        try:
            split_url(url)
        except ValueError as error:
            raise ValueError(f"{section}.{error}, such as http://127.0.0.1:8000") from None
        return url

    return AfterValidator(check)
