"""What the clients of the engine server and of the Atropos API share: a call with one deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import orjson

from grpo.system.http_call import http_request, split_url


class CallError(RuntimeError):
    """A server refused or failed a call.

    Attributes:
        status: HTTP status; None if there was no answer.
        param: the option to blame, if the server named one.
    """

    def __init__(self, message: str, *, status: int | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


class JsonClient:
    """Calls to an API that speaks JSON, each over a connection of its own, so that threads can
    share a client.

    Args:
        url: ``http://host:port``.
        token: access token of the server.
        timeout: seconds a call may take unless it is given its own.

    Attributes:
        refused: raised where the server refuses or fails a call.
        timed_out: raised where a deadline passes, and what to do then.
        unreachable: raised where nobody answers, and what to do then.

    Raises:
        ValueError: for another address.
    """

    refused: ClassVar[type[CallError]]
    timed_out: ClassVar[tuple[type[CallError], str]]
    unreachable: ClassVar[tuple[type[CallError], str]]

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 60.0) -> None:
        self.host, self.port = split_url(url)
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout

    def answers(self, path: str) -> bool:
        """True if a GET is answered; waits 5 seconds at most."""
        try:
            self.call("GET", path, timeout=min(5.0, self.timeout))
        except CallError:
            return False
        return True

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """One request; returns the JSON of the answer.

        Raises:
            CallError: of the kinds above, with the server's message.
        """
        raw = self.exchange(method, path, body, timeout=timeout)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise self.refused(f"{method} {self.url}{path}: the answer is not JSON; does another "
                               "program listen there?") from None

    def exchange(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None,
        on_line: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Like :meth:`call`, but returns the answer as it came.

        Args:
            method: such as ``POST``.
            path: with its query.
            body: sent as JSON.
            timeout: seconds for all of it.
            on_line: gets each line of the answer as soon as it is there.
        """
        what = f"{method} {self.url}{path}"
        timeout = self.timeout if timeout is None else timeout
        try:
            status, raw = http_request(
                self.host, self.port, method, path, None if body is None else orjson.dumps(body),
                token=self.token, timeout=timeout, on_line=on_line)
        except TimeoutError:
            kind, advice = self.timed_out
            raise kind(f"{what}: no answer in {timeout:g} s{advice}") from None
        except ConnectionError as error:
            kind, advice = self.unreachable
            raise kind(f"{what}: {error or type(error).__name__}; {advice}") from error
        if status >= 400:
            raise self.refusal(what, raw, status)
        return raw

    def refusal(self, what: str, raw: bytes, status: int) -> CallError:
        """The error for what a server said of a call, in its own words."""
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError:
            value = raw[:200].decode("utf-8", "replace")
        error = value.get("error") if isinstance(value, dict) else None
        said, param = ((error["message"], error.get("param")) if isinstance(error, dict)
                       else (str(value)[:200], None))
        kind = self.timed_out[0] if status == 504 else self.refused
        return kind(f"{what}: {said} (status {status})", status=status, param=param)
