"""Python's cyclic garbage collection, left out where it takes time and finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no cyclic garbage inside.

    The modules of PyTorch, TorchRL and vLLM bring half a million objects that come to stay. Going
    through them again and again is a third of the time that their import takes.

    Examples:
        >>> with without_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
