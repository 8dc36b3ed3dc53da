"""The policy of an asynchronous run, for what the trainer itself wants generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from grpo.policies.base import Completions, Policy, RowListener, Sampling
from grpo.policies.driver import Job
from grpo.policies.handle import EngineError
from grpo.policies.ray_engine import WorkerPool


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
        for number in self.pool.present:
            self.pool.ask(number, "set_version", version, timeout=60.0)

    def close(self) -> None:
        self.pool.close()

    def start(self, tensordict: TensorDictBase) -> Callable[[], TensorDictBase]:
        """See :meth:`grpo.policies.base.Policy.start`; the workers begin at once."""
        prompts, number = self.prompts_of(tensordict), self.calls
        self.calls += 1
        self.heal()
        calls = self._send(prompts, number)
        return lambda: self.write(tensordict, self._result(calls, prompts, number))

    def _generate(self, prompts: list[list[int]], on_row: RowListener | None = None) -> Completions:
        self.heal()
        return self._result(self._send(prompts, self.calls), prompts, self.calls)

    def _result(self, calls: list[Any], prompts: list[list[int]], number: int) -> Completions:
        """What the workers return, who are all asked anew if one has died meanwhile, also where a
        healing since has replaced it."""
        while True:
            try:
                return self._joined(calls)
            except EngineError:
                self.pool.look()
                if not any(map(self.pool.lost, calls)):
                    raise
                self.heal()  # the pool limits how often
                calls = self._send(prompts, number)

    def _send(self, prompts: list[list[int]], number: int) -> list[Any]:
        numbers = self.pool.usable
        each = -(-len(prompts) // len(numbers))
        calls = []
        for worker, first in zip(numbers, range(0, len(prompts), each), strict=False):
            job = Job(prompts[first:first + each], self.sampling, call=number, first=first,
                      of=len(prompts))
            calls.append(self.pool.send(worker, "generate", job, self.timeout))
        return calls

    def _joined(self, calls: list[Any]) -> Completions:
        parts = [self.pool.result(call, timeout=self.timeout + 10.0) for call in calls]
        return Completions(*([row for part in parts for row in getattr(part, name)]
                             for name in ("tokens", "log_probs", "truncated", "versions")))
