"""Continuous batching for a bridge whose policy is an engine server, in another process."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from grpo.atropos.bridge import Bridge
from grpo.atropos.calls import Call
from grpo.policies.client import EngineCallError, Generated
from grpo.policies.server import ServerPolicy
from grpo.server.api import SamplingFields

# How soon a finished answer is noticed while no new call arrives, in seconds.
_PULSE = 0.002


class ServerDriver:
    """Let an engine server answer a bridge's calls, each by a request of its own.

    The server batches what comes, and dates every token by the weights that sampled it. An
    answer that an update aborted is asked for again. The counterpart of
    :class:`~grpo.atropos.bridge_engine.EngineDriver`, for a policy that is not in this process.

    Args:
        bridge: whose calls are answered; any sampling option of the server may be asked for if it
            was made with ``temperature_only=False``, but for log-probs of other tokens.
        policy: its client, end tokens and timeout are used.
        max_running: requests to the server at a time.

    Raises:
        RuntimeError: from :meth:`drain`, if the server does not finish in time.
    """

    def __init__(self, bridge: Bridge, policy: ServerPolicy, *, max_running: int = 256) -> None:
        if max_running < 1:
            raise ValueError(f"max_running={max_running} must be at least 1")
        self.bridge, self.policy, self.max_running = bridge, policy, max_running
        self._pool = ThreadPoolExecutor(max_running, thread_name_prefix="bridge-call")
        self._running: dict[Future, Call] = {}

    @property
    def running(self) -> int:
        """Calls that the server works on."""
        return len(self._running)

    def advance(self, timeout: float = 0.0) -> None:
        """Send on what waits, reply to what is finished.

        Args:
            timeout: seconds to wait for a call if there is nothing to do.

        Raises:
            EngineCallError: if the server is gone or fails; the calls then wait again.
        """
        room = self.max_running - len(self._running)
        pause = min(_PULSE, timeout) if self._running else timeout
        for call in self.bridge.take(room, timeout=pause) if room else ():
            self._running[self._pool.submit(self._ask, call)] = call
        self._reply(wait(self._running, timeout=0 if room else _PULSE,
                         return_when=FIRST_COMPLETED).done)

    def drain(self, timeout: float = 600.0) -> None:
        """Finish what runs without sending more."""
        deadline = time.monotonic() + timeout
        while self._running:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"the engine server still works on {len(self._running)} calls "
                                   f"after {timeout:g} s; is it paused? Else lower the "
                                   "environments' max_tokens or give it more time")
            self._reply(wait(self._running, timeout=left, return_when=FIRST_COMPLETED).done)

    def close(self) -> None:
        """Wait for no more answers; calls that run are given back to the bridge."""
        self.bridge.put_back(list(self._running.values()))
        self._running = {}
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, call: Call) -> Generated:
        fields = call.ask.fields
        options = fields.model_dump(include=set(SamplingFields.model_fields)) | {
            "n": 1, "seed": call.seed, "max_tokens": call.max_tokens}
        if not fields.ignore_eos:
            options["stop_token_ids"] = [*(fields.stop_token_ids or ()),
                                         *self.policy.eos_token_ids]
        (answer,) = self.policy.client.generate([call.prompt], timeout=self.policy.timeout,
                                                **options)
        return answer

    def _reply(self, done: set[Future]) -> None:
        for future in done:
            call = self._running.pop(future)
            try:
                answer = future.result()
            except EngineCallError as error:
                if error.status is None or error.status >= 500:
                    self.bridge.put_back([call])
                    raise
                self.bridge.fail(call, str(error))
                continue
            if answer.finish_reasons[0] == "abort":
                self.bridge.put_back([call])
                continue
            self.bridge.reply(
                call, answer.tokens[0], answer.log_probs[0],
                versions=[tuple(span) for span in answer.versions[0]],
                truncated=answer.finish_reasons[0] == "length")
