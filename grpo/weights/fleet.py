"""Weights for all workers of an asynchronous run, also for those that had to be replaced."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from grpo.policies.engine_fleet import EngineFleet, RayEngine
from grpo.policies.handle import EngineError, PauseMode
from grpo.policies.ray_engine import Call, WorkerPool
from grpo.weights.adapters import engine_factors
from grpo.weights.channel import TransferError
from grpo.weights.fingerprint import ALL, Part, fingerprints
from grpo.weights.gather import Tell, TrainerRanks, tell_nobody, trained_parameters
from grpo.weights.packed import Packed
from grpo.weights.shared import WeightSync
from grpo.weights.transfer import WeightTransfer


class FleetSync(WeightSync):
    """What all ways have in common.

    Args:
        pool: whose workers get the weights.

    Attributes:
        on_publish: called with each new version as soon as the workers have it.

    Raises:
        WorkersLost: from :meth:`publish` and :meth:`heal`, when workers die again and again.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.on_publish: Callable[[int], None] = lambda version: None

    def publish(self, *, now: bool = False) -> int:
        """Give all workers the trainer's weights as a new version."""
        version, self.waited = self.version + 1, 0.0
        try:
            self.pool.revive()
            self._until_sent(self._publish)
        finally:
            # Also if nobody is left to have them: what is saved then is this version.
            self.version = version
            self.on_publish(version)
        return version

    def heal(self) -> None:
        """Replace dead workers, and give those that are there the present weights.

        The trainer's weights must not have changed since they were published.
        """
        self.pool.revive()
        if self.pool.outdated:
            self._until_sent(self._refresh)

    def start(self) -> None:
        """Give all workers the trainer's weights as the version that they start with.

        For weights that the workers do not find where they load their model from: adapters.
        """
        self.pool.outdated.update(range(self.pool.count))
        self.heal()

    def differing(self, part: Part = ALL) -> list[str]:
        """Names of parameters that differ in any worker, by fingerprint.

        A worker that dies meanwhile is replaced, and the comparison is made again.
        """
        return self.begin_differing(part)()

    def begin_differing(self, part: Part = ALL) -> Callable[[], list[str]]:
        """See :meth:`WeightSync.begin_differing`."""
        self.heal()
        lives, finish = list(self.pool.lives), self._begin_differing(part)

        def differing() -> list[str]:
            try:
                return finish()
            except EngineError:
                self.pool.look()
                if not self.pool.dead and self.pool.lives == lives:
                    raise
            return self.differing(part)

        return differing

    def _until_sent(self, send: Callable[[], None]) -> None:
        """Try again with those that are there while any die; the pool limits how often."""
        sent = False
        while True:
            try:
                send()
            except (EngineError, TransferError):
                self.pool.look()
                if not self.pool.dead:
                    raise
            else:
                # What comes from now on gets the same; the others have it.
                send, sent = self._refresh, True
            if not self.pool.dead:
                self.pool.outdated.clear()
                return
            self.pool.revive()
            if sent and not self.pool.outdated:
                return

    @abstractmethod
    def _publish(self) -> None:
        """Send the trainer's weights as a new version."""

    @abstractmethod
    def _begin_differing(self, part: Part) -> Callable[[], list[str]]:
        """See :meth:`begin_differing`; what it returns fails if a worker does not answer."""

    @abstractmethod
    def _refresh(self) -> None:
        """Send them again, as the present version, to workers that have been replaced."""


