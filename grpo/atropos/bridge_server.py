"""The bridge's inference server in a thread, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
import time

from grpo.atropos.bridge import Bridge
from grpo.server.app import MAX_BODY_BYTES
from grpo.system.http_call import is_loopback
from grpo.system.http_connections import server_of
from grpo.system.lifeline import bind

_STARTED_WITHIN = 30.0  # seconds
_STOPPED_WITHIN = 10.0
_MOST_SAID = 300  # characters of the error that ended the trainer


class BridgeServer:
    """Serve a bridge from a thread of this process until closed; a context manager.

    Args:
        bridge: what answers.
        host: address to listen on; anywhere but on a loopback address a token is needed.
        port: 0 chooses a free one.
        token: wanted from clients.
        max_body_bytes: greater requests are refused.

    Attributes:
        url: ``http://host:port``; OpenAI clients want ``/v1`` behind it.

    Raises:
        ValueError: without a token for an address that other machines reach.
        RuntimeError: if the server does not start.

    Examples:
        >>> with BridgeServer(bridge, port=0) as server:        # doctest: +SKIP
        ...     print(server.url + "/v1")
    """

    def __init__(
        self,
        bridge: Bridge,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        token = (token or "").strip() or None
        if token is None and not is_loopback(host):
            raise ValueError(f"host={host!r} opens the policy to other machines; give a token, or "
                             "use host='127.0.0.1'")
        self.bridge = bridge
        app = bridge.app(token=token, max_body_bytes=max_body_bytes)
        self._socket = bind(host, port)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._server = server_of(app, grace=2)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._socket])),
            name="bridge-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _STARTED_WITHIN
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self._socket.close()
                raise RuntimeError(f"the bridge's server at {self.url} did not start; see its log")
            time.sleep(0.005)

    def close(self, reason: str = "the trainer has finished") -> None:
        """Answer what still waits with 503 and the reason, and stop."""
        if not self._thread.is_alive():
            return
        self.bridge.close(reason)
        self._server.should_exit = True
        self._thread.join(_STOPPED_WITHIN)
        self._socket.close()

    def __enter__(self) -> BridgeServer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self.close()
        first = "".join(str(error).splitlines()[:1])[:_MOST_SAID]
        what = type(error).__name__ + (first and f": {first}")
        self.close(f"the trainer, whose policy answers here, ended with {what}; see its log and "
                   "start it again")
