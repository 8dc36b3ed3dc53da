"""JSON over HTTP as our servers speak it: bodies as models, refusals that name the field."""

from __future__ import annotations

import json
import reprlib
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect


class ApiError(Exception):
    """A request that is answered with a JSON error.

    Args:
        message: what is wrong and how to put it right.
        status: HTTP status.
        type: kind of error, a word for programs.
        param: the field to blame, if there is one.

    Examples:
        >>> error = ApiError("n=0 must be at least 1", param="n")
        >>> error.status, error.body()["error"]["type"]
        (400, 'invalid_request_error')
    """

    def __init__(
        self, message: str, *, status: int = 400, type: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type, self.param = message, status, type, param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param}}

    def response(self) -> Response:
        response = json_response(self.body(), status=self.status)
        if self.status == 408:  # what comes later of the request is not the next one
            response.headers["Connection"] = "close"
        return response


def json_response(value: Any, *, status: int = 200) -> Response:
    """``value`` as JSON; NaN and infinity never leave the server, so none must be in it.

    What a request said may be repeated in an answer: half of a surrogate pair, which has no UTF-8,
    becomes a question mark, and integers may be of any size.
    """
    try:
        raw = orjson.dumps(value)
    except TypeError:
        raw = json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    return Response(raw, status_code=status, media_type="application/json")


class Body(BaseModel):
    """A JSON object whose fields are all known and of the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Body)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON as ``model``; an empty body stands for ``{}``.

    Raises:
        ApiError: naming the first field that is wrong.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError("the client went away", status=499, type="client_closed") from None
    try:
        # Strict JSON: NaN and Infinity, which Python's own parser takes, are refused.
        value = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, not {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    field = str(error["loc"][0]) if error["loc"] else None
    if error["type"] == "extra_forbidden":
        raise ApiError(f"unknown field {field!r}; known are {', '.join(model.model_fields)}",
                       param=field)
    given = f"={shorten(value[field])}" if field in value else ""
    where = f"{field}{given}: " if field else ""
    raise ApiError(where + error["msg"].removeprefix("Value error, "), param=field)


def shorten(value: Any, limit: int = 80) -> str:
    """``repr`` of a value cut to ``limit`` characters, which takes no longer for great values."""
    text = _BRIEF.repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 4, 30, 10
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 100
