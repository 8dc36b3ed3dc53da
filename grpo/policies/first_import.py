"""Import vLLM so that its first import does not keep the caller's objects alive."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from typing import NoReturn

from grpo.system.collection import without_collection
from grpo.system.threads import in_background


def vllm_available() -> bool:
    """True if vLLM (GPU or CPU build) can be imported."""
    return importlib.util.find_spec("vllm") is not None


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
    importing = in_background(_import)
    try:
        importing.result()
    except BaseException as error:
        if not importing.done():  # a signal has come, which need not wait for the import
            atexit.register(_leave, getattr(error, "exit_code", 1))
        raise


def _leave(code: int) -> NoReturn:
    """End without taking the interpreter apart beneath a thread that still imports."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _import() -> None:
    with without_collection():
        from vllm import LLM  # noqa: F401 (it is imported for its effect)
        from vllm.engine import arg_utils  # noqa: F401
