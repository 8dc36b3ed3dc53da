"""The policy of an asynchronous run, for what the trainer itself wants generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo.engines.driver import Job
from grpo.engines.ray_engine import EngineDied, WorkerPool
from grpo.policies.base import Completions, Policy, Sampling


class FleetPolicy(Policy):
    """Divide the rows of a call over rollout workers, in contiguous parts.

    Evaluations and the canary's checks join what the workers generate for training. A call draws
    the same samples however many workers share it, as far as their engines are seeded by row.

    Args:
        pool: of the workers.
        sampling: see :class:`~grpo.policies.base.Sampling`.
        heal: replaces workers that died, with the present weights.
        timeout: seconds for a call.
        options: those of :class:`~grpo.policies.base.Policy`.
    """

    def __init__(self, pool: WorkerPool, sampling: Sampling, *, heal: Callable[[], None],
                 timeout: float = 1800.0, **options: Any) -> None:
        super().__init__(sampling, **options)
        self.pool, self.heal, self.timeout = pool, heal, timeout

    def start_at(self, version: int) -> None:
        for number in range(self.pool.count):
            self.pool.ask(number, "set_version", version, timeout=60.0)

    def close(self) -> None:
        self.pool.close()

    def _generate(self, prompts: list[list[int]]) -> Completions:
        while True:
            self.heal()
            try:
                return self._divided(prompts)
            except EngineDied:
                continue  # the pool limits how often

    def _divided(self, prompts: list[list[int]]) -> Completions:
        numbers = self.pool.usable
        each = -(-len(prompts) // len(numbers))
        calls = []
        for number, first in zip(numbers, range(0, len(prompts), each), strict=False):
            job = Job(prompts[first:first + each], self.sampling, call=self.calls, first=first,
                      of=len(prompts))
            calls.append(self.pool.send(number, "generate", job, self.timeout))
        parts = [self.pool.result(call, timeout=self.timeout + 10.0) for call in calls]
        return Completions(*([row for part in parts for row in getattr(part, name)]
                             for name in ("tokens", "log_probs", "truncated", "versions")))
