"""Batches of finished Atropos groups for the trainer, by pull or through a bridge."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from tensordict import TensorDictBase

from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.recompute import RecomputeLogProbs

# Seconds between looks for finished groups while no environment asks for anything.
_PULSE = 0.05


class Driver(Protocol):
    """Lets a policy answer the calls of a bridge."""

    policy: Any

    def advance(self, timeout: float) -> None:
        """Do a little work; wait at most ``timeout`` seconds if there is none."""

    def drain(self, timeout: float) -> None:
        """Finish what has begun, so that the weights may change."""


class AtroposCollector:
    """Batches of whole groups, as they finish.

    In pull form an engine elsewhere serves the environments, and this only waits for groups. In
    bridge form the trainer's own policy serves them while this waits: ``driver`` answers their
    requests until enough groups have come back with their scores. No request waits for a score. At
    the end of :meth:`collect` nothing is being sampled; what environments ask for during the update
    waits until the next call, and is sampled by the new weights.

    Batches have at most as many rows as the assembler allows, fewer where the next group did not
    fit. They take a :class:`~grpo.atropos.advantages.GivenAdvantage`.

    Args:
        assembler: source of groups, batch size, conversion.
        driver: answers the bridge's calls; None: pull form.
        recompute: fills in unknown log-probs; None: a batch that has some is an error.
        policy: of the engine that serves the environments in pull form; None: nobody here.
        timeout: seconds without a new group after which :meth:`collect` gives up.

    Attributes:
        seconds: what the last batch took: ``"generate"`` (driving the policy) and ``"reward"``
            (waiting for groups).
        metrics: everything left out or filled in, counted since the start.

    Raises:
        TimeoutError: from :meth:`collect`.
        ValueError: from :meth:`collect`, for unknown log-probs without ``recompute``.
    """

    def __init__(
        self,
        assembler: GroupAssembler,
        *,
        driver: Driver | None = None,
        recompute: RecomputeLogProbs | None = None,
        policy: Any = None,
        timeout: float = 600.0,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be positive seconds")
        self.assembler, self.driver, self.recompute = assembler, driver, recompute
        self._policy, self.timeout = policy, timeout
        self.seconds = {"generate": 0.0, "reward": 0.0}
        self.metrics: dict[str, float] = {}
        self.failures: dict[str, str] = {}  # environments keep theirs to themselves

    def state_dict(self) -> dict[str, Any]:
        """Where the source of groups is, for a checkpoint."""
        return self.assembler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.assembler.load_state_dict(state)

    @property
    def policy(self) -> Any:
        """Who answers the environments; in pull form what the trainer knows of it."""
        if self._policy is not None:
            return self._policy
        return _Elsewhere() if self.driver is None else self.driver.policy

    def collect(self) -> TensorDictBase:
        """One batch of finished groups, flat and dense."""
        self.seconds = {"generate": 0.0, "reward": 0.0}
        self._fill()
        if self.driver is not None:
            self._timed("generate", self.driver.drain, self.timeout)
        batch = self.assembler.batch()
        self.metrics = self.assembler.metrics()
        if self.recompute is not None:
            self.recompute(batch)
            self.metrics |= self.recompute.metrics
        else:
            _refuse_unknown(batch)
        return batch

    def _fill(self) -> None:
        """Until a batch is full, with a deadline that every new group moves."""
        rows, deadline = self.assembler.waiting_rows, time.monotonic() + self.timeout
        # In bridge form environments make progress only while their calls are answered.
        wait = min(1.0, self.timeout) if self.driver is None else 0.0
        while not self._timed("reward", self.assembler.poll, wait):
            if self.driver is not None:
                self._timed("generate", self.driver.advance, _PULSE)
            if self.assembler.waiting_rows != rows:
                rows, deadline = self.assembler.waiting_rows, time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                if trouble := getattr(self.assembler.source, "trouble", None):
                    raise TimeoutError(f"the Atropos API did not answer, so no group came within "
                                       f"{self.timeout:g} s: {trouble}. Start a hub "
                                       "(python -m grpo.atropos.hub_server) or run-api there, or "
                                       "set atropos.url to where it is")
                raise TimeoutError(
                    f"no group finished within {self.timeout:g} s; {rows} of "
                    f"{self.assembler.rows} rows are here, and so far "
                    f"{self.assembler.metrics() or 'nothing'} was counted. "
                    + (getattr(self.assembler.source, "silence", None) or
                       "See the environments' logs: are they running, do all their groups have "
                       "equal scores?"))

    def _timed(self, phase: str, function: Callable, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.seconds[phase] += time.perf_counter() - start


class _Elsewhere:
    """The policy of the pull form: no random numbers of this process depend on it."""

    def __init__(self) -> None:
        self.calls = 0


def _refuse_unknown(batch: TensorDictBase) -> None:
    unknown = int(batch["log_probs", "full"].isnan().any(-1).sum())
    if unknown:
        raise ValueError(f"the log-probs of {unknown} of {len(batch)} rows are not known: their "
                         "environment sent none; give the collector recompute=RecomputeLogProbs("
                         "...), or let the environments ask a bridge, which remembers them")
