"""Let several processes compute on the same CPU cores without slowing each other down."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# How long an OpenMP thread waits before it lets go of its core. GNU's own variable, which outranks
# OpenMP's, counts loops: these take ten microseconds, and its default of 300,000 is what two
# processes on the same cores would spend waiting for each other.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
_OTHER_RUNTIME = "KMP_BLOCKTIME"
# Left to itself vLLM for CPUs binds each worker to cores counted from the first, whoever is there.
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def share_cores(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Let idle threads sleep and bind none to a core, unless the environment says otherwise.

    OpenMP reads its variables when it is loaded: a command calls this before anything imports
    PyTorch. Later calls reach only the processes that are started afterwards. The variables are
    returned, too, for processes that do not inherit them.

    Examples:
        >>> share_cores({"OMP_WAIT_POLICY": "ACTIVE"})
        {'OMP_WAIT_POLICY': 'ACTIVE', 'VLLM_CPU_OMP_THREADS_BIND': 'nobind'}
    """
    names = (*_WAITING, _OTHER_RUNTIME)
    if not any(name in environment for name in names):
        environment.update(_WAITING)
    environment.setdefault(_BINDING, "nobind")
    return {name: environment[name] for name in (*names, _BINDING) if name in environment}
