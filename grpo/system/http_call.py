"""One HTTP request with one deadline, for all of it."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import orjson


def split_url(url: str) -> tuple[str, int]:
    """Host and port of a server's address.

    Raises:
        ValueError: if it is not of the form ``http://host:port``.

    Examples:
        >>> split_url("http://127.0.0.1:9001/")
        ('127.0.0.1', 9001)
    """
    wrong = ValueError(f"url={url!r} must have the form http://host:port")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/"):
        raise wrong
    return parts.hostname, port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    Examples:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def http_request(
    host: str, port: int, method: str, path: str, body: bytes | None = None, *,
    token: str | None = None, timeout: float, on_line: Callable[[bytes], None] | None = None,
) -> tuple[int, bytes]:
    """Send a request with a JSON body over a connection of its own; status and body of the answer.

    ``on_line`` gets each line of an answer that is no refusal as soon as it is there, and the body
    is what is left. The other arguments are those of :class:`~grpo.system.json_client.JsonClient`.

    Raises:
        TimeoutError: if the whole answer is not here after ``timeout`` seconds.
        ConnectionError: if there is no server, or it goes away or errs in the protocol.
    """
    deadline = time.monotonic() + timeout
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        try:
            connection.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a body stops reading it, but has sent its reasons before.
            if connection.sock is None:
                raise
        sock = connection.sock
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        response = connection.getresponse()
        try:
            on_line = on_line if response.status < 400 else None
            return response.status, _read(sock, response, deadline, on_line)
        except (ConnectionError, http.client.HTTPException):
            if response.status < 400:
                raise
            # It closed on a body that was still being sent, which may take the reasons with it.
            return response.status, orjson.dumps({"error": {"message": (
                f"{response.reason}; the server closed before it had read the request")}})
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    finally:
        connection.close()


def _read(
    sock: socket.socket, response: http.client.HTTPResponse, deadline: float,
    on_line: Callable[[bytes], None] | None,
) -> bytes:
    """The body, or what follows its last line."""
    pieces = []
    # From Python 3.12.3 on the last piece closes the response, and the socket with it.
    while not response.isclosed():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        piece = response.read1(1 << 16)
        if not piece:
            break
        pieces.append(piece)
        if on_line is not None and b"\n" in piece:
            *lines, rest = b"".join(pieces).split(b"\n")
            pieces = [rest]
            for line in lines:
                on_line(line)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)
