"""The policy of this process answers the calls of a bridge, one step of its engine at a time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from grpo.atropos.bridge import Bridge
from grpo.atropos.calls import Call
from grpo.policies.base import Completions, Sampling
from grpo.policies.driver import Job, Sampler
from grpo.policies.handle import EngineError
from grpo.server.generation import positions_of
from grpo.server.versioned import Constructors
from grpo.system.json_api import ApiError

# Seconds: of a wait for a call; until the thread must have ended.
_PULSE, _ENDS_WITHIN = 0.05, 10.0


class BridgeDriver:
    """Let a sampler answer calls as they come.

    No thread is started: whoever calls :meth:`advance` drives the engine, usually the collector
    while it waits for groups. So weights never change during a step, and after :meth:`drain`
    nothing runs that an update could disturb. Requests that arrive meanwhile wait in the bridge.

    Args:
        bridge: whose calls are answered. If it was made with ``temperature_only=False``, the
            sampler must be vLLM's, and requests may use any of its options; else their temperature
            and length are heeded, up to the ``max_tokens`` of the policy.
        sampler: of :mod:`grpo.policies.samplers`; its policy says which version the weights have.
        max_running: calls in the engine at a time; None: all that wait.
        linger: seconds that an idle engine waits for further calls after the first; for samplers
            that answer several at once, but take no more while they do.
        make: how to build vLLM's types; default: vLLM is imported if the bridge needs it.
    """

    def __init__(
        self, bridge: Bridge, sampler: Sampler, *, max_running: int | None = None,
        linger: float = 0.0, make: Constructors | None = None,
    ) -> None:
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running={max_running} must be at least 1, or None")
        self.bridge, self.sampler, self.max_running = bridge, sampler, max_running
        self.linger = linger
        self._make = None if bridge.temperature_only else make or Constructors.vllm()
        self._refusals = (ApiError, *(self._make.refusals if self._make else ()))
        self._running: dict[Job, Call] = {}

    @property
    def policy(self) -> Any:
        """Whose random numbers a checkpoint continues."""
        return self.sampler.policy

    @property
    def running(self) -> int:
        """Calls that the engine works on."""
        return len(self._running)

    def advance(self, timeout: float = 0.0) -> None:
        """Take what waits, let the engine do one step, reply to what is finished; with nothing to
        do, wait ``timeout`` seconds for a call."""
        room = None if self.max_running is None else self.max_running - len(self._running)
        if room != 0:
            self._start(self._take(room, timeout))
        self._step()

    def drain(self, timeout: float = 600.0) -> None:
        """Finish what runs and take no more; RuntimeError if that needs more than ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while self._running:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine still works on {len(self._running)} calls after "
                                   f"{timeout:g} s; lower the environments' max_tokens or give it "
                                   "more time")
            self._step()

    def _take(self, room: int | None, timeout: float) -> list[Call]:
        if self._running:
            return self.bridge.take(room)
        calls = self.bridge.take(room, timeout=timeout)
        if calls and self.linger:
            time.sleep(self.linger)
            if room is None or room > len(calls):
                calls += self.bridge.take(None if room is None else room - len(calls))
        return calls

    def _start(self, calls: list[Call]) -> None:
        policy, alike = self.policy, {}
        if calls and (version := policy.version()) != self.sampler.version:
            self.sampler.set_version(version)
        for call in calls:
            alike.setdefault(self._sampling(call), []).append(call)
        for sampling, group in alike.items():
            # Counted as one call of the policy with a row for each, so that no two calls of the
            # bridge draw the same random numbers.
            for number, call in enumerate(group):
                self._add(call, Job([call.prompt], sampling, policy.calls, number, len(group)))
            policy.calls += 1

    def _sampling(self, call: Call) -> Sampling:
        sampling = self.policy.sampling
        if self._make is not None:  # what the request asks is in the parameters
            return sampling
        return replace(sampling, temperature=call.ask.fields.temperature,
                       max_tokens=min(call.max_tokens, sampling.max_tokens))

    def _add(self, call: Call, job: Job) -> None:
        try:
            job = replace(job, params=self._make and self._params(call))
            self.sampler.add(job)
        except self._refusals as error:
            self.bridge.fail(call, str(error))
        else:
            self._running[job] = call

    def _params(self, call: Call) -> Any:
        """vLLM's sampling parameters for what a request asks."""
        fields = call.ask.fields
        options = fields.sampling_options() | {
            "n": 1, "seed": call.seed, "max_tokens": call.max_tokens}
        if not fields.ignore_eos:
            options["stop_token_ids"] = [*(fields.stop_token_ids or ()),
                                         *self.policy.eos_token_ids]
        # Only a stop string needs the text while tokens are sampled.
        return self._make.sampling_params(streamed=False, logprobs=call.ask.logprobs or 0,
                                          detokenize=bool(fields.stop), **options)

    def _step(self) -> None:
        for job in [job for job, call in self._running.items() if call.cancelled]:
            self.sampler.drop(job)
            del self._running[job]
        if self._running:
            for job, completions in self.sampler.step():
                self._reply(job, completions)

    def _reply(self, job: Job, completions: Completions | EngineError) -> None:
        call, positions = self._running.pop(job), None
        if isinstance(completions, EngineError):  # one job's; the engine goes on with others
            self.bridge.fail(call, str(completions), status=500)
            return
        tokens, log_probs = completions.tokens[0], completions.log_probs[0]
        if job.params is not None:
            flat = log_probs
            log_probs = [flat.logprobs[start] for start in flat.start_indices]
            positions = positions_of(flat) if call.ask.logprobs else None
        self.bridge.reply(call, tokens, log_probs, versions=completions.versions[0],
                          truncated=completions.truncated[0], positions=positions)


class DriverThread:
    """Lets a driver answer calls all the time, also while the trainer trains; a context manager.

    For samplers whose engines are elsewhere, and take new weights while they sample.

    Args:
        driver: used by nobody else from now on.
    """

    def __init__(self, driver: BridgeDriver) -> None:
        self.driver = driver
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="bridge-driver")

    def check(self) -> None:
        """Raise RuntimeError if the thread has failed."""
        if self._error is not None:
            raise RuntimeError("what answers the environments failed: "
                               f"{self._error!r}") from self._error

    def __enter__(self) -> DriverThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=_ENDS_WITHIN)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self.driver.advance(_PULSE)
        except Exception as error:  # check() raises it in the trainer's thread
            if not self._ended.is_set():
                self._error = error
