"""What our HTTP servers have in common: who may ask, limit of the body, errors as JSON.

A web page in a browser on this machine can send requests to any port of it, also to those that
other machines cannot reach. The browser says so, and no request that comes from a page is answered:
neither one with a foreign ``Origin`` or ``Sec-Fetch-Site``, nor, where there is no token, one to a
name other than this machine's, which a page's owner may have made to lead here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import logging
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo.system.json_api import ApiError

# Times the limit, of a body that is read to its end so that its sender can read the refusal.
_MOST_DISCARDED = 16
IDLE_SECONDS = 30.0  # between two pieces of a body
BODY_SECONDS = 300.0  # for all of it
logger = logging.getLogger(__name__)


def bare_app(
    title: str, *, token: str | None, max_body_bytes: int, open_paths: tuple[str, ...] = (),
    advice: str = "",
) -> FastAPI:
    """An application without routes that asks for the token, bounds bodies, and errs in JSON.

    Args:
        title: of the application.
        token: if given, requests want ``Authorization: Bearer <token>``, or the token as the
            password of basic authentication, which clients send for ``http://:<token>@host:port``.
            Without one, requests must name this machine by an address, ``localhost`` or its name.
        max_body_bytes: greater requests are answered with 413.
        open_paths: for these no token is wanted.
        advice: what the sender of too great a body can do.

    Raises:
        ValueError: for a token that is empty.
    """
    if token is not None and not token.strip():
        raise ValueError(f"token={token!r} is empty, and would keep nobody out; give another, or "
                         "None")
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_exception_handler(Exception, fault)
    app.add_middleware(_Guard, token=token, max_body_bytes=max_body_bytes, open_paths=open_paths,
                       advice=advice)
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    return ApiError(f"{request.method} {request.url.path}: {error.detail}",
                    status=error.status_code, type="not_found").response()


async def _bad_query(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return ApiError(f"{name}={first['input']!r}: {first['msg']}", param=name).response()


async def fault(request: Request, error: Exception) -> Response:
    """An error of ours: logged, and answered with 500."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, type="server_error").response()


@dataclass(frozen=True)
class _Guard:
    """Refuse requests without the token or with too great a body, before any route sees them."""

    app: ASGIApp
    token: str | None
    max_body_bytes: int
    open_paths: tuple[str, ...]
    advice: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if reason := _of_a_page(headers, any_name=self.token is not None):
            error = ApiError(f"this server does not answer web pages, and {reason}", status=403,
                             type="forbidden")
            return await error.response()(scope, receive, send)
        if self.token is not None and scope["path"] not in self.open_paths and not (
                hmac.compare_digest(_secret(headers.get(b"authorization", b"")),
                                    self.token.encode())):
            error = ApiError("this server wants the header 'Authorization: Bearer <token>' with "
                             "the token it was started with", status=401,
                             type="authentication_error")
            return await error.response()(scope, receive, send)
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            # A client that is still sending would see its connection break, and no answer.
            patient = _patient(receive)
            while int(announced) <= _MOST_DISCARDED * self.max_body_bytes and (
                    await patient()).get("more_body"):
                pass
            return await self._too_great().response()(scope, receive, send)
        received, patient = 0, _patient(receive)

        async def counted() -> Message:
            nonlocal received
            message = await patient()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise self._too_great()
            return message

        await self.app(scope, counted, send)

    def _too_great(self) -> ApiError:
        return ApiError(f"the body is greater than {self.max_body_bytes} bytes; {self.advice}start "
                        "the server with a greater --max-body-mib", status=413,
                        type="request_too_large")


def _patient(receive: Receive) -> Receive:
    """``receive`` with a deadline for the body; the client's leave, after it, is waited for."""
    loop = asyncio.get_running_loop()
    deadline, whole = loop.time() + BODY_SECONDS, False

    async def patient() -> Message:
        nonlocal whole
        if whole:
            return await receive()
        try:
            message = await asyncio.wait_for(
                receive(), max(0.0, min(IDLE_SECONDS, deadline - loop.time())))
        except TimeoutError:
            raise ApiError("the rest of the body did not come in time", status=408,
                           type="timeout") from None
        whole = not message.get("more_body", False)
        return message

    return patient


def from_browser(request: Request) -> bool:
    """Whether a browser may have sent a request, for whatever reason."""
    return any(name in request.headers for name in ("origin", "referer", "sec-fetch-site"))


def _of_a_page(headers: dict[bytes, bytes], *, any_name: bool) -> str:
    """Why a request may come from a web page; empty if it does not."""
    host = headers.get(b"host", b"localhost").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and origin != f"http://{host}":
        return f"the request has the header Origin: {origin[:80]}"
    site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
    if site not in ("none", "same-origin"):
        return f"the request has the header Sec-Fetch-Site: {site[:20]}"
    if not any_name and not _is_own_name(host):
        return (f"the request is for the host {host[:80]!r}, a name that may lead here by a trick; "
                "call the server by its address")
    return ""


def _is_own_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return (name == "localhost" or name.endswith(".localhost")
                or name == socket.gethostname().lower())


def _secret(authorization: bytes) -> bytes:
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value).partition(b":")[2]
        except binascii.Error:
            pass
    return b""
