"""Notices environments that have registered but send no request to the engine, and says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from grpo.atropos.client import AtroposClient, AtroposError
from grpo.atropos.forward import ATROPOSLIB_PORTS

#: Seconds that an environment may be registered before its first question is missed.
SILENT_SECONDS = 60.0
_LOOK_SECONDS = 5.0


@dataclass(eq=False)
class SilenceCheck:
    """Says, once, that environments are registered and no request has come to the engine.

    It is called while a run waits for its first groups, when nobody else asks the engine. As
    ``run-api`` does not tell who is registered, the time counts there from its first answer.

    Args:
        api: where environments register.
        asked: how many requests the engine has seen so far, or None if it does not say.
        url: of the engine, for the message.
        forwarded: further ports that lead to the engine.
        say: gets the message.
        after: seconds without a request until it is said.
        clock: seconds, never going back.

    Attributes:
        message: what was said; None while there is nothing to say.
    """

    api: AtroposClient
    asked: Callable[[], int | None]
    _: KW_ONLY
    url: str
    say: Callable[[str], None]
    forwarded: Sequence[int] = ()
    after: float = SILENT_SECONDS
    clock: Callable[[], float] = time.monotonic
    message: str | None = field(default=None, init=False)
    _heard: bool = field(default=False, init=False)
    _count: int | None = field(default=None, init=False)
    _since: float | None = field(default=None, init=False)  # somebody is registered
    _next_look: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        now = self.clock()
        if self._heard or now < self._next_look:
            return
        self._next_look = now + min(_LOOK_SECONDS, self.after / 4)
        count = self.asked()
        if count is None:
            return
        if self._count is not None and count != self._count:
            self._heard, self.message = True, None
            return
        self._count = count
        names = self._registered()
        if names == []:
            self._since = None
        elif self._since is None:
            self._since = now
        elif self.message is None and now - self._since >= self.after:
            self.message = self._explain(names)
            self.say(self.message)

    def _registered(self) -> list[str] | None:
        """Names of the environments; None where the API does not say."""
        try:
            status = self.api.status()
        except AtroposError:  # the stream of groups reports that the API is away
            return []
        if "hub" not in status:
            return None
        return [env["name"] for env in status["hub"]["environments"] if env["connected"]]

    def _explain(self, names: list[str] | None) -> str:
        if names is None:
            start = (f"the Atropos API has answered for {self.after:g} s and given no group, and "
                     f"no request has come to the engine at {self.url}. If no environment runs "
                     "yet, start one; else it asks another address")
        else:
            start = (f"environment {', '.join(names)} registered {self.after:g} s ago or earlier, "
                     f"but no request has come to the engine at {self.url}")
        if self.forwarded:
            return (f"{start}, nor to the ports {_listed(self.forwarded)} that lead to it. See "
                    "what address the environment's log names")
        return (f"{start}. atroposlib asks localhost:{ATROPOSLIB_PORTS[0]} to "
                f"{ATROPOSLIB_PORTS[-1]}, whatever --openai.base_url says, where config_init "
                "returns one server configuration and not a list; others have an address written "
                f"into them. Start with --forward-ports {_listed(ATROPOSLIB_PORTS)}, which lead "
                "to the engine then, or let config_init return a list of one. An environment "
                "that takes long before its first question is no such case")


def _listed(ports: Sequence[int]) -> str:
    return ",".join(map(str, ports))