class ObjectStoreSync(FleetSync):
    """For workers that generate with Transformers: what is trained, through Ray's object store.

    Args:
        model: the trainer's, sharded or not.
        pool: of the workers.
        timeout: seconds for one update; a worker takes it up between two groups.
        tell: the other ranks of a sharded trainer to gather.
    """

    in_flight = False

    def __init__(self, model: nn.Module, pool: WorkerPool, *, timeout: float = 600.0,
                 tell: Tell = tell_nobody) -> None:
        super().__init__(pool)
        self.model, self.timeout, self.tell = model, timeout, tell

    def _publish(self) -> None:
        self.waited = self._send(self.version + 1, self.pool.present)
        self.version += 1

    def _refresh(self) -> None:
        self._send(self.version, sorted(self.pool.outdated))

    @torch.no_grad()
    def _send(self, version: int, numbers: Iterable[int]) -> float:
        """Returns for how many seconds the last worker finished what it was at."""
        values = self.pool.put(Packed.of(self._trained()))
        calls = [self._give(number, values, version) for number in numbers]
        return max(self._results(calls), default=0.0)

    def _results(self, calls: list[Call]) -> list[Any]:
        return [self.pool.result(call, timeout=self.timeout + 10.0) for call in calls]

    def _give(self, number: int, values: Any, version: int) -> Call:
        """Have a worker take up values from :meth:`WorkerPool.put`."""
        return self.pool.send(number, "load_state", values, version, self.timeout)

    def _trained(self) -> dict[str, Tensor]:
        with self.tell("gather", "trained"):
            return dict(TrainerRanks(self.model).whole(trained_parameters(self.model)))

    def _begin_differing(self, part: Part) -> Callable[[], list[str]]:
        """Of all parameters, also of frozen ones."""
        named = part.choose(self.model.named_parameters())
        names = [name for name, _ in named]
        calls = [self.pool.send(number, "fingerprints", names, self.timeout)
                 for number in self.pool.usable]
        with self.tell("gather", "all", part):
            ours = fingerprints(whole for _, whole in TrainerRanks(self.model).whole(named))

        def differing() -> list[str]:
            theirs = self._results(calls)
            return [name for name, mine in zip(names, ours, strict=True)
                    if any(of_worker[name] != mine for of_worker in theirs)]

        return differing


class FleetLoRA(ObjectStoreSync):
    """For vLLM engines whose adapter is trained: its factors through Ray's object store.

    Each worker pauses its engine between two steps, writes them into the adapter's slot, forgets
    the keys and values of the old ones and goes on; none waits for another. Workers get their first
    adapter by :meth:`start`.

    Args:
        model: the trainer's, with adapters.
        pool: of the workers.
        pause_mode: ``keep`` lets running requests go on with the new adapter, ``wait`` finishes
            them first.
        options: of :class:`ObjectStoreSync`.
    """

    in_flight = True

    def __init__(self, model: nn.Module, pool: WorkerPool, *, pause_mode: PauseMode = "keep",
                 **options: Any) -> None:
        super().__init__(model, pool, **options)
        self.pause_mode = pause_mode

    def _give(self, number: int, values: Any, version: int) -> Call:
        return self.pool.send(number, "load_adapter", values, version, self.pause_mode,
                              self.timeout)

    def _trained(self) -> dict[str, Tensor]:
        with self.tell("adapters"):
            return engine_factors(self.model)

    @torch.no_grad()
    def _begin_differing(self, part: Part) -> Callable[[], list[str]]:
        """Of the factors, as ``module.lora_A`` or ``module.lora_B``."""
        ours = dict(part.choose(self._trained().items()))
        values = self.pool.put(Packed.of(ours))
        calls = [self.pool.send(number, "differing_adapter", values, self.timeout)
                 for number in self.pool.usable]

        def differing() -> list[str]:
            found = {name for names in self._results(calls) for name in names}
            return [name for name in ours if name in found]

        return differing


class FleetTransfer(FleetSync):
    """For vLLM engines: one broadcast reaches all workers of all engines that are there.

    Args:
        model: the trainer's.
        pool: of the workers.
        tensor_parallel_size: devices of an engine.
        options: of :class:`~grpo.weights.transfer.WeightTransfer`.
    """

    def __init__(self, model: nn.Module, pool: WorkerPool, *, tensor_parallel_size: int = 1,
                 **options: Any) -> None:
        super().__init__(pool)
        self.fleet = EngineFleet([RayEngine(pool, number) for number in range(pool.count)],
                                 tensor_parallel_size=tensor_parallel_size)
        self.transfer = WeightTransfer(model, self.fleet, **options)
        self._of_an_engine = self.transfer.workers[:tensor_parallel_size]  # all are alike
        self._met = list(pool.lives)

    def _meet(self) -> None:
        """Reach the engines that are there, where others were when it connected."""
        there = [self.pool.lives[number] for number in self.pool.present]
        if there == self._met:
            return
        self.transfer.close()
        self.fleet.engines = [RayEngine(self.pool, number) for number in self.pool.present]
        self.transfer.workers = self._of_an_engine * len(there)
        self._met = there

    def _publish(self) -> None:
        self._meet()
        self.transfer.version = self.version
        self.version = self.transfer.publish()
        self.waited = self.transfer.waited

    def _refresh(self) -> None:
        self._meet()
        self.transfer.version = self.version - 1
        self.transfer.publish()

    def _begin_differing(self, part: Part) -> Callable[[], list[str]]:
        self._meet()
        return self.transfer.begin_differing(part)
