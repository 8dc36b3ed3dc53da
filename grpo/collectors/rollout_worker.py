"""What generates in an asynchronous run: engine, environment and rewards in one process.

A :class:`RolloutWorker` is a plain object; :mod:`grpo.policies.ray_engine` runs it as a Ray actor.
Groups come in by number and go out finished and scored. Its engine belongs to one thread
(:class:`~grpo.policies.driver.EngineDriver`), in which weights arrive, too; rewards have threads of
their own (:class:`~grpo.collectors.group_scoring.GroupScoring`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDictBase

from grpo.collectors.group_scoring import Asked, Environments, GroupScoring, Outcome, ScoredGroups
from grpo.envs.prompts import Prompt
from grpo.policies.base import Completions, Policy
from grpo.policies.converse import hold
from grpo.policies.driver import EngineDriver, Job
from grpo.policies.handle import EngineError, InProcessEngine, PauseMode
from grpo.policies.samplers import TransformersSampler, VLLMSampler
from grpo.weights.fingerprint import fingerprints
from grpo.weights.lora_slot import AdapterSlot
from grpo.weights.packed import Packed
from grpo.weights.worker.lora import nested

_MOST_TALKS = 1024  # conversations at a time
# Between the numbers of calls of a conversation's turns, so that each draws its own random numbers.
_CALLS_A_TURN = 15_485_863


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What a worker is built from; everything in it can be sent to another host."""

    config: dict[str, Any]  # a grpo.config.schema.Config as plain values
    path: str  # folder or hub id of the weights that the run starts from
    prompt_width: int  # P
    max_model_len: int  # prompt plus response, in tokens
    rows: int  # that the engine generates at a time
    backend: str  # vllm or transformers
    device: str  # cuda or cpu
    dtype: str  # of the weights, without "torch."
    tensor_parallel_size: int = 1  # devices of the engine
    alone: bool = True  # which has them to itself


@dataclass(frozen=True)
class WorkerParts:
    """What a worker works with."""

    policy: Policy
    engine: InProcessEngine | None  # the policy's, for new weights; None with Transformers
    sampler: TransformersSampler | VLLMSampler  # what the thread of the engine drives
    environments: Environments | None  # None where others begin groups
    groups_a_call: int  # that are begun together
    group_rows: int  # completions of a prompt


@dataclass(frozen=True)
class Report:
    """What a worker has to say."""

    scored: list[ScoredGroups]  # finished since the report before
    busy: float  # seconds that the engine has been at work since the worker started
    tokens: int  # sampled since then
    seconds: float  # since then
    started: float  # Unix time of that start, which tells a worker from the one that it replaces
    #: Of the rewards of those groups, as of :class:`~grpo.envs.rewards.RewardBatch`.
    failures: dict[str, str] = field(default_factory=dict)

    def outcomes(self) -> list[Outcome]:
        """Of each finished group."""
        return [outcome for groups in self.scored for outcome in groups.outcomes()]


