"""The engine server's application: routes, errors as JSON, access token, limit of the body."""

from __future__ import annotations

import hmac
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grpo.engines import routes_bridge, routes_generate, routes_openai
from grpo.engines.api import ApiError
from grpo.engines.generation import Generation
from grpo.engines.versioned import Constructors, VersionedEngine

MAX_BODY_BYTES = 32 << 20
logger = logging.getLogger(__name__)


def create_app(
    engine: Any,
    *,
    tokenizer: Any,
    model_names: tuple[str, ...],
    max_model_len: int,
    vocab_size: int,
    make: Constructors | None = None,
    token: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    rpc_methods: tuple[str, ...] = (),
    info: dict[str, Any] | None = None,
    handover: dict[str, Any] | None = None,
) -> FastAPI:
    """The application around a running engine.

    Args:
        engine: vLLM's ``AsyncLLM``.
        tokenizer: of the model, with its chat template.
        model_names: names by which requests may call the model; the first is shown.
        max_model_len: prompt plus response, in tokens.
        vocab_size: of the model.
        make: how to build vLLM's types; imports vLLM if left out.
        token: if given, all routes but ``/health`` want ``Authorization: Bearer <token>``.
        max_body_bytes: greater requests are answered with 413.
        rpc_methods: what ``/bridge/rpc`` may call on the workers.
        info: facts that ``/bridge/info`` repeats. ``max_lora_rank`` set means adapters can be
            loaded, ``sleep_mode`` true that the engine can give its memory back.
        handover: description of the shared weights, where they are shared.
    """
    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(title="grpo engine", docs_url=None, redoc_url=None)
    state = app.state
    state.versioned = VersionedEngine(engine, model_names=model_names,
                                      make=make or Constructors.vllm())
    state.generation = Generation(state.versioned, tokenizer=tokenizer,
                                  max_model_len=max_model_len, vocab_size=vocab_size)
    state.info = {"model_name": model_names[0], "model": model_names[-1], **(info or {})}
    state.handover, state.rpc_methods = handover, rpc_methods
    state.updates, state.last_update = 0, 0.0
    for module in (routes_generate, routes_openai, routes_bridge):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_exception_handler(Exception, _fault)
    app.add_middleware(_Guard, token=token, max_body_bytes=max_body_bytes)
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


async def _fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, type="server_error").response()


class _Guard:
    """Refuse requests without the token or with too great a body, before any route sees them."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self.app = app
        self.expected = None if token is None else f"Bearer {token}".encode()
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        if self.expected is not None and scope["path"] != "/health" and not hmac.compare_digest(
                headers.get(b"authorization", b""), self.expected):
            error = ApiError("this server wants the header 'Authorization: Bearer <token>' with "
                             "the token it was started with", status=401,
                             type="authentication_error")
            return await error.response()(scope, receive, send)
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_body_bytes:
            return await self._too_great().response()(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise self._too_great()
            return message

        await self.app(scope, counted, send)

    def _too_great(self) -> ApiError:
        return ApiError(f"the body is greater than {self.max_body_bytes} bytes; send fewer prompts "
                        "a request, or start the server with a greater --max-body-mib",
                        status=413, type="request_too_large")
