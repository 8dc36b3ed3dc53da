"""Ports of this machine that lead to an engine: ``python -m grpo.atropos.forward --help``.

atroposlib asks ``localhost:9004`` to ``9007``, whatever ``--openai.base_url`` says, where an
environment's ``config_init`` returns one server configuration and not a list of them. Connections
to these ports are passed on as they are, so that answers stream as they do at the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from grpo.system.http_call import split_url
from grpo.system.lifeline import bind
from grpo.system.ports import check_ports

#: Ports that are written into atroposlib.
ATROPOSLIB_PORTS = (9004, 9005, 9006, 9007)
_HOST = "127.0.0.1"
_PIECE = 1 << 16  # bytes that are read at a time
_CONNECT_SECONDS = 10.0
_STOP_SECONDS = 10.0
_DISCARD_SECONDS = 5.0


class PortForwarder:
    """Listen on ports of the loopback interface and pass connections on; a context manager.

    Args:
        ports: where to listen; 0 takes a free one, and the attribute ``ports`` has its number.
        url: of the server that answers, ``http://host:port``; while nothing listens there, requests
            are answered with 503.
        max_connections: at a time, over all ports; more are answered with 503.

    Attributes:
        connections: number of connections so far.

    Raises:
        ValueError: for a port that is the server's own, or is named twice.
        OSError: naming the port, if it is taken.

    Examples:
        >>> with PortForwarder([9004, 9005], "http://127.0.0.1:9001"):      # doctest: +SKIP
        ...     train()
    """

    def __init__(
        self, ports: Sequence[int], url: str, *, max_connections: int = 1024
    ) -> None:
        if max_connections < 1:
            raise ValueError(f"max_connections={max_connections} must be at least 1")
        self.url, self.max_connections = url, max_connections
        self._target = split_url(url)
        check_ports(ports, url)
        self._sockets: list[socket.socket] = []
        try:
            for port in ports:
                self._sockets.append(bind(_HOST, port))
        except OSError as error:
            self._close_sockets()
            raise OSError(error.errno, f"port {port} of {_HOST} cannot be forwarded: "
                          f"{os.strerror(error.errno)}") from error
        self.ports = tuple(sock.getsockname()[1] for sock in self._sockets)
        self.connections = 0
        self._open: set[asyncio.Task] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()),
                                        name="port-forwarder", daemon=True)

    def __enter__(self) -> PortForwarder:
        self._thread.start()
        if not self._ready.wait(_STOP_SECONDS):
            raise RuntimeError(f"the ports {self.ports} could not be listened on in time")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and close what is open; may be called again."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop has just ended
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(_STOP_SECONDS)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        servers = [await asyncio.start_server(self._accept, sock=sock, limit=_PIECE)
                   for sock in self._sockets]
        self._ready.set()
        await self._ended.wait()
        for server in servers:
            server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self._open.add(task)
        try:
            if len(self._open) > self.max_connections:
                return await _refuse(reader, writer, f"{self.max_connections} connections are open "
                                     "at these ports, as many as may be; start fewer workers")
            await self._pass_on(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # one of the two is gone, or the run is over
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port = self._target
        try:
            answers, asks = await asyncio.wait_for(
                asyncio.open_connection(host, port, limit=_PIECE), _CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            return await _refuse(reader, writer, f"the engine at {self.url} does not answer "
                                 f"({error}); it may be starting: ask again later")
        sent = asyncio.ensure_future(_copy(reader, asks))
        try:
            await _copy(answers, writer)
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
            asks.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, and its end, holding no more than one piece and a buffer."""
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: str
) -> None:
    body = json.dumps({"error": {"message": message, "type": "unavailable",
                                 "param": None}}).encode()
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.write_eof()
    # A client that is still sending when the connection is closed would not see the answer.
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while await reader.read(_PIECE):
                pass


def main(argv: list[str] | None = None) -> None:
    """Forward until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.atropos.forward", description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--to", default="http://127.0.0.1:9001", metavar="URL",
                        help="of the engine")
    parser.add_argument("ports", nargs="*", type=int, default=ATROPOSLIB_PORTS,
                        help="of this machine")
    args = parser.parse_args(argv)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        with PortForwarder(args.ports, args.to) as forwarder:
            print(f"the ports {', '.join(map(str, forwarder.ports))} lead to {args.to}", flush=True)
            ended.wait()
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
