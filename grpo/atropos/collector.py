"""Batches of finished Atropos groups for the trainer, in the pull form or in the bridge form."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tensordict import TensorDictBase

from grpo.atropos.assemble import GroupAssembler
from grpo.atropos.recompute import RecomputeLogProbs
from grpo.policies.base import Policy

if TYPE_CHECKING:  # it needs a web framework, which the pull form does without
    from grpo.atropos.bridge_driver import BridgeDriver

# Seconds between looks for finished groups while no environment asks for anything.
_PULSE = 0.05
# Seconds in which the last groups come of environments that have finished.
_LAST_GROUPS = 30.0


@dataclass(eq=False)
class AtroposCollector:
    """Batches of whole groups, as they finish.

    In the pull form an engine elsewhere serves the environments, and the collector only waits for
    groups. In the bridge form the policy of this process serves them: while the collector waits,
    ``driver`` answers the requests that come to the bridge, none of which waits for a score. At the
    end of :meth:`collect` nothing is being sampled. What environments ask for during the update
    waits until the next call, and is sampled by the new weights.

    Batches have at most as many rows as the assembler allows, and fewer where the next group did
    not fit. Their advantages come from :class:`~grpo.atropos.advantages.GivenAdvantage`.

    Args:
        assembler: source of groups, batch size, conversion.
        driver: answers the bridge's calls; None: pull form.
        recompute: fills in unknown log-probs; None: a batch that has some is an error.
        policy: that answers the environments; default: the driver's.
        timeout: seconds without a new group after which :meth:`collect` gives up.
        explain: says more of why none came, if anything is known.
        ended: whether all environments have; then the last groups have 30 seconds.

    Attributes:
        seconds: what the last batch took: ``"generate"`` (driving the policy) and ``"reward"``
            (waiting for groups).
        metrics: counts, since the start, of what was left out or filled in.

    Raises:
        TimeoutError: from :meth:`collect`.
        ValueError: from :meth:`collect`, for unknown log-probs without ``recompute``.
    """

    assembler: GroupAssembler
    _: KW_ONLY
    driver: BridgeDriver | None = None
    recompute: RecomputeLogProbs | None = None
    policy: Policy | None = None
    timeout: float = 600.0
    explain: Callable[[], str] = str
    ended: Callable[[], bool] = lambda: False
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    keeps_untrained: ClassVar[bool] = False  # its source hands out again what was not saved
    finished: ClassVar[int] = 0
    # Environments keep the failures of their rewards to themselves.
    failures: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be positive seconds")
        if self.policy is None and self.driver is not None:
            self.policy = self.driver.policy

    def state_dict(self) -> dict[str, Any]:
        """Where the source of groups is, for a checkpoint."""
        return self.assembler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.assembler.load_state_dict(state)

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
        """Wait until a batch is full; every new group moves the deadline."""
        rows, since = self.assembler.waiting_rows, time.monotonic()
        # In the bridge form environments make progress only while their calls are answered.
        wait = min(1.0, self.timeout) if self.driver is None else 0.0
        while not self._timed("reward", self.assembler.poll, wait):
            if self.driver is not None:
                self._timed("generate", self.driver.advance, _PULSE)
            if self.assembler.waiting_rows != rows:
                rows, since = self.assembler.waiting_rows, time.monotonic()
            allowed = min(self.timeout, _LAST_GROUPS) if self.ended() else self.timeout
            if time.monotonic() - since > allowed:
                raise TimeoutError("\n".join(filter(None, [
                    self._late(rows, allowed), self.explain()])))

    def _late(self, rows: int, seconds: float) -> str:
        """Why no group came in so many seconds, while so many rows wait for the others."""
        if trouble := getattr(self.assembler.source, "trouble", None):
            return (f"the Atropos API did not answer, so no group came within {seconds:g} s: "
                    f"{trouble}. Start a hub (python -m grpo.atropos.hub_server) or run-api "
                    "there, or set atropos.url to where it is")
        return (f"no group finished within {seconds:g} s; {rows} of {self.assembler.rows} "
                f"rows are here, and so far {self.assembler.metrics() or 'nothing'} was counted. "
                + (getattr(self.assembler.source, "silence", None) or
                   "See the environments' logs: are they running? atroposlib drops groups of "
                   "equal scores, and without a word those with a row longer than the "
                   "max_token_len that the trainer registered (atropos.seq_len)"))

    def _timed(self, phase: str, function: Callable, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.seconds[phase] += time.perf_counter() - start


def _refuse_unknown(batch: TensorDictBase) -> None:
    unknown = int(batch["log_probs", "full"].isnan().any(-1).sum())
    if unknown:
        raise ValueError(f"the log-probs of {unknown} of {len(batch)} rows are not known: their "
                         "environment sent none; give the collector recompute=RecomputeLogProbs("
                         "...), or let the environments ask a bridge, which remembers them")