class RolloutWorker:
    """Generate groups by their numbers.

    Args:
        build: makes the parts, in the process of the worker.
        setup: what all workers are built from.
        number: of this worker; engines that are not seeded by row draw by it.
        prompts: to train on, the same in every worker.
    """

    def __init__(self, build: Callable[[WorkerSetup, int, list[Prompt]], WorkerParts],
                 setup: WorkerSetup, number: int, prompts: list[Prompt]) -> None:
        parts = build(setup, number, prompts)
        self.setup, self.policy, self.engine = setup, parts.policy, parts.engine
        self._groups_a_call, self._group_rows = parts.groups_a_call, parts.group_rows
        self.driver = EngineDriver(parts.sampler)
        self.scoring = parts.environments and GroupScoring(parts.policy, parts.environments)
        self._slot: AdapterSlot | None = None
        self._jobs: dict[int, Job] = {}  # by lease; of a conversation that of its last turn
        self._holds_dialogs = False
        # A conversation has a thread, which nearly always waits for the engine.
        self._talking = ThreadPoolExecutor(_MOST_TALKS, thread_name_prefix="dialog")
        self._started, self._started_at = time.monotonic(), time.time()

    def describe(self) -> dict[str, Any]:
        """Who and where this is, and what its engine has failed with."""
        return {"pid": os.getpid(), "host": os.uname().nodename, "device": self.setup.device,
                "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "failure": self.driver.failure}

    # -- rollouts ------------------------------------------------------------------------------

    def submit(self, leases: list[tuple[int, int]]) -> None:
        """Start groups, given as ``(lease, number of the group)``."""
        for lease, number in leases:
            try:
                self._start(lease, number)
            except Exception as error:  # nobody waits for this call
                self.scoring.fail(lease, error)

    def _start(self, lease: int, number: int) -> None:
        asked = self.scoring.begin(number)
        if asked.dialog is None:
            self._sample(lease, number, asked.prompts).add_done_callback(
                lambda future: self._sampled(lease, number, future))
        else:
            self._holds_dialogs = True
            self._talking.submit(self._converse, lease, number, asked)

    def _sample(self, lease: int, number: int, prompts: list[list[int]], *, turn: int = 0,
                limit: int | None = None) -> Future:
        """Sample rows of a group, in a dialog those of a turn that go on."""
        call, place = divmod(number, self._groups_a_call)
        sampling = self.policy.sampling
        job = self._jobs[lease] = Job(
            prompts, replace(sampling, max_tokens=limit or sampling.max_tokens),
            call=call + turn * _CALLS_A_TURN, first=place * self._group_rows,
            of=self._groups_a_call * self._group_rows, goes_on=turn > 0)
        return self.driver.submit(job)

    def cancel(self, leases: list[int]) -> None:
        """Give up on groups; those that are finished already are reported all the same."""
        for lease in leases:
            job = self._jobs.pop(lease, None)
            if job is not None:
                self.driver.cancel(job)

    def finished(self, timeout: float) -> Report:
        """The groups finished since the last call; waits at most ``timeout`` seconds for one.

        Raises:
            EngineError: if the engine has failed.
        """
        if not self.driver.alive():
            self.driver.call(lambda: None, timeout=timeout)  # raises with the reason
        scored, failures = self.scoring.taken(timeout)
        return Report(scored, self.driver.busy, self.driver.sampler.tokens,
                      time.monotonic() - self._started, self._started_at, failures)

    def _sampled(self, lease: int, number: int, future: Future) -> None:
        self._jobs.pop(lease, None)
        self._finish(lease, number, future.result)

    def _converse(self, lease: int, number: int, asked: Asked) -> None:
        def speak(prompts: list[list[int]], limit: int, turn: int) -> TensorDictBase:
            if turn and lease not in self._jobs:
                raise CancelledError  # between two turns
            future = self._sample(lease, number, prompts, turn=turn, limit=limit)
            return self.policy.write(self.policy.pad_prompts(prompts), future.result())

        self._finish(lease, number, lambda: hold(
            speak, asked.prompts, asked.dialog, asked.problems,
            max_tokens=self.policy.sampling.max_tokens))
        self._jobs.pop(lease, None)

    def _finish(self, lease: int, number: int, sampled: Callable[[], Completions]) -> None:
        """Have a group scored, unless it was cancelled or has failed."""
        try:
            self.scoring.add(lease, number, sampled())
        except CancelledError:
            return
        except Exception as error:  # of one group
            self.scoring.fail(lease, error)

    def generate(self, job: Job, timeout: float) -> Completions:
        """Sample rows for the trainer, such as an evaluation's; they join what is running.

        Raises:
            EngineError: if that takes longer than ``timeout`` seconds.
        """
        try:
            return self.driver.submit(job).result(timeout)
        except TimeoutError:
            self.driver.cancel(job)
            raise EngineError(f"the engine did not finish {len(job.prompts)} rows within "
                              f"{timeout:g} s; if it needs longer, raise "
                              "train.rollout_timeout") from None

    # -- weights: the methods of an EngineHandle -----------------------------------------------

    def collective_rpc(self, method: str, args: tuple, timeout: float) -> list[Any]:
        """See :class:`~grpo.policies.handle.EngineHandle`; runs between two steps."""
        if self.engine is None:
            raise EngineError(f"{method} is for vLLM; weights of a transformers worker are given "
                              "by load_state")
        return self.driver.call(lambda: self.engine.collective_rpc(method, *args, timeout=timeout),
                                timeout=timeout, what=method)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop sampling: keep what runs, wait for it, or abort it."""
        if mode == "wait":
            self.driver.drain(timeout=timeout, over=self._all_wait)
        elif mode == "abort":
            self.driver.abort(timeout=timeout)
        self.driver.pause(timeout=timeout)
        if self.engine is not None:
            self._between_steps(lambda: self.engine.pause("keep", timeout=timeout), timeout)

    def _all_wait(self, held: Collection[Job]) -> bool:
        """Whether no conversation goes on; between two turns it has no request."""
        return all(job in held for job in [*self._jobs.values()])

    def resume(self, timeout: float) -> None:
        if self.engine is not None:
            self._between_steps(lambda: self.engine.resume(timeout=timeout), timeout)
        self.driver.resume(timeout=timeout)

    def reset_prefix_cache(self, timeout: float) -> bool:
        return self._between_steps(
            lambda: self.engine.reset_prefix_cache(timeout=timeout), timeout)

    def set_version(self, version: int) -> None:
        self._between_steps(lambda: self.driver.sampler.set_version(version), 60.0)

    def go_on(self, version: int, timeout: float) -> bool:
        """Generate with new weights; False, and still paused, where the engine keeps what it has
        computed with the old ones."""
        if not self.reset_prefix_cache(timeout):
            return False
        self.set_version(version)
        self.resume(timeout)
        return True

    # -- weights that come through Ray's object store ------------------------------------------

    def load_adapter(self, packed: Packed, version: int, mode: PauseMode, timeout: float) -> float:
        """A new adapter for vLLM, between two steps.

        Args:
            packed: ``module.lora_A`` ``[rank, in]`` and ``module.lora_B`` ``[out, rank]``, with the
                scaling folded into the latter.
            version: of the tokens sampled from now on.
            mode: ``keep`` what runs, or ``wait`` for it.
            timeout: seconds that each part of it may take.

        Returns:
            Seconds in which requests were finished first.

        Raises:
            EngineError: if that takes longer, or the engine keeps what the old adapter computed; it
                then stays paused.
        """
        values, start = self._adapter_values(packed), time.perf_counter()
        self.pause(mode, timeout)
        waited = time.perf_counter() - start if mode == "wait" else 0.0
        self._between_steps(lambda: self._adapter_slot(values, timeout).write(values), timeout)
        if not self.go_on(version, timeout):
            raise EngineError(f"the adapter of version {version} is there, but the engine refused "
                              "to forget the keys and values of the one before")
        return waited

    def differing_adapter(self, packed: Packed, timeout: float) -> list[str]:
        """Names of the values that differ in the adapter's slot."""
        values = self._adapter_values(packed)
        if self._slot is None:  # it was never given any; these may not be all there are
            return list(values)
        return self._between_steps(lambda: self._slot.differing(values), timeout,
                                   "a comparison of the weights")

    def _adapter_values(self, packed: Packed) -> dict[str, torch.Tensor]:
        """On the device of the slot, if there is one; several workers take their shards of it."""
        return packed.tensors(self.setup.device if self.setup.tensor_parallel_size == 1 else "cpu")

    def _adapter_slot(self, values: dict[str, torch.Tensor], timeout: float) -> AdapterSlot:
        if self._slot is None:
            shapes = {name: (*factors["lora_A"].shape, len(factors["lora_B"]))
                      for name, factors in nested(values).items()}
            self._slot = AdapterSlot(self.engine, shapes, timeout=timeout)
        return self._slot

    def load_state(self, packed: Packed, version: int, timeout: float) -> float:
        """New values of a Transformers model's trained parameters, between two groups; the seconds
        in which groups were finished first."""
        start = time.perf_counter()

        def load() -> float:
            waited = time.perf_counter() - start
            params = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, value in packed.tensors().items():
                    params[name].copy_(value)
            self.driver.sampler.set_version(version)
            return waited

        if not self._holds_dialogs:  # a group is one job
            return self._between_steps(load, timeout)
        self.pause("wait", timeout)
        try:
            return self._between_steps(load, timeout)
        finally:
            self.resume(timeout)

    def fingerprints(self, names: list[str], timeout: float) -> dict[str, str]:
        """Of some of a Transformers model's parameters, to compare with the trainer's."""
        def compute() -> dict[str, str]:
            params = dict(self.policy.model.named_parameters())
            found = fingerprints(params[name] for name in names)
            return dict(zip(names, found, strict=True))

        return self._between_steps(compute, timeout, "a comparison of the weights")

    def _between_steps(self, function: Callable[[], Any], timeout: float,
                       what: str = "a change of the weights") -> Any:
        return self.driver.call(function, timeout=timeout, what=what)

    def close(self) -> None:
        """End engine and threads."""
        if self.scoring is not None:
            self.scoring.close()
        self._talking.shutdown(wait=False, cancel_futures=True)
        self.driver.close()

