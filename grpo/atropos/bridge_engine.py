"""Continuous batching for a bridge: an in-process vLLM engine that calls join as they come."""

from __future__ import annotations

import itertools
import time
from typing import Any

from grpo.atropos.bridge import Bridge
from grpo.atropos.calls import Call
from grpo.policies.vllm import VLLMPolicy
from grpo.server.generation import positions_of
from grpo.server.versioned import Constructors


class EngineDriver:
    """Let a :class:`~grpo.policies.vllm.VLLMPolicy` answer calls, one engine step at a time.

    No thread is started: whoever calls :meth:`advance` drives the engine, usually the collector
    while it waits for rewards. So weights never change during a step, and after :meth:`drain`
    nothing runs that an update could disturb. Requests that arrive meanwhile wait in the bridge.

    Args:
        bridge: whose calls are answered; any sampling option that vLLM knows may be asked for if
            it was made with ``temperature_only=False``.
        policy: its engine, adapter and version are used; sampling options are the requests' own.
        max_running: calls in the engine at a time; None: all that wait.
        make: how to build vLLM's types; imports vLLM if left out.

    Raises:
        RuntimeError: from :meth:`drain`, if the engine does not finish in time.
    """

    def __init__(
        self, bridge: Bridge, policy: VLLMPolicy, *, max_running: int | None = None,
        make: Constructors | None = None,
    ) -> None:
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running={max_running} must be at least 1, or None")
        self.bridge, self.policy, self.max_running = bridge, policy, max_running
        self._engine = policy.engine.llm_engine
        self._make = make or Constructors.vllm()
        self._running: dict[str, tuple[Call, int]] = {}
        self._ids = itertools.count()

    @property
    def running(self) -> int:
        """Calls that the engine works on."""
        return len(self._running)

    def advance(self, timeout: float = 0.0) -> None:
        """Take what waits, let the engine do one step, reply to what is finished.

        Args:
            timeout: seconds to wait for a call if there is nothing to do.
        """
        room = None if self.max_running is None else self.max_running - len(self._running)
        if room != 0:
            for call in self.bridge.take(room, timeout=0.0 if self._running else timeout):
                self._start(call)
        self._step()

    def drain(self, timeout: float = 600.0) -> None:
        """Finish what runs without taking more."""
        deadline = time.monotonic() + timeout
        while self._running:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine still works on {len(self._running)} calls after "
                                   f"{timeout:g} s; lower the environments' max_tokens or give it "
                                   "more time")
            self._step()

    def _start(self, call: Call) -> None:
        fields = call.ask.fields
        options = fields.sampling_options() | {
            "n": 1, "seed": call.seed, "max_tokens": call.max_tokens}
        if not fields.ignore_eos:
            options["stop_token_ids"] = [*(fields.stop_token_ids or ()),
                                         *self.policy.eos_token_ids]
        id = f"call-{next(self._ids)}"
        try:
            # Only a stop string needs the text while tokens are sampled.
            params = self._make.sampling_params(
                streamed=False, logprobs=call.ask.logprobs or 0, detokenize=bool(fields.stop),
                **options)
            self._engine.add_request(id, {"prompt_token_ids": call.prompt}, params,
                                     lora_request=self.policy.lora_request)
        except self._make.refusals as error:
            return self.bridge.fail(call, str(error))
        self._running[id] = call, self.policy.version()

    def _step(self) -> None:
        cancelled = [id for id, (call, _) in self._running.items() if call.cancelled]
        if cancelled:
            self._engine.abort_request(cancelled)
            for id in cancelled:
                del self._running[id]
        if not self._running:
            return
        for output in self._engine.step():
            if output.finished and output.request_id in self._running:
                self._finish(output)

    def _finish(self, output: Any) -> None:
        call, version = self._running.pop(output.request_id)
        part = output.outputs[0]
        tokens, flat = list(part.token_ids), part.logprobs
        positions = positions_of(flat) if call.ask.logprobs else None
        log_probs = [flat.logprobs[start] for start in flat.start_indices] if positions else (
            list(flat.logprobs))
        self.bridge.reply(
            call, tokens, log_probs, versions=[(version, len(tokens))] if tokens else [],
            truncated=part.finish_reason == "length", positions=positions)
