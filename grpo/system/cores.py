"""Let several processes compute on the same CPU cores without slowing each other down."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Loops of an OpenMP thread that waits, some ten microseconds, before it lets go of its core. GNU's
# default is 300,000 loops, which two processes on the same cores spend waiting for each other.
_SPINS = "3000"
# GNU's own variable outranks OpenMP's, which other runtimes read.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS}
_OTHER_RUNTIMES = ("KMP_BLOCKTIME",)
# Left to itself vLLM for CPUs binds each worker to cores counted from the first, whoever is there.
_BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def share_cores(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Let idle threads sleep and bind none to a core, unless the environment says otherwise.

    OpenMP reads its variables when it is loaded: a command calls this before anything imports
    PyTorch. Later calls reach only the processes that are started afterwards.

    Args:
        environment: the process's own; changed in place.

    Returns:
        The variables as they are now, for processes that do not inherit them.

    Examples:
        >>> share_cores({"OMP_WAIT_POLICY": "ACTIVE"})
        {'OMP_WAIT_POLICY': 'ACTIVE', 'VLLM_CPU_OMP_THREADS_BIND': 'nobind'}
    """
    if not any(name in environment for name in (*_WAITING, *_OTHER_RUNTIMES)):
        environment.update(_WAITING)
    for name, value in _BINDING.items():
        environment.setdefault(name, value)
    return {name: environment[name] for name in (*_WAITING, *_OTHER_RUNTIMES, *_BINDING)
            if name in environment}
