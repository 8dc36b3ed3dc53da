"""Reads the bodies of requests to the hub, packed or not; an error names the first wrong field."""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from grpo.atropos.wire_json import GroupError, read_json, restandardised
from grpo.system.json_api import ApiError, shorten

_MOST_MEMBERS = 8  # of a gzip file; unpacking one copies all that follow
Model = TypeVar("Model", bound=BaseModel)


async def read_model(request: Request, model: type[Model]) -> Model:
    """The request's JSON as ``model``; ApiError 422 names the first field that is wrong."""
    try:
        value, standard = read_json(await unpacked_body(request))
        if not standard:
            # What is kept is shown again, and must then be JSON that everybody reads.
            value = restandardised(value)
    except GroupError as error:
        raise ApiError(str(error), status=422) from None
    return validate(model, value)


def validate(model: type[Model], value: Any) -> Model:
    """A value as ``model``; errors as :func:`read_model`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(step) for step in first["loc"]) or "body"
        raise ApiError(f"{name}={shorten(first['input'], 60)}: {first['msg']}", status=422,
                       param=name) from None


async def unpacked_body(request: Request) -> bytes:
    """The request's body, unpacked; ApiError for what is not gzip, or too large (413)."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        # Nobody reads this answer; it keeps a traceback out of the server's log.
        raise ApiError("the client went away", status=499, type="client_closed") from None
    if not raw or "gzip" not in request.headers.get("content-encoding", "").lower():
        return raw
    limit = request.app.state.service.max_body_bytes
    unpacked = b""
    for _ in range(_MOST_MEMBERS):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            unpacked += unpacker.decompress(raw, limit + 1 - len(unpacked))
        except zlib.error as error:
            raise ApiError(f"Invalid gzip payload: {error}", type="bad_gzip") from None
        if len(unpacked) > limit:
            raise ApiError(f"the body, unpacked, is greater than {limit} bytes; send smaller "
                           "groups, or start the server with a greater --max-body-mib",
                           status=413, type="request_too_large")
        if not unpacker.eof:
            raise ApiError("Invalid gzip payload: it is cut short", type="bad_gzip")
        raw = unpacker.unused_data
        if not raw:
            return unpacked
    raise ApiError(f"Invalid gzip payload: it has more than {_MOST_MEMBERS} members; pack it as "
                   "one", type="bad_gzip")
