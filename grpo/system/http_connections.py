"""How our HTTP servers deal with connections: so many, each with deadlines, none forwarded."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0  # from the first byte of a request, or from the connection, to the last header
_MOST_FILES = 1 << 16
_SPARE_FILES = 256


def server_of(app: Any, *, grace: int) -> uvicorn.Server:
    """A server for an application; whoever holds a connection without asking loses it.

    ``X-Forwarded-For`` is not read, because anybody can write it. More connections than half of the
    files that this process may open are answered with 503. Running requests have ``grace`` seconds
    when the server is told to stop.
    """
    return uvicorn.Server(uvicorn.Config(
        app, http=Impatient, ws="none", lifespan="off", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, timeout_graceful_shutdown=grace,
        limit_concurrency=_connections()))


class Impatient(AutoHTTPProtocol):
    """uvicorn's protocol, with a deadline for the head of a request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop()
        super().connection_lost(error)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _connections() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(16, min(soft // 2, soft - _SPARE_FILES))
