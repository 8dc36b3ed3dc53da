"""Who may talk to the Ray that a run starts: Ray's processes unpickle, and so run, what arrives at
their ports, which are open on every interface of the machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

#: What Ray reads; no other process of a run is told of them.
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def token_of_ray(*, own: bool) -> Callable[[], None]:
    """Before ``ray.init``: the Ray that this process starts asks whoever talks to it for a token
    that only this run has. Returns what takes that back, to be called when Ray has ended.

    ``RAY_AUTH_MODE`` is the user's word where it is set, and so is a token in ``RAY_AUTH_TOKEN`` or
    ``RAY_AUTH_TOKEN_PATH``. Rays before 2.52 know no tokens.

    Args:
        own: Ray is started here; False: it runs already, and has a token or not.
    """
    import ray._raylet

    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is None:
        return lambda: None
    given: list[str] = []
    if own and MODE not in os.environ:
        os.environ[MODE] = "token"
        given.append(MODE)
        # A file in the user's home may be there as well, which others may be able to read.
        if not (os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)):
            os.environ[TOKEN] = secrets.token_hex(32)
            given.append(TOKEN)
    # Ray has read its settings, and perhaps the token of a run before this, and keeps both.
    ray._raylet.Config.initialize("")
    loader.instance().reset_cache()

    def forget() -> None:
        for name in given:
            os.environ.pop(name, None)

    return forget
