"""The hub as a server: in a thread of this process, or ``python -m grpo.atropos.hub_server``.

It listens on the loopback interface unless told otherwise, and anywhere else only with a token.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import threading
from pathlib import Path
from typing import Any

from grpo.atropos.client import AtroposClient
from grpo.atropos.hub_journal import Journal
from grpo.atropos.hub_state import Limits
from grpo.system.command_line import Parser
from grpo.system.http_call import is_loopback
from grpo.system.lifeline import TOKEN_VARIABLE, bind, exit_with_parent

_PROG = "python -m grpo.atropos.hub_server"
DEFAULT_PORT = 8000  # run-api's
_START_SECONDS = 30.0


class HubServer:
    """A hub that answers from a thread; a context manager that starts and stops it.

    Args:
        host: address to listen on; anywhere but on a loopback address a token is needed.
        port: 0 takes a free one.
        token: access token.
        journal: file in which the hub's state survives a restart; None keeps it in memory.
        limits: of memory and time.
        **options: further ones of :func:`~grpo.atropos.hub_app.create_app`.

    Raises:
        ValueError: if the address is open to other machines and there is no token, or if the
            journal is not one.
        OSError: if the port or the journal is in use.

    Examples:
        >>> with HubServer() as hub:                                     # doctest: +SKIP
        ...     start_environment(rollout_server_url=hub.url)
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        journal: str | Path | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        self.token = token
        self._server, self._journal = build(host, token=token, journal=journal, limits=limits,
                                            **options)
        try:
            self._socket = bind(host, port)
        except OSError:
            self._close_journal()
            raise
        self.port = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), name="grpo-hub", daemon=True)

    def __enter__(self) -> HubServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the thread, and return when the hub answers; RuntimeError otherwise."""
        self._thread.start()
        AtroposClient(self.url, token=self.token).wait_ready(timeout=_START_SECONDS)

    def stop(self, *, timeout: float = 10.0) -> None:
        """End the thread, or raise TimeoutError; held requests are answered with an error."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the hub at {self.url} did not end in {timeout:g} s")
        self._socket.close()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()


def build(
    host: str,
    *,
    token: str | None = None,
    journal: str | Path | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> tuple[Any, Journal | None]:
    """A uvicorn server for a hub, and the hub's journal; raises as :class:`HubServer`, and
    ModuleNotFoundError naming what to install."""
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("fastapi") is None:
        raise ModuleNotFoundError("the hub needs a web server: pip install fastapi uvicorn")
    from grpo.atropos.hub import Hub
    from grpo.atropos.hub_app import create_app
    from grpo.system.http_connections import server_of

    token = (token or "").strip() or None
    if token is None and not is_loopback(host):
        raise ValueError(f"host={host!r} opens the hub to other machines, whose groups would train "
                         f"the model; give a token (or {TOKEN_VARIABLE}), or use 127.0.0.1")
    opened = Journal(journal) if journal is not None else None
    app = create_app(Hub(limits=limits or Limits(), journal=opened), token=token, **options)
    return server_of(app, grace=1), opened


def parser(prog: str = _PROG) -> argparse.ArgumentParser:
    """The command line; ``--host`` and ``--port`` are those of ``run-api``."""
    parser = Parser(
        prog=prog, description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=DEFAULT_PORT, help="0 chooses a free one")
    add("--fd", type=int, help="a bound socket to listen on, inherited from the parent")
    add("--token", help=f"wanted from clients; default: the variable {TOKEN_VARIABLE}")
    add("--journal", type=Path, help="file in which the state survives a restart")
    add("--max-queue-mib", type=int, default=1024, help="of waiting groups; beyond, senders wait")
    add("--max-body-mib", type=int, default=32, help="greater requests are refused")
    add("--env-seconds", type=float, default=120.0,
        help="an environment that is silent for so long counts as gone")
    add("--minimum-seconds", type=float, default=60.0,
        help="how long a batch waits for an environment's min_batch_allocation")
    add("--private", action="store_true",
        help="for the run that starts it; others leave it alone")
    add("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser


def main(argv: list[str] | None = None, *, prog: str = _PROG) -> None:
    """Run the hub until SIGTERM or SIGINT."""
    options = parser(prog)
    args = options.parse_args(argv)
    try:
        limits = Limits(queue_bytes=args.max_queue_mib << 20, env_seconds=args.env_seconds,
                        minimum_seconds=args.minimum_seconds)
        server, journal = build(
            args.host, token=args.token or os.environ.get(TOKEN_VARIABLE) or None,
            journal=args.journal, limits=limits, max_body_bytes=args.max_body_mib << 20,
            private=args.private)
        sock = bind(args.host, args.port) if args.fd is None else socket.socket(fileno=args.fd)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        options.error(str(error))
    if args.exit_with_parent:
        exit_with_parent()
    sock.set_inheritable(False)
    host, port = sock.getsockname()[:2]
    print(f"the hub is at http://{host}:{port}", flush=True)
    try:
        server.run(sockets=[sock])
    finally:
        if journal is not None:
            journal.close()


if __name__ == "__main__":
    main()
