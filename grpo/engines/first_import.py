"""vLLM's first import, which keeps what runs while it happens."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor


def import_vllm() -> None:
    """Import vLLM in a thread of its own, unless it is imported already.

    An exception that is kept somewhere in that import holds the frames that it was raised under,
    with all their variables, for as long as the process lives: in a sweep those are the first job's
    trainer, model and engine. Nothing of ours runs in a new thread.

    Raises:
        ImportError: as the import itself.
    """
    if "vllm.engine.arg_utils" in sys.modules:
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_import).result()


def _import() -> None:
    from vllm import LLM  # noqa: F401 (it is imported for its effect)
    from vllm.engine import arg_utils  # noqa: F401
