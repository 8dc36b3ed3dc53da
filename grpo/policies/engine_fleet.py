"""The engines of rollout workers as one handle.

    fleet = EngineFleet([RayEngine(pool, number) for number in range(pool.count)])
    WeightTransfer(model, fleet, backend="nccl").publish()    # one broadcast reaches all
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from grpo.policies.handle import EngineHandle, PauseMode
from grpo.policies.ray_engine import WorkerPool
from grpo.system.threads import in_background

# What a message may take beyond the time that the worker was given.
_GRACE = 10.0


@dataclass(eq=False)
class RayEngine:
    """The :class:`~grpo.policies.handle.EngineHandle` of one worker of a pool."""

    pool: WorkerPool
    number: int  # of the worker; a replaced one keeps it

    def __str__(self) -> str:
        return f"vLLM engine of {self.pool.name(self.number)}"

    def collective_rpc(self, method: str, *args: Any, timeout: float) -> list[Any]:
        return self._ask("collective_rpc", method, args, timeout, timeout=timeout)

    def reset_prefix_cache(self, timeout: float) -> bool:
        return self._ask("reset_prefix_cache", timeout, timeout=timeout)

    def pause(self, mode: PauseMode = "keep", *, timeout: float) -> None:
        self._ask("pause", mode, timeout, timeout=timeout)

    def resume(self, *, timeout: float) -> None:
        self._ask("resume", timeout, timeout=timeout)

    def set_version(self, version: int) -> None:
        self._ask("set_version", version, timeout=60.0)

    def go_on(self, version: int, *, timeout: float) -> bool:
        return self._ask("go_on", version, timeout, timeout=timeout)

    def alive(self) -> bool:
        return self.number not in self.pool.dead

    def _ask(self, method: str, *args: Any, timeout: float) -> Any:
        return self.pool.ask(self.number, method, *args, timeout=timeout + _GRACE)


@dataclass(eq=False)
class EngineFleet:
    """Several engines as one handle: what is asked of it is asked of all at the same time.

    Workers are numbered over all engines, so that they can join one group for a transfer.

    Args:
        engines: with the same number of workers each.
        tensor_parallel_size: workers of an engine.

    Examples:
        >>> EngineFleet([]).alive()
        True
    """

    engines: Sequence[EngineHandle]
    _: KW_ONLY
    tensor_parallel_size: int = 1

    def __str__(self) -> str:
        return f"{len(self.engines)} engines"

    def collective_rpc(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """One result for each worker of each engine, in the order of their numbers."""
        calls = []
        for number, engine in enumerate(self.engines):
            if method == "transfer_connect":
                config, plan = args
                first = config.get("first_rank", 1) + number * self.tensor_parallel_size
                calls.append((engine.collective_rpc, method, {**config, "first_rank": first}, plan))
            else:
                calls.append((engine.collective_rpc, method, *args))
        return [result for results in _together(calls, timeout=timeout) for result in results]

    def reset_prefix_cache(self, timeout: float) -> bool:
        return all(self._all("reset_prefix_cache", timeout=timeout))

    def pause(self, mode: PauseMode = "keep", *, timeout: float) -> None:
        self._all("pause", mode, timeout=timeout)

    def resume(self, *, timeout: float) -> None:
        self._all("resume", timeout=timeout)

    def set_version(self, version: int) -> None:
        _together([(engine.set_version, version) for engine in self.engines])

    def go_on(self, version: int, *, timeout: float) -> bool:
        return all(self._all("go_on", version, timeout=timeout))

    def alive(self) -> bool:
        return all(engine.alive() for engine in self.engines)

    def _all(self, method: str, *args: Any, timeout: float) -> list[Any]:
        calls = [(getattr(engine, method), *args) for engine in self.engines]
        return _together(calls, timeout=timeout)


def _together(calls: list[tuple], **options: Any) -> list[Any]:
    """Make all calls at the same time; each ends by a deadline of its own.

    An error is raised as soon as it is there: the others may wait for the very engine that failed.
    """
    waiting = [in_background(function, *args, **options) for function, *args in calls]
    while not all(future.done() for future in waiting):
        for future in waiting:
            if future.done() and future.exception():
                raise future.exception()
        time.sleep(1e-3)
    return [future.result() for future in waiting]
