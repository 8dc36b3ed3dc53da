"""What a rollout worker asks and how it scores: environments for its groups, in threads of their
own, so that no request waits for a score."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase

from grpo.collectors.sync import DROPPED
from grpo.envs.dialog import Dialog
from grpo.envs.rewards.batch import first_failures
from grpo.envs.tasks.base import Problem
from grpo.envs.verifiable import VerifiableEnv
from grpo.policies.base import Completions, Policy
from grpo.weights.packed import Packed

#: ``(lease, rows of its group, None)``, or without rows the reason.
Outcome = tuple[int, TensorDictBase | None, str | None]


@dataclass(frozen=True)
class Environments:
    """How a worker makes its environments.

    Attributes:
        make: one for batches of so many groups.
        threads: that score.
        together: groups that one may score in a call. A call returns when all of its rewards are
            there, so it is 1 where rewards are waited for.
    """

    make: Callable[[int], VerifiableEnv]
    threads: int = 1
    together: int = 1


class Asked(NamedTuple):
    """What a group begins with."""

    prompts: list[list[int]]  # token ids, a row each
    problems: list[Problem]
    dialog: Dialog | None


@dataclass(frozen=True)
class ScoredGroups:
    """Groups that were scored together, as they travel to the trainer."""

    leases: list[int]
    rows: Packed | None  # of all, one group behind the other
    error: str | None = None

    def outcomes(self) -> list[Outcome]:
        """Of each group."""
        if self.rows is None:
            return [(lease, None, self.error) for lease in self.leases]
        values = self.rows.tensors()
        batch = TensorDict(values, batch_size=[len(next(iter(values.values())))])
        parts = batch.split(len(batch) // len(self.leases))
        # Copies, because a part that is sent or saved takes the memory that it shares along.
        return [(lease, part.clone(), None)
                for lease, part in zip(self.leases, parts, strict=True)]


class _Sampled(NamedTuple):
    lease: int
    number: int  # of the group
    completions: Completions


class GroupScoring:
    """Score groups as they are sampled; those that wait are scored together, as far as they may.

    Many groups end at the same step of the engine where rows run into their limit. One by one, each
    costs the interpreter milliseconds that the engine's thread needs as well.

    Args:
        policy: writes completions into batches.
        environments: that ask and score.
    """

    def __init__(self, policy: Policy, environments: Environments) -> None:
        self.policy, self.environments = policy, environments
        self._idle: queue.LifoQueue[dict[int, VerifiableEnv]] = queue.LifoQueue()
        for _ in range(environments.threads + 1):  # one of them to begin groups in
            self._idle.put({})
        self._sampled: queue.SimpleQueue[_Sampled] = queue.SimpleQueue()
        self._scored: queue.SimpleQueue[ScoredGroups] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(environments.threads, thread_name_prefix="scoring")

    def begin(self, number: int) -> Asked:
        """The prompts of a group."""
        return self._with_env([number], lambda env, batch: Asked(
            self.policy.prompts_of(batch), env.current_problems, env.dialog))

    def add(self, lease: int, number: int, completions: Completions) -> None:
        """Have a group scored; it is among what is :meth:`taken` later."""
        self._sampled.put(_Sampled(lease, number, completions))
        self._threads.submit(self._score_waiting)

    def fail(self, lease: int, error: Exception) -> None:
        """Note that a group has no rows; the trainer decides what becomes of it."""
        self._scored.put(ScoredGroups([lease], None, f"{type(error).__name__}: {error}"))

    def taken(self, timeout: float) -> tuple[list[ScoredGroups], dict[str, str]]:
        """What was scored since the last call, and failures of its rewards; waits at most
        ``timeout`` seconds for a group."""
        groups = []
        with suppress(queue.Empty):
            groups.append(self._scored.get(timeout=timeout))
        groups += _all_of(self._scored)
        return groups, first_failures(_all_of(self._failures))

    def _score_waiting(self) -> None:
        waiting = _all_of(self._sampled, most=self.environments.together)
        if waiting:  # and no other thread has taken them
            self._try(waiting)

    def _try(self, groups: list[_Sampled]) -> None:
        try:
            self._score(groups)
        except Exception as error:
            if len(groups) == 1:
                self.fail(groups[0].lease, error)
                return
            for group in groups:  # whose fault it was shows when each is alone
                self._try([group])

    def _score(self, groups: list[_Sampled]) -> None:
        completions = Completions.joined([group.completions for group in groups])
        rows = self._with_env([group.number for group in groups],
                              lambda env, batch: self._step(env, batch, completions))
        self._scored.put(ScoredGroups([group.lease for group in groups], rows))

    def _step(self, env: VerifiableEnv, batch: TensorDictBase, completions: Completions) -> Packed:
        scored = env.step(self.policy.write(batch, completions)).exclude(*DROPPED).flatten()
        if env.failures:  # first, so that they are there when the groups are
            self._failures.put(env.failures)
        return Packed.of(dict(scored.items(include_nested=True, leaves_only=True)))

    def _with_env(
        self, numbers: Sequence[int], use: Callable[[VerifiableEnv, TensorDictBase], Any]
    ) -> Any:
        """Use an environment, which is set to groups; each is used by one thread at a time."""
        by_size = self._idle.get()
        try:
            env = by_size.get(len(numbers))
            if env is None:
                env = by_size[len(numbers)] = self.environments.make(len(numbers))
            env.seek(*numbers)
            return use(env, env.reset())
        finally:
            self._idle.put(by_size)

    def close(self) -> None:
        """Give up on what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _all_of(waiting: queue.SimpleQueue, most: int | None = None) -> list[Any]:
    """What is in a queue now, or the first ``most`` of it."""
    taken = []
    while most is None or len(taken) < most:
        try:
            taken.append(waiting.get_nowait())
        except queue.Empty:
            break
    return taken
